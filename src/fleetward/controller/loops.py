"""What the controller does by itself: assign, verify, upkeep, presence, and passing hints on.

Owns when each service runs: at a hint, and from time to time without one, since a hint may be lost. A
loop holds nothing that a restart would lose, does a bounded amount of work a round, and after an error
goes on with growing pauses. Any number of controllers run all of them at once. Refuses to know policy.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from fleetward.controller.blobs import BlobStore
from fleetward.controller.hints import ASSIGN, JOBS, VERIFY, Hub, Signal, node_topic
from fleetward.controller.services import assigning, presence, upkeep, verifying
from fleetward.controller.store.tx import Database
from fleetward.domain.errors import Fault
from fleetward.domain.nodes import Rhythm, rhythm

_LOG: Final = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0  # what a lost hint may cost
PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_MAX_SECONDS: Final = 5.0  # an outage of the database is over at most this long before work goes on
LISTEN_GAP_SECONDS: Final = 0.5  # between two tries to hear the other controllers
OUTBOX_GAP_SECONDS: Final = 0.005  # hints that arise together travel together


class Tempo:
    """The beat of the fleet as it is now; told anew by each beat of the controller."""

    def __init__(self, *, scale: float) -> None:
        self._scale = scale
        self._rhythm = rhythm(node_count=0, scale=scale)

    @property
    def rhythm(self) -> Rhythm:
        """The present beat and the deadlines that follow from it."""
        return self._rhythm

    def refresh(self, database: Database) -> None:
        """Count the fleet anew."""
        self._rhythm = upkeep.fleet_rhythm(database, scale=self._scale)


class Channel(Protocol):
    """The way to the other controllers; the store has it."""

    def send(self, topics: list[str]) -> None:
        """Tell the other controllers."""
        ...

    def listen(self, *, heard: Callable[[list[str]], None], joined: Callable[[], None]) -> None:
        """Hear them until the channel is closed or breaks."""
        ...


@dataclass(frozen=True, slots=True)
class Loop:
    """One thing done again and again. `run` says whether there is more to do at once."""

    name: str
    run: Callable[[], bool]
    signal: Signal
    poll_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What the loops need; the composition root makes it."""

    database: Database
    blobs: BlobStore
    hub: Hub
    tempo: Tempo
    controller_id: UUID
    verify_batch_max: int

    def assign(self) -> bool:
        """Hand queued jobs to nodes."""
        done = assigning.assign(self.database, rhythm=self.tempo.rhythm)
        if done.made:
            self.hub.wake({JOBS, *map(node_topic, done.nodes)})
        return done.has_more

    def verify(self) -> bool:
        """Look at the bytes of what nodes say they finished."""
        done = verifying.verify(
            self.database, self.blobs, verifier=f"controller:{self.controller_id}", limit=self.verify_batch_max
        )
        if done.done:
            self.hub.wake({ASSIGN, JOBS, *map(node_topic, done.nodes)})
        return done.done >= self.verify_batch_max

    def keep_up(self) -> bool:
        """End what is overdue, and let what waited go on."""
        now = self.tempo.rhythm
        expired = upkeep.expire_leases(self.database, rhythm=now)
        silent = upkeep.mark_silent(self.database, rhythm=now)
        released = upkeep.release_due(self.database)
        failed = upkeep.fail_overdue(self.database)
        if not (expired or silent or released or failed):
            return False
        self.hub.wake({ASSIGN, VERIFY, JOBS})
        return True

    def be_present(self) -> bool:
        """Show the other controllers that this one lives, and count the fleet."""
        presence.beat(self.database, controller_id=self.controller_id)
        self.tempo.refresh(self.database)
        return False


def loops_of(duties: Duties) -> tuple[Loop, ...]:
    """Every loop that a controller runs, with what wakes it and how long it waits at most."""
    hub, beat_seconds = duties.hub, duties.tempo.rhythm.beat.total_seconds()
    return (
        Loop("assign", duties.assign, hub.signal(ASSIGN), POLL_SECONDS),
        Loop("verify", duties.verify, hub.signal(VERIFY), POLL_SECONDS),
        Loop("upkeep", duties.keep_up, Signal(), min(POLL_SECONDS, beat_seconds / 4)),
        Loop("presence", duties.be_present, Signal(), beat_seconds / 2),
    )


class Loops:
    """The loops as threads: started once, stopped once."""

    def __init__(self, loops: Sequence[Loop], *, hub: Hub, channel: Channel) -> None:
        self._loops = tuple(loops)
        self._hub = hub
        self._channel = channel
        self._is_stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin; returns at once."""
        targets: list[tuple[str, Callable[[], None]]] = [
            (loop.name, lambda loop=loop: self._run(loop)) for loop in self._loops
        ]
        targets += [("send", self._send), ("listen", self._listen)]
        for name, target in targets:
            thread = threading.Thread(target=target, name=f"loop-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, *, timeout: float) -> None:
        """End all loops; a round that is under way may finish within the time. Close the channel first."""
        self._is_stopping.set()
        self._hub.wake_all()
        for loop in self._loops:
            loop.signal.set()
        self._hub.outbox_signal.set()
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, loop: Loop) -> None:
        pause = PAUSE_FIRST_SECONDS
        while not self._is_stopping.is_set():
            try:
                has_more = loop.run()
            except Exception as error:  # no error of one round may end the loop
                _log_error(loop.name, error)
                self._is_stopping.wait(pause)
                pause = min(2 * pause, PAUSE_MAX_SECONDS)
                continue
            pause = PAUSE_FIRST_SECONDS
            if not has_more and not self._is_stopping.is_set():
                loop.signal.wait(loop.poll_seconds)

    def _send(self) -> None:
        while not self._is_stopping.is_set():
            self._hub.outbox_signal.wait(POLL_SECONDS)
            self._is_stopping.wait(OUTBOX_GAP_SECONDS)
            topics = self._hub.take_outbox()
            if not topics:
                continue
            try:
                self._channel.send(topics)
            except Exception as error:  # these hints are lost, which hints may be
                _log_error("send", error)
                self._is_stopping.wait(PAUSE_FIRST_SECONDS)

    def _listen(self) -> None:
        while not self._is_stopping.is_set():
            try:
                self._channel.listen(heard=self._hub.arrive, joined=self._hub.wake_all)
            except Exception as error:  # connect again; `joined` then makes up for what was missed
                _log_error("listen", error)
            self._is_stopping.wait(LISTEN_GAP_SECONDS)


def _log_error(name: str, error: Exception) -> None:
    if isinstance(error, Fault):
        _LOG.warning("loop %s: %s: %s", name, error.code, error.message, exc_info=error.__cause__)
    else:
        _LOG.error("loop %s failed on a bug of ours; it goes on", name, exc_info=error)
