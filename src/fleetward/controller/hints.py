"""Hints: who should look again now, because something they wait for may have changed.

Owns topics, those who wait for them in this process, and the queue of what other controllers should
hear. A hint says nothing about what changed and may be lost: whoever waits also looks by itself from
time to time. Refuses to know the database and what is done with a hint.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final
from uuid import UUID

ASSIGN: Final = "assign"
VERIFY: Final = "verify"
JOBS: Final = "jobs"  # some job somewhere changed: its watchers look, at a rate that they bound together
OUTBOX_MAX: Final = 10_000  # topics that wait for the sender; beyond it they are dropped, as a hint may be


def node_topic(node_id: UUID) -> str:
    """What concerns one node."""
    return f"node:{node_id.hex}"


def job_topic(job_id: UUID) -> str:
    """What concerns one job."""
    return f"job:{job_id.hex}"


def assignment_topic(assignment_id: UUID) -> str:
    """What concerns one attempt, its log above all."""
    return f"assignment:{assignment_id.hex}"


class Signal:
    """A loop's wake-up: any number of hints before it looks are one."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Wake the loop, now or as soon as it waits."""
        self._event.set()

    def wait(self, timeout: float) -> bool:
        """Wait for a hint; False when the time passed without one."""
        woke = self._event.wait(timeout)
        self._event.clear()
        return woke


class Watch:
    """One held call's wait for its topics. It remembers a hint that came before the wait."""

    def __init__(self, hub: "Hub", topics: Iterable[str]) -> None:
        self._hub = hub
        self._topics: set[str] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._is_hinted = False
        for topic in topics:
            self.add(topic)

    def add(self, topic: str) -> None:
        """Wait for this topic too."""
        if topic not in self._topics:
            self._topics.add(topic)
            self._hub.enrol(topic, self)

    def close(self) -> None:
        """Wait for nothing any more."""
        for topic in self._topics:
            self._hub.leave(topic, self)
        self._topics.clear()

    def hint(self) -> None:
        """Wake the call; on the loop's thread only."""
        self._is_hinted = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float) -> bool:
        """Wait for a hint since the last wait; False when the time passed without one."""
        if not self._is_hinted and seconds > 0:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, _finish, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        woke, self._is_hinted = self._is_hinted, False
        return woke


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Hub:
    """Where hints arrive and who hears them. `wake` may be called on any thread, watches live on the loop's."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals: dict[str, Signal] = {ASSIGN: Signal(), VERIFY: Signal()}
        self._watches: defaultdict[str, set[Watch]] = defaultdict(set)
        self._lock = threading.Lock()
        self._arrived: set[str] = set()
        self._outbox: set[str] = set()
        self.outbox_signal = Signal()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say on which loop the held calls wait."""
        self._loop = loop

    def signal(self, topic: str) -> Signal:
        """The wake-up of the loop that serves a topic."""
        return self._signals[topic]

    def watch(self, *topics: str) -> Watch:
        """Begin to wait for topics. Do it before the question is asked, or a hint between is missed."""
        return Watch(self, topics)

    def count(self, topic: str) -> int:
        """How many held calls wait for a topic."""
        return len(self._watches[topic]) if topic in self._watches else 0

    def wake(self, topics: Iterable[str]) -> None:
        """Wake whoever waits for the topics, here and at the other controllers."""
        wanted = frozenset(topics)
        if not wanted:
            return
        with self._lock:
            if len(self._outbox) < OUTBOX_MAX:
                self._outbox |= wanted
        self.outbox_signal.set()
        self.arrive(wanted)

    def arrive(self, topics: Iterable[str]) -> None:
        """Wake whoever waits here; other controllers have been told or have told us."""
        wanted = frozenset(topics)
        for topic in wanted & self._signals.keys():
            self._signals[topic].set()
        if self._loop is None:
            return
        with self._lock:
            is_first = not self._arrived
            self._arrived |= wanted
        # One call into the loop serves all that arrives before it runs.
        if is_first:
            self._call(self._deliver)

    def wake_all(self) -> None:
        """Wake everybody here: hints may have been missed, or the controller is about to stop."""
        for signal in self._signals.values():
            signal.set()
        self._call(self._deliver_all)

    def take_outbox(self) -> list[str]:
        """Take what the other controllers should hear."""
        with self._lock:
            topics, self._outbox = self._outbox, set()
        return sorted(topics)

    def enrol(self, topic: str, watch: Watch) -> None:
        """Add a watch to a topic; on the loop's thread only."""
        self._watches[topic].add(watch)

    def leave(self, topic: str, watch: Watch) -> None:
        """Take a watch out of a topic; on the loop's thread only."""
        watches = self._watches[topic]
        watches.discard(watch)
        if not watches:
            del self._watches[topic]

    def _call(self, deliver: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop has closed: nobody waits any more
            self._loop = None

    def _deliver(self) -> None:
        with self._lock:
            topics, self._arrived = self._arrived, set()
        for topic in topics:
            for watch in tuple(self._watches.get(topic, ())):
                watch.hint()

    def _deliver_all(self) -> None:
        for watches in tuple(self._watches.values()):
            for watch in tuple(watches):
                watch.hint()
