"""How a machine becomes a node.

Owns pairing codes and their one use. Refuses to know sessions: those begin once a node exists.
"""

from collections.abc import Callable
from datetime import timedelta

from fleetward.controller.store import nodes
from fleetward.controller.store.tx import Database, Tx, as_json
from fleetward.domain.errors import MalformedRequest, NameRemoved, NodeExists, PairingRefused, Unauthenticated
from fleetward.domain.ids import PairingCodeId, UserId
from fleetward.domain.jobs import check_labels
from fleetward.domain.nodes import MAC, check_name, name_from_mac
from fleetward.wire.handshake import (
    SECRET_BYTES,
    JoinString,
    check_signature,
    code_key,
    decode,
    encode,
    pairing_transcript,
)
from fleetward.wire.messages import PairingCode, PairingCodeRequest, PairReply, PairRequest
from fleetward.wire.versions import agent_is_supported

EXPIRES_MIN = timedelta(seconds=10)
EXPIRES_MAX = timedelta(days=7)  # a code is for a person at a machine, not for an image


def make_code(database: Database, request: PairingCodeRequest, *, url: str, pin: str, by: UserId) -> PairingCode:
    """Make a one-time code; its secret is in the answer and nowhere else."""
    check_labels(request.labels)
    # Compared as numbers: a duration cannot hold every number of seconds that may be asked for.
    if not EXPIRES_MIN.total_seconds() <= request.expires_seconds <= EXPIRES_MAX.total_seconds():
        raise MalformedRequest(
            f"a code cannot last {request.expires_seconds} seconds; "
            f"from {EXPIRES_MIN.total_seconds():.0f} to {EXPIRES_MAX.total_seconds():.0f}",
            field="expires_seconds",
        )
    secret = database.entropy(SECRET_BYTES)
    with database.begin() as tx:
        made = tx.one(
            nodes.MAKE_CODE,
            id=tx.new_id(),
            public_key=code_key(secret).public_key().public_bytes_raw(),
            labels=as_json(request.labels),
            lasts=timedelta(seconds=request.expires_seconds),
            created_by=by,
            actor=f"user:{by}",
        )
    join = JoinString(url=url, code_id=PairingCodeId(made.id), secret=secret, pin=pin)
    return PairingCode(id=made.id, join_string=join.text(), code=str(made.id), expires_at=made.expires_at)


def pair(
    database: Database,
    request: PairRequest,
    *,
    pin: str,
    sign: Callable[[bytes], bytes],
    controller_public: bytes,
) -> PairReply:
    """Turn a machine into a node, once per code; the same machine asking again gets the same answer."""
    check_name(request.name)
    if request.mac and not MAC.fullmatch(request.mac):
        raise MalformedRequest(f"{request.mac!r} is no hardware address", field="mac")
    if not agent_is_supported(request.agent_version):
        raise MalformedRequest(f"agent version {request.agent_version!r} is not one this controller works with")
    node_key = _key_bytes(request.node_key)
    transcript = pairing_transcript(
        code_id=PairingCodeId(request.code_id), pin=pin, node_key=node_key, name=request.name, mac=request.mac
    )
    check_signature(public_key=node_key, signature=_signature(request.node_signature), message=transcript)
    with database.begin() as tx:
        paired = _use_code(tx, request, node_key=node_key, transcript=transcript)
    return PairReply(
        node_id=paired.id,
        name=paired.name,
        key_epoch=paired.key_epoch,
        controller_key=encode(controller_public),
        controller_signature=encode(sign(transcript)),
    )


def _use_code(tx: Tx, request: PairRequest, *, node_key: bytes, transcript: bytes) -> nodes.Paired:
    code = tx.maybe(nodes.LOCK_CODE, id=request.code_id)
    if code is None:
        raise _refused()
    try:
        check_signature(public_key=code.public_key, signature=_signature(request.code_signature), message=transcript)
    except Unauthenticated as error:
        raise _refused() from error
    if code.used_at is not None:
        return _answered_before(tx, code, request, node_key=node_key)
    if code.expires_at <= tx.now:
        raise _refused()
    _refuse_taken_name(tx, request)
    paired = tx.one(
        nodes.PAIR,
        id=tx.new_id(),
        name=request.name,
        mac=request.mac or None,
        labels=as_json(code.labels),
        code_id=code.id,
    )
    tx.one(
        nodes.GIVE_KEY,
        credential_id=tx.new_id(),
        node_id=paired.id,
        public_key=node_key,
        key_epoch=paired.key_epoch,
        code_id=code.id,
    )
    return paired


def _answered_before(tx: Tx, code: nodes.Code, request: PairRequest, *, node_key: bytes) -> nodes.Paired:
    """A used code answers only the very machine that used it: its reply may have been lost."""
    node = tx.maybe(nodes.BY_NAME, name=request.name)
    if code.used_by_key != node_key or node is None or node.id != code.used_by_node_id or node.status == "removed":
        raise _refused()
    return nodes.Paired(id=node.id, name=node.name, key_epoch=node.key_epoch)


def _refuse_taken_name(tx: Tx, request: PairRequest) -> None:
    node = tx.maybe(nodes.BY_NAME, name=request.name)
    if node is None and request.mac:
        node = tx.maybe(nodes.TOMBSTONE_OF_MAC, mac=request.mac, derived=name_from_mac(request.mac))
    if node is None:
        return
    if node.status == "removed":
        raise NameRemoved(
            f"this machine was node {node.name!r}, which was removed for good",
            hint="a removed node never comes back as itself; ask for a code made with `--replaces`",
        )
    raise NodeExists(
        f"a node named {node.name!r} exists already",
        hint="give this machine another name with --name, or remove the other node first",
    )


def _refused() -> PairingRefused:
    return PairingRefused(
        "this pairing code cannot be used: it is unknown, expired or used",
        hint="make a new one with `fleetward node pair`",
    )


def _key_bytes(text: str) -> bytes:
    raw = _signature(text)
    if len(raw) != 32:
        raise MalformedRequest("a node key is 32 bytes of Ed25519 as base64url", field="node_key")
    return raw


def _signature(text: str) -> bytes:
    try:
        return decode(text)
    except ValueError as error:
        raise MalformedRequest("a key or signature is not base64url without padding") from error
