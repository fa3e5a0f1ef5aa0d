"""Following a job: every event once and in order, the reason while it waits, and a log to its last byte."""

from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest
from loopback_server import Answer, serve

from fleetward.cli.watch import LogPrinter, copy_log, events, follow_events, log_tail
from fleetward.client import Client
from fleetward.domain.jobs import JobSpec
from fleetward.wire import messages as m

JOB = UUID(int=1)
ATTEMPT = UUID(int=2)
AT = datetime(2026, 1, 1, tzinfo=UTC)


def page(*kinds: str, first: int = 1) -> Answer:
    items = [
        m.Event(
            cursor=str(number),
            id=number,
            kind=kind,
            actor="controller",
            at=AT,
            job_id=JOB,
            assignment_id=None,
            node_id=None,
            node=None,
            data={},
        )
        for number, kind in enumerate(kinds, first)
    ]
    return Answer(body=msgspec.json.encode(m.Events(items=items, next=str(first + len(items) - 1))))


def job(status: str, why: str = "") -> Answer:
    shown = m.Job(
        id=JOB,
        kind="command",
        name="",
        status=status,
        priority=50,
        spec=JobSpec(command=["true"]),
        replicas=1,
        quorum=1,
        failures=0,
        losses=0,
        created_at=AT,
        started_at=None,
        finished_at=None,
        cancel_requested_at=None,
        winning_assignment_id=None,
        error=None,
        why=why,
    )
    return Answer(body=msgspec.json.encode(shown))


def piece(content: bytes, *, offset: int, ended: bool) -> Answer:
    told = m.Log(assignment_id=ATTEMPT, offset=offset, next_offset=offset + len(content), content=content, ended=ended)
    return Answer(body=msgspec.json.encode(told))


def test_events_are_followed_by_cursor_until_the_job_has_ended() -> None:
    answers = [page("job.submitted", "assignment.assigned"), page("assignment.started", "job.completed", first=3)]
    with serve(answers) as server, Client(server.url) as client:
        kinds = [event.kind for event in follow_events(client, JOB)]
    assert kinds == ["job.submitted", "assignment.assigned", "assignment.started", "job.completed"]
    assert ["after=" in asked.target for asked in server.asked] == [False, True]
    assert "after=2&" in server.asked[1].target
    assert "wait_seconds=2.0" in server.asked[1].target


def test_while_nothing_happens_the_reason_is_asked_for() -> None:
    waiting: list[str] = []
    answers = [page("job.submitted"), page(first=2), job("queued", why="no eligible node"), page("job.failed", first=2)]
    with serve(answers) as server, Client(server.url) as client:
        list(follow_events(client, JOB, on_idle=lambda job: waiting.append(job.why)))
    assert waiting == ["no eligible node"]


def test_a_job_that_has_ended_meanwhile_is_told_to_its_last_event() -> None:
    answers = [page(), job("completed"), page("job.completed"), page(first=2)]
    with serve(answers) as server, Client(server.url) as client:
        assert [event.kind for event in follow_events(client, JOB)] == ["job.completed"]


def test_what_is_recorded_by_now_is_read_page_by_page() -> None:
    with serve([page("job.submitted"), page("job.runnable", first=2), page(first=3)]) as server:
        with Client(server.url) as client:
            assert [event.kind for event in events(client, JOB)] == ["job.submitted", "job.runnable"]
    assert len(server.asked) == 3


def test_a_log_is_copied_byte_for_byte(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    answers = [
        piece(b"no \xff text\n", offset=0, ended=False),
        piece(b"", offset=10, ended=False),
        piece(b"\x1b[m", offset=10, ended=True),
    ]
    with serve(answers) as server, Client(server.url) as client:
        copy_log(client, JOB, ATTEMPT, printer=LogPrinter(to_stderr=False))
    assert capfdbinary.readouterr().out == b"no \xff text\n\x1b[m"
    assert ["offset=0" in server.asked[0].target, "offset=10" in server.asked[2].target] == [True, True]


def test_after_the_end_nothing_more_is_written(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = LogPrinter(to_stderr=True)
    printer.write(b"one", source="a")
    printer.close()
    printer.write(b"two", source="a")
    assert capfdbinary.readouterr() == (b"", b"one")


def test_the_tail_is_the_last_lines() -> None:
    lines = b"".join(b"%d\n" % number for number in range(100))
    answers = [piece(lines, offset=0, ended=False), piece(b"", offset=len(lines), ended=True)]
    with serve(answers) as server, Client(server.url) as client:
        assert log_tail(client, JOB) == [str(number) for number in range(80, 100)]
