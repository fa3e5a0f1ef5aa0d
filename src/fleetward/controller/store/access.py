"""Users and keys in SQL.

Owns the statements on `users` and `api_keys`. Refuses to know a key's secret: it sees hashes.
"""

from dataclasses import dataclass
from uuid import UUID

from fleetward.controller.store.tx import Statement


@dataclass(frozen=True, slots=True)
class User:
    """A user who may act."""

    id: UUID
    name: str


OWNER = Statement(
    """
    SELECT id, name FROM users
    WHERE role = 'owner'
    ORDER BY created_at, id
    LIMIT 1
    """,
    row=User,
)

MAKE_USER = Statement(
    """
    WITH made AS (
        INSERT INTO users (id, name, role, created_at)
        VALUES (%(id)s::uuid, %(name)s::text, %(role)s::text, %(now)s::timestamptz)
        ON CONFLICT (name) DO NOTHING
        RETURNING id, name, role, created_at
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, kind, actor, at, data)
        SELECT
            'user', made.id, 'user.created', 'controller', %(now)s::timestamptz,
            jsonb_build_object('user', to_jsonb(made))
        FROM made
    )
    SELECT id, name FROM made
    """,
    row=User,
)


@dataclass(frozen=True, slots=True)
class MadeKey:
    """An API key that was made."""

    id: UUID


MAKE_KEY = Statement(
    """
    WITH made AS (
        INSERT INTO api_keys (id, owner_id, name, key_hash, scopes, created_at, expires_at)
        VALUES (
            %(id)s::uuid, %(owner_id)s::uuid, %(name)s::text, %(key_hash)s::bytea,
            %(scopes)s::text[]::api_key_scope[], %(now)s::timestamptz, %(now)s::timestamptz + %(lasts)s::interval
        )
        RETURNING id, owner_id, name, scopes, created_at, expires_at
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, kind, actor, at, data)
        SELECT
            'api_key', made.id, 'api_key.created', %(actor)s::text, %(now)s::timestamptz,
            jsonb_build_object('api_key', to_jsonb(made))
        FROM made
    )
    SELECT id FROM made
    """,
    row=MadeKey,
)


@dataclass(frozen=True, slots=True)
class LiveKey:
    """A key that is neither revoked nor lapsed, and whom it speaks for."""

    id: UUID
    user_id: UUID
    name: str
    key_hash: bytes
    scopes: list[str]


LIVE_KEY = Statement(
    """
    SELECT key.id, owner.id AS user_id, owner.name, key.key_hash, key.scopes::text[] AS scopes
    FROM api_keys AS key
    JOIN users AS owner ON owner.id = key.owner_id
    WHERE key.id = %(id)s::uuid
      AND key.revoked_at IS NULL
      AND (key.expires_at IS NULL OR key.expires_at > %(now)s::timestamptz)
      AND owner.suspended_at IS NULL
    """,
    row=LiveKey,
)
