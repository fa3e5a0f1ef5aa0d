"""`make check`: every step in order, one line each with its seconds, the tests last.

Owns which steps there are and how they are told. Refuses to stop at the first failure: one run says all
that is wrong. What a machine lacks is listed by name, and is a failure only where FLEETWARD_TEST_REQUIRE
says that it is here.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BIN: Final = Path(sys.executable).parent
POSTGRES_15: Final = (Path("/usr/lib/postgresql/15/bin"), Path("/usr/pgsql-15/bin"))
REQUIRE: Final = "FLEETWARD_TEST_REQUIRE"


@dataclass(frozen=True, slots=True)
class Step:
    """One command. A live one writes to the terminal itself; of the others only failures are shown."""

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    is_live: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended."""

    step: Step
    status: int
    seconds: float

    @property
    def line(self) -> str:
        """What is printed of it."""
        return f"{'ok  ' if self.status == 0 else 'FAIL'} {self.step.name:24} {self.seconds:7.1f} s"


def steps(*, workers: int, seeds: int) -> list[Step]:
    """Every step of the check, the quick ones first."""
    python = str(BIN / "python")
    pytest = [python, "-m", "pytest", "--quiet"]
    found = [
        Step("format", [str(BIN / "ruff"), "format", "--check", "."]),
        Step("lint", [str(BIN / "ruff"), "check", "."]),
        Step("imports", [str(BIN / "lint-imports"), "--no-cache"]),
        Step("dependencies", [str(BIN / "deptry"), "src", "--no-ansi"]),
        Step("types", [str(BIN / "basedpyright")]),
        Step("reference pages", [python, "-m", "tools.docs", "--check"]),
        Step("simulated worlds", [python, "-m", "fleetward.sim", "--seeds", str(seeds)]),
    ]
    if postgres_15() is not None:
        store = [*pytest, "-n", str(workers), "tests/store"]
        found.append(Step("store on PostgreSQL 15", store, {"FLEETWARD_TEST_POSTGRES": "15"}))
    found.append(Step("tests", [*pytest, "-n", str(workers)], is_live=True))
    return found


def postgres_15() -> Path | None:
    """Where this machine's PostgreSQL 15 has its programs."""
    return next((folder for folder in POSTGRES_15 if (folder / "initdb").exists()), None)


def run(step: Step) -> Outcome:
    """Run one step to its end, and show what it said if that matters."""
    begun = time.monotonic()
    ended = subprocess.run(
        step.command,
        cwd=ROOT,
        env={**os.environ, **step.environment},
        stdout=None if step.is_live else subprocess.PIPE,
        stderr=None if step.is_live else subprocess.STDOUT,
        text=True,
        check=False,
    )
    outcome = Outcome(step, ended.returncode, time.monotonic() - begun)
    if outcome.status != 0 and not step.is_live:
        print(f"\n$ {' '.join(step.command)}\n{ended.stdout}")
    return outcome


def main() -> int:
    """Run all steps; the status is 0 only when each of them passed."""
    parser = argparse.ArgumentParser(prog="python -m tools.check", description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="test processes at once")
    parser.add_argument("--seeds", type=int, default=100, help="simulated worlds")
    parser.add_argument("--only", action="append", metavar="STEP", help="only this step, by name; may be repeated")
    given = parser.parse_args()
    chosen = [
        step for step in steps(workers=given.workers, seeds=given.seeds) if step.name in (given.only or step.name)
    ]
    failed: list[str] = []
    for step in chosen:
        if step.is_live:
            print(f"     {step.name} …", flush=True)
        outcome = run(step)
        print(outcome.line, flush=True)
        if outcome.status != 0:
            failed.append(step.name)
    if postgres_15() is None:
        print(
            "not run here: postgres15: no PostgreSQL 15 is installed, so the store was tried on the embedded one only"
        )
        if "postgres15" in os.environ.get(REQUIRE, ""):
            failed.append("postgres15 (required here)")
    print(f"failed: {', '.join(failed)}" if failed else "all of it passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
