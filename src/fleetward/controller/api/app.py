"""The API as an ASGI application: find the endpoint, read the call, run its handler, answer.

Owns the order of the checks and which thread does what. Refuses to know what any endpoint means.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, assert_never

import msgspec

from fleetward.controller.api import replies, requests
from fleetward.controller.api.context import Answering, Call, Context, Handler, Holding, Receiving, Sending
from fleetward.controller.api.handlers import check_table
from fleetward.controller.api.replies import Reply, Send
from fleetward.controller.api.requests import ClientGone, Message, Receive
from fleetward.controller.api.routes import Match, Router
from fleetward.controller.api.streams import BodyPieces, sent_pieces
from fleetward.controller.services import access, sessions
from fleetward.controller.services.access import Caller
from fleetward.domain.access import allows
from fleetward.domain.errors import Fault, Forbidden, Refusal, Unauthenticated, quoted
from fleetward.wire.endpoints import Access, Body, Endpoint

T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)
INLINE_DECODE_BYTES_MAX: Final = 32 * 1024  # decoded on the loop in well under a millisecond
DRAIN_BYTES_MAX: Final = 8 * 1024 * 1024  # of a refused body, so that its sender reads the refusal
DRAIN_SECONDS_MAX: Final = 2.0
KEY_MARK: Final = "fwt_"


@dataclass(slots=True)
class _Request:
    """One request on its way through the checks."""

    headers: Mapping[str, str]
    receive: Receive
    is_read: bool

    async def receive_noted(self) -> Message:
        """Receive, and note when the body has been read to its end."""
        message = await self.receive()
        if not message.get("more_body", False):
            self.is_read = True
        return message


class Application:
    """The ASGI application. `hosts` are the names it answers to; None answers to any."""

    def __init__(
        self,
        context: Context,
        *,
        endpoints: Iterable[Endpoint],
        handlers: Mapping[str, Handler],
        hosts: frozenset[str] | None,
    ) -> None:
        endpoints = tuple(endpoints)
        check_table(endpoints, handlers)
        for endpoint in endpoints:
            requests.check_parameters(endpoint)
        self._context = context
        self._handlers = handlers
        self._hosts = hosts
        self._router = Router(endpoints)
        self._decoders = {e.name: msgspec.json.Decoder(e.request) for e in endpoints if e.request is not None}
        self._references = itertools.count(1)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        assert scope["type"] == "http", "the server speaks HTTP only"
        request = _Request(headers={}, receive=receive, is_read=False)
        try:
            reply = await self._reply(scope, request)
        except (ClientGone, asyncio.CancelledError):
            return
        closes = not request.is_read and not await _drain(request)
        try:
            await replies.send_reply(send, reply, closes=closes)
        except (Refusal, Fault) as error:
            # The status has gone out; the length that does not fit tells the client that the rest is missing.
            _LOG.warning("a download broke off: %s", error.message, exc_info=error)

    async def _reply(self, scope: Mapping[str, Any], request: _Request) -> Reply:
        try:
            request.headers = requests.read_headers(scope["headers"])
            self._check_host(request.headers)
            match = self._router.find(method=scope["method"], path=scope["path"])
            return await self._serve(match, requests.read_query(match.endpoint, scope["query_string"]), request)
        except (Refusal, Fault) as error:
            _log_error(scope, error)
            return replies.problem(error)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:  # the last line: nothing of ours leaks, and the caller gets an answer
            return replies.unexpected(error, reference=f"request-{next(self._references)}")

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse names that are not ours: a page elsewhere may point its own name at this machine."""
        if self._hosts is None:
            return
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name.lower().strip("[]") not in self._hosts:
            raise Forbidden(
                f"this controller does not answer to the host {quoted(host)}",
                hint=f"it answers to: {', '.join(sorted(self._hosts))}",
                field="host",
            )

    async def _serve(self, match: Match, query: requests.Query, request: _Request) -> Reply:
        endpoint = match.endpoint
        call = Call(params=match.params, query=query, size_bytes=requests.body_size(request.headers))
        authenticate: Callable[[Call], Call] = self._anyone
        match endpoint.access:
            case Access.NODE:
                token = _bearer(request.headers)
                credential = sessions.read_token(token, token_key=self._context.identity.token_key)
                call = replace(call, node=credential)
            case Access.USER:
                call = replace(call, idempotency_key=requests.idempotency_key(request.headers))
                authenticate = partial(self._authenticate, endpoint, _key(request.headers))
            case Access.PUBLIC:
                pass
            case _:
                assert_never(endpoint.access)
        requests.check_size(endpoint, request.headers)
        request.is_read = endpoint.request_body is Body.NONE
        body = b""
        if endpoint.request_body is Body.JSON:
            body = await requests.read_body(endpoint, request.receive_noted)
        return await self._run(endpoint, call, body, request, authenticate)

    async def _run(
        self, endpoint: Endpoint, call: Call, body: bytes, request: _Request, authenticate: Callable[[Call], Call]
    ) -> Reply:
        context = self._context

        def ready() -> Call:
            known = authenticate(call)
            requests.check_kind(endpoint, request.headers)
            return self._decode(endpoint, known, body)

        handler = self._handlers[endpoint.name]
        match handler:
            case Answering():
                return await self._in_work(lambda: replies.document(handler.run(context, ready())))
            case Holding():
                is_quick = endpoint.access is Access.NODE and len(body) <= INLINE_DECODE_BYTES_MAX
                known = ready() if is_quick else await self._in_work(ready)
                return replies.document(await _while_there(handler.run(context, known), request.receive))
            case Receiving():
                return await self._upload(endpoint, handler, request, ready)
            case Sending():
                sent = await self._in_work(lambda: handler.run(context, ready()))
                pieces = sent_pieces(sent.pieces, executor=context.streams)
                return replies.stream(pieces, size_bytes=sent.size_bytes)
            case _:
                assert_never(handler)

    async def _upload(
        self, endpoint: Endpoint, handler: Receiving, request: _Request, ready: Callable[[], Call]
    ) -> Reply:
        loop = asyncio.get_running_loop()
        call = await self._in_work(ready)
        pieces = BodyPieces(endpoint, request.receive_noted, loop=loop)
        try:
            work = partial(handler.run, self._context, call, pieces)
            return replies.document(await loop.run_in_executor(self._context.streams, work))
        finally:
            pieces.stop()

    async def _in_work(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._context.work, work)

    def _anyone(self, call: Call) -> Call:
        return call

    def _authenticate(self, endpoint: Endpoint, key: str, call: Call) -> Call:
        check = partial(self._caller, key)
        caller = check()
        if not allows(caller.scopes, needed=endpoint.scope):
            raise Forbidden(
                f"this key does not have the scope {endpoint.scope}, which {endpoint.name} needs",
                hint="use a key that has it, or have one made",
            )
        return replace(call, user=caller, recheck=check)

    def _caller(self, key: str) -> Caller:
        return access.authenticate(self._context.database, key, hmac_key=self._context.identity.api_key_hmac)

    def _decode(self, endpoint: Endpoint, call: Call, body: bytes) -> Call:
        decoder = self._decoders.get(endpoint.name)
        return call if decoder is None else replace(call, document=requests.decode(decoder, body))


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not credential.strip():
        raise Unauthenticated("this endpoint needs a credential", hint="send Authorization: Bearer …")
    return credential.strip()


def _key(headers: Mapping[str, str]) -> str:
    key = _bearer(headers)
    if not key.startswith(KEY_MARK):
        raise Unauthenticated("the credential is no API key", hint=f"an API key begins with {KEY_MARK}")
    return key


async def _while_there(work: Any, receive: Receive) -> msgspec.Struct:
    """Run a call that may be held, for as long as its client is there."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drain(request: _Request) -> bool:
    """Read the rest of a body that was refused, if it is small; whether its end was reached."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return True
    if (requests.body_size(request.headers) or DRAIN_BYTES_MAX + 1) > DRAIN_BYTES_MAX:
        return False
    try:
        async with asyncio.timeout(DRAIN_SECONDS_MAX):
            while not request.is_read:
                await requests.read_piece(request.receive_noted)
    except (TimeoutError, ClientGone):
        return False
    return True


def _log_error(scope: Mapping[str, Any], error: Refusal | Fault) -> None:
    what = f"{scope['method']} {quoted(scope['path'])}"
    if isinstance(error, Fault):
        _LOG.warning("%s failed: %s: %s", what, error.code, error.message, exc_info=error.__cause__)
    else:
        _LOG.debug("%s refused: %s: %s", what, error.code, error.message)
