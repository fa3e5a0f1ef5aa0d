"""The session's driver: a queue of events, one loop, and the commands carried out in order.

Owns the queue, the time that the session is told, the calls about the node itself, and the journal's
place before everything that follows from it. Refuses to decide: that is the session's.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetward.agent import identity, journal
from fleetward.agent.attempt import boottime
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
    WakeAt,
    Write,
)
from fleetward.agent.events import Event, Refused, Replied, SessionOpened, Started, StartFailed, StopRequested, Tick
from fleetward.agent.hands import Hands
from fleetward.agent.home import AgentHome
from fleetward.agent.identity import Identity
from fleetward.agent.inventory import LoadMeter, inventory
from fleetward.agent.sandbox import Features
from fleetward.agent.session import Session
from fleetward.agent.transfers import Line
from fleetward.domain.errors import Fault, Refusal
from fleetward.wire.problem import code_of

CALLS_MAX: Final = 4  # one that is held, one that supersedes it, and two that a dead network swallowed

log = logging.getLogger(__name__)

Call = Sync | OpenSession
Events = SimpleQueue[Event]


class Calls:
    """The calls about the node itself. Of those that wait for a thread only the newest still matters."""

    def __init__(self, make: Callable[[Call], Event], *, events: Events) -> None:
        self._make = make
        self._events = events
        self._guard = threading.Lock()
        self._next: Call | None = None
        self._busy = 0

    def put(self, call: Call) -> None:
        """Make a call now, or as soon as one of too many has ended; its answer is an event."""
        with self._guard:
            self._next = call
            if self._busy == CALLS_MAX:
                return
            self._busy += 1
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._guard:
                call, self._next = self._next, None
                if call is None:
                    self._busy -= 1
                    return
            self._events.put(self._answer(call))

    def _answer(self, call: Call) -> Event:
        sequence = call.request.sequence if isinstance(call, Sync) else 0
        try:
            return self._make(call)
        except (Refusal, Fault) as error:
            hint = f"; {error.hint}" if error.hint else ""
            return Refused(sequence, code_of(error), error.message + hint)
        except Exception as error:
            log.exception("a call to the controller failed in a way that nothing here expects")
            return Refused(sequence, "unexpected", str(error))


@dataclass(slots=True)
class Driver:
    """Runs one session until it leaves."""

    session: Session
    home: AgentHome
    who: Identity
    key: Ed25519PrivateKey
    line: Line
    hands: Hands
    features: Features
    events: Events
    _calls: Calls = field(init=False)
    _meter: LoadMeter = field(default_factory=LoadMeter, init=False)
    _wake_at: float | None = field(default=None, init=False)
    _trouble: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._calls = Calls(self._call, events=self.events)

    def run(self) -> Leave:
        """Take events in and do what the session says, until it says to leave."""
        self.hands.take_up()
        self.events.put(Started())
        while True:
            event = self._next_event()
            self._mention(event)
            left = self._do_all(self.session.handle(event, now=boottime()))
            if left is not None:
                self.hands.leave()
                return left

    def _next_event(self) -> Event:
        limit = None if self._wake_at is None else max(0.0, self._wake_at - boottime())
        try:
            event = self.events.get(timeout=limit)
        except Empty:
            self._wake_at = None
            event = Tick()
        if isinstance(event, Replied | Tick):
            self.session.load = self._meter.read(self.home.path)
        return event

    def _do_all(self, commands: list[Command]) -> Leave | None:
        """Carry out in order; what would follow from a journal that could not be written does not happen."""
        unwritten: Fault | None = None
        for command in commands:
            match command:
                case Leave():
                    return command
                case Write():
                    unwritten = self._write(command.journal)
                case Start() if unwritten is not None:
                    self.events.put(StartFailed(command.entry.id, unwritten.message, "lost"))
                case OpenSession() if unwritten is not None:
                    self.events.put(Refused(0, unwritten.code, unwritten.message))
                case _:
                    self._do(command)
        return None

    def _do(self, command: OpenSession | Sync | Start | Renew | Stop | Collect | Upload | Forget | WakeAt) -> None:
        match command:
            case OpenSession() | Sync():
                self._wake_at = None
                self._calls.put(command)
            case WakeAt():
                self._wake_at = command.at
            case Start():
                log.info("starting %s", command.entry.id, extra={"job": command.entry.job_id})
                self.hands.start(command)
            case Renew():
                self.hands.renew(command)
            case Stop():
                log.info("stopping %s", command.id)
                self.hands.stop(command)
            case Collect():
                log.info("%s has ended", command.entry.id, extra={"job": command.entry.job_id})
                self.hands.collect(command)
            case Upload():
                self.hands.upload(command)
            case Forget():
                self.hands.forget(command.id)
            case _:
                assert_never(command)

    def _write(self, written: Journal) -> Fault | None:
        try:
            journal.write(self.home.journal, written)
        except Fault as fault:
            log.warning("%s; what runs goes on, nothing new is begun", fault.message)
            return fault
        return None

    def _call(self, call: Call) -> Event:
        if isinstance(call, Sync):
            return Replied(self.line.client.sync(call.request))
        reply = identity.open_session(
            self.line.client,
            self.who,
            self.key,
            last_session=call.last_session,
            nonce=call.nonce,
            inventory=inventory(self.home.path, sandbox=self.features.document()),
        )
        self.line.renew(reply.token)
        return SessionOpened(reply.session)

    def _mention(self, event: Event) -> None:
        """Tell people what they would ask about; the same trouble once."""
        match event:
            case SessionOpened():
                log.info("connected to %s as %s", self.who.url, self.who.name, extra={"session": event.session})
            case Refused() if event.message != self._trouble and event.code not in {"session_stale", "unauthenticated"}:
                self._trouble = event.message
                log.warning("%s", event.message, extra={"code": event.code})
            case Replied():
                self._trouble = ""
            case StartFailed():
                log.warning("%s was not started: %s", event.id, event.message)
            case StopRequested() if not event.at_once:
                log.info("finishing %d attempts, then leaving; again to leave at once", len(self.session.held))
            case _:
                pass
