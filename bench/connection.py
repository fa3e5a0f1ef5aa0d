"""As little HTTP as a load generator needs: one kept connection, one call at a time.

Owns the bytes on the connection, so that the generator costs little beside what it measures. Refuses to
know what the calls mean.
"""

import asyncio
import re
from typing import Final, Self
from urllib.parse import urlsplit

import msgspec

HEAD_END: Final = b"\r\n\r\n"
LENGTH: Final = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
OK_BELOW: Final = 300
ENCODER: Final = msgspec.json.Encoder()


class UnexpectedReply(Exception):
    """A call was not answered with success."""


class Connection:
    """One connection to the controller, with the credential of whoever speaks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, host: str, token: str) -> None:
        self._reader = reader
        self._writer = writer
        self._head = f"HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n"

    @classmethod
    async def open(cls, url: str, *, token: str) -> Self:
        """Connect."""
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 24)
        return cls(reader, writer, host=where.netloc, token=token)

    async def post(self, path: str, request: msgspec.Struct) -> bytes:
        """Send a document and return the one that answers."""
        body = ENCODER.encode(request)
        head = f"POST {path} {self._head}content-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(HEAD_END)
        length = LENGTH.search(answer)
        if length is None:
            raise UnexpectedReply(f"POST {path} was answered without a length: {answer[:200]!r}")
        content = await self._reader.readexactly(int(length[1]))
        if int(answer[9:12]) >= OK_BELOW:
            raise UnexpectedReply(f"POST {path} was answered {answer[9:12].decode()}: {content[:500]!r}")
        return content

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
