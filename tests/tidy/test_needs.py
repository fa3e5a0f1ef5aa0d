"""What a machine lacks is told by name, and fails only where it was said to be there."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.needs import REQUIRE
from tests.tidy.tree import ROOT

LACKING: Final = """
import pytest
from tests.needs import needs

@pytest.fixture
def terraform():
    needs("terraform", "no such program")

def test_in_the_test():
    needs("chromium", "no browser is installed")

def test_in_a_fixture(terraform):
    raise AssertionError

def test_that_needs_nothing():
    assert True
"""


def outcome(folder: Path, *, require: str) -> tuple[int, str]:
    (folder / "test_lacking.py").write_text(LACKING)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "tests.needs", "-p", "no:randomly", "-q", str(folder)],
        cwd=ROOT,
        env={**os.environ, REQUIRE: require},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_a_lack_is_told_by_name_and_changes_no_status(tmp_path: Path) -> None:
    status, said = outcome(tmp_path, require="")
    assert status == 0
    assert "not run here: chromium: no browser is installed (1 test)" in said
    assert "not run here: terraform: no such program (1 test)" in said
    assert "1 passed, 2 skipped" in said


def test_a_lack_of_what_was_said_to_be_here_fails(tmp_path: Path) -> None:
    status, said = outcome(tmp_path, require="postgres15, chromium")
    assert status == 1
    assert "FLEETWARD_TEST_REQUIRE says that chromium is here, but: no browser is installed" in said
    assert "1 failed, 1 passed, 1 skipped" in said
