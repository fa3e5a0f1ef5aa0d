"""What a node believes, and what it therefore does: the agent without its hands.

Owns the agent's whole decision-making as one state machine: (event, now) in, commands out. Refuses to
know clocks, files, sockets, processes and threads; the driver in `main` has those, and the simulator
has others. Nothing here is believed twice: what the controller wants comes whole with every reply,
what runs comes from the supervisors, and what must outlive this process is in the journal before
anything follows from it.

The life of one attempt, in stages:

    STARTING -> RUNNING -> COLLECTING -> UPLOADING -> REPORTING -> (forgotten)

An attempt is started once: the journal names it before `Start`, and a start that was commanded twice
finds its own supervisor. It is reported as succeeded only when its log and all its files are with the
controller or in the report itself. It is forgotten only when its processes are gone and the controller
no longer lists it.
"""

import random
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
    Upload,
    WakeAt,
    Write,
)
from fleetward.agent.events import (
    Collected,
    CollectFailed,
    EndedBy,
    Event,
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
from fleetward.domain.artifacts import INLINE_SYNC_BYTES_MAX
from fleetward.domain.nodes import Load
from fleetward.wire.messages import (
    AssignmentOrder,
    HeldAssignment,
    InlineArtifact,
    SyncReply,
    SyncRequest,
)

GRACE_SECONDS: Final = 10.0  # between TERM and KILL
RETRY_FIRST: Final = 0.5  # seconds
RETRY_MAX: Final = 30.0  # shorter than half of the shortest lease, so that an outage ends before trust does
QUIET_MIN: Final = 1.0  # seconds between calls when replies bring nothing and come at once

End = Literal["succeeded", "failed", "cancelled", "lost"]


class Stage(IntEnum):
    """How far an attempt has come on this node."""

    STARTING = 0
    RUNNING = 1
    COLLECTING = 2
    UPLOADING = 3
    REPORTING = 4


@dataclass(slots=True)
class _Attempt:
    entry: JournalEntry
    stage: Stage = Stage.STARTING
    known: Literal["run", "stop"] = "run"
    is_commanded: bool = False
    is_dropped: bool = False
    is_gone: bool = False
    ended_by: EndedBy | None = None
    exit_code: int | None = None
    final: End | None = None
    error: str = ""
    inline: tuple[InlineArtifact, ...] = ()

    @property
    def state(self) -> Literal["assigned", "running", "succeeded", "failed", "cancelled", "lost"]:
        if self.stage is Stage.REPORTING:
            assert self.final is not None, "an attempt reports its end only when it has one"
            return self.final
        return "assigned" if self.stage is Stage.STARTING else "running"


@dataclass(slots=True)
class Session:
    """The state machine. Feed it events with `handle`; do what it returns, in order."""

    rng: random.Random
    journal: Journal
    load: Load = field(default_factory=Load)
    _attempts: dict[UUID, _Attempt] = field(default_factory=dict[UUID, _Attempt], init=False)
    _session: int = field(default=0, init=False)
    _sequence: int = field(default=0, init=False)
    _accepted: int = field(default=0, init=False)
    _asked_at: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _beat_seconds: float = field(default=10.0, init=False)
    _failures: int = field(default=0, init=False)
    _is_opening: bool = field(default=False, init=False)
    _is_dirty: bool = field(default=False, init=False)
    _is_leaving: bool = field(default=False, init=False)
    _verdict: Leave | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for entry in self.journal.held:
            self._attempts[entry.id] = self._resumed(entry)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take one event in and return all that follows from it."""
        self._is_dirty = False
        commands = self._take_in(event, now=now)
        if self._is_dirty:
            commands += self._ask(now=now)
        return commands + self._maybe_leave()

    def _take_in(self, event: Event, *, now: float) -> list[Command]:
        match event:
            case Started():
                return self._open()
            case SessionOpened():
                return self._begin(event.session, now=now)
            case Replied():
                return self._obey(event.reply, now=now)
            case Refused():
                return self._bear(event, now=now)
            case Tick():
                return self._ask(now=now)
            case StopRequested():
                return self._stop_requested(at_once=event.at_once)
            case _:
                return self._learn(event)

    def _learn(self, event: Observed | StartFailed | Collected | CollectFailed | Uploaded) -> list[Command]:
        """Take in what happened to one attempt."""
        match event:
            case Observed():
                return self._observe(event)
            case StartFailed():
                return self._start_failed(event)
            case Collected():
                return self._collected(event)
            case CollectFailed():
                return self._end(event.id, "failed", event.message)
            case Uploaded():
                return self._uploaded(event.id)
            case _:
                assert_never(event)

    @property
    def held(self) -> frozenset[UUID]:
        """The attempts that this node knows of."""
        return frozenset(self._attempts)

    # Sessions and calls

    def _resumed(self, entry: JournalEntry) -> _Attempt:
        attempt = _Attempt(entry)
        if entry.failed:
            attempt.stage, attempt.final = Stage.REPORTING, "failed"
            attempt.error, attempt.is_gone = entry.failed, True
        return attempt

    def _open(self) -> list[Command]:
        """Ask for a session. The nonce is on disk first and reused until an answer is, so a lost one costs nothing."""
        if self._is_opening:
            return []
        self._session, self._is_opening = 0, True
        commands: list[Command] = []
        if not self.journal.nonce:
            commands += self._write(nonce=f"{self.rng.getrandbits(128):032x}")
        return [*commands, OpenSession(last_session=self.journal.last_session, nonce=self.journal.nonce)]

    def _begin(self, session: int, *, now: float) -> list[Command]:
        self._session, self._sequence, self._accepted = session, 0, 0
        self._is_opening, self._failures = False, 0
        self._asked_at.clear()
        return [*self._write(last_session=session, nonce=""), *self._ask(now=now)]

    def _ask(self, *, now: float) -> list[Command]:
        """Say all that is held. Without a session, ask for one instead."""
        if self._verdict is not None:
            return []
        if self._session == 0:
            return self._open()
        self._sequence += 1
        self._asked_at[self._sequence] = now
        return [
            Sync(
                SyncRequest(
                    sequence=self._sequence,
                    load=self.load,
                    held=self._report(),
                    wait_seconds=self._beat_seconds,
                )
            )
        ]

    def _report(self) -> list[HeldAssignment]:
        """All that is held; small files ride along up to the size of one call, the rest waits for the next."""
        room = INLINE_SYNC_BYTES_MAX
        held: list[HeldAssignment] = []
        for attempt in self._attempts.values():
            if attempt.is_dropped:
                continue
            size = sum(file.size_bytes for file in attempt.inline)
            fits = size <= room
            if fits:
                room -= size
            held.append(_held(attempt) if fits else _held_back(attempt))
        return held

    def _bear(self, event: Refused, *, now: float) -> list[Command]:
        """Live with a refusal: a newer call makes it moot, some are final, most only take time."""
        if 0 < event.sequence < self._sequence:
            return []
        if event.sequence == 0:
            self._is_opening = False
        match event.code:
            case "node_removed":
                message = f"this node was removed: {event.message}"
                return self._give_up(Leave(exit_status=5, message=message, forgets_credential=True))
            case "node_cloned":
                return self._give_up(Leave(exit_status=3, message=event.message))
            case "agent_too_old":
                return self._give_up(Leave(exit_status=6, message=event.message))
            case "session_stale" | "unauthenticated" if event.sequence != 0:
                return self._open()
            case _:
                self._failures += 1
                bound = min(RETRY_MAX, RETRY_FIRST * 2 ** min(self._failures, 10))
                return [WakeAt(now + bound * (0.5 + self.rng.random() / 2))]

    def _give_up(self, verdict: Leave) -> list[Command]:
        """Stop all work; the agent leaves when nothing of it is left."""
        self._verdict = verdict
        stops: list[Command] = []
        for attempt in list(self._attempts.values()):
            stops += self._drop(attempt)
        return stops

    # What the controller wants

    def _obey(self, reply: SyncReply, *, now: float) -> list[Command]:
        """Make this node hold what the reply lists, and nothing else."""
        if self._verdict is not None or reply.sequence <= self._accepted or reply.sequence not in self._asked_at:
            return []
        asked_at = self._asked_at[reply.sequence]
        self._accepted = reply.sequence
        self._asked_at = {sequence: at for sequence, at in self._asked_at.items() if sequence > reply.sequence}
        self._beat_seconds = reply.beat_seconds
        self._failures = 0
        deadline = asked_at + reply.lease_seconds
        listed = {order.id for order in reply.assignments}
        commands: list[Command] = []
        for attempt in [one for one in self._attempts.values() if one.entry.id not in listed]:
            commands += self._drop(attempt)
        for order in reply.assignments:
            commands += self._follow(order, deadline=deadline)
        if reply.sequence < self._sequence:
            return commands
        if not commands and now - asked_at < min(QUIET_MIN, self._beat_seconds / 2):
            return [WakeAt(now + QUIET_MIN)]
        self._is_dirty = True
        return commands

    def _follow(self, order: AssignmentOrder, *, deadline: float) -> list[Command]:
        attempt = self._attempts.get(order.id)
        if attempt is None:
            return self._take_on(order, deadline=deadline)
        if order.fence != attempt.entry.fence or attempt.is_dropped:
            return []
        if order.desired == "stop" and attempt.known == "run":
            attempt.known = "stop"
            if not self._may_live(attempt):
                attempt.is_gone = True
                return self._end(order.id, "cancelled", "stopped before it started")
            return self._stop(attempt)
        if attempt.stage > Stage.RUNNING or attempt.is_gone:
            return []
        if attempt.stage is Stage.STARTING and not attempt.is_commanded:
            return [self._start(attempt, deadline=deadline)]
        return [Renew(order.id, deadline)]

    def _take_on(self, order: AssignmentOrder, *, deadline: float) -> list[Command]:
        """Begin an attempt that this node has not seen, or say at once that it will not run here."""
        if order.spec is None:
            return []
        entry = JournalEntry(
            id=order.id, fence=order.fence, job_id=order.job_id, attempt=order.attempt, spec=order.spec
        )
        attempt = self._attempts[order.id] = _Attempt(entry, known=order.desired)
        self._is_dirty = True
        if order.desired == "stop" or self._is_leaving:
            attempt.stage, attempt.is_gone = Stage.REPORTING, True
            attempt.final = "cancelled" if order.desired == "stop" else "lost"
            attempt.error = "" if order.desired == "stop" else "the agent is leaving and takes on no more work"
            return []
        return [*self._write(), self._start(attempt, deadline=deadline)]

    def _start(self, attempt: _Attempt, *, deadline: float) -> Start:
        attempt.is_commanded = True
        entry = attempt.entry
        return Start(
            id=entry.id,
            fence=entry.fence,
            job_id=entry.job_id,
            attempt=entry.attempt,
            spec=entry.spec,
            deadline=deadline,
        )

    def _drop(self, attempt: _Attempt) -> list[Command]:
        """Stop and forget what the controller does not list any more."""
        attempt.is_dropped = True
        if attempt.is_gone or not self._may_live(attempt):
            return self._forget(attempt)
        return self._stop(attempt)

    def _may_live(self, attempt: _Attempt) -> bool:
        """Whether the attempt may have processes: it was started by this run, or seen by it."""
        return attempt.is_commanded or attempt.stage is not Stage.STARTING

    def _stop(self, attempt: _Attempt) -> list[Command]:
        return [] if attempt.is_gone else [Stop(attempt.entry.id, GRACE_SECONDS)]

    def _forget(self, attempt: _Attempt) -> list[Command]:
        del self._attempts[attempt.entry.id]
        return [Forget(attempt.entry.id), *self._write()]

    # What happens to attempts

    def _observe(self, event: Observed) -> list[Command]:
        attempt = self._attempts.get(event.id)
        if attempt is None:
            # On disk but not in the journal: it is forgotten already, only not yet gone.
            return [Forget(event.id)] if event.is_gone else [Stop(event.id, GRACE_SECONDS)]
        if event.is_gone:
            return self._gone(attempt, event)
        if event.is_running and attempt.stage is Stage.STARTING:
            attempt.stage = Stage.RUNNING
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
        return [
            Collect(
                attempt.entry.id,
                attempt.entry.fence,
                attempt.entry.spec,
                wants_files=_ending(attempt)[0] == "succeeded",
            )
        ]

    def _start_failed(self, event: StartFailed) -> list[Command]:
        attempt = self._attempts.get(event.id)
        if attempt is None or attempt.is_gone:
            return []
        attempt.is_gone = True
        if attempt.is_dropped:
            return self._forget(attempt)
        if attempt.known == "stop":
            return self._end(event.id, "cancelled", "stopped before it started")
        attempt.entry = msgspec.structs.replace(attempt.entry, failed=event.message or "it could not be started")
        return [*self._write(), *self._end(event.id, "failed", attempt.entry.failed)]

    def _collected(self, event: Collected) -> list[Command]:
        attempt = self._attempts.get(event.id)
        if attempt is None or attempt.stage is not Stage.COLLECTING:
            return []
        attempt.inline = event.inline
        if event.large:
            attempt.stage = Stage.UPLOADING
            return [Upload(event.id, attempt.entry.fence, event.large)]
        return self._end(event.id, *_ending(attempt))

    def _uploaded(self, attempt_id: UUID) -> list[Command]:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.stage is not Stage.UPLOADING:
            return []
        return self._end(attempt_id, *_ending(attempt))

    def _end(self, attempt_id: UUID, final: End, error: str) -> list[Command]:
        """Settle how an attempt ended; from here on it is only reported."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.stage is Stage.REPORTING:
            return []
        if attempt.is_dropped:
            return self._forget(attempt)
        attempt.stage, attempt.final, attempt.error = Stage.REPORTING, final, error
        self._is_dirty = True
        return []

    # Leaving

    def _stop_requested(self, *, at_once: bool) -> list[Command]:
        self._is_leaving = True
        if at_once and self._verdict is None:
            self._verdict = Leave(exit_status=0, message="left at once; what runs is taken up again at the next start")
            return [self._verdict]
        return []

    def _maybe_leave(self) -> list[Command]:
        if self._attempts:
            return []
        if self._verdict is not None:
            return [self._verdict]
        return [Leave(exit_status=0, message="left; nothing was running")] if self._is_leaving else []

    def _write(self, *, last_session: int | None = None, nonce: str | None = None) -> list[Command]:
        self.journal = Journal(
            last_session=self.journal.last_session if last_session is None else last_session,
            nonce=self.journal.nonce if nonce is None else nonce,
            held=[attempt.entry for attempt in self._attempts.values()],
        )
        return [Write(self.journal)]


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
    return HeldAssignment(
        id=attempt.entry.id,
        fence=attempt.entry.fence,
        state=attempt.state,
        known=attempt.known,
        released=attempt.is_gone and attempt.stage is Stage.REPORTING,
        exit_code=attempt.exit_code,
        error=attempt.error if attempt.stage is Stage.REPORTING else "",
        inline=list(attempt.inline) if attempt.stage is Stage.REPORTING else [],
    )


def _held_back(attempt: _Attempt) -> HeldAssignment:
    """A report whose files did not fit in this call says nothing new yet."""
    return HeldAssignment(id=attempt.entry.id, fence=attempt.entry.fence, state="running", known=attempt.known)
