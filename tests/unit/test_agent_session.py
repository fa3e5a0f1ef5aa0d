"""Stories of one node: what it is told, and the whole list of what it does about it."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

from fleetward.agent.commands import (
    Collect,
    Forget,
    Journal,
    JournalEntry,
    Leave,
    OpenSession,
    Renew,
    Start,
    Stop,
    Sync,
    Unstarted,
    Upload,
    WakeAt,
    Write,
)
from fleetward.agent.events import (
    Blame,
    Collected,
    EndedBy,
    Event,
    HandInFailed,
    Observed,
    Refused,
    Replied,
    SessionOpened,
    Started,
    StartFailed,
    StopRequested,
    Tick,
    Uploaded,
)
from fleetward.agent.session import IDLE_REPLIES_MAX, INLINE_FILE_BYTES, QUIET_SECONDS, RETRY_FIRST, RETRY_MAX, Session
from fleetward.domain.artifacts import INLINE_SYNC_BYTES_MAX
from fleetward.domain.jobs import JobSpec
from fleetward.wire.messages import (
    AssignmentOrder,
    DeclaredArtifact,
    HeldAssignment,
    InlineArtifact,
    SyncReply,
    SyncRequest,
)

A, B, JOB = UUID(int=1), UUID(int=2), UUID(int=9)
SPEC = JobSpec(command=["true"])
ENTRY = JournalEntry(id=A, fence=7, job_id=JOB, attempt=1, spec=SPEC)
RECEIPT = InlineArtifact(path=".fleetward/receipt.json", size_bytes=2, sha256="0" * 64, content=b"{}")
LARGE = DeclaredArtifact(path="model.bin", size_bytes=70_000, sha256="1" * 64)


def begun(*, journal: Journal | None = None, found: Sequence[Observed] = ()) -> Session:
    """A node at second 0, with its first session open and its first call, sequence 1, on its way."""
    session = Session(rng=random.Random(1), journal=journal or Journal())
    for seen in found:
        session.handle(seen, now=0.0)
    session.handle(Started(), now=0.0)
    session.handle(SessionOpened(session.journal.last_session + 1), now=0.0)
    return session


def order(
    id: UUID = A,
    *,
    fence: int = 7,
    desired: Literal["run", "stop"] = "run",
    spec: JobSpec | None = None,
    lease_seconds: float = 90.0,
) -> AssignmentOrder:
    return AssignmentOrder(
        id=id, fence=fence, job_id=JOB, attempt=1, desired=desired, spec=spec, lease_seconds=lease_seconds
    )


def reply(sequence: int, *orders: AssignmentOrder, lease_seconds: float = 90.0) -> Replied:
    return Replied(
        SyncReply(
            assignments=list(orders),
            sequence=sequence,
            lease_seconds=lease_seconds,
            beat_seconds=10.0,
            server_time=datetime(2026, 1, 1, tzinfo=UTC),
        )
    )


def call(sequence: int, *held: HeldAssignment, wait_seconds: float = 10.0) -> Sync:
    return Sync(SyncRequest(sequence=sequence, held=list(held), wait_seconds=wait_seconds))


def held(state: str, *, id: UUID = A, known: Literal["run", "stop"] = "run") -> HeldAssignment:
    assert state in {"assigned", "running"}
    return HeldAssignment(id=id, fence=7, state="assigned" if state == "assigned" else "running", known=known)


def gone(
    *, ended_by: EndedBy | None = "exited", exit_code: int | None = 0, message: str = "", id: UUID = A
) -> Observed:
    return Observed(id, is_running=False, is_gone=True, ended_by=ended_by, exit_code=exit_code, message=message)


RUNNING = Observed(A, is_running=True)


def running() -> Session:
    """A node whose attempt A runs since second 3; its call 4 is on its way."""
    session = begun()
    session.handle(reply(1, order(spec=SPEC)), now=1.0)
    session.handle(reply(2, order()), now=2.0)
    session.handle(RUNNING, now=3.0)
    return session


def final(session: Session, *events: Event) -> HeldAssignment:
    """The last report of attempt A after these events."""
    commands = [command for event in events for command in session.handle(event, now=10.0)]
    reports = [command.request.held for command in commands if isinstance(command, Sync)]
    return next(held for held in reports[-1] if held.id == A)


def test_a_nonce_is_on_disk_before_it_is_used():
    session = Session(rng=random.Random(1), journal=Journal(last_session=4))
    nonce = f"{random.Random(1).getrandbits(128):032x}"
    assert session.handle(Started(), now=0.0) == [
        Write(Journal(last_session=4, nonce=nonce)),
        OpenSession(last_session=4, nonce=nonce),
    ]
    assert session.handle(SessionOpened(5), now=1.0) == [Write(Journal(last_session=5)), call(1)]


def test_a_restarted_agent_asks_again_with_the_nonce_of_its_journal():
    session = Session(rng=random.Random(1), journal=Journal(last_session=4, nonce="abc"))
    assert session.handle(Started(), now=0.0)[-1] == OpenSession(last_session=4, nonce="abc")


def test_an_attempt_is_on_disk_before_it_starts_and_named_at_once():
    session = begun()
    assert session.handle(reply(1, order(spec=SPEC, lease_seconds=80.0)), now=5.0) == [
        Write(Journal(last_session=1, held=[ENTRY])),
        Start(ENTRY, deadline=80.0, margin_seconds=10.0),
        call(2, held("assigned")),
    ]
    assert session.handle(RUNNING, now=6.0) == [call(3, held("running"))]


def test_a_lease_counts_from_when_we_asked_and_its_margin_is_a_sixth_of_a_short_one():
    session = begun()
    session.handle(reply(1), now=20.0)
    commands = session.handle(reply(2, order(spec=SPEC, lease_seconds=11.0), lease_seconds=12.0), now=28.0)
    assert commands[1] == Start(ENTRY, deadline=31.0, margin_seconds=2.0)
    assert session.handle(reply(3, order(lease_seconds=12.0), lease_seconds=12.0), now=33.0)[0] == Renew(A, 40.0)


def test_every_answer_renews_what_runs():
    session = running()
    assert session.handle(reply(4, order()), now=9.0) == [Renew(A, 93.0), call(5, held("running"))]


def test_success_is_reported_when_log_and_files_are_handed_in():
    session = running()
    assert session.handle(gone(), now=5.0) == [Collect(ENTRY, wants_files=True)]
    assert session.handle(Collected(A, inline=(RECEIPT,), large=(LARGE,)), now=6.0) == [Upload(ENTRY, (LARGE,))]
    done = HeldAssignment(id=A, fence=7, state="succeeded", released=True, exit_code=0, inline=[RECEIPT])
    assert session.handle(Uploaded(A), now=7.0) == [call(5, done)]
    assert session.handle(reply(5), now=8.0) == [Write(Journal(last_session=1)), Forget(A), call(6)]
    assert session.held == frozenset()


def test_until_its_end_is_reported_an_attempt_counts_as_running():
    session = running()
    session.handle(gone(), now=5.0)
    assert session.handle(reply(4, order()), now=6.0) == [call(5, held("running"))]


def test_ends_are_told_in_words():
    def told(seen: Observed) -> tuple[str, str]:
        report = final(running(), seen, Collected(A, inline=(RECEIPT,), large=()))
        assert report.released
        assert report.inline == [RECEIPT]
        return report.state, report.error

    assert told(gone(exit_code=3)) == ("failed", "the command ended with exit code 3")
    assert told(gone(ended_by="timeout", exit_code=143, message="ran out of its time of 5 s")) == (
        "failed",
        "ran out of its time of 5 s",
    )
    assert told(gone(ended_by="start_failed", exit_code=None, message="no such file")) == ("failed", "no such file")
    assert told(gone(ended_by="deadline", exit_code=143)) == ("lost", "the lease could not be renewed in time")
    assert told(gone(ended_by="lost", exit_code=None, message="restarted")) == ("lost", "restarted")
    assert told(gone(ended_by=None, exit_code=None)) == ("lost", "the processes ended and nobody saw how")
    assert told(gone(ended_by="stopped", exit_code=143)) == ("lost", "the processes ended and nobody saw how")


def test_a_failed_attempt_hands_in_its_receipt_only():
    assert running().handle(gone(exit_code=3), now=5.0) == [Collect(ENTRY, wants_files=False)]


def test_a_cancelled_attempt_is_stopped_and_says_so():
    session = running()
    assert session.handle(reply(4, order(desired="stop")), now=5.0) == [
        Stop(A, 10.0),
        call(5, held("running", known="stop")),
    ]
    report = final(session, gone(ended_by="stopped", exit_code=143), Collected(A, inline=(), large=()))
    assert (report.state, report.error, report.released) == ("cancelled", "stopped as asked", True)


def test_what_finished_before_it_saw_the_cancel_has_succeeded():
    session = running()
    session.handle(reply(4, order(desired="stop")), now=5.0)
    assert final(session, gone(), Collected(A, inline=(), large=())).state == "succeeded"


def test_what_is_cancelled_before_it_starts_never_does():
    stopped = HeldAssignment(
        id=A, fence=7, state="cancelled", known="stop", released=True, error="stopped before it started"
    )
    assert begun().handle(reply(1, order(spec=SPEC, desired="stop")), now=1.0) == [call(2, stopped)]
    restarted = begun(journal=Journal(held=[ENTRY]))
    assert restarted.handle(reply(1, order(desired="stop")), now=1.0) == [call(2, stopped)]


def test_a_stop_that_overtakes_the_start_cancels():
    session = begun()
    session.handle(reply(1, order(spec=SPEC)), now=1.0)
    session.handle(reply(2, order()), now=2.0)
    assert Stop(A, 10.0) in session.handle(reply(3, order(desired="stop")), now=3.0)
    report = final(session, StartFailed(A, "called off"))
    assert (report.state, report.error, report.released) == ("cancelled", "stopped before it started", True)


def test_a_start_that_failed_is_remembered_by_a_restarted_agent():
    def failed(blame: Blame) -> tuple[HeldAssignment, Journal]:
        session = begun()
        session.handle(reply(1, order(spec=SPEC)), now=1.0)
        session.handle(reply(2, order()), now=2.0)
        written, told = session.handle(StartFailed(A, "no room", blame), now=3.0)
        assert isinstance(written, Write)
        assert isinstance(told, Sync)
        return told.request.held[0], written.journal

    report, journal = failed("failed")
    assert (report.state, report.error, report.released) == ("failed", "no room", True)
    report, _ = failed("lost")
    assert report.state == "lost"
    restarted = begun(journal=journal)
    assert final(restarted, Tick()).error == "no room"
    assert journal.held[0].unstarted == Unstarted(blame="failed", message="no room")
    assert restarted.handle(reply(2, order()), now=20.0) == [call(3, final(begun(journal=journal), Tick()))]


def test_a_success_without_its_files_is_none_and_any_other_end_needs_none():
    report = final(running(), gone(), HandInFailed(A, "artifact 'x' was declared before with other bytes"))
    assert (report.state, report.error) == ("failed", "artifact 'x' was declared before with other bytes")
    report = final(running(), gone(), HandInFailed(A, "no room", "lost"))
    assert (report.state, report.error) == ("lost", "no room")
    report = final(running(), gone(exit_code=3), HandInFailed(A, "no room", "lost"))
    assert (report.state, report.error) == ("failed", "the command ended with exit code 3")


def test_what_the_controller_does_not_list_is_stopped_and_then_forgotten():
    session = running()
    assert session.handle(reply(4), now=5.0) == [Stop(A, 10.0), call(5)]
    assert session.handle(reply(5), now=6.0) == [call(6)]
    assert session.handle(gone(ended_by="stopped", exit_code=143), now=7.0) == [
        Write(Journal(last_session=1)),
        Forget(A),
    ]


def test_an_older_answer_and_another_fence_change_nothing():
    session = running()
    session.handle(reply(4, order()), now=5.0)
    assert session.handle(reply(3), now=6.0) == []
    assert session.handle(reply(4), now=6.0) == []
    assert session.handle(reply(5, order(fence=6, desired="stop")), now=7.0) == [call(6, held("running"))]


def test_an_answer_of_an_earlier_session_fits_none_of_this_one():
    session = running()
    assert session.handle(Refused(4, "session_stale", ""), now=5.0)[-1] == OpenSession(
        last_session=1, nonce=session.journal.nonce
    )
    session.handle(SessionOpened(2), now=6.0)
    assert session.handle(SessionOpened(2), now=6.0) == []
    assert [session.handle(reply(sequence), now=7.0) for sequence in range(1, 5)] == [[], [], [], []]
    assert session.held == {A}


def test_a_restarted_agent_adopts_what_runs():
    session = begun(journal=Journal(last_session=1, held=[ENTRY]), found=[RUNNING])
    assert session.handle(reply(1, order()), now=5.0) == [Renew(A, 90.0), call(2, held("running"))]


def test_a_restarted_agent_hands_in_what_ended_meanwhile():
    session = Session(rng=random.Random(1), journal=Journal(last_session=1, held=[ENTRY]))
    assert session.handle(gone(), now=0.0) == [Collect(ENTRY, wants_files=True)]


def test_a_restarted_agent_starts_what_was_never_launched():
    session = begun(journal=Journal(last_session=1, held=[ENTRY]))
    assert Start(ENTRY, 90.0, 10.0) in session.handle(reply(1, order()), now=5.0)


def test_a_folder_that_the_journal_does_not_know_is_cleared_up():
    session = begun()
    assert session.handle(Observed(B, is_running=True), now=1.0) == [Stop(B, 10.0)]
    assert session.handle(gone(id=B), now=2.0) == [Forget(B)]
    assert session.handle(Uploaded(B), now=3.0) == []


def test_trouble_is_borne_with_growing_pauses_while_work_goes_on():
    session = running()
    sequence, pauses = 4, list[float]()
    for _ in range(12):
        [wake] = session.handle(Refused(sequence, "unreachable", "no answer"), now=100.0)
        assert isinstance(wake, WakeAt)
        pauses.append(wake.at - 100.0)
        [again] = session.handle(Tick(), now=wake.at)
        assert isinstance(again, Sync)
        sequence = again.request.sequence
    assert RETRY_FIRST / 2 <= pauses[0] <= RETRY_FIRST
    assert RETRY_MAX / 2 <= pauses[-1] <= RETRY_MAX
    assert session.handle(Refused(sequence - 1, "unreachable", "no answer"), now=200.0) == []
    assert session.held == {A}


def test_a_removed_node_stops_its_work_and_forgets_who_it_was():
    session = running()
    assert session.handle(Refused(4, "node_removed", "node 'n' was removed"), now=5.0) == [Stop(A, 10.0)]
    assert session.handle(Tick(), now=6.0) == []
    assert session.handle(gone(ended_by="stopped", exit_code=143), now=7.0) == [
        Write(Journal(last_session=1)),
        Forget(A),
        Leave(5, "node 'n' was removed", forgets_credential=True),
    ]
    assert session.handle(Tick(), now=8.0) == []


def test_a_copied_node_stops_its_work_and_leaves():
    session = begun()
    assert session.handle(Refused(0, "node_cloned", "two machines"), now=5.0) == [Leave(3, "two machines")]


def test_an_agent_that_is_too_old_leaves_its_work_to_the_next_one():
    session = running()
    assert session.handle(Refused(4, "agent_too_old", "pip install"), now=5.0) == [Leave(6, "pip install")]


def test_asked_to_leave_it_finishes_first_and_takes_on_nothing_new():
    session = running()
    assert session.handle(StopRequested(at_once=False), now=5.0) == []
    assert session.handle(reply(4, order(), order(B, spec=SPEC)), now=6.0) == [Renew(A, 93.0), call(5, held("running"))]
    final(session, gone(), Collected(A, inline=(), large=()))
    assert session.handle(reply(6), now=11.0) == [
        Write(Journal(last_session=1)),
        Forget(A),
        call(7),
        Leave(0, "left; nothing was running"),
    ]


def test_asked_to_leave_at_once_it_leaves_its_work_to_the_supervisors():
    session = running()
    [left] = session.handle(StopRequested(at_once=True), now=5.0)
    assert isinstance(left, Leave)
    assert left.exit_status == 0


def test_small_files_ride_along_up_to_the_size_of_one_call():
    big = INLINE_SYNC_BYTES_MAX - INLINE_FILE_BYTES
    file = InlineArtifact(path="x", size_bytes=big, sha256="0" * 64, content=b"")
    entries = [ENTRY, JournalEntry(id=B, fence=7, job_id=JOB, attempt=1, spec=SPEC)]
    session = begun(journal=Journal(held=entries), found=[gone(), gone(id=B)])
    session.handle(Collected(A, inline=(file,), large=()), now=1.0)
    [told] = session.handle(Collected(B, inline=(file,), large=()), now=1.0)
    assert isinstance(told, Sync)
    assert [(each.state, len(each.inline)) for each in told.request.held] == [("succeeded", 1), ("running", 0)]
    *_, told = session.handle(reply(3, order(B)), now=2.0)
    assert isinstance(told, Sync)
    assert [(each.state, len(each.inline)) for each in told.request.held] == [("succeeded", 1)]


def test_a_controller_that_never_holds_does_not_spin_it():
    session = begun()
    for sequence in range(1, IDLE_REPLIES_MAX + 1):
        assert session.handle(reply(sequence), now=0.0) == [call(sequence + 1)]
    assert session.handle(reply(IDLE_REPLIES_MAX + 1), now=0.0) == [WakeAt(QUIET_SECONDS)]
    assert session.handle(Tick(), now=QUIET_SECONDS) == [call(IDLE_REPLIES_MAX + 2)]
    assert session.handle(reply(IDLE_REPLIES_MAX + 2), now=11.0) == [call(IDLE_REPLIES_MAX + 3)]
