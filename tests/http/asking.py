"""Asking a controller over HTTP, as wrongly as a test likes."""

import http.client
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fleetward.client import Client
from fleetward.domain.ids import NodeId
from fleetward.domain.nodes import Inventory
from fleetward.wire.endpoints import Access
from fleetward.wire.handshake import (
    JoinString,
    check_signature,
    code_key,
    decode,
    encode,
    pairing_transcript,
    session_transcript,
)
from fleetward.wire.messages import (
    ChallengeRequest,
    HeldAssignment,
    PairingCodeRequest,
    PairRequest,
    SessionRequest,
    SyncReply,
    SyncRequest,
)
from fleetward.wire.versions import VERSION


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Api:
    """A running controller, and credentials for it."""

    url: str
    owner: str
    node: str
    key: Callable[..., str]

    def credential_for(self, access: Access) -> str:
        """A good credential of that kind."""
        return {Access.PUBLIC: "", Access.USER: self.owner, Access.NODE: self.node}[access]

    def ask(
        self,
        method: str,
        path: str,
        *,
        credential: str = "",
        authorization: str = "",
        body: bytes | Iterable[bytes] | None = None,
        content_type: str = "",
        headers: dict[str, str] | None = None,
        timeout: float = 30.0,
    ) -> Answer:
        """Send one request on a connection of its own."""
        sent = dict(headers or {})
        if credential or authorization:
            sent["authorization"] = authorization or f"Bearer {credential}"
        if content_type:
            sent["content-type"] = content_type
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout)
        try:
            connection.putrequest(method, _raw(path), skip_host="host" in sent, skip_accept_encoding=True)
            return _finish(connection, sent, body)
        finally:
            connection.close()


def _raw(path: str) -> str:
    return "".join(char if "!" <= char <= "~" else quote(char) for char in path)


def _finish(
    connection: http.client.HTTPConnection, sent: dict[str, str], body: bytes | Iterable[bytes] | None
) -> Answer:
    is_chunked = not isinstance(body, bytes | None)
    if isinstance(body, bytes):
        sent.setdefault("content-length", str(len(body)))
    elif is_chunked:
        sent["transfer-encoding"] = "chunked"
    for name, value in sent.items():
        connection.putheader(name, value.encode())
    # Refused before all was sent: the answer is there all the same.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.endheaders(body, encode_chunked=is_chunked)
    reply = connection.getresponse()
    return Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())


def clock() -> float:
    """Seconds of a clock that only goes forward."""
    return time.monotonic()


class Node:
    """A machine that has paired and speaks for itself, without an agent."""

    def __init__(self, api: Api, name: str) -> None:
        self.name = name
        self._client = Client(api.url)
        code = self._client.with_token(api.owner).make_pairing_code(PairingCodeRequest(labels={"who": name}))
        join = JoinString.parse(code.join_string)
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw()
        said = pairing_transcript(code_id=join.code_id, pin=join.pin, node_key=public, name=name, mac="")
        paired = self._client.pair(
            PairRequest(
                code_id=join.code_id,
                name=name,
                mac="",
                node_key=encode(public),
                code_signature=encode(code_key(join.secret).sign(said)),
                node_signature=encode(key.sign(said)),
                agent_version=VERSION,
            )
        )
        check_signature(
            public_key=Ed25519PublicKey.from_public_bytes(decode(paired.controller_key)[-32:]).public_bytes_raw(),
            signature=decode(paired.controller_signature),
            message=said,
        )
        self.id = NodeId(paired.node_id)
        challenge = self._client.challenge(ChallengeRequest(node_id=self.id)).challenge
        said = session_transcript(node_id=self.id, challenge=challenge, last_session=0, nonce="n" * 22)
        session = self._client.open_session(
            SessionRequest(
                node_id=self.id,
                challenge=challenge,
                last_session=0,
                nonce="n" * 22,
                signature=encode(key.sign(said)),
                inventory=Inventory(
                    cpus_milli=4000,
                    memory_bytes=1 << 33,
                    disk_bytes=1 << 33,
                    os="linux",
                    arch="x86_64",
                    agent_version=VERSION,
                    boot_id="b",
                ),
            )
        )
        self.token = session.token
        self.client = self._client.with_token(session.token)
        self._sequence = 0

    def sync(self, *, held: Sequence[HeldAssignment] = (), wait_seconds: float = 0.0) -> SyncReply:
        """Say what is held, and hear what should be."""
        self._sequence += 1
        return self.client.sync(SyncRequest(sequence=self._sequence, held=[*held], wait_seconds=wait_seconds))

    def close(self) -> None:
        """Hang up."""
        self._client.close()
