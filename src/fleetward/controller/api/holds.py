"""Questions of users that wait for an answer: events of a job, bytes of a log.

Owns when to look again: soon after a hint, and ever more rarely without one. All watchers together look
at a bounded rate, so that many of them slow each other down and not the fleet. Refuses to know what is
looked at.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Final, TypeVar

from fleetward.controller.hints import JOBS, Hub

Answer = TypeVar("Answer")

FIRST_SECONDS: Final = 0.02  # an event settles once the transactions beside it have ended: milliseconds
LAST_SECONDS: Final = 1.0  # what a lost hint may cost
LOOKS_PER_SECOND: Final = 200.0  # a few per cent of what one database core answers


class Holds:
    """The held questions of all users who talk to this controller."""

    def __init__(self, hub: Hub, *, executor: Executor) -> None:
        self._hub = hub
        self._executor = executor
        self._is_closing = False

    def close(self) -> None:
        """Let every held question be answered now; the controller is about to stop."""
        self._is_closing = True

    async def hold(
        self,
        look: Callable[[], Answer],
        *,
        is_news: Callable[[Answer], bool],
        topics: Callable[[Answer], Iterable[str]],
        wait_seconds: float,
    ) -> Answer:
        """Look until there is news or the wait is over, and give the last answer."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_seconds
        interval = FIRST_SECONDS
        watch = self._hub.watch(JOBS)
        try:
            while True:
                answer = await loop.run_in_executor(self._executor, look)
                left = ends - loop.time()
                if is_news(answer) or left <= 0 or self._is_closing:
                    return answer
                for topic in topics(answer):
                    watch.add(topic)
                fair = self._hub.count(JOBS) / LOOKS_PER_SECOND
                woke = await watch.wait(min(max(interval, fair), left))
                if woke and not self._is_closing:
                    await asyncio.sleep(min(fair, max(0.0, ends - loop.time())))
                interval = FIRST_SECONDS if woke else min(2 * interval, LAST_SECONDS)
        finally:
            watch.close()
