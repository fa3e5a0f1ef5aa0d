"""Reading what came in: headers, query, body, each within its limits.

Owns the form that every request must have before any service sees it. Refuses to know who may call.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec

from fleetward.domain.errors import MalformedRequest, RequestTooLarge, quoted
from fleetward.wire.endpoints import Body, Endpoint

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

DEPTH_MAX: Final = 32  # a JSON schema of an artifact check is the deepest thing anyone sends
PAGE_MAX: Final = 1000
PAGE_DEFAULT: Final = 100
TEXT_CHARS_MAX: Final = 4096  # the longest query parameter is an artifact's path
WAIT_SECONDS_MAX: Final = 60.0
OFFSET_MAX: Final = 2**63 - 1
BODY_SECONDS_MAX: Final = 30.0  # for a JSON body to arrive whole
IDEMPOTENCY_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")

_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ESCAPED_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Every query parameter that some endpoint takes, read."""

    limit: int = PAGE_DEFAULT
    after: str | None = None
    status: str | None = None
    fence: int | None = None
    offset: int = 0
    path: str | None = None
    assignment: UUID | None = None
    wait_seconds: float = 0.0


def _whole(text: str, *, least: int, most: int) -> int:
    if not re.fullmatch(r"\d{1,19}", text) or not least <= int(text) <= most:
        raise ValueError(f"a whole number from {least} to {most}")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text):
        raise ValueError("a number of seconds")
    return min(float(text), WAIT_SECONDS_MAX)


def _text(text: str) -> str:
    if not text or len(text) > TEXT_CHARS_MAX or "\0" in text:
        raise ValueError(f"a text of 1 to {TEXT_CHARS_MAX} characters without NUL")
    return text


def uuid_of(text: str, *, field: str) -> UUID:
    """Read an id, or refuse with the field's name."""
    try:
        return _uuid(text)
    except ValueError as error:
        raise MalformedRequest(f"{field} cannot be {quoted(text)}: it must be {error}", field=field) from error


def _uuid(text: str) -> UUID:
    if not re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{32}", text):
        raise ValueError("an id (a UUID)")
    return UUID(text)


_PARAMETERS: Final[Mapping[str, Callable[[str], object]]] = {
    "limit": lambda text: _whole(text, least=1, most=PAGE_MAX),
    "after": _text,
    "status": _text,
    "fence": lambda text: _whole(text, least=0, most=OFFSET_MAX),
    "offset": lambda text: _whole(text, least=0, most=OFFSET_MAX),
    "path": _text,
    "assignment": _uuid,
    "wait_seconds": _seconds,
}


def check_parameters(endpoint: Endpoint) -> None:
    """Fail at start when an endpoint takes a query parameter that nobody can read."""
    unknown = set(endpoint.query) - _PARAMETERS.keys()
    assert not unknown, f"endpoint {endpoint.name} takes query parameters without a reader: {sorted(unknown)}"


def read_query(endpoint: Endpoint, raw: bytes) -> Query:
    """Read the query string: only what the endpoint takes, each once, within its bounds."""
    if not raw:
        return Query()
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=16
        )
    except ValueError as error:
        raise MalformedRequest("the query string cannot be read: it must be name=value pairs in UTF-8") from error
    found: dict[str, object] = {}
    for name, text in pairs:
        if name not in endpoint.query:
            takes = ", ".join(endpoint.query) or "none"
            raise MalformedRequest(
                f"{quoted(name)} is no query parameter of this endpoint", hint=f"it takes: {takes}", field=name[:64]
            )
        if name in found:
            raise MalformedRequest(f"query parameter {name} came twice", field=name)
        try:
            found[name] = _PARAMETERS[name](text)
        except ValueError as error:
            raise MalformedRequest(
                f"query parameter {name} cannot be {quoted(text)}: it must be {error}", field=name
            ) from error
    return msgspec.convert(found, Query)


def needed(value: int | str | None, *, name: str) -> None:
    """Refuse when a query parameter that the endpoint cannot do without is missing."""
    if value is None:
        raise MalformedRequest(f"query parameter {name} is missing", field=name)


def read_headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Read the headers; one that decides something may come only once."""
    headers: dict[str, str] = {}
    for name, value in raw:
        key = name.decode("latin-1")
        if key in {"authorization", "content-type", "content-length", "host", "idempotency-key"} and key in headers:
            raise MalformedRequest(f"header {key} came twice", field=key)
        headers[key] = value.decode("latin-1")
    return headers


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Read the key under which a repeated call has one effect."""
    key = headers.get("idempotency-key")
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise MalformedRequest(
            "header Idempotency-Key must be 1 to 255 visible ASCII characters", field="idempotency-key"
        )
    return key


def check_size(endpoint: Endpoint, headers: Mapping[str, str]) -> None:
    """Refuse a body by its announced size before it is read: it is too large, or none belongs there."""
    size_bytes = body_size(headers)
    if size_bytes is None and "content-length" in headers:
        announced = quoted(headers["content-length"])
        raise MalformedRequest(f"header Content-Length cannot be {announced}", field="content-length")
    if endpoint.request_body is Body.NONE and (size_bytes or "transfer-encoding" in headers):
        raise MalformedRequest("this endpoint takes no body")
    if size_bytes is not None and size_bytes > endpoint.body_bytes_max:
        raise too_large(endpoint)


def check_kind(endpoint: Endpoint, headers: Mapping[str, str]) -> None:
    """Refuse a body of another type than the endpoint takes."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    match endpoint.request_body:
        case Body.JSON if kind != "application/json":
            raise MalformedRequest(
                f"the body is {_named(kind)}, but this endpoint takes JSON",
                hint="send Content-Type: application/json",
                field="content-type",
            )
        case Body.BYTES if kind not in {"", "application/octet-stream"}:
            raise MalformedRequest(
                f"the body is {_named(kind)}, but this endpoint takes raw bytes",
                hint="send Content-Type: application/octet-stream",
                field="content-type",
            )
        case _:
            pass


def _named(kind: str) -> str:
    return quoted(kind) if kind else "of no type that was said"


def body_size(headers: Mapping[str, str]) -> int | None:
    """How many bytes the sender said will come; the server holds it to that."""
    announced = headers.get("content-length", "")
    return int(announced) if re.fullmatch(r"\d{1,18}", announced) else None


def too_large(endpoint: Endpoint) -> RequestTooLarge:
    """The refusal of a body beyond the endpoint's limit."""
    return RequestTooLarge(f"the body is larger than the {endpoint.body_bytes_max} bytes that this endpoint takes")


async def read_body(endpoint: Endpoint, receive: Receive) -> bytes:
    """Read a whole body that fits in memory."""
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            while True:
                piece, is_last = await read_piece(receive)
                size += len(piece)
                if size > endpoint.body_bytes_max:
                    raise too_large(endpoint)
                pieces.append(piece)
                if is_last:
                    return b"".join(pieces)
    except TimeoutError as error:
        raise MalformedRequest(f"the body did not arrive within {BODY_SECONDS_MAX:.0f} s; send it again") from error


async def read_piece(receive: Receive) -> tuple[bytes, bool]:
    """Read the next piece of a body, and whether it is the last."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), not message.get("more_body", False)


def decode(decoder: "msgspec.json.Decoder[Any]", body: bytes) -> object:
    """Read a JSON document of the decoder's type; refuse what is unknown, too deep or not to be stored."""
    if depth(body) > DEPTH_MAX:
        raise MalformedRequest(f"the body is nested deeper than {DEPTH_MAX} levels")
    if b"\0" in body or (b"\\u0000" in body and _ESCAPED_NUL.search(body)):
        raise MalformedRequest("the body contains a NUL character, which no text here may")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, field = str(error).partition(" - at `$")
        detail = message[0].lower() + message[1:]
        raise MalformedRequest(f"the body does not fit: {detail}", field=field.rstrip("`").lstrip(".")[:128]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"the body is no JSON: {error}") from error


def depth(body: bytes) -> int:
    """How deep a JSON text is nested, or a number that is at least as large and small enough to pass."""
    opened = body.count(b"[") + body.count(b"{")
    if opened <= DEPTH_MAX:
        return opened
    deepest = level = 0
    for byte in _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS):
        if byte in b"[{":
            level += 1
            deepest = max(deepest, level)
        else:
            level -= 1
    return deepest
