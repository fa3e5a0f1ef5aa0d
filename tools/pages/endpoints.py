"""The page of endpoints, and of every message that they carry.

Owns how a call and a message are written down. Refuses to know how a call is served.
"""

import types
import typing
from collections.abc import Iterator

import msgspec

from fleetward.wire.endpoints import ENDPOINTS, Access, Body, Endpoint
from tools.pages.markdown import mono, page, sentence, table


def text() -> str:
    """Write the page."""
    messages = sorted(_messages(), key=lambda found: found.__name__)
    return page(
        "Endpoints",
        "`src/fleetward/wire/endpoints.py`",
        "One table drives routing, the client, the scope checks and this page. *node* means the session token of a "
        "paired node; every other credential is an API key whose scopes must hold the one named.",
        table(
            ["call", "method and path", "who", "query", "request", "reply", "body at most"],
            [_row(endpoint) for endpoint in ENDPOINTS],
        ),
        "## Messages",
        *(_message(found) for found in messages),
    )


def _row(endpoint: Endpoint) -> list[str]:
    who = mono(endpoint.scope) if endpoint.access is Access.USER else endpoint.access.value
    request = "bytes" if endpoint.request_body is Body.BYTES else _linked(endpoint.request)
    reply = "bytes" if endpoint.reply_body is Body.BYTES else _linked(endpoint.reply)
    limit = "" if endpoint.request_body is Body.NONE else str(endpoint.body_bytes_max)
    query = " ".join(mono(name) for name in endpoint.query)
    return [mono(endpoint.name), f"`{endpoint.method} {endpoint.path}`", who, query, request, reply, limit]


def _linked(found: type | None) -> str:
    return "" if found is None else f"[{found.__name__}](#{found.__name__.lower()})"


def _messages() -> set[type[msgspec.Struct]]:
    waiting: list[object] = [kind for endpoint in ENDPOINTS for kind in (endpoint.request, endpoint.reply)]
    found: set[type[msgspec.Struct]] = set()
    while waiting:
        for kind in _structs(waiting.pop()):
            if kind not in found:
                found.add(kind)
                waiting.extend(field.type for field in msgspec.structs.fields(kind))
    return found


def _structs(annotation: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _structs(argument)


def _message(found: type[msgspec.Struct]) -> str:
    rows = [
        (mono(field.encode_name), mono(_named(field.type)), _default(field)) for field in msgspec.structs.fields(found)
    ]
    parts = [
        f"### {found.__name__}",
        sentence(found.__doc__),
        table(["field", "type", "default"], rows) if rows else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
        return mono(repr(made)) if not isinstance(made, msgspec.Struct) else f"a whole {type(made).__name__}"
    return mono(repr(field.default))


def _named(annotation: object) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in {types.UnionType, typing.Union}:
        return " or ".join(_named(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _named(arguments[0]) + " " + " ".join(_bounds(bound) for bound in arguments[1:])
    if origin is typing.Literal:
        return ", ".join(repr(argument) for argument in arguments)
    if isinstance(origin, type) and arguments:
        return f"{origin.__name__}[{', '.join(_named(argument) for argument in arguments)}]"
    if annotation is type(None):
        return "null"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _bounds(meta: object) -> str:
    if not isinstance(meta, msgspec.Meta):
        return ""
    names = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
    held = {name: getattr(meta, name) for name in names}
    return "(" + ", ".join(f"{name} {bound}" for name, bound in held.items() if bound is not None) + ")"
