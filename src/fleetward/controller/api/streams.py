"""Streams between the async edge and the services, which are synchronous.

Owns the two bridges: pieces of a body that a service reads in a worker thread, and pieces that a service
yields and the edge sends. Each is at most one piece ahead, so a slow side holds the fast one back and
memory stays bounded. Refuses to know what is streamed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Final

from fleetward.controller.api.requests import Receive, read_piece, too_large
from fleetward.domain.errors import MalformedRequest
from fleetward.wire.endpoints import Endpoint

PIECE_SECONDS_MAX: Final = 60.0  # a sender that is silent for longer resumes by its offset later


class BodyPieces:
    """A body's pieces, for a service in a worker thread. Reads the next piece while one is worked on."""

    def __init__(self, endpoint: Endpoint, receive: Receive, *, loop: asyncio.AbstractEventLoop) -> None:
        self._endpoint = endpoint
        self._receive = receive
        self._loop = loop
        self._next: Future[tuple[bytes, bool]] | None = None
        self._size = 0
        self.is_read = False

    def __iter__(self) -> Iterator[bytes]:
        self._ask()
        while not self.is_read:
            piece, is_last = self._wait()
            self._size += len(piece)
            if self._size > self._endpoint.body_bytes_max:
                raise too_large(self._endpoint)
            self.is_read = is_last
            if not is_last:
                self._ask()
            if piece:
                yield piece

    def stop(self) -> None:
        """Read no further; the service has made up its mind."""
        if self._next is not None:
            self._next.cancel()

    def _ask(self) -> None:
        self._next = asyncio.run_coroutine_threadsafe(read_piece(self._receive), self._loop)

    def _wait(self) -> tuple[bytes, bool]:
        assert self._next is not None, "a piece is asked for before it is waited for"
        try:
            return self._next.result(PIECE_SECONDS_MAX)
        except WaitedTooLong as error:
            raise MalformedRequest(
                f"no byte of the body came for {PIECE_SECONDS_MAX:.0f} s", hint="go on at the offset that arrived"
            ) from error


async def sent_pieces(pieces: Iterator[bytes], *, executor: Executor) -> AsyncIterator[bytes]:
    """Give out a service's pieces; the next is read while one is sent."""
    loop = asyncio.get_running_loop()
    coming = loop.run_in_executor(executor, next, pieces, None)
    try:
        while (piece := await asyncio.shield(coming)) is not None:
            coming = loop.run_in_executor(executor, next, pieces, None)
            yield piece
    finally:
        if not coming.done():
            await asyncio.wait({coming})
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
