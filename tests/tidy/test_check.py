"""`make check` tells the truth: every step runs, one line each, and the status says whether all passed."""

import sys

import pytest

from tools import check
from tools.check import Outcome, Step, run, steps


def test_every_step_of_the_contract_is_there() -> None:
    names = [step.name for step in steps(workers=2, seeds=100)]
    assert names[:7] == [
        "format",
        "lint",
        "imports",
        "dependencies",
        "types",
        "reference pages",
        "simulated worlds",
    ]
    assert names[-1] == "tests"
    assert ("store on PostgreSQL 15" in names) == (check.postgres_15() is not None)


def test_the_tests_come_last_and_speak_for_themselves() -> None:
    last = steps(workers=2, seeds=100)[-1]
    assert last.is_live
    assert not any(step.is_live for step in steps(workers=2, seeds=100)[:-1])


def test_a_step_that_fails_shows_what_it_said(capfd: pytest.CaptureFixture[str]) -> None:
    said = run(Step("trial", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]))
    assert said.status == 3
    assert said.line.startswith("FAIL trial ")
    assert "the reason" in capfd.readouterr().out


def test_a_step_that_passes_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    said = run(Step("trial", [sys.executable, "-c", "print('chatter')"]))
    assert said.status == 0
    assert capfd.readouterr().out == ""


def test_a_line_has_the_seconds() -> None:
    assert Outcome(Step("lint", []), 0, 1.25).line == "ok   lint                         1.2 s"


def test_the_status_says_that_a_step_failed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    trial = [Step("good", [sys.executable, "-c", ""]), Step("bad", [sys.executable, "-c", "raise SystemExit(1)"])]
    monkeypatch.setattr(check, "steps", lambda **_: trial)
    monkeypatch.setattr(sys, "argv", ["check"])
    assert check.main() == 1
    assert capfd.readouterr().out.rstrip().endswith("failed: bad")


def test_a_required_postgresql_that_is_not_here_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "POSTGRES_15", ())
    monkeypatch.setattr(check, "steps", lambda **_: [])
    monkeypatch.setattr(sys, "argv", ["check"])
    monkeypatch.delenv(check.REQUIRE, raising=False)
    assert check.main() == 0
    assert "not run here: postgres15: " in capfd.readouterr().out
    monkeypatch.setenv(check.REQUIRE, "bwrap,postgres15")
    assert check.main() == 1
