"""A simulated node: the real agent session, with a driver whose every step may be the last.

Owns what `agent.main` does with real hands: carry out commands, watch supervisors, time out calls, keep the
identity. Refuses to decide anything that the session decides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Protocol, TypeVar, assert_never
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetward.agent import commands, events
from fleetward.agent.session import Session
from fleetward.controller.services.sessions import NodeCredential, read_token
from fleetward.controller.services.sync import SyncCall
from fleetward.domain.artifacts import RECEIPT_PATH
from fleetward.domain.errors import Fault, Refusal
from fleetward.domain.ids import NodeId
from fleetward.sim.controller import Keyring, SimController
from fleetward.sim.machine import CHUNK_BYTES, FakeFile, Machine, Process
from fleetward.sim.network import Call, Network, Outcome, unreachable
from fleetward.wire.handshake import JoinString, code_key, encode, pairing_transcript, session_transcript
from fleetward.wire.messages import (
    Challenge,
    DeclareReply,
    DeclareRequest,
    PairReply,
    PairRequest,
    SessionReply,
    SessionRequest,
    SyncReply,
    UploadState,
)

CALL_SECONDS: Final = 15.0  # until a call that is not held counts as lost
CALLS_MAX: Final = 4  # at once about the node itself, as in `agent.driver`
REFUSALS_MAX: Final = 8  # of an upload, before it is given up
# What a session that is being renewed, or an upload that began twice, may be told; nothing else passes by itself.
PASSING: Final = frozenset({"session_stale", "unauthenticated", "assignment_lost", "upload_offset"})

NodeCall = commands.Sync | commands.OpenSession
Doable = (
    NodeCall
    | commands.Start
    | commands.Renew
    | commands.Stop
    | commands.Collect
    | commands.Upload
    | commands.Forget
    | commands.WakeAt
    | commands.Leave
)

Answer = TypeVar("Answer")


class HasAgents(Protocol):
    """How often agents are in trouble."""

    @property
    def agents(self) -> float:
        """A factor."""
        ...


class Surroundings(Protocol):
    """What a node sees of its world."""

    @property
    def now(self) -> datetime:
        """The true time."""
        ...

    @property
    def network(self) -> Network:
        """What carries its calls."""
        ...

    @property
    def keyring(self) -> Keyring:
        """The controllers' keys, of which a node knows the pin."""
        ...

    def chance(self, probability: float) -> bool:
        """Whether a fault happens; never once faults have stopped."""
        ...

    def within(self, low: float, high: float) -> float:
        """A number by chance."""
        ...

    @property
    def weather(self) -> "HasAgents":
        """How much trouble there is."""
        ...

    def arrival(self) -> datetime:
        """When what is sent now arrives."""
        ...

    def say(self, text: str) -> None:
        """Add a line to the story."""
        ...

    def label(self, id: UUID) -> str:
        """The short name of a thing."""
        ...


@dataclass(slots=True, eq=False)
class Timer:
    """Something to be done at a time of the machine's clock."""

    at: float
    act: Callable[[], None]


@dataclass(slots=True, eq=False)
class Upload:
    """Files on their way to the controller."""

    fence: int
    files: dict[str, FakeFile]
    refusals: int = 0


@dataclass(slots=True, eq=False)
class SimNode:
    """A machine with an identity, and an agent that comes and goes."""

    world: Surroundings
    machine: Machine
    key: Ed25519PrivateKey
    join: JoinString | None = None
    node_id: UUID | None = None
    agent: "SimAgent | None" = None
    is_removed: bool = False
    asked_at: datetime | None = None

    @property
    def name(self) -> str:
        """The name it pairs under."""
        return self.machine.name

    @property
    def local(self) -> float:
        """What its clock shows."""
        return self.machine.clock(self.world.now)

    @property
    def wants_to_pair(self) -> bool:
        """Whether it is no node yet, and does not wait for an answer."""
        is_waiting = self.asked_at is not None and self.world.now < self.asked_at + timedelta(seconds=CALL_SECONDS)
        return self.node_id is None and not is_waiting

    def seconds_left(self) -> float | None:
        """How long until something is due on this machine."""
        local, due = self.local, [process.ends_at for process in self.machine.living()]
        if self.agent is not None:
            due += [timer.at for timer in self.agent.timers]
            due += [] if self.agent.wake_at is None else [self.agent.wake_at]
        return max(0.0, min(due) - local) if due else None

    def ask_to_pair(self) -> None:
        """Send the code's one use; said again until it is answered."""
        if self.join is None or not self.wants_to_pair:
            return
        join, public = self.join, self.key.public_key().public_bytes_raw()
        transcript = pairing_transcript(code_id=join.code_id, pin=join.pin, node_key=public, name=self.name, mac="")
        request = PairRequest(
            code_id=join.code_id,
            name=self.name,
            mac="",
            node_key=encode(public),
            code_signature=encode(code_key(join.secret).sign(transcript)),
            node_signature=encode(self.key.sign(transcript)),
            agent_version="0.1.0",
        )
        self.asked_at = self.world.now
        self.world.network.send(
            Call(
                number=self.world.network.number(),
                sender=self.name,
                what="pair",
                work=lambda controller: controller.pair(request),
                answered=self._paired,
                arrives_at=self.world.arrival(),
            )
        )

    def _paired(self, outcome: Outcome) -> None:
        self.asked_at = None
        if isinstance(outcome, PairReply):
            assert self.node_id in {None, outcome.node_id}, "a machine is one node"
            self.node_id = outcome.node_id
            self.world.say(f"{self.name} is paired as {self.world.label(outcome.node_id)}")
        elif isinstance(outcome, Refusal):
            self.world.say(f"{self.name} may not pair: {outcome.code}")
            self.join = None

    def start_agent(self) -> None:
        """Start the agent; what is on disk is looked at first."""
        assert self.agent is None, "one agent to a home"
        assert self.node_id is not None, "only a node has an agent"
        self.agent = SimAgent(self, Session(rng=self.machine.rng, journal=self.machine.disk.journal))
        self.agent.begin()

    def end_agent(self) -> None:
        """The agent's process is gone; supervisors do not notice."""
        if self.agent is not None:
            self.agent.end()
            self.agent = None


@dataclass(slots=True, eq=False)
class SimAgent:
    """One run of the agent's process."""

    node: SimNode
    session: Session
    is_over: bool = False
    credential: NodeCredential | None = None
    timers: list[Timer] = field(default_factory=list[Timer])
    wake_at: float | None = None
    calls: list[Call] = field(default_factory=list[Call])
    starting: dict[UUID, Process] = field(default_factory=dict[UUID, Process])
    uploads: dict[UUID, Upload] = field(default_factory=dict[UUID, Upload])
    told: dict[UUID, str] = field(default_factory=dict[UUID, str])
    said: int = 0  # the highest sequence of its calls
    busy: int = 0
    waiting: NodeCall | None = None
    answered: set[int] = field(default_factory=set[int])

    @property
    def world(self) -> Surroundings:
        """The world around it."""
        return self.node.world

    @property
    def machine(self) -> Machine:
        """The machine it runs on."""
        return self.node.machine

    def begin(self) -> None:
        """Observe every supervisor on disk, then begin."""
        self.observe()
        self.feed(events.Started())

    def end(self) -> None:
        """End this run."""
        self.is_over = True
        for call in self.calls:
            call.is_closed = True

    def feed(self, event: events.Event) -> None:
        """Let the session take an event in, and do what it says, unless this run ends in between."""
        if self.is_over:
            return
        is_unwritten = False
        for command in self.session.handle(event, now=self.node.local):
            if self.world.chance(0.004 * self.world.weather.agents):
                self.world.say(f"{self.node.name}: the agent dies before {type(command).__name__}")
                self.node.end_agent()
                return
            match command:
                case commands.Write() if self.world.chance(0.01 * self.world.weather.agents):
                    self.world.say(f"{self.node.name}: the journal cannot be written")
                    is_unwritten = True
                case commands.Write():
                    is_unwritten = False
                    self.machine.disk.journal = command.journal
                case commands.Start() if is_unwritten:
                    failed = events.StartFailed(command.entry.id, "the journal cannot be written", "lost")
                    self.after(0.0, lambda failed=failed: self.feed(failed))
                case commands.OpenSession() if is_unwritten:
                    self.after(0.0, lambda: self.feed(events.Refused(0, "storage_failed", "planted")))
                case _:
                    self.do(command)
            if self.is_over:
                return

    @property
    def is_due(self) -> bool:
        """Whether there is anything to do."""
        local = self.node.local
        return (
            any(timer.at <= local for timer in self.timers)
            or (self.wake_at is not None and self.wake_at <= local)
            or any(self.told.get(one.id) != one.phase for one in self.machine.disk.attempts.values())
        )

    def work(self) -> None:
        """Do whatever is due: timers, news of supervisors, the wish to be woken."""
        local = self.node.local
        for timer in [timer for timer in self.timers if timer.at <= local]:
            self.timers.remove(timer)
            if not self.is_over:
                timer.act()
        self.observe()
        if self.wake_at is not None and self.wake_at <= local and not self.is_over:
            self.wake_at = None
            self.feed(events.Tick())

    def observe(self) -> None:
        """Tell the session what has changed at its supervisors."""
        for process in list(self.machine.disk.attempts.values()):
            if self.told.get(process.id) == process.phase or self.is_over:
                continue
            self.told[process.id] = process.phase
            if process.is_gone:
                self.world.say(f"{self.node.name}: {self.world.label(process.id)} is gone, {process.ended_by}")
            self.feed(
                events.Observed(
                    process.id,
                    is_running=not process.is_gone,
                    is_gone=process.is_gone,
                    ended_by=process.ended_by,
                    exit_code=process.exit_code if process.ended_by == "exited" else None,
                )
            )

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later, if this run is still there."""
        self.timers.append(Timer(self.node.local + seconds, act))

    # Commands

    def do(self, command: Doable) -> None:
        """Carry one command out."""
        match command:
            case commands.OpenSession() | commands.Sync():
                self.wake_at = None
                self._put(command)
            case commands.WakeAt():
                self.wake_at = command.at
            case commands.Leave():
                self._leave(command)
            case commands.Start():
                self._prepare(command)
            case commands.Renew():
                for process in self._processes(command.id):
                    process.deadline = max(process.deadline, command.deadline)
            case commands.Stop():
                self._stop(command)
            case commands.Collect():
                self.after(self.world.within(0.0, 3.0), lambda: self._collect(command))
            case commands.Upload():
                process = self.machine.disk.attempts[command.entry.id]
                wanted = {file.path for file in command.files}
                files = {file.path: file for file in process.files if file.path in wanted}
                self.uploads[process.id] = Upload(process.fence, files)
                self._declare(process.id)
            case commands.Forget():
                self._forget(command.id)
            case _:
                assert_never(command)

    def _processes(self, id: UUID) -> list[Process]:
        found = [self.starting.get(id), self.machine.disk.attempts.get(id)]
        return [process for process in found if process is not None]

    def _prepare(self, command: commands.Start) -> None:
        entry = command.entry
        self.starting[entry.id] = self.machine.make_process(
            id=entry.id,
            fence=entry.fence,
            job_id=entry.job_id,
            spec=entry.spec,
            deadline=command.deadline,
            margin_seconds=command.margin_seconds,
        )
        self.after(self.world.within(0.0, 3.0), lambda: self._start(entry.id))

    def _start(self, id: UUID) -> None:
        process = self.starting.pop(id, None)
        if process is None:
            return
        if self.world.chance(0.03):
            self.feed(events.StartFailed(id, "it could not be started", "lost" if self.world.chance(0.5) else "failed"))
            return
        process.begin(self.node.local)
        self.machine.run(process)
        self.world.say(f"{self.node.name} starts {self.world.label(id)} of {self.world.label(process.job_id)}")

    def _stop(self, command: commands.Stop) -> None:
        if self.starting.pop(command.id, None) is not None:
            self.after(0.0, lambda: self.feed(events.StartFailed(command.id, "stopped before it started")))
        process = self.machine.disk.attempts.get(command.id)
        if process is not None:
            at = self.node.local + self.world.within(0.0, command.grace_seconds)
            process.stop_at = at if process.stop_at is None else min(at, process.stop_at)

    def _forget(self, id: UUID) -> None:
        self.starting.pop(id, None)
        self.uploads.pop(id, None)
        self.told.pop(id, None)
        process = self.machine.disk.attempts.pop(id, None)
        assert process is None or process.is_gone, "an attempt that may still run is not to be forgotten"

    def _leave(self, command: commands.Leave) -> None:
        self.world.say(f"{self.node.name}: the agent leaves with {command.exit_status}")
        self.node.is_removed |= command.forgets_credential
        self.node.end_agent()

    # Files

    def _collect(self, command: commands.Collect) -> None:
        id = command.entry.id
        process = self.machine.disk.attempts.get(id)
        if process is None or id not in self.session.held:
            return
        if self.world.chance(0.02):
            blame = "lost" if self.world.chance(0.5) else "failed"
            self.feed(events.HandInFailed(id, "a promised file cannot be read", blame))
            return
        content = f"receipt of {id} on {self.node.name}: {process.ended_by}".encode()
        files = [FakeFile(RECEIPT_PATH, content, content, is_large=False)]
        files += process.files if command.wants_files else ()
        self.feed(
            events.Collected(
                id,
                inline=tuple(file.inline for file in files if not file.is_large),
                large=tuple(file.declared for file in files if file.is_large),
            )
        )

    def _declare(self, id: UUID) -> None:
        upload, credential = self.uploads.get(id), self.credential
        if upload is None or id not in self.session.held:
            return
        if credential is None:
            self.after(self.world.within(1.0, 5.0), lambda: self._declare(id))
            return
        request = DeclareRequest(fence=upload.fence, artifacts=[file.declared for file in upload.files.values()])
        self._call(
            f"declare {self.world.label(id)}",
            lambda controller: controller.declare(credential, assignment_id=id, request=request),
            lambda outcome: self._declared(id, outcome),
        )

    def _declared(self, id: UUID, outcome: Outcome) -> None:
        upload, credential = self.uploads.get(id), self.credential
        if not isinstance(outcome, DeclareReply) or upload is None or credential is None:
            self._upload_refused(id, outcome)
            return
        missing = [state for state in outcome.uploads if not state.stored]
        if not missing:
            del self.uploads[id]
            self.feed(events.Uploaded(id))
            return
        path, offset = missing[0].path, missing[0].received_bytes
        size = int(self.world.within(1, 4)) * CHUNK_BYTES
        piece = upload.files[path].content[offset : offset + size]
        chunks = [piece[at : at + CHUNK_BYTES] for at in range(0, len(piece), CHUNK_BYTES)]
        self._call(
            f"upload {self.world.label(id)}",
            lambda controller: controller.upload(
                credential, assignment_id=id, fence=upload.fence, path=path, offset=offset, chunks=chunks
            ),
            lambda answer: self._uploaded(id, answer),
        )

    def _uploaded(self, id: UUID, outcome: Outcome) -> None:
        if isinstance(outcome, UploadState):
            self._declare(id)
        else:
            self._upload_refused(id, outcome)

    def _upload_refused(self, id: UUID, outcome: Outcome) -> None:
        """Bear what may pass: trouble for ever, a session that ends for a while, anything else not at all."""
        upload = self.uploads.get(id)
        if upload is None:
            return
        if isinstance(outcome, Refusal):
            upload.refusals += 1
        if isinstance(outcome, Refusal) and (outcome.code not in PASSING or upload.refusals > REFUSALS_MAX):
            del self.uploads[id]
            self.feed(events.HandInFailed(id, outcome.message))
        else:
            self.after(self.world.within(1.0, 5.0), lambda: self._declare(id))

    # Calls

    def _call(
        self,
        what: str,
        work: Callable[[SimController], object],
        answered: Callable[[Outcome], None],
        *,
        patience: float = CALL_SECONDS,
        sync: SyncCall | None = None,
    ) -> Call:
        def answer(outcome: Outcome) -> None:
            if not self.is_over:
                answered(outcome)

        call = Call(
            number=self.world.network.number(),
            sender=self.node.name,
            what=what,
            work=work,
            answered=answer,
            arrives_at=self.world.arrival(),
            sync=sync,
        )
        self.calls.append(call)
        self.world.network.send(call)
        self.after(patience, lambda: self._give_up(call))
        return call

    def _give_up(self, call: Call) -> None:
        if not call.is_closed:
            call.is_closed = True
            call.answered(unreachable())

    def _put(self, command: NodeCall) -> None:
        """Make a call about the node itself; of those that find no room only the newest matters."""
        if self.busy == CALLS_MAX:
            self.waiting = command
            return
        self.busy += 1
        if isinstance(command, commands.Sync):
            self._sync(command)
        else:
            self._ask_challenge(command)

    def _ended(self) -> None:
        self.busy -= 1
        if self.waiting is not None:
            command, self.waiting = self.waiting, None
            self._put(command)

    def _ask_challenge(self, command: commands.OpenSession) -> None:
        node_id = self.node.node_id
        assert node_id is not None, "an agent runs for a node"
        self._call(
            "challenge",
            lambda controller: controller.challenge(node_id),
            lambda outcome: self._challenged(command, outcome),
        )

    def _challenged(self, command: commands.OpenSession, outcome: Outcome) -> None:
        if not isinstance(outcome, Challenge):
            self._opened(outcome)
            return
        assert self.node.node_id is not None, "an agent runs for a node"
        message = session_transcript(
            node_id=NodeId(self.node.node_id),
            challenge=outcome.challenge,
            last_session=command.last_session,
            nonce=command.nonce,
        )
        request = SessionRequest(
            node_id=self.node.node_id,
            challenge=outcome.challenge,
            last_session=command.last_session,
            nonce=command.nonce,
            signature=encode(self.node.key.sign(message)),
            inventory=self.machine.inventory,
        )
        what = f"open session {command.last_session + 1}"
        self._call(what, lambda controller: controller.open_session(request), self._opened)

    def _opened(self, outcome: Outcome) -> None:
        if isinstance(outcome, SessionReply):
            self.credential = read_token(outcome.token, token_key=self.world.keyring.token_key)
            self._ended()
            self.feed(events.SessionOpened(outcome.session))
        else:
            self._ended()
            self._refused(0, outcome)

    def _sync(self, command: commands.Sync) -> None:
        assert self.credential is not None, "only a session syncs"
        self.said = max(self.said, command.request.sequence)
        request = SyncCall(self.credential, command.request)
        self.calls = [call for call in self.calls if not call.is_closed]
        self._call(
            f"sync {self.credential.session}.{command.request.sequence}",
            lambda controller: controller.sync([request])[0],
            lambda outcome: self._synced(request, outcome),
            patience=CALL_SECONDS + command.request.wait_seconds,
            sync=request,
        )

    def _synced(self, call: SyncCall, outcome: Outcome) -> None:
        if call.request.sequence not in self.answered:
            self.answered.add(call.request.sequence)
            self._ended()
        if isinstance(outcome, SyncReply):
            self.feed(events.Replied(outcome))
        else:
            self._refused(call.request.sequence, outcome)

    def _refused(self, sequence: int, outcome: Outcome) -> None:
        assert isinstance(outcome, (Refusal, Fault)), "a call ends with its answer or an error"
        self.feed(events.Refused(sequence, outcome.code, outcome.message))
