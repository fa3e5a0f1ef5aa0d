"""From times to figures, and from figures to the table that is printed.

Owns the arithmetic: rates, percentiles, ratios. Refuses to measure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.commits import Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """So many jobs from the first submitted to the last completed, and the CPU that each part took meanwhile."""

    jobs: int
    seconds: float
    generator_cpu: float
    controller_cpu: float | None = None
    postgres_cpu: float | None = None

    @property
    def per_second(self) -> float:
        """Verified jobs a second."""
        return self.jobs / self.seconds


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something took, half of the time and at worst but for one in a hundred; in seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        """Sum up what was measured."""
        return cls(percentile(seconds, 50), percentile(seconds, 99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All that one run measured."""

    throughput: Throughput
    told: Latency
    running: Latency
    per_second: float
    commits: Sequence[Rate]
    with_pgbench: bool


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed."""
    if not values:
        raise ValueError("nothing was measured")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def means(rates: Sequence[Rate]) -> list[Rate]:
    """One rate for each number of clients: the mean of what was measured before and after."""
    by_clients: dict[int, list[float]] = {}
    for rate in rates:
        by_clients.setdefault(rate.clients, []).append(rate.per_second)
    return [Rate(clients, sum(found) / len(found)) for clients, found in sorted(by_clients.items())]


def table(figures: Figures) -> str:
    """Write the figures for people."""
    done = figures.throughput
    commits = means(figures.commits)
    with_what = "pgbench" if figures.with_pgbench else "a loop through psycopg: no pgbench is installed here"
    lines = [
        ("verified jobs", f"{done.per_second:,.0f} /s", f"{done.jobs:,} jobs in {done.seconds:.2f} s, over HTTP"),
        *(
            (f"  CPU of {name}", f"{used / done.seconds:.0%}", f"of one core: {1000 * used / done.jobs:.1f} ms a job")
            for name, used in _parts(done)
        ),
        *((f"commits, {rate.clients} client(s)", f"{rate.per_second:,.0f} /s", with_what) for rate in commits),
        *(
            (f"  jobs : commits, {rate.clients}", f"{done.per_second / rate.per_second:.3f}", "the ratio")
            for rate in commits
        ),
        _latency("submit -> node has it", figures.told, f"at {figures.per_second:g} jobs/s, seen by the clients"),
        _latency("submit -> running", figures.running, "the same jobs, by the database's times"),
    ]
    if commits:
        first = commits[0]
        lines.append(
            (
                f"  p50 : a commit, {first.clients}",
                f"{figures.running.p50 * first.per_second:.1f}",
                "submit -> running in single-row commits",
            )
        )
    return "\n".join(f"{name:26} {value:>20}   {note}" for name, value, note in lines)


def _parts(done: Throughput) -> list[tuple[str, float]]:
    found = [
        ("the load generator", done.generator_cpu),
        ("the controller", done.controller_cpu),
        ("PostgreSQL", done.postgres_cpu),
    ]
    return [(name, used) for name, used in found if used is not None]


def _latency(name: str, latency: Latency, note: str) -> tuple[str, str, str]:
    return name, f"{latency.p50 * 1000:.1f} / {latency.p99 * 1000:.1f} ms", f"p50 / p99, {note}"
