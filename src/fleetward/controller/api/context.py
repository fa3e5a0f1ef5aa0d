"""What every handler is given: the world behind the API, and one call.

Owns the shapes that tie endpoints to services. Refuses to know HTTP.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

import msgspec

from fleetward.controller.api.holds import Holds
from fleetward.controller.api.requests import Query, uuid_of
from fleetward.controller.api.syncs import Syncs
from fleetward.controller.blobs import BlobStore
from fleetward.controller.hints import Hub
from fleetward.controller.services.access import Caller
from fleetward.controller.services.sessions import NodeCredential
from fleetward.controller.store.tx import Database
from fleetward.domain.ids import UserId
from fleetward.domain.nodes import Rhythm

Document = TypeVar("Document", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The controller as others know it, and the secrets by which it knows others."""

    url: str
    pin: str
    public_key: bytes  # DER SubjectPublicKeyInfo; `pin` is its digest
    sign: Callable[[bytes], bytes]
    token_key: bytes
    api_key_hmac: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the handlers work with; the composition root makes it once."""

    database: Database
    blobs: BlobStore
    hub: Hub
    syncs: Syncs
    holds: Holds
    identity: Identity
    rhythm: Callable[[], Rhythm]
    work: Executor  # short calls of services
    streams: Executor  # uploads and downloads, so that slow ones never keep short calls waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, read and authenticated."""

    params: Mapping[str, str]
    query: Query
    document: object = None
    size_bytes: int | None = None  # of the body, where its sender said
    idempotency_key: str | None = None
    user: Caller | None = None
    node: NodeCredential | None = None
    recheck: Callable[[], object] = lambda: None  # refuses once the caller's key has been revoked

    def id(self) -> UUID:
        """The id in the path."""
        return uuid_of(self.params["id"], field="id")

    def body(self, kind: type[Document]) -> Document:
        """The JSON document that came with the call."""
        assert isinstance(self.document, kind), "the body was decoded as the endpoint's request type"
        return self.document

    def caller(self) -> Caller:
        """The user who calls."""
        assert self.user is not None, "a user's endpoint is called by a user"
        return self.user

    def by(self) -> UserId:
        """The id of the user who calls."""
        return self.caller().user_id

    def credential(self) -> NodeCredential:
        """What the calling node's token proves."""
        assert self.node is not None, "a node's endpoint is called by a node"
        return self.node


@dataclass(frozen=True, slots=True)
class Answering:
    """A short call: one service in a worker thread, then a document."""

    run: Callable[[Context, Call], msgspec.Struct]


@dataclass(frozen=True, slots=True)
class Receiving:
    """An upload: the service reads the body's pieces as they arrive."""

    run: Callable[[Context, Call, Iterable[bytes]], msgspec.Struct]


@dataclass(frozen=True, slots=True)
class Sent:
    """A download: its size where it is known, and its pieces."""

    size_bytes: int | None
    pieces: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Sending:
    """A download: the service gives the pieces as they are asked for."""

    run: Callable[[Context, Call], Sent]


@dataclass(frozen=True, slots=True)
class Holding:
    """A call that may be held until there is something to say."""

    run: Callable[[Context, Call], Awaitable[msgspec.Struct]]


Handler = Answering | Receiving | Sending | Holding
