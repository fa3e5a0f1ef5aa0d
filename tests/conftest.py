"""What every test of the suite stands on.

Owns the report of what was not run here. Refuses to know any fixture of one area: those live in plugins
beside it (`fix_database.py`) and in the folders of their tests.
"""

from collections.abc import Generator
from importlib.util import find_spec
from typing import Final

import pytest

from tests.needs import NotRunHere, needs, required

__all__ = ["needs"]

pytest_plugins: Final = ["tests.fix_database"] if find_spec("tests.fix_database") else []

MARK: Final = "not run here: "


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
    if required():
        terminalreporter.write_line(f"required here: {', '.join(sorted(required()))}")
