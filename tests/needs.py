"""What a machine may lack, said by name: a plugin of pytest.

Owns the one way in which a test may stay undone: `needs("bwrap", "…why it cannot be had here")`. The end
of the run lists it as `not run here: <name>: <reason>`, and the exit status stays as it was. Where
FLEETWARD_TEST_REQUIRE names the thing, its lack is a failure. Refuses to know what can be lacking.
"""

import os
from collections.abc import Generator
from typing import Final, NoReturn

import pytest

REQUIRE: Final = "FLEETWARD_TEST_REQUIRE"
MARK: Final = "not run here: "


class NotRunHere(Exception):
    """This machine lacks something that the test cannot do without."""


def required() -> frozenset[str]:
    """The names that whoever runs the tests says are here."""
    return frozenset(name.strip() for name in os.environ.get(REQUIRE, "").split(",") if name.strip())


def needs(name: str, reason: str) -> NoReturn:
    """End the test or fixture that calls it: the machine has no `name`, as `reason` explains."""
    if name in required():
        raise AssertionError(f"{REQUIRE} says that {name} is here, but: {reason}")
    raise NotRunHere(f"{MARK}{name}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a lack of the machine into "not run"; everything else stays what it was."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, NotRunHere):
        report.outcome = "skipped"
        path, line, _ = item.location
        report.longrepr = (path, (line or 0) + 1, str(call.excinfo.value))
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List by name what was not run here."""
    lacks: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if said.startswith(MARK):
            lacks[said] = lacks.get(said, 0) + 1
    for said, count in sorted(lacks.items()):
        terminalreporter.write_line(f"{said} ({count} {'test' if count == 1 else 'tests'})")
