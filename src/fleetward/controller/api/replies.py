"""Writing what goes out: JSON documents, streams of bytes, problems.

Owns the form of every reply and how any error becomes a problem document. Refuses to know which
endpoint is answered.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from fleetward.domain.errors import Fault, MethodNotAllowed, Refusal, Unauthenticated, Unexpected
from fleetward.wire.problem import MEDIA_TYPE, problem_of

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

_LOG: Final = logging.getLogger(__name__)
_ENCODER: Final = msgspec.json.Encoder()
_JSON: Final[Header] = (b"content-type", b"application/json")
_PROBLEM: Final[Header] = (b"content-type", MEDIA_TYPE.encode())
_BYTES: Final[Header] = (b"content-type", b"application/octet-stream")
# Bytes come from strangers' jobs: no browser may take them for a page of ours.
_COMMON: Final[tuple[Header, ...]] = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A status, headers, and a body that is whole or comes in pieces."""

    status: int = 200
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    pieces: AsyncIterator[bytes] | None = field(default=None)


def document(value: msgspec.Struct) -> Reply:
    """Answer with a JSON document."""
    return Reply(headers=(_JSON,), body=_ENCODER.encode(value))


def stream(pieces: AsyncIterator[bytes], *, size_bytes: int | None) -> Reply:
    """Answer with bytes as they are read; with a size, a cut reply shows."""
    length: tuple[Header, ...] = () if size_bytes is None else ((b"content-length", str(size_bytes).encode()),)
    return Reply(headers=(_BYTES, *length), pieces=pieces)


def problem(error: Refusal | Fault) -> Reply:
    """Answer with a problem document."""
    body = problem_of(error)
    headers: list[Header] = [_PROBLEM]
    match error:
        case Unauthenticated():
            headers.append((b"www-authenticate", b"Bearer"))
        case MethodNotAllowed():
            headers.append((b"allow", error.hint.removeprefix("it takes ").encode()))
        case Fault() if body.status == Fault.status:
            headers.append((b"retry-after", b"1"))
        case _:
            pass
    encoded = _ENCODER.encode({"type": body.type, **msgspec.to_builtins(body)})
    return Reply(status=body.status, headers=tuple(headers), body=encoded)


def unexpected(error: Exception, *, reference: str) -> Reply:
    """Answer for our own bug: the log has the cause, the caller a reference to it and nothing else."""
    _LOG.error("a request failed on a bug of ours", extra={"reference": reference}, exc_info=error)
    return problem(
        Unexpected(
            f"the controller failed on this request; its log says why under {reference}",
            hint="look into controller.log on the controller's machine",
        )
    )


async def send_reply(send: Send, reply: Reply, *, closes: bool) -> None:
    """Send a reply; `closes` ends the connection after it."""
    headers = [*reply.headers, *_COMMON]
    if closes:
        headers.append((b"connection", b"close"))
    if reply.pieces is None:
        headers.append((b"content-length", str(len(reply.body)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})
        return
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    async for piece in reply.pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
