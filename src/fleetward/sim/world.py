"""A world: controllers, nodes, strangers and an operator around one database, in one thread, by one chance.

Owns time, the story, the seams of running services, the check after every step, and the two phases: first
faults, then none, and what is left must end in time. Refuses to know what may happen (`acts`) and what must
hold (`checks`).
"""

import hashlib
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID

import psycopg
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from psycopg.pq import TransactionStatus

from fleetward.controller.blobs import LocalBlobs
from fleetward.controller.services.sync import SyncCall, has_news
from fleetward.domain.errors import Fault, Refusal
from fleetward.domain.ids import UserId
from fleetward.sim import acts, checks
from fleetward.sim.agent import SimNode
from fleetward.sim.checks import JOB_ENDS, Checks, Violated
from fleetward.sim.controller import RHYTHM, Keyring, SimController
from fleetward.sim.effects import PLANTED, Boundary, BrokenCommit, BrokenConnection, BrokenDisk, Crash
from fleetward.sim.machine import Machine
from fleetward.sim.network import Call, Held, Network, Outcome, unreachable
from fleetward.sim.server import BEGINNING, WorldDatabase
from fleetward.sim.submissions import Submission
from fleetward.wire.messages import SyncReply

ACTS: Final = 320  # of the first phase
DEPTH_MAX: Final = 2  # how deep acts happen within others
ROUNDS_MAX: Final = 1000  # of the second phase; its true bound is a time
LEASES_MAX: Final = 3  # I10
# What a caller may be told, whatever it does. Any other refusal is one that no service expects.
EXPECTED: Final = frozenset(
    {"session_stale", "node_removed", "unauthenticated", "assignment_lost", "artifact_conflict", "upload_offset"}
    | {"digest_mismatch", "size_mismatch", "artifact_not_found", "pairing_refused", "node_exists"}
)
BUGS: Final = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    psycopg.Error,
)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Weather:
    """How much of each kind of trouble a world has: worlds that differ find more than worlds that are alike."""

    network: float
    agents: float
    controllers: float
    operator: float
    calm: float = 1.0

    @classmethod
    def of(cls, rng: random.Random) -> "Weather":
        """Throw the dice for one world."""
        network, agents, controllers, operator = rng.choices([0.0, 0.3, 1.0, 3.0], [1, 2, 4, 3], k=4)
        return cls(network=network, agents=agents, controllers=controllers, operator=operator)


@dataclass(slots=True, eq=False)
class World:
    """One world by one seed."""

    seed: int
    rng: random.Random
    weather: Weather
    observer: psycopg.Connection
    controllers: list[SimController]
    keyring: Keyring
    checks: Checks
    blobs: LocalBlobs
    blob_folder: Path
    is_faulty: bool = False
    now: datetime = BEGINNING
    network: Network = field(default_factory=Network)
    nodes: list[SimNode] = field(default_factory=list[SimNode])
    strangers: list[SimNode] = field(default_factory=list[SimNode])
    submissions: list[Submission] = field(default_factory=list[Submission])
    spoilt: dict[str, int] = field(default_factory=dict[str, int])
    cut_off: dict[str, datetime] = field(default_factory=dict[str, datetime])
    story: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    labels: dict[UUID, str] = field(default_factory=dict[UUID, str])
    operator: UserId | None = None
    step: int = 0
    depth: int = 0

    # Chance, time, words

    def chance(self, probability: float) -> bool:
        """Whether a fault happens; never once faults have stopped."""
        return self.is_faulty and self.rng.random() < probability

    def within(self, low: float, high: float) -> float:
        """A number by chance."""
        return self.rng.uniform(low, high)

    def arrival(self, *, is_late: bool = False) -> datetime:
        """When what is sent now arrives: at once, or late where the network is slow."""
        is_late = is_late or self.chance(0.1 * self.weather.network)
        return self.now + timedelta(seconds=self.within(0.0, self.pick([3.0, 15.0, 60.0])) if is_late else 0.0)

    def pick(self, things: Sequence[Value]) -> Value:
        """One of several, by chance."""
        return things[self.rng.randrange(len(things))]

    def say(self, text: str) -> None:
        """Add a line to the story."""
        passed = (self.now - BEGINNING).total_seconds()
        self.story.append(f"{self.step:4} {passed:9.3f} {'  ' * self.depth}{text}")

    def count(self, what: str) -> None:
        """Count something rare, so that a run shows what it has reached."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def label(self, id: UUID) -> str:
        """A short name for a thing, in the order in which things appeared."""
        return self.labels.setdefault(id, f"#{len(self.labels) + 1}")

    def digest(self) -> str:
        """A hash of all that happened, equal whenever the same seed runs."""
        return hashlib.sha256("\n".join(self.story).encode()).hexdigest()

    def pass_time(self, seconds: float) -> None:
        """Let time go on, for the database and every machine."""
        self.now += timedelta(milliseconds=max(1, round(seconds * 1000)))
        self.observer.execute("UPDATE sim.clock SET at = %s", [self.now], prepare=True)
        for node in self.nodes:
            node.machine.advance(self.now)

    # Between two effects

    def reach(self, controller: SimController, boundary: Boundary) -> None:
        """Decide what happens at a boundary inside a running service."""
        if boundary.is_free:
            status = controller.connection.info.transaction_status
            assert status == TransactionStatus.IDLE, f"{boundary.value} while a transaction is open"
        if not self.is_faulty:
            return
        if self.chance(0.005 * self.weather.controllers):
            self.say(f"{controller.name} dies {boundary.value}")
            self.count(f"controller dies {boundary.value}")
            controller.crash()
            raise Crash
        self._break(controller, boundary)
        if boundary.is_free and self.depth < DEPTH_MAX and self.chance(0.12):
            self.depth += 1
            try:
                self.act()
            finally:
                self.depth -= 1

    @contextmanager
    def alone(self) -> Generator[None]:
        """Let nobody else act in between."""
        depth, self.depth = self.depth, DEPTH_MAX
        try:
            yield
        finally:
            self.depth = depth

    def _break(self, controller: SimController, boundary: Boundary) -> None:
        broken: Fault | None = None
        match boundary:
            case Boundary.BEGIN | Boundary.COMMIT if self.chance(0.003 * self.weather.controllers):
                broken = BrokenConnection("planted: the database does not answer")
            case Boundary.COMMITTED if self.chance(0.003 * self.weather.controllers):
                broken = BrokenCommit("planted: the answer to the commit is lost")
            case Boundary.WRITE | Boundary.READ | Boundary.PIECE if self.chance(0.02 * self.weather.controllers):
                broken = BrokenDisk("planted: the disk fails")
            case _:
                return
        self.say(f"{controller.name}: {broken.code} {boundary.value}")
        self.count(f"{broken.code} {boundary.value}")
        raise broken

    def serve(self, controller: SimController, work: Callable[[], Value]) -> Value | Refusal | Fault | None:
        """Let a controller do something; what it came to, or nothing when it died meanwhile."""
        try:
            outcome = work()
        except Crash:
            return None
        except PLANTED as fault:
            return fault
        except Refusal as refusal:
            if refusal.code in EXPECTED:
                return refusal
            raise self._surprise(controller, refusal) from refusal
        except (Fault, *BUGS) as error:
            raise self._surprise(controller, error) from error
        finally:
            if controller.life is None and controller.connection.info.transaction_status != TransactionStatus.IDLE:
                controller.connection.rollback()
        return outcome

    def _surprise(self, controller: SimController, error: Exception) -> Violated:
        sentence = "no service meets what it does not expect"
        return Violated(0, sentence, controller.name, f"{type(error).__name__}: {error}")

    # Calls

    def deliver(self, calls: Sequence[Call]) -> None:
        """Let calls arrive at one controller; syncs that arrive together share a transaction."""
        up = [controller for controller in self.controllers if controller.is_up]
        if not up:
            for call in calls:
                self.network.give_back(call, unreachable())
            return
        controller = self.pick(up)
        self.say(f"{controller.name} hears {', '.join(f'{call.sender} {call.what}' for call in calls)}")
        syncs = [call for call in calls if isinstance(call.sync, SyncCall)]
        if syncs:
            self._deliver_syncs(controller, syncs)
        for call in calls:
            if call.sync is None and controller.is_up:
                outcome = self.serve(controller, lambda call=call: call.work(controller))
                self._answer(call, outcome)

    def _deliver_syncs(self, controller: SimController, calls: Sequence[Call]) -> None:
        requests = [call.sync for call in calls if isinstance(call.sync, SyncCall)]
        sessions = {node.id: node.session for node in self.checks.standing.nodes.values()}
        outcome = self.serve(controller, lambda: controller.sync(requests))
        for index, call in enumerate(calls):
            answer = outcome[index] if isinstance(outcome, list) else outcome
            request = requests[index].credential
            if isinstance(answer, SyncReply) and request.session < sessions.get(request.node_id, 0):
                detail = f"a sync of session {request.session} was believed in session {sessions[request.node_id]}"
                raise Violated(4, "only the present session reports", f"node {request.node_id}", detail)
            if isinstance(answer, Refusal) and answer.code not in EXPECTED:
                raise self._surprise(controller, answer) from answer
            life = controller.life
            if isinstance(answer, SyncReply) and life is not None and self.may_hold(requests[index], answer):
                self.network.held.append(Held(call, controller, life, self.now))
            else:
                self._answer(call, answer)

    def may_hold(self, call: SyncCall, reply: SyncReply) -> bool:
        """Whether a controller keeps the answer back until there is news."""
        return call.request.wait_seconds > 0 and not has_news(call.request, reply) and not self.chance(0.3)

    def let_go(self, held: Sequence[Held]) -> None:
        """Answer held calls anew: the hold is over, or a hint has come."""
        for one in held:
            self.network.held.remove(one)
            if one.life.is_over:
                self._answer(one.call, None)
        for controller in self.controllers:
            mine = [one for one in held if not one.life.is_over and one.controller is controller]
            calls = [one.call.sync for one in mine if isinstance(one.call.sync, SyncCall)]
            if calls:
                outcome = self.serve(controller, lambda controller=controller, calls=calls: controller.look(calls))
                for number, one in enumerate(mine):
                    self._look_answered(one, outcome[number] if isinstance(outcome, list) else outcome)

    def _look_answered(self, held: Held, answer: Outcome | None) -> None:
        assert isinstance(held.call.sync, SyncCall), "only syncs are held"
        is_early = self.now < held.since + RHYTHM.beat
        if isinstance(answer, SyncReply) and is_early and self.may_hold(held.call.sync, answer):
            self.network.held.append(held)
        else:
            self._answer(held.call, answer)

    def _answer(self, call: Call, outcome: Outcome | None) -> None:
        if isinstance(outcome, (Refusal, Fault)):
            self.say(f"{call.sender} {call.what}: {outcome.code}")
            self.count(f"refused: {outcome.code}")
        # A controller that died may or may not break the connection; silence is the worse.
        if outcome is not None:
            self.network.give_back(call, outcome)
        elif not self.chance(0.5):
            self.network.give_back(call, unreachable())

    # Steps

    def act(self) -> None:
        """Let one thing happen, and check."""
        self.step += 1
        name, act = acts.choose(self)
        self.count(f"act: {name}")
        act(self)
        self.check()

    def check(self) -> None:
        """Hold the world against everything that must be true of it."""
        before = self.checks.standing
        if any(controller.life is None or controller.database.is_dirty for controller in self.controllers):
            self.checks.look(is_spoilt=bool(self.spoilt))
            for controller in self.controllers:
                if controller.life is not None:
                    controller.database.is_dirty = False
        now = self.checks.standing
        members = [(node.node_id, node.machine) for node in self.nodes if node.node_id is not None]
        checks.machines_agree([(id, one) for id, one in members if now.nodes[id].status != "removed"], now)
        checks.starts_are_single(machine for _, machine in members)
        checks.winners_have_bytes(before, now, blobs=self.blobs, spoilt=self.spoilt)

    def run(self) -> None:
        """Live: a beginning, faults, and an end in peace."""
        self.begin()
        self.is_faulty = True
        for _ in range(ACTS):
            self.act()
        self.is_faulty = False
        self.end_in_peace()

    def begin(self) -> None:
        """Start controllers, an operator and the first machines."""
        for controller in self.controllers:
            controller.boot()
            controller.start()
        self.operator = self.controllers[0].ensure_owner()
        for _ in range(2):
            self.add_machine()
        for _ in range(4):
            acts.one_round(self)
            self.check()
        # The third one has still to pair, through everything that happens.
        self.add_machine()
        self.check()

    def add_machine(self) -> SimNode:
        """Put a new machine beside the fleet; it has still to pair."""
        mac = self.rng.randbytes(6).hex()
        machine = Machine(
            name=f"node-{mac}",
            rng=self.rng,
            cpus_milli=self.pick([2000, 3000]),
            memory_bytes=2**33,
            started_at=self.now,
        )
        node = SimNode(self, machine, Ed25519PrivateKey.from_private_bytes(self.rng.randbytes(32)))
        self.nodes.append(node)
        return node

    # The end

    def end_in_peace(self) -> None:
        """Faults have stopped: every job must end in time, and every node must come to hold nothing."""
        self.say("faults stop")
        self.cut_off.clear()
        until = self.now + LEASES_MAX * RHYTHM.lease + self._work_left()
        for _ in range(ROUNDS_MAX):
            self.step += 1
            acts.one_round(self)
            self.check()
            if not self._unfinished():
                self.say("all has ended")
                return
            if self.now > until:
                break
        subject, detail = self._unfinished()[0]
        raise Violated(10, "once faults stop, every job ends in time and every node is free", subject, detail)

    def _work_left(self) -> timedelta:
        seconds = 0.0
        for submission in self.submissions:
            job = self.checks.standing.jobs.get(submission.job_id) if submission.job_id is not None else None
            if job is None or job.status not in JOB_ENDS:
                # Its own time, for every attempt that it may still need, with starting, collecting and back-off.
                attempts = submission.spec.max_attempts * submission.spec.replicas
                seconds += attempts * (float(submission.spec.env["SIM_SECONDS"]) + 15.0)
        return timedelta(seconds=seconds)

    def _unfinished(self) -> list[tuple[str, str]]:
        now = self.checks.standing
        left = [("a submission", "is not answered") for one in self.submissions if one.job_id is None]
        left += [("a machine", f"{node.name} is not paired") for node in self.nodes if node.node_id is None]
        left += [(f"job {job.id}", f"is {job.status}") for job in now.jobs.values() if job.status not in JOB_ENDS]
        left += [
            (f"assignment {held.id}", f"is {held.state} and not released")
            for held in now.assignments.values()
            if held.released is None
        ]
        return left


def make_world(seed: int, *, database: WorldDatabase, folder: Path, stack: ExitStack) -> World:
    """Build the world of a seed on its own database and folder."""
    rng = random.Random(seed)
    observer = stack.enter_context(closing(database.connect_observer()))
    keyring = Keyring.made(rng)
    blob_folder = folder / "blobs"
    blobs = LocalBlobs(blob_folder, reserve_bytes=0)
    stack.callback(blobs.close)
    controllers: list[SimController] = []
    world = World(
        seed=seed,
        rng=rng,
        weather=Weather.of(rng),
        observer=observer,
        controllers=controllers,
        keyring=keyring,
        checks=Checks(observer),
        blobs=blobs,
        blob_folder=blob_folder,
    )
    for number in (1, 2):
        controller = SimController(
            name=f"controller {number}",
            id=UUID(int=rng.getrandbits(128), version=4),
            connection=stack.enter_context(closing(database.connect_service())),
            folder=blob_folder,
            rng=rng,
            keyring=keyring,
            reach=world.reach,
        )
        stack.callback(controller.crash)
        controllers.append(controller)
    return world
