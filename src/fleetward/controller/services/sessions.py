"""One run of an agent: how it opens a session, and what its token proves.

Owns challenges, session numbers and tokens. Refuses to know what a session is used for.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec

from fleetward.controller.store import nodes
from fleetward.controller.store.tx import Database, Tx, as_json
from fleetward.domain.errors import (
    AgentTooOld,
    MalformedRequest,
    NodeCloned,
    NodeNotFound,
    NodeRemoved,
    SessionStale,
    Unauthenticated,
)
from fleetward.domain.ids import NodeId
from fleetward.wire.handshake import NONCE_BYTES, check_signature, decode, encode, session_transcript
from fleetward.wire.messages import Challenge, SessionReply, SessionRequest
from fleetward.wire.versions import VERSION, agent_is_supported

CHALLENGE_LASTS = timedelta(seconds=60)
TOKEN_LASTS = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class NodeCredential:
    """Whom a session token proves; every statement checks session and key epoch again."""

    node_id: NodeId
    key_epoch: int
    session: int
    expires_at: datetime


def challenge(database: Database, *, node_id: NodeId, token_key: bytes) -> Challenge:
    """Give out a challenge that needs no memory: it carries its own age and our mark."""
    with database.begin() as tx:
        until = tx.now + CHALLENGE_LASTS
    nonce = encode(database.entropy(NONCE_BYTES))
    return Challenge(challenge=_sealed(["challenge", node_id.hex, until.timestamp(), nonce], key=token_key))


def open_session(database: Database, request: SessionRequest, *, token_key: bytes) -> SessionReply:
    """Open the next session of a node, or repeat the answer to the same nonce."""
    if not agent_is_supported(request.inventory.agent_version):
        raise AgentTooOld(
            f"agent version {request.inventory.agent_version!r} does not work with controller {VERSION}",
            hint=f"on that machine: pip install 'fleetward=={VERSION}'",
        )
    with database.begin() as tx:
        node = tx.maybe(nodes.LOCK_BY_ID, node_id=request.node_id)
        if node is None or node.public_key is None:
            raise NodeNotFound(f"no node has the id {request.node_id}", hint="pair this machine again")
        challenged_at = _check_proof(tx, request, public_key=node.public_key, token_key=token_key)
        if node.status == "removed":
            raise removed(node.name)
        session = _next_session(tx, node, request)
        if session is None and challenged_at <= tx.one(nodes.SESSION_OPENED_AT, node_id=node.id).at:
            # It set out before the present session began and was overtaken: late, and nobody's copy.
            raise stale()
        expires_at = tx.now + TOKEN_LASTS
    if session is None:
        _fence(database, node)
        raise cloned(node.name)
    credential = [node.id.hex, node.key_epoch, session, expires_at.timestamp()]
    token = _sealed(["session", *credential], key=token_key)
    return SessionReply(session=session, token=token, expires_at=expires_at)


def read_token(text: str, *, token_key: bytes) -> NodeCredential:
    """Read a session token; whether its session is still the node's own, the database says."""
    fields = _unsealed(text, key=token_key)
    match fields:
        case ["session", str(node), int(key_epoch), int(session), float(until)]:
            return NodeCredential(
                node_id=NodeId(UUID(hex=node)),
                key_epoch=key_epoch,
                session=session,
                expires_at=datetime.fromtimestamp(until, UTC),
            )
        case _:
            raise Unauthenticated("this is no session token", hint="open a session first")


def removed(name: str) -> NodeRemoved:
    """The one answer that a removed node ever gets."""
    return NodeRemoved(
        f"node {name!r} was removed for good; this machine's credential proves nothing any more",
        hint="the agent stops here; to use the machine again pair it under another name",
    )


def _next_session(tx: Tx, node: nodes.NodeKey, request: SessionRequest) -> int | None:
    """The session's number, or nothing when two machines must be holding the same state."""
    if node.session_nonce == request.nonce and node.session == request.last_session + 1:
        return node.session
    if node.session != request.last_session:
        return None
    opened = tx.one(
        nodes.OPEN_SESSION,
        node_id=node.id,
        last_session=request.last_session,
        nonce=request.nonce,
        cpus_milli=request.inventory.cpus_milli,
        memory_bytes=request.inventory.memory_bytes,
        disk_bytes=request.inventory.disk_bytes,
        inventory=as_json(msgspec.to_builtins(request.inventory)),
    )
    return opened.session


def _check_proof(tx: Tx, request: SessionRequest, *, public_key: bytes, token_key: bytes) -> datetime:
    """Refuse unless the node's key signed a challenge of ours; returns when that was given out."""
    match _unsealed(request.challenge, key=token_key):
        case ["challenge", str(node), float(until), str()] if node == request.node_id.hex:
            challenge_ends_at = datetime.fromtimestamp(until, UTC)
        case _:
            raise Unauthenticated("the challenge is not one of ours for this node")
    if tx.now > challenge_ends_at:
        raise Unauthenticated("the challenge has lapsed", hint="ask for another and sign that")
    message = session_transcript(
        node_id=NodeId(request.node_id),
        challenge=request.challenge,
        last_session=request.last_session,
        nonce=request.nonce,
    )
    try:
        signature = decode(request.signature)
    except ValueError as error:
        raise MalformedRequest("the signature is not base64url without padding", field="signature") from error
    check_signature(public_key=public_key, signature=signature, message=message)
    return challenge_ends_at - CHALLENGE_LASTS


def _fence(database: Database, node: nodes.NodeKey) -> None:
    """Shut both holders of the state out, and record it; their transaction has ended without a change."""
    with database.begin() as tx:
        nodes.lock(tx, [node.id])
        tx.maybe(nodes.FENCE_CLONE, node_id=node.id)


def cloned(name: str) -> NodeCloned:
    """The answer to both machines that hold one node's state."""
    return NodeCloned(
        f"two machines present the state of node {name!r}; neither is believed until it is re-keyed",
        hint="find the copy and wipe it, then re-key the node",
    )


def stale() -> SessionStale:
    """The answer to a session that is no longer its node's own."""
    return SessionStale("this session has ended or a newer one took its place", hint="open a new session")


def _sealed(fields: list[object], *, key: bytes) -> str:
    body = json.dumps(fields, separators=(",", ":")).encode()
    return f"{encode(body)}.{encode(hmac.digest(key, body, hashlib.sha256))}"


def _unsealed(text: str, *, key: bytes) -> list[object]:
    body, _, seal = text.partition(".")
    try:
        raw, mark = decode(body), decode(seal)
        if not hmac.compare_digest(hmac.digest(key, raw, hashlib.sha256), mark):
            raise Unauthenticated("the token is not one of ours")
        return msgspec.json.decode(raw, type=list[object])
    except (ValueError, msgspec.DecodeError) as error:
        raise Unauthenticated("the token is not one of ours") from error
