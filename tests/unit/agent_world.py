"""A world for one session: the smallest controller, disk, network and machine that it can live in.

Owns the other side of every command and checks, at each, what must always hold. Refuses to be lenient: the
network loses, repeats and reorders, and the agent falls between any two commands.
"""

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

from fleetward.agent.commands import (
    Collect,
    Command,
    Forget,
    Journal,
    Leave,
    OpenSession,
    Renew,
    Start,
    Stop,
    Sync,
    Upload,
    Write,
)
from fleetward.agent.events import (
    Collected,
    Event,
    Observed,
    Refused,
    Replied,
    SessionOpened,
    Started,
    StartFailed,
    Tick,
    Uploaded,
)
from fleetward.agent.session import Session
from fleetward.domain.jobs import JobSpec
from fleetward.wire.messages import AssignmentOrder, DeclaredArtifact, HeldAssignment, SyncReply, SyncRequest

LEASE = 90.0
SPEC = JobSpec(command=["true"])
LARGE = DeclaredArtifact(path="large", size_bytes=70_000, sha256="0" * 64)


@dataclass
class Row:
    """What the controller knows of one assignment."""

    id: UUID
    state: str = "assigned"
    desired: Literal["run", "stop"] = "run"
    is_released: bool = False
    lease_ends: float = 0.0


@dataclass
class Process:
    """An attempt on the machine. It outlives every agent."""

    deadline: float
    phase: Literal["running", "gone"] = "running"
    ended_by: Literal["exited", "stopped", "deadline"] | None = None
    exit_code: int | None = None
    is_stopping: bool = False


@dataclass
class World:
    """Everything around one agent."""

    seed: int = 0
    now: float = 1000.0
    rows: dict[UUID, Row] = field(default_factory=dict)
    processes: dict[UUID, Process] = field(default_factory=dict)
    launched: set[UUID] = field(default_factory=set)
    logged: set[UUID] = field(default_factory=set)
    stored: set[UUID] = field(default_factory=set)
    disk: Journal = field(default_factory=Journal)
    is_disk_full: bool = False
    session: int = 0
    sequence: int = 0
    nonce: str = ""
    requests: list[tuple[int, SyncRequest]] = field(default_factory=list)
    replies: list[Event] = field(default_factory=list)
    chores: list[Start | Collect | Upload] = field(default_factory=list)
    left: Leave | None = None
    agent: Session = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    # The agent

    def restart(self) -> None:
        """An agent falls, and another takes up what is on disk."""
        self.seed += 1
        self.left = None
        self.chores.clear()
        self.replies.clear()
        self.agent = Session(rng=random.Random(self.seed), journal=self.disk)
        for id, process in self.processes.items():
            self.tell(observed(id, process))
        self.tell(Started())

    def tell(self, event: Event, *, falls_after: int | None = None) -> None:
        """Tell the agent something and do what it says, or only the first few commands: then it falls."""
        if self.left is not None:
            return
        commands = self.agent.handle(event, now=self.now)
        unwritten = False
        for done, command in enumerate(commands):
            if falls_after == done:
                self.restart()
                return
            if isinstance(command, Write):
                unwritten = self.is_disk_full
                self.disk = self.disk if unwritten else command.journal
            elif unwritten and isinstance(command, Start):
                self.replies.append(StartFailed(command.entry.id, "no room", "lost"))
            elif unwritten and isinstance(command, OpenSession):
                self.replies.append(Refused(0, "storage_full", "no room"))
            else:
                self.do(command)

    def do(self, command: Command) -> None:
        """Carry out one command, and check that it may be given."""
        match command:
            case OpenSession():
                assert command.nonce == self.disk.nonce, "a nonce is on disk before it is used"
                self.open_session(command)
            case Sync():
                self.check_report(command.request)
                self.requests.append((self.agent.journal.last_session, command.request))
            case Start() | Collect() | Upload():
                if isinstance(command, Start):
                    assert command.entry in self.disk.held, "an attempt is on disk before it is started"
                    assert command.entry.id not in self.launched, "an attempt is started once"
                self.chores.append(command)
            case Renew():
                process = self.processes.get(command.id)
                if process is not None:
                    process.deadline = max(process.deadline, command.deadline)
                self.check_lease(command.id, command.deadline)
            case Stop():
                self.stop(command.id)
            case Forget():
                self.forget(command.id)
            case Leave():
                self.left = command
            case _:
                pass

    def stop(self, id: UUID) -> None:
        starting = [chore for chore in self.chores if isinstance(chore, Start) and chore.entry.id == id]
        for chore in starting:
            self.chores.remove(chore)
            self.replies.append(StartFailed(id, "stopped before it started"))
        if id in self.processes:
            self.processes[id].is_stopping = True

    def forget(self, id: UUID) -> None:
        process = self.processes.pop(id, None)
        assert process is None or process.phase == "gone", "only what is gone is forgotten"
        row = self.rows.get(id)
        if self.left is None and row is not None:
            assert row.is_released, "nothing is forgotten before the controller has dropped it"

    def check_report(self, request: SyncRequest) -> None:
        for held in request.held:
            process = self.processes.get(held.id)
            if held.released:
                assert process is None or process.phase == "gone", "released means that the tree is gone"
                assert held.state not in {"assigned", "running"}, "released comes with the end"
            if held.state == "succeeded":
                assert process is not None, "succeeded means that it ran"
                assert process.exit_code == 0, "succeeded means exit code 0"
                assert held.id in self.logged, "succeeded means that the log has arrived"
                assert held.id in self.stored, "succeeded means that every file is stored"

    def check_lease(self, id: UUID, deadline: float) -> None:
        kept = self.rows[id].lease_ends
        assert deadline <= kept + 1e-6, "a node never trusts a lease longer than the controller keeps it"

    # The machine

    def chore(self, index: int, *, needs_upload: bool) -> None:
        """One of the things under way is done."""
        command = self.chores.pop(index % len(self.chores))
        id = command.entry.id
        match command:
            case Start():
                assert id not in self.launched, "a command runs once, whatever falls"
                self.launched.add(id)
                self.check_lease(id, command.deadline)
                self.processes[id] = Process(deadline=command.deadline)
                self.tell(observed(id, self.processes[id]))
            case Collect():
                self.logged.add(id)
                is_large = needs_upload and command.wants_files
                if not is_large:
                    self.stored.add(id)
                self.tell(Collected(id, inline=(), large=(LARGE,) if is_large else ()))
            case Upload():
                self.stored.add(id)
                self.tell(Uploaded(id))

    def end(self, id: UUID, *, exit_code: int) -> None:
        """A command ends: by itself, or because it was told to."""
        process = self.processes[id]
        ended_by = "stopped" if process.is_stopping else "exited"
        self.processes[id] = replace(process, phase="gone", ended_by=ended_by, exit_code=exit_code)
        self.tell(observed(id, self.processes[id]))

    def pass_time(self, seconds: float) -> None:
        """Time passes; what has outlived its lease is ended by its supervisor."""
        self.now += seconds
        for id, process in list(self.processes.items()):
            if process.phase == "running" and self.now >= process.deadline:
                self.processes[id] = replace(process, phase="gone", ended_by="deadline", exit_code=143)
                self.tell(observed(id, self.processes[id]))
        self.tell(Tick())

    # The controller and the network

    def open_session(self, command: OpenSession) -> None:
        if command.nonce == self.nonce and self.session == command.last_session + 1:
            pass
        else:
            assert command.last_session == self.session, "a restarted agent is never taken for a copy"
            self.session, self.nonce, self.sequence = self.session + 1, command.nonce, 0
        self.replies.append(SessionOpened(self.session))

    def receive(self, index: int) -> None:
        """One of the requests on the way arrives at the controller."""
        session, request = self.requests.pop(index % len(self.requests))
        if session != self.session or request.sequence <= self.sequence:
            self.replies.append(Refused(request.sequence, "session_stale", "open a new session"))
            return
        self.sequence = request.sequence
        held = {each.id: each for each in request.held}
        for row in self.rows.values():
            if row.id in held and not row.is_released:
                self.take_in(row, held[row.id])
            elif row.state != "assigned":
                row.is_released = True
        self.replies.append(Replied(self.answer(request, set(held))))

    def take_in(self, row: Row, held: HeldAssignment) -> None:
        if row.state in {"assigned", "running"}:
            row.lease_ends = self.now + LEASE
            row.state = held.state
        row.is_released = held.released

    def answer(self, request: SyncRequest, known: set[UUID]) -> SyncReply:
        orders = [
            AssignmentOrder(
                id=row.id,
                fence=1,
                job_id=row.id,
                attempt=1,
                desired=row.desired,
                lease_seconds=row.lease_ends - self.now,
                spec=None if row.id in known else SPEC,
            )
            for row in self.rows.values()
            if not row.is_released
        ]
        return SyncReply(
            assignments=orders,
            sequence=request.sequence,
            lease_seconds=LEASE,
            beat_seconds=10.0,
            server_time=datetime(2026, 1, 1, tzinfo=UTC),
        )

    def go_on(self, *, needs_upload: bool) -> None:
        """What is on its way arrives, in order, and what is under way is done."""
        while self.chores:
            self.chore(0, needs_upload=needs_upload)
        while self.requests:
            self.receive(0)
        replies, self.replies = self.replies, []
        for event in replies:
            self.tell(event)

    def expire(self) -> None:
        """Leases that have run out end, as the controller sees it."""
        for row in self.rows.values():
            if row.state in {"assigned", "running"} and self.now > row.lease_ends:
                row.state, row.desired = "failed", "stop"


def observed(id: UUID, process: Process) -> Observed:
    return Observed(
        id=id,
        is_running=process.phase == "running",
        is_gone=process.phase == "gone",
        ended_by=process.ended_by,
        exit_code=process.exit_code,
    )
