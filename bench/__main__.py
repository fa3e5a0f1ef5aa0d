"""`python -m bench`: one run, one table.

Owns the order of a run: commits, jobs, latency, commits again, all on one PostgreSQL. Refuses to know how
each is measured.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psycopg

from bench.commits import Rate, measure, tool
from bench.controller import BenchError, Controller, throwaway, used
from bench.figures import Figures, Latency, Throughput, table
from bench.load import Fleet, LoadGenerator, Task, generator

LOOK_SECONDS: Final = 0.05
SECONDS_A_JOB_MAX: Final = 0.5  # slower than this something hangs
CLIENT_COUNTS: Final = (1, 16)
LEFT: Final = "SELECT count(*) FROM jobs WHERE status IN ('queued', 'running')"
COMPLETED: Final = """
    SELECT count(*), extract(epoch FROM max(finished_at) - min(created_at))::float8 FROM jobs WHERE status = 'completed'
"""
RUNNING: Final = """
    SELECT extract(epoch FROM attempt.started_at - jobs.created_at)::float8 FROM jobs
    JOIN job_assignments AS attempt ON attempt.id = jobs.winning_assignment_id
    ORDER BY jobs.created_at DESC LIMIT %s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    jobs: int
    nodes: int
    slots: int
    clients: int
    per_second: float
    paced: int
    commit_seconds: int


def run(plan: Plan) -> Figures:
    """Measure everything once, on one throw-away controller."""
    with throwaway() as controller:
        owner = controller.database_url("owner")
        fleet = Fleet(url=controller.url, key=controller.key, nodes=plan.nodes, slots=plan.slots, clients=plan.clients)
        commits = _commits(owner, plan)
        with generator(fleet) as load, psycopg.connect(owner, autocommit=True) as database:
            throughput = _throughput(controller, load, database, plan)
            told = load.do(Task(jobs=plan.paced, per_second=plan.per_second)).told_seconds
            _await_all(database, plan.paced)
            running = [row[0] for row in database.execute(RUNNING, [plan.paced])]
        commits += _commits(owner, plan)
    return Figures(
        throughput=throughput,
        told=Latency.of(told),
        running=Latency.of(running),
        per_second=plan.per_second,
        commits=commits,
        with_pgbench=tool() is not None,
    )


def _commits(url: str, plan: Plan) -> list[Rate]:
    if plan.commit_seconds == 0:
        return []
    return [measure(url, clients=clients, seconds=plan.commit_seconds) for clients in CLIENT_COUNTS]


def _throughput(
    controller: Controller, load: LoadGenerator, database: psycopg.Connection[tuple[object, ...]], plan: Plan
) -> Throughput:
    before = used(controller)
    load.do(Task(jobs=plan.jobs))
    _await_all(database, plan.jobs)
    generator_cpu = load.so_far().cpu_seconds
    after = used(controller)
    row = database.execute(COMPLETED).fetchone()
    match row:
        case (int(count), float(seconds)) if count == plan.jobs:
            spent = None if before is None or after is None else after.since(before)
            return Throughput(
                jobs=count,
                seconds=seconds,
                generator_cpu=generator_cpu,
                controller_cpu=None if spent is None else spent.controller,
                postgres_cpu=None if spent is None else spent.postgres,
            )
        case _:
            raise BenchError(f"{plan.jobs} jobs were submitted, and of completed ones there are {row}")


def _await_all(database: psycopg.Connection[tuple[object, ...]], jobs: int) -> None:
    """Return once no job is left to be done."""
    until = time.monotonic() + 10 + jobs * SECONDS_A_JOB_MAX
    while time.monotonic() < until:
        if database.execute(LEFT).fetchone() == (0,):
            return
        time.sleep(LOOK_SECONDS)
    raise BenchError(f"of {jobs} jobs some are not done after {10 + jobs * SECONDS_A_JOB_MAX:.0f} s")


def main(arguments: Sequence[str]) -> int:
    """Run, print, and say how it ended."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure verified jobs a second.")
    parser.add_argument("--jobs", type=int, default=2000, help="jobs for the throughput (2000)")
    parser.add_argument("--nodes", type=int, default=8, help="simulated nodes (8)")
    parser.add_argument("--slots", type=int, default=32, help="jobs that a node runs at once (32)")
    parser.add_argument("--clients", type=int, default=8, help="connections that submit (8)")
    parser.add_argument("--per-second", type=float, default=20, help="rate of the jobs for the latency (20)")
    parser.add_argument("--paced", type=int, default=200, help="how many of those (200)")
    parser.add_argument("--commit-seconds", type=int, default=3, help="how long each rate of commits is taken; 0: not")
    plan = Plan(**vars(parser.parse_args(arguments)))
    try:
        print(table(run(plan)))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"bench: {error}: {error.stderr}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
