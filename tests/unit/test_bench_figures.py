"""The bench's arithmetic: percentiles, means, ratios, and what pgbench printed."""

import pytest

from bench.commits import Rate, parse_rate
from bench.figures import Figures, Latency, Throughput, means, percentile, table

PRINTED = """transaction type: insert.sql
number of transactions actually processed: 3001
latency average = 0.333 ms
initial connection time = 2.1 ms
tps = 3003.250000 (without initial connection time)
"""


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([7.0], 50, 7.0), ([7.0], 99, 7.0), ([3.0, 1.0, 2.0], 50, 2.0), ([*map(float, range(1, 101))], 99, 99.0)],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], percent: float, expected: float):
    assert percentile(values, percent) == expected


def test_nothing_measured_has_no_percentile():
    with pytest.raises(ValueError, match="nothing was measured"):
        percentile([], 50)


def test_what_was_measured_before_and_after_is_one_rate():
    assert means([Rate(16, 4.0), Rate(1, 1.0), Rate(1, 3.0)]) == [Rate(1, 2.0), Rate(16, 4.0)]


def test_pgbench_tells_its_rate():
    assert parse_rate(PRINTED) == 3003.25


def test_a_pgbench_that_tells_no_rate_is_said():
    with pytest.raises(ValueError, match="printed no rate: 'pgbench: error'"):
        parse_rate("pgbench: error")


def test_the_table_has_every_figure_and_its_ratio():
    figures = Figures(
        throughput=Throughput(jobs=2000, seconds=4.0, generator_cpu=1.0, controller_cpu=3.0, postgres_cpu=None),
        told=Latency(0.004, 0.009),
        running=Latency(0.005, 0.02),
        per_second=20,
        commits=[Rate(1, 1000.0), Rate(1, 3000.0)],
        with_pgbench=True,
    )
    told = [" ".join(line.split()) for line in table(figures).splitlines()]
    assert told == [
        "verified jobs 500 /s 2,000 jobs in 4.00 s, over HTTP",
        "CPU of the load generator 25% of one core: 0.5 ms a job",
        "CPU of the controller 75% of one core: 1.5 ms a job",
        "commits, 1 client(s) 2,000 /s pgbench",
        "jobs : commits, 1 0.250 the ratio",
        "submit -> node has it 4.0 / 9.0 ms p50 / p99, at 20 jobs/s, seen by the clients",
        "submit -> running 5.0 / 20.0 ms p50 / p99, the same jobs, by the database's times",
        "p50 : a commit, 1 10.0 submit -> running in single-row commits",
    ]
