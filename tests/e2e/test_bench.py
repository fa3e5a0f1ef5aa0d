"""The bench measures: a real controller, simulated nodes, a handful of jobs."""

from bench.__main__ import Plan, run

FEW = Plan(jobs=20, nodes=2, slots=4, clients=2, per_second=20, paced=4, commit_seconds=0)


def test_a_tiny_run_completes_every_job_and_times_it():
    figures = run(FEW)
    assert figures.throughput.jobs == FEW.jobs
    assert figures.throughput.seconds > 0
    assert 0 < figures.told.p50 <= figures.told.p99
    assert 0 < figures.running.p50 <= figures.running.p99
