"""Whose key this is, and what it may do.

Owns users and API keys: how a key is written, kept and recognised. Refuses to know routes: the endpoint
table says which scope each needs.
"""

import hashlib
import hmac
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from fleetward.controller.store import access
from fleetward.controller.store.tx import Database
from fleetward.domain.errors import Unauthenticated
from fleetward.domain.ids import ApiKeyId, UserId
from fleetward.wire.handshake import encode

KEY_SECRET_BYTES = 32
KEY_LASTS = timedelta(days=90)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key proves, and what it may do."""

    user_id: UserId
    name: str
    scopes: tuple[str, ...]
    key_id: ApiKeyId


def ensure_owner(database: Database, *, name: str) -> UserId:
    """The first user, who may do everything; made when there is none."""
    with database.begin() as tx:
        owner = tx.maybe(access.OWNER)
        if owner is None:
            tx.maybe(access.MAKE_USER, id=tx.new_id(), name=name, role="owner")
            owner = tx.one(access.OWNER)
    return UserId(owner.id)


def make_key(database: Database, *, owner: UserId, name: str, scopes: Sequence[str], hmac_key: bytes) -> str:
    """Make a key and return its text, which is kept nowhere; the checksum tells a mistyped key from a wrong one."""
    secret = encode(database.entropy(KEY_SECRET_BYTES))
    with database.begin() as tx:
        key_id = tx.new_id()
        tx.one(
            access.MAKE_KEY,
            id=key_id,
            owner_id=owner,
            name=name,
            key_hash=_hash(secret, hmac_key=hmac_key),
            scopes=list(scopes),
            lasts=KEY_LASTS,
            actor=f"user:{owner}",
        )
    body = f"fwt_{key_id.hex}_{secret}"
    return f"{body}_{_checksum(body)}"


def authenticate(database: Database, text: str, *, hmac_key: bytes) -> Caller:
    """Say whom a key proves; what is wrong with a bad one is not told."""
    body, _, checksum = text.rpartition("_")
    prefix, _, rest = body.partition("_")
    id_hex, _, secret = rest.partition("_")
    if prefix != "fwt" or checksum != _checksum(body):
        raise _unknown()
    try:
        key_id = UUID(hex=id_hex)
    except ValueError as error:
        raise _unknown() from error
    with database.begin() as tx:
        found = tx.later(access.LIVE_KEY, id=key_id)
    key = next(iter(found.rows), None)
    if key is None or not hmac.compare_digest(key.key_hash, _hash(secret, hmac_key=hmac_key)):
        raise _unknown()
    return Caller(user_id=UserId(key.user_id), name=key.name, scopes=tuple(key.scopes), key_id=ApiKeyId(key.id))


def _unknown() -> Unauthenticated:
    return Unauthenticated(
        "the API key proves nobody: it is unknown, mistyped, revoked or lapsed",
        hint="on the controller's machine the CLI reads $FLEETWARD_HOME/token; elsewhere set FLEETWARD_TOKEN",
    )


def _hash(secret: str, *, hmac_key: bytes) -> bytes:
    return hmac.digest(hmac_key, secret.encode(), hashlib.sha256)


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
