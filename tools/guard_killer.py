"""Deletes one condition of one statement at a time, and expects a test to fail: `python -m tools.guard_killer`.

Owns what a condition is (a line that begins with WHERE or AND), which tests run a statement, and the list of
conditions that no test defends. All of it happens in one pytest session, in which the text of the statement is
replaced, so that a condition costs a few tests and no start. Refuses to judge whether an undefended condition
is needed: a reader does, and writes the test or deletes the line.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import pytest
from _pytest.runner import runtestprotocol

from fleetward.controller.store.tx import Later, Statement, Tx
from tools.pages.statements import Named, statements

ROOT: Final = Path(__file__).resolve().parents[1]
SUITES: Final = ("tests/store", "tests/services")
TEST_SECONDS_MAX: Final = 30  # without its guard a statement may wait for ever
CONDITION: Final = re.compile(r"\s*(WHERE|AND)\b")
CONTINUED: Final = re.compile(r"\s*(OR|THEN|IS|=|<|>|\|\|)(\b|\s)")
HALF_BETWEEN: Final = re.compile(r"\bBETWEEN\s+\S+\s*$")
QUOTED: Final = re.compile(r"'(?:[^']|'')*'")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A statement without one of its conditions."""

    named: Named
    line: int
    condition: str
    sql: str

    @property
    def title(self) -> str:
        """What is printed of it."""
        return f"{self.named.module}.{self.named.name}:{self.line}: {self.condition}"


def conditions(sql: str) -> Iterator[tuple[int, str, str]]:
    """Every condition that stands on lines of its own: where, its text, and the SQL without it."""
    lines = sql.splitlines()
    for start, line in enumerate(lines):
        word = CONDITION.match(line)
        if word is None or _is_bound_of_between(lines, start):
            continue
        end = _end(lines, start)
        if end is None:
            continue
        text = " ".join(part.strip() for part in lines[start:end])
        rest = ["WHERE true"] if word[1] == "WHERE" else []
        yield start + 1, text, "\n".join([*lines[:start], *rest, *lines[end:]])


def _end(lines: Sequence[str], start: int) -> int | None:
    """The line after the condition, or None where it shares a line with something else."""
    depth = 0
    for number, line in enumerate(lines[start:], start):
        bare = QUOTED.sub("''", line)
        depth += bare.count("(") - bare.count(")")
        if depth < 0:
            return None
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if re.search(r"\bTHEN\b", bare) and depth == 0:
            return None
        if depth == 0 and not CONTINUED.match(following) and not HALF_BETWEEN.search(bare):
            return number + 1
    return None


def _is_bound_of_between(lines: Sequence[str], number: int) -> bool:
    return number > 0 and HALF_BETWEEN.search(lines[number - 1]) is not None


def mutants(only: Sequence[str] = ()) -> list[Mutant]:
    """All of them, or those of the statements named NOUN or NOUN.NAME."""
    return [
        Mutant(named, line, condition, sql)
        for named in statements()
        if not only or {named.module, f"{named.module}.{named.name}"} & set(only)
        for line, condition, sql in conditions(named.statement.sql)
    ]


@dataclass(slots=True)
class Killer:
    """A plugin of pytest that takes the place of its loop."""

    waiting: list[Mutant]
    say: Callable[[str], None]
    survivors: list[Mutant] = field(default_factory=list[Mutant])
    untested: list[Mutant] = field(default_factory=list[Mutant])
    broken: list[str] = field(default_factory=list[str])
    killed: int = 0
    _tests: dict[int, list[tuple[float, pytest.Item]]] = field(
        default_factory=dict[int, list[tuple[float, pytest.Item]]]
    )

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run every test once to see which statements it runs, then the tests of each mutant."""
        if session.testsfailed:
            raise session.Interrupted("the tests could not be collected")
        for item in session.items:
            self._learn(item)
        self.say(f"{len(session.items)} tests run {len(self._tests)} statements; {len(self.waiting)} conditions")
        for mutant in self.waiting:
            self._try(mutant)
        return True

    def _learn(self, item: pytest.Item) -> None:
        begun = time.monotonic()
        with _watched() as seen:
            has_passed = _passes(item)
        if not has_passed:
            self.broken.append(item.nodeid)
            return
        for key in seen:
            self._tests.setdefault(key, []).append((time.monotonic() - begun, item))

    def _try(self, mutant: Mutant) -> None:
        tests = sorted(self._tests.get(id(mutant.named.statement), []), key=lambda timed: timed[0])
        if not tests:
            self.untested.append(mutant)
            return
        with _replaced(mutant.named.statement, mutant.sql):
            killer = next((item for _, item in tests if not _passes(item)), None)
        if killer is None:
            self.survivors.append(mutant)
            self.say(f"survived {len(tests)} tests: {mutant.title}")
        elif _passes(killer):
            self.killed += 1
        else:
            # What the broken statement left behind would count as a kill of every later one.
            raise killer.session.Interrupted(f"{killer.nodeid} still fails after {mutant.title} is whole again")


def _passes(item: pytest.Item) -> bool:
    # Torn down to the session after each test, because the next one may be any.
    following = cast("pytest.Item", item.session)
    return all(report.passed or report.skipped for report in runtestprotocol(item, log=False, nextitem=following))


@contextmanager
def _watched() -> Generator[set[int]]:
    """Which statements run."""
    seen: set[int] = set()
    plain = Tx.later

    def watched(tx: Tx, statement: Statement[Any], **params: object) -> Later[Any]:
        seen.add(id(statement))
        return plain(tx, statement, **params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tx, "later", watched)
        yield seen


@contextmanager
def _replaced(statement: Statement[Any], sql: str) -> Generator[None]:
    """The same statement, which everyone holds, with another text."""
    before = statement.sql
    object.__setattr__(statement, "sql", sql)
    try:
        yield
    finally:
        object.__setattr__(statement, "sql", before)


def run(killer: Killer, options: Sequence[str]) -> int:
    """Try the killer's mutants in one session of pytest; the status is pytest's own."""
    plain = [
        *("--quiet", "--no-header", "--no-summary", "-p", "no:randomly", "-p", "no:cacheprovider"),
        *("-o", "timeout_method=signal", "-o", f"timeout={TEST_SECONDS_MAX}"),
    ]
    return pytest.main([*plain, *options], plugins=[killer])


def main() -> int:
    """Say which conditions no test defends; status 1 when there are any."""
    parser = argparse.ArgumentParser(prog="python -m tools.guard_killer", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NOUN[.NAME]", help="only these statements")
    parser.add_argument("--tests", action="append", metavar="PATH", help=f"default: {' '.join(SUITES)}")
    parser.add_argument("--list", action="store_true", help="print the conditions and run nothing")
    given = parser.parse_args()
    if given.list:
        print("\n".join(mutant.title for mutant in mutants(given.only)))
        return 0
    os.chdir(ROOT)
    begun = time.monotonic()
    killer = Killer(mutants(given.only), lambda said: print(said, flush=True))
    status = run(killer, [suite for suite in given.tests or SUITES if Path(suite).exists()])
    for name in killer.broken:
        print(f"fails by itself, so it defends nothing: {name}")
    for mutant in killer.untested:
        print(f"run by no test: {mutant.title}")
    left = len(killer.survivors) + len(killer.untested)
    print(
        f"{killer.killed} conditions were missed by a test, {len(killer.survivors)} were not, {len(killer.untested)} "
        f"are run by none; {time.monotonic() - begun:.0f} s"
    )
    is_clean = left == 0 and not killer.broken and status in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
