"""What a node believes, and what it therefore does: the agent without its hands.

Owns the agent's whole decision-making as one state machine: (event, now) in, commands out. Refuses to
know clocks, files, sockets, processes and threads; the driver in `main` has those, and the simulator
has others. Nothing here is believed twice: what the controller wants comes whole with every reply,
what runs comes from the supervisors, and what must outlive this process is in the journal before
anything follows from it.

The life of one attempt, in stages:

    TAKEN -> STARTING -> RUNNING -> COLLECTING -> UPLOADING -> REPORTING -> (forgotten)

An order says what is left of its lease, and the node trusts that from when it asked: never longer than the
controller does. The journal names an attempt before it starts; one that after a restart only the journal
knows is TAKEN until an order names it again. From STARTING on there may be processes, until they are
observed gone. It is reported as succeeded only when its log and all its files are with the controller or
in the report itself. It is forgotten only when its processes are gone and the controller no longer lists it.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal, assert_never
from uuid import UUID

import msgspec

from fleetward.agent.commands import (
    Collect,
    Command,
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
    Collected,
    EndedBy,
    Event,
    HandInFailed,
    Observed,
    OfAttempt,
    Refused,
    Replied,
    SessionOpened,
    Started,
    StartFailed,
    StopRequested,
    Tick,
    Uploaded,
)
from fleetward.domain.artifacts import INLINE_SYNC_BYTES_MAX
from fleetward.domain.nodes import Load
from fleetward.wire.messages import AssignmentOrder, HeldAssignment, InlineArtifact, SyncReply, SyncRequest

REMOVED: Final = 5  # exit statuses of the agent
TOO_OLD: Final = 6
CLONED: Final = 3

GRACE_SECONDS: Final = 10.0  # between TERM and KILL
MARGIN_SECONDS_MAX: Final = 10.0  # a tree is ended this long before its lease is; a sixth of a short one
BEAT_SECONDS: Final = 10.0  # until the controller dictates another
INLINE_FILE_BYTES: Final = 512  # what a small file's name and digest are reckoned at, beside its bytes
RETRY_FIRST: Final = 0.5  # seconds
RETRY_MAX: Final = 30.0  # a third of the shortest lease, so that a short outage costs no work
QUIET_SECONDS: Final = 1.0  # between calls, once replies keep coming at once and bring nothing
IDLE_REPLIES_MAX: Final = (
    3  # a hint may end a hold early and for nothing; a controller that never holds must not spin us
)

End = Literal["succeeded", "failed", "cancelled", "lost"]
State = Literal["assigned", "running", "succeeded", "failed", "cancelled", "lost"]


class Stage(IntEnum):
    """How far an attempt has come on this node."""

    TAKEN = 0
    STARTING = 1
    RUNNING = 2
    COLLECTING = 3
    UPLOADING = 4
    REPORTING = 5


@dataclass(slots=True)
class _Attempt:
    entry: JournalEntry
    stage: Stage = Stage.TAKEN
    known: Literal["run", "stop"] = "run"
    is_dropped: bool = False
    is_gone: bool = False
    ended_by: EndedBy | None = None
    exit_code: int | None = None
    final: End | None = None
    error: str = ""
    inline: tuple[InlineArtifact, ...] = ()

    @property
    def id(self) -> UUID:
        return self.entry.id

    @property
    def may_live(self) -> bool:
        return self.stage >= Stage.STARTING and not self.is_gone

    @property
    def state(self) -> State:
        if self.stage is Stage.REPORTING:
            assert self.final is not None, "an attempt reports its end only when it has one"
            return self.final
        return "running" if self.stage >= Stage.RUNNING else "assigned"


@dataclass(slots=True)
class Session:
    """The state machine. Feed it events with `handle`; do what it returns, in order."""

    rng: random.Random
    journal: Journal
    load: Load = field(default_factory=Load)
    _attempts: dict[UUID, _Attempt] = field(default_factory=dict[UUID, _Attempt], init=False)
    _session: int = field(default=0, init=False)
    _sequence: int = field(default=0, init=False)
    _asked_at: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _beat_seconds: float = field(default=BEAT_SECONDS, init=False)
    _failures: int = field(default=0, init=False)
    _idle_replies: int = field(default=0, init=False)
    _is_opening: bool = field(default=False, init=False)
    _is_dirty: bool = field(default=False, init=False)
    _must_write: bool = field(default=False, init=False)
    _is_leaving: bool = field(default=False, init=False)
    _verdict: Leave | None = field(default=None, init=False)
    _has_left: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for entry in self.journal.held:
            attempt = self._attempts[entry.id] = _Attempt(entry)
            if entry.unstarted is not None:
                attempt.is_gone = True
                self._end(attempt, entry.unstarted.blame, entry.unstarted.message)

    @property
    def held(self) -> frozenset[UUID]:
        """The attempts that this node knows of."""
        return frozenset(self._attempts)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take one event in and return all that follows from it."""
        if self._has_left:
            return []
        self._is_dirty = self._must_write = False
        commands = self._take_in(event, now=now)
        if self._is_dirty and self._session != 0:
            commands += self._ask(now=now)
        commands += self._maybe_leave()
        return [Write(self.journal), *commands] if self._must_write else commands

    def _take_in(self, event: Event, *, now: float) -> list[Command]:
        match event:
            case Started():
                return self._open()
            case SessionOpened():
                return self._begin(event.session)
            case Replied():
                return self._obey(event.reply, now=now)
            case Refused():
                return self._bear(event, now=now)
            case Tick():
                return self._ask(now=now)
            case StopRequested():
                return self._stop_requested(event)
            case _:
                attempt = self._attempts.get(event.id)
                return self._unknown(event) if attempt is None else self._learn(attempt, event)

    # Sessions and calls

    def _open(self) -> list[Command]:
        """Ask for a session. The nonce is on disk first and reused until an answer is, so a lost one costs nothing."""
        if self._is_opening or self._verdict is not None:
            return []
        self._session, self._is_opening = 0, True
        self._write(nonce=self.journal.nonce or f"{self.rng.getrandbits(128):032x}")
        return [OpenSession(last_session=self.journal.last_session, nonce=self.journal.nonce)]

    def _begin(self, session: int) -> list[Command]:
        if session <= self.journal.last_session:
            return []
        # Sequences go on across sessions: then no answer of an earlier session can be taken for one of this.
        self._asked_at.clear()
        self._session, self._is_opening, self._failures, self._is_dirty = session, False, 0, True
        self._write(last_session=session, nonce="")
        return []

    def _ask(self, *, now: float) -> list[Command]:
        """Say all that is held. Without a session, ask for one instead."""
        if self._verdict is not None:
            return []
        if self._session == 0:
            return self._open()
        self._sequence += 1
        self._asked_at[self._sequence] = now
        held = self._report()
        return [Sync(SyncRequest(sequence=self._sequence, load=self.load, held=held, wait_seconds=self._beat_seconds))]

    def _report(self) -> list[HeldAssignment]:
        """All that is held; small files ride along up to the size of one call, the rest waits for the next."""
        room = INLINE_SYNC_BYTES_MAX
        held: list[HeldAssignment] = []
        for attempt in self._attempts.values():
            if attempt.is_dropped:
                continue
            size = sum(file.size_bytes + INLINE_FILE_BYTES for file in attempt.inline)
            fits = size <= room
            room -= size if fits else 0
            held.append(_held(attempt) if fits else _held_back(attempt))
        return held

    def _bear(self, event: Refused, *, now: float) -> list[Command]:
        """Live with a refusal: a newer call makes it moot, some are final, most only take time."""
        self._asked_at.pop(event.sequence, None)
        if 0 < event.sequence < self._sequence or self._verdict is not None:
            return []
        if event.sequence == 0:
            self._is_opening = False
        match event.code:
            case "node_removed":
                return self._give_up(Leave(REMOVED, event.message, forgets_credential=True))
            case "node_cloned":
                return self._give_up(Leave(CLONED, event.message))
            case "agent_too_old":
                return self._leave_at_once(Leave(TOO_OLD, event.message))
            case "session_stale" | "unauthenticated" if event.sequence != 0:
                return self._open()
            case _:
                self._failures += 1
                bound = min(RETRY_MAX, RETRY_FIRST * 2 ** min(self._failures - 1, 10))
                return [WakeAt(now + bound * (0.5 + self.rng.random() / 2))]

    # What the controller wants

    def _obey(self, reply: SyncReply, *, now: float) -> list[Command]:
        """Make this node hold what the reply lists, and nothing else."""
        asked_at = self._asked_at.get(reply.sequence)
        if self._verdict is not None or asked_at is None:
            return []
        self._failures, self._beat_seconds = 0, reply.beat_seconds
        # Only newer answers are heard from here on.
        self._asked_at = {sequence: at for sequence, at in self._asked_at.items() if sequence > reply.sequence}
        margin = min(MARGIN_SECONDS_MAX, reply.lease_seconds / 6)
        listed = {order.id for order in reply.assignments}
        commands: list[Command] = []
        for attempt in [each for each in self._attempts.values() if each.id not in listed]:
            commands += self._drop(attempt)
        for order in reply.assignments:
            commands += self._follow(order, deadline=asked_at + order.lease_seconds, margin=margin)
        if reply.sequence < self._sequence:
            return commands
        return commands + self._go_on(commands, asked_at=asked_at, now=now)

    def _go_on(self, commands: Iterable[Command], *, asked_at: float, now: float) -> list[Command]:
        """Call again at once: the controller's hold is the beat. Only if it does not hold, keep our own."""
        is_idle = all(isinstance(command, Renew) for command in commands) and not self._is_dirty
        self._idle_replies = self._idle_replies + 1 if is_idle and now - asked_at < QUIET_SECONDS else 0
        if self._idle_replies > IDLE_REPLIES_MAX:
            return [WakeAt(now + QUIET_SECONDS)]
        self._is_dirty = True
        return []

    def _follow(self, order: AssignmentOrder, *, deadline: float, margin: float) -> list[Command]:
        attempt = self._attempts.get(order.id) or self._take_on(order)
        if attempt is None or attempt.is_dropped or order.fence != attempt.entry.fence:
            return []
        if order.desired == "stop":
            return self._told_to_stop(attempt)
        match attempt.stage:
            case Stage.TAKEN:
                attempt.stage = Stage.STARTING
                self._write()
                return [Start(attempt.entry, deadline, margin)]
            case Stage.STARTING | Stage.RUNNING:
                return [Renew(attempt.id, deadline)]
            case _:
                return []

    def _take_on(self, order: AssignmentOrder) -> _Attempt | None:
        """Take an order that this node has not seen. An agent that leaves does not: its lease will lapse."""
        if order.spec is None or self._is_leaving:
            return None
        self._is_dirty = True
        attempt = self._attempts[order.id] = _Attempt(
            JournalEntry(id=order.id, fence=order.fence, job_id=order.job_id, attempt=order.attempt, spec=order.spec)
        )
        return attempt

    def _told_to_stop(self, attempt: _Attempt) -> list[Command]:
        if attempt.known == "stop":
            return []
        attempt.known = "stop"
        if attempt.stage is Stage.TAKEN:
            attempt.is_gone = True
            return self._end(attempt, "cancelled", "stopped before it started")
        return [Stop(attempt.id, GRACE_SECONDS)] if attempt.may_live else []

    def _drop(self, attempt: _Attempt) -> list[Command]:
        """Stop and forget what the controller does not list any more."""
        if attempt.is_dropped:
            return []
        attempt.is_dropped = True
        return [Stop(attempt.id, GRACE_SECONDS)] if attempt.may_live else self._forget(attempt)

    def _forget(self, attempt: _Attempt) -> list[Command]:
        del self._attempts[attempt.id]
        self._write()
        return [Forget(attempt.id)]

    # What happens to attempts

    def _unknown(self, event: OfAttempt) -> list[Command]:
        """On disk but not in the journal: it was forgotten already, only not yet removed."""
        if not isinstance(event, Observed):
            return []
        return [Forget(event.id)] if event.is_gone else [Stop(event.id, GRACE_SECONDS)]

    def _learn(self, attempt: _Attempt, event: OfAttempt) -> list[Command]:
        match event:
            case Observed():
                return self._gone(attempt, event) if event.is_gone else self._alive(attempt, event)
            case StartFailed():
                return self._start_failed(attempt, event)
            case Collected() if attempt.stage is Stage.COLLECTING:
                return self._collected(attempt, event)
            case Uploaded() if attempt.stage is Stage.UPLOADING:
                return self._end(attempt, *_ending(attempt))
            case HandInFailed() if attempt.stage in {Stage.COLLECTING, Stage.UPLOADING}:
                return self._hand_in_failed(attempt, event)
            case Collected() | Uploaded() | HandInFailed():
                return []
            case _:
                assert_never(event)

    def _alive(self, attempt: _Attempt, event: Observed) -> list[Command]:
        before = attempt.stage
        attempt.stage = max(before, Stage.RUNNING if event.is_running else Stage.STARTING)
        if attempt.stage is Stage.RUNNING and before is not Stage.RUNNING:
            self._is_dirty = not attempt.is_dropped
        return []

    def _gone(self, attempt: _Attempt, event: Observed) -> list[Command]:
        if attempt.is_gone:
            return []
        attempt.is_gone = True
        attempt.ended_by, attempt.exit_code, attempt.error = event.ended_by, event.exit_code, event.message
        if attempt.is_dropped:
            return self._forget(attempt)
        attempt.stage = Stage.COLLECTING
        return [Collect(attempt.entry, wants_files=_ending(attempt)[0] == "succeeded")]

    def _start_failed(self, attempt: _Attempt, event: StartFailed) -> list[Command]:
        if attempt.stage is not Stage.STARTING or attempt.is_gone:
            return []
        attempt.is_gone = True
        if attempt.is_dropped:
            return self._forget(attempt)
        if attempt.known == "stop":
            return self._end(attempt, "cancelled", "stopped before it started")
        unstarted = Unstarted(blame=event.blame, message=event.message)
        attempt.entry = msgspec.structs.replace(attempt.entry, unstarted=unstarted)
        self._write()
        return self._end(attempt, event.blame, event.message)

    def _collected(self, attempt: _Attempt, event: Collected) -> list[Command]:
        attempt.inline = event.inline
        if not event.large:
            return self._end(attempt, *_ending(attempt))
        attempt.stage = Stage.UPLOADING
        return [Upload(attempt.entry, event.large)]

    def _hand_in_failed(self, attempt: _Attempt, event: HandInFailed) -> list[Command]:
        """Only a success needs its files; any other end stays what it was."""
        attempt.inline = ()
        final, error = _ending(attempt)
        if final == "succeeded":
            final, error = event.blame, event.message
        return self._end(attempt, final, error)

    def _end(self, attempt: _Attempt, final: End, error: str) -> list[Command]:
        """Settle how an attempt ended; from here on it is only reported."""
        assert attempt.is_gone, "an attempt that may still run has not ended"
        attempt.stage, attempt.final, attempt.error = Stage.REPORTING, final, error
        self._is_dirty = True
        return []

    # Leaving

    def _stop_requested(self, event: StopRequested) -> list[Command]:
        self._is_leaving = True
        if event.at_once:
            return self._leave_at_once(Leave(0, "left at once; what runs is taken up again at the next start"))
        return []

    def _give_up(self, verdict: Leave) -> list[Command]:
        """Stop all work; the agent leaves when nothing of it is left."""
        self._verdict = verdict
        return [command for attempt in list(self._attempts.values()) for command in self._drop(attempt)]

    def _leave_at_once(self, verdict: Leave) -> list[Command]:
        """Leave the work to its supervisors, and to the journal the knowledge of it."""
        self._verdict = verdict
        self._attempts.clear()
        return []

    def _maybe_leave(self) -> list[Command]:
        if self._attempts or not (self._is_leaving or self._verdict):
            return []
        self._has_left = True
        return [self._verdict or Leave(0, "left; nothing was running")]

    def _write(self, *, last_session: int | None = None, nonce: str | None = None) -> None:
        """Have what is believed now written, once, before all commands that follow from this event."""
        self._must_write = True
        self.journal = Journal(
            last_session=self.journal.last_session if last_session is None else last_session,
            nonce=self.journal.nonce if nonce is None else nonce,
            held=[attempt.entry for attempt in self._attempts.values() if attempt.stage is not Stage.TAKEN],
        )


def _ending(attempt: _Attempt) -> tuple[End, str]:
    """Name the end of an attempt whose processes are gone, and say it in words."""
    match attempt.ended_by:
        case "exited" if attempt.exit_code == 0:
            return "succeeded", ""
        case "exited":
            return "failed", f"the command ended with exit code {attempt.exit_code}"
        case "stopped" if attempt.known == "stop":
            return "cancelled", "stopped as asked"
        case "timeout":
            return "failed", attempt.error or "the command ran longer than its run_seconds"
        case "start_failed":
            return "failed", attempt.error or "the command could not be started"
        case "deadline":
            return "lost", attempt.error or "the lease could not be renewed in time"
        case _:
            return "lost", attempt.error or "the processes ended and nobody saw how"


def _held(attempt: _Attempt) -> HeldAssignment:
    is_final = attempt.stage is Stage.REPORTING
    return HeldAssignment(
        id=attempt.id,
        fence=attempt.entry.fence,
        state=attempt.state,
        known=attempt.known,
        released=is_final,
        exit_code=attempt.exit_code if is_final else None,
        error=attempt.error if is_final else "",
        inline=list(attempt.inline) if is_final else [],
    )


def _held_back(attempt: _Attempt) -> HeldAssignment:
    """A report whose files did not fit in this call says nothing new yet."""
    return HeldAssignment(id=attempt.id, fence=attempt.entry.fence, state="running", known=attempt.known)
