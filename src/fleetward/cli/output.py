"""How things are said: JSON or columns on standard output, everything else on standard error.

Owns the one renderer of errors and the exit status of each kind. Refuses to know what is said.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from fleetward.domain.errors import Fault, Refusal
from fleetward.wire.problem import Problem, RemoteFault, RemoteRefusal, problem_of

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
UNREACHABLE: Final = 4
INTERRUPTED: Final = 130

UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Output:
    """Says things in the way the person asked for."""

    is_json: bool
    is_quiet: bool

    def document(self, value: object) -> None:
        """Write one JSON document on a line of its own."""
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
        sys.stdout.buffer.flush()

    def line(self, text: str) -> None:
        """Write what was asked for."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Say what happens meanwhile; silent when that is not wanted."""
        if not self.is_quiet:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Write rows in columns."""
        shown = [[visible(cell) for cell in row] for row in rows]
        widths = [max(len(cell) for cell in column) for column in zip(titles, *shown, strict=True)]
        for row in [[title.upper() for title in titles], *shown]:
            self.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Write named values, one a line; empty ones are left out."""
        known = [(name, value) for name, value in pairs if value]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            self.line(f"{name.ljust(width)}  {visible(value)}")


def report(error: Refusal | Fault | OSError, *, is_json: bool) -> int:
    """Say on standard error what went wrong and what to do, and give the exit status of its kind."""
    problem = _problem(error)
    if is_json:
        sys.stderr.write(msgspec.json.encode(problem).decode() + "\n")
    else:
        sys.stderr.write(f"fleetward: {visible(problem.detail)}\n")
        if problem.hint:
            sys.stderr.write(f"  {visible(problem.hint)}\n")
    return REFUSED if problem.status < 500 else UNREACHABLE


def _problem(error: Refusal | Fault | OSError) -> Problem:
    match error:
        case RemoteRefusal() | RemoteFault():
            return error.problem
        case Refusal() | Fault():
            return problem_of(error)
        case OSError():
            reason = (error.strerror or str(error)).lower()
            what = f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason
            return Problem(code="local_system", status=500, title="local system", detail=what)


def visible(text: str) -> str:
    """Show control characters instead of obeying them: names and messages come from elsewhere."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def visible_log(content: bytes) -> str:
    """The same for a log, whose lines and tabs are wanted."""
    text = content.decode(errors="backslashreplace").replace("\r\n", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def size(count: int) -> str:
    """A number of bytes, for a person."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def instant(at: datetime | None) -> str:
    """A moment in UTC, to the second."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def counts(numbers: dict[str, int]) -> str:
    """Numbers by name, those above zero."""
    return ", ".join(f"{number} {name}" for name, number in numbers.items() if number) or "none"
