"""Every event of a job is told in words."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fleetward.cli.story import paths, reason, sentence
from fleetward.domain.jobs import AssignmentState, JobStatus, Outcome
from fleetward.wire.messages import Event

STORE = Path(__file__).parents[2] / "src" / "fleetward" / "controller" / "store"


def event(kind: str, data: dict[str, object] | None = None) -> Event:
    return Event(
        cursor="1",
        id=1,
        kind=kind,
        actor="controller",
        at=datetime(2026, 1, 1, tzinfo=UTC),
        job_id=None,
        assignment_id=None,
        node_id=None,
        node="ada",
        data=data or {},
    )


def recorded_kinds() -> set[str]:
    """The kinds that the store's statements write: those spelled out, and those made of a state or an outcome."""
    text = "".join(path.read_text() for path in STORE.glob("*.py"))
    spelled = set(re.findall(r"'((?:job|assignment|artifact)\.[a-z_]+)'", text))
    made = {f"assignment.{ending.value}" for ending in (*Outcome, AssignmentState.SUCCEEDED)}
    return spelled | made | {f"job.{status.value}" for status in JobStatus if status.is_ended}


@pytest.mark.parametrize("kind", sorted(recorded_kinds()))
def test_every_kind_that_the_store_records_has_its_sentence(kind: str) -> None:
    assert sentence(event(kind)) != kind


def test_an_end_is_told_with_its_reason() -> None:
    ended = event("assignment.failed", {"assignment": {"error": "exit status 3"}})
    assert sentence(ended) == "ada failed: exit status 3"
    given_up = event("job.failed", {"job": {"error": "given up after 3 failed attempts"}})
    assert sentence(given_up) == "failed: given up after 3 failed attempts"


def test_artifacts_are_named() -> None:
    stored = event("artifact.stored", {"artifacts": [{"path": "a.txt"}, {"path": "b.txt"}]})
    assert paths(stored) == ["a.txt", "b.txt"]
    assert sentence(stored) == "stored from ada: a.txt, b.txt"


@pytest.mark.parametrize("data", [{}, {"assignment": None}, {"assignment": {"error": 3}}, {"artifacts": "x"}])
def test_data_of_another_form_is_no_obstacle(data: dict[str, object]) -> None:
    assert reason(event("assignment.failed", data)) == ""
    assert paths(event("assignment.failed", data)) == []


def test_a_kind_of_a_later_version_is_shown_as_it_is() -> None:
    assert sentence(event("job.teleported")) == "job.teleported"
