"""`python -m fleetward.sim`: many worlds, or one of them told in full.

Owns the command line, the processes that share the seeds, and what is printed. Exit status 1 when an
invariant was violated.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from fleetward.sim import bugs
from fleetward.sim.running import Ran, run, run_all
from fleetward.sim.server import Server, serving

SHOWN_MAX: Final = 3  # failing worlds that are told in full, the shortest first
JOBS: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    asked = _parser().parse_args(arguments)
    with serving() as server:
        if asked.bugs:
            return _hunt_all(server, jobs=asked.jobs)
        if asked.seed is not None:
            return _tell_one(server, asked.seed, bug=asked.bug, is_traced=asked.trace)
        return _run_many(server, range(asked.first, asked.first + asked.seeds), jobs=asked.jobs, bug=asked.bug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleetward.sim", allow_abbrev=False, description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many worlds")
    parser.add_argument("--first", type=int, default=1, help="the first seed of them")
    parser.add_argument("--seed", type=int, help="one world only")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell its whole story")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at once")
    parser.add_argument("--bug", choices=sorted(bugs.BUGS), help="plant this bug first")
    parser.add_argument("--bugs", action="store_true", help="plant each known bug in turn and find it")
    return parser


def _say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _tell_one(server: Server, seed: int, *, bug: str | None, is_traced: bool) -> int:
    ran = run(seed, server=server, bug=bug)
    if is_traced:
        _say("\n".join(ran.story))
    _say(ran.told if ran.violation else f"seed {seed}: all held, {ran.steps} steps, {ran.jobs}")
    _say(f"hash of the story: {ran.digest}")
    return 1 if ran.violation else 0


def _run_many(server: Server, seeds: Sequence[int], *, jobs: int, bug: str | None) -> int:
    begun = time.monotonic()
    steps, rare, ended = 0, Counter[str](), Counter[str]()
    failed: list[Ran] = []
    for ran in run_all(server, seeds, jobs=jobs, bug=bug):
        steps += ran.steps
        rare.update(ran.counts)
        ended.update(ran.jobs)
        if ran.violation:
            failed.append(ran)
            _say(f"seed {ran.seed} violates {ran.violation[:200]}")
    for ran in sorted(failed, key=lambda ran: len(ran.story))[:SHOWN_MAX]:
        _say()
        _say(ran.told)
    seconds = time.monotonic() - begun
    reached = ", ".join(f"{what} {count}" for what, count in sorted(rare.items()) if not what.startswith("act: "))
    _say(f"reached: {reached}")
    _say(f"jobs: {', '.join(f'{count} {status}' for status, count in sorted(ended.items()))}")
    _say(f"{len(seeds)} worlds, {steps} steps, {seconds:.0f} s: {len(failed)} violations")
    return 1 if failed else 0


def _hunt_all(server: Server, *, jobs: int) -> int:
    """Plant each bug, and look for the first seed that shows it."""
    missed = 0
    _say(f"{'bug':32} {'seed':>5} {'seconds':>8}  violates")
    for name in bugs.BUGS:
        begun = time.monotonic()
        found = _hunt(server, name, jobs=jobs)
        seconds = time.monotonic() - begun
        if found is None:
            missed += 1
            _say(f"{name:32} {'-':>5} {seconds:8.1f}  nothing in {bugs.SEEDS_MAX} seeds")
        else:
            _say(f"{name:32} {found.seed:5} {seconds:8.1f}  {found.violation[:120]}")
    return 1 if missed else 0


def _hunt(server: Server, name: str, *, jobs: int) -> Ran | None:
    for first in range(1, bugs.SEEDS_MAX + 1, 4 * jobs):
        for ran in run_all(server, range(first, first + 4 * jobs), jobs=jobs, bug=name):
            if ran.violation:
                return ran
    return None


if __name__ == "__main__":
    sys.exit(main())
