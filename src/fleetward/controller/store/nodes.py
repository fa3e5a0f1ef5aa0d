"""Nodes in SQL: codes, pairing, sessions, beats, and how nodes look to people.

Owns the statements on `compute_nodes` and the tables around it. Refuses to know signatures: `services`
checks those before a row changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from fleetward.controller.store.tx import Statement, Tx


@dataclass(frozen=True, slots=True)
class MadeCode:
    """A pairing code that was made."""

    id: UUID
    expires_at: datetime


MAKE_CODE = Statement(
    """
    WITH made AS (
        INSERT INTO node_pairing_codes (id, public_key, labels, expires_at, created_by, created_at)
        VALUES (
            %(id)s::uuid, %(public_key)s::bytea, %(labels)s::jsonb, %(now)s::timestamptz + %(lasts)s::interval,
            %(created_by)s::uuid, %(now)s::timestamptz
        )
        RETURNING *
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, kind, actor, at, data)
        SELECT
            'pairing_code', made.id, 'pairing_code.created', %(actor)s::text, %(now)s::timestamptz,
            jsonb_build_object('pairing_code', to_jsonb(made))
        FROM made
    )
    SELECT id, expires_at FROM made
    """,
    row=MadeCode,
)


@dataclass(frozen=True, slots=True)
class Code:
    """A pairing code, held by this transaction."""

    id: UUID
    public_key: bytes
    labels: dict[str, str]
    expires_at: datetime
    used_at: datetime | None
    used_by_node_id: UUID | None
    used_by_key: bytes | None


LOCK_CODE = Statement(
    """
    SELECT id, public_key, labels, expires_at, used_at, used_by_node_id, used_by_key
    FROM node_pairing_codes
    WHERE id = %(id)s::uuid
    FOR NO KEY UPDATE
    """,
    row=Code,
)


@dataclass(frozen=True, slots=True)
class NodeKey:
    """Who a node is, and by which key."""

    id: UUID
    name: str
    status: str
    mac: str | None
    session: int
    session_nonce: str | None
    key_epoch: int
    public_key: bytes | None


BY_NAME = Statement(
    """
    SELECT
        node.id, node.name, node.status, node.mac, node.session, node.session_nonce, node.key_epoch, key.public_key
    FROM compute_nodes AS node
    LEFT JOIN node_credentials AS key ON key.node_id = node.id AND key.key_epoch = node.key_epoch
    WHERE node.name = %(name)s::text
    """,
    row=NodeKey,
)

TOMBSTONE_OF_MAC = Statement(
    """
    SELECT
        node.id, node.name, node.status, node.mac, node.session, node.session_nonce, node.key_epoch, key.public_key
    FROM compute_nodes AS node
    LEFT JOIN node_credentials AS key ON key.node_id = node.id AND key.key_epoch = node.key_epoch
    WHERE node.mac = %(mac)s::text
      AND node.status = 'removed'
      AND node.name = %(derived)s::text
    LIMIT 1
    """,
    row=NodeKey,
)

BY_ID = Statement(
    """
    SELECT
        node.id, node.name, node.status, node.mac, node.session, node.session_nonce, node.key_epoch, key.public_key
    FROM compute_nodes AS node
    LEFT JOIN node_credentials AS key ON key.node_id = node.id AND key.key_epoch = node.key_epoch
    WHERE node.id = %(node_id)s::uuid
    """,
    row=NodeKey,
)

LOCK_BY_ID = Statement(
    """
    SELECT
        node.id, node.name, node.status, node.mac, node.session, node.session_nonce, node.key_epoch, key.public_key
    FROM compute_nodes AS node
    LEFT JOIN node_credentials AS key ON key.node_id = node.id AND key.key_epoch = node.key_epoch
    WHERE node.id = %(node_id)s::uuid
    FOR NO KEY UPDATE OF node
    """,
    row=NodeKey,
)


@dataclass(frozen=True, slots=True)
class Paired:
    """A node that a code made."""

    id: UUID
    name: str
    key_epoch: int


PAIR = Statement(
    """
    WITH made AS (
        INSERT INTO compute_nodes (id, name, mac, labels, created_at, joined_at)
        VALUES (
            %(id)s::uuid, %(name)s::text, %(mac)s::text, %(labels)s::jsonb, %(now)s::timestamptz,
            %(now)s::timestamptz
        )
        RETURNING *
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor, at, data)
        SELECT
            'node', made.id, made.id, 'node.paired', 'pairing_code:' || %(code_id)s::uuid, %(now)s::timestamptz,
            jsonb_build_object('node', to_jsonb(made))
        FROM made
    )
    SELECT id, name, key_epoch FROM made
    """,
    row=Paired,
)


@dataclass(frozen=True, slots=True)
class UsedCode:
    """The code that a pairing consumed."""

    id: UUID


# A statement of its own: the trigger on credentials locks the node's row, which must be there by then.
GIVE_KEY = Statement(
    """
    WITH given AS (
        INSERT INTO node_credentials (id, node_id, public_key, key_epoch, created_at)
        VALUES (
            %(credential_id)s::uuid, %(node_id)s::uuid, %(public_key)s::bytea, %(key_epoch)s::int,
            %(now)s::timestamptz
        )
        RETURNING *
    ), used AS (
        UPDATE node_pairing_codes SET
            used_at = %(now)s::timestamptz, used_by_node_id = given.node_id, used_by_key = given.public_key
        FROM given
        WHERE node_pairing_codes.id = %(code_id)s::uuid
          AND node_pairing_codes.used_at IS NULL
        RETURNING
            node_pairing_codes.id, node_pairing_codes.used_at, node_pairing_codes.used_by_node_id,
            node_pairing_codes.used_by_key
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor, at, data)
        SELECT
            'pairing_code', used.id, given.node_id, 'pairing_code.used', 'node:' || given.node_id,
            %(now)s::timestamptz,
            jsonb_build_object('pairing_code', to_jsonb(used) - 'id', 'credential', to_jsonb(given))
        FROM used, given
    )
    SELECT id FROM used
    """,
    row=UsedCode,
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that was opened."""

    id: UUID
    session: int
    key_epoch: int


OPEN_SESSION = Statement(
    """
    WITH opened AS (
        UPDATE compute_nodes SET
            session = session + 1,
            session_nonce = %(nonce)s::text,
            cpus_milli = %(cpus_milli)s::int,
            memory_bytes = %(memory_bytes)s::bigint,
            disk_bytes = %(disk_bytes)s::bigint,
            inventory = %(inventory)s::jsonb
        WHERE id = %(node_id)s::uuid
          AND status <> 'removed'
          AND session = %(last_session)s::bigint
        RETURNING id, session, session_nonce, cpus_milli, memory_bytes, disk_bytes, inventory, key_epoch
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor, at, data)
        SELECT
            'node', opened.id, opened.id, 'node.session_opened', 'node:' || opened.id, %(now)s::timestamptz,
            jsonb_build_object('node', to_jsonb(opened) - 'id' - 'key_epoch')
        FROM opened
    )
    SELECT id, session, key_epoch FROM opened
    """,
    row=Opened,
)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """When a node's present session began."""

    at: datetime


SESSION_OPENED_AT = Statement(
    """
    SELECT coalesce(max(at), 'epoch'::timestamptz) AS at FROM audit_events
    WHERE subject_kind = 'node'
      AND subject_id = %(node_id)s::uuid
      AND kind = 'node.session_opened'
    """,
    row=SessionOpened,
)

FENCE_CLONE = Statement(
    """
    WITH fenced AS (
        UPDATE compute_nodes SET
            session = session + 1, session_nonce = NULL, eligible = false, eligible_reason = 'cloned'
        WHERE id = %(node_id)s::uuid
          AND status <> 'removed'
          AND eligible_reason IS DISTINCT FROM 'cloned'
        RETURNING id, session, session_nonce, eligible, eligible_reason, key_epoch
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor, at, data)
        SELECT
            'node', fenced.id, fenced.id, 'node.cloned', 'controller', %(now)s::timestamptz,
            jsonb_build_object('node', to_jsonb(fenced) - 'id' - 'key_epoch')
        FROM fenced
    )
    SELECT id, session, key_epoch FROM fenced
    """,
    row=Opened,
)


@dataclass(frozen=True, slots=True)
class LiveNode:
    """What a sync must know of its node before it is believed."""

    id: UUID
    status: str
    session: int
    key_epoch: int
    eligible_reason: str | None
    beat_session: int | None
    sequence: int | None


LIVE = Statement(
    """
    SELECT
        node.id, node.status, node.session, node.key_epoch, node.eligible_reason,
        beat.session AS beat_session, beat.sequence
    FROM compute_nodes AS node
    LEFT JOIN node_heartbeats AS beat ON beat.node_id = node.id
    WHERE node.id = ANY (%(node_ids)s::uuid[])
    ORDER BY node.id
    """,
    row=LiveNode,
)


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node whose row this transaction holds."""

    id: UUID
    status: str


LOCK_SHARED = Statement(
    """
    SELECT id, status FROM compute_nodes
    WHERE id = ANY (%(node_ids)s::uuid[])
    ORDER BY id
    FOR SHARE
    """,
    row=HeldNode,
)

LOCK = Statement(
    """
    SELECT id, status FROM compute_nodes
    WHERE id = ANY (%(node_ids)s::uuid[])
    ORDER BY id
    FOR NO KEY UPDATE
    """,
    row=HeldNode,
)


def lock(tx: Tx, node_ids: Iterable[UUID]) -> None:
    """Hold these nodes' rows before anything that follows, as one who may change them, lowest id first."""
    wanted = sorted(set(node_ids))
    if wanted:
        tx.later(LOCK, node_ids=wanted)


def lock_shared(tx: Tx, node_ids: Iterable[UUID]) -> None:
    """Keep these nodes from being changed while this transaction writes beside them."""
    wanted = sorted(set(node_ids))
    if wanted:
        tx.later(LOCK_SHARED, node_ids=wanted)


BEAT = Statement(
    """
    WITH beats AS MATERIALIZED (
        SELECT * FROM unnest(
            %(node_ids)s::uuid[], %(sessions)s::bigint[], %(key_epochs)s::int[], %(sequences)s::bigint[],
            %(loads)s::jsonb[]
        ) AS beat (node_id, session, key_epoch, sequence, load)
    )
    INSERT INTO node_heartbeats AS kept (node_id, session, sequence, seen_at, beat_seconds, load)
    SELECT beat.node_id, beat.session, beat.sequence, %(now)s::timestamptz, %(beat_seconds)s::float8, beat.load
    FROM beats AS beat
    JOIN compute_nodes AS node ON node.id = beat.node_id
    WHERE node.session = beat.session
      AND node.key_epoch = beat.key_epoch
      AND node.status <> 'removed'
    ORDER BY beat.node_id
    ON CONFLICT (node_id) DO UPDATE SET
        session = excluded.session,
        sequence = excluded.sequence,
        seen_at = excluded.seen_at,
        beat_seconds = excluded.beat_seconds,
        load = excluded.load
    WHERE kept.session < excluded.session
       OR kept.sequence < excluded.sequence
    RETURNING kept.node_id AS id
    """,
    row=UsedCode,
)

PROMOTE = Statement(
    """
    WITH promoted AS (
        UPDATE compute_nodes SET status = 'online'
        WHERE id = ANY (%(node_ids)s::uuid[])
          AND status IN ('provisioning', 'offline')
        RETURNING id, status
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor, at, data)
        SELECT
            'node', promoted.id, promoted.id, 'node.online', 'node:' || promoted.id, %(now)s::timestamptz,
            jsonb_build_object('node', jsonb_build_object('status', promoted.status))
        FROM promoted
    )
    SELECT id, status FROM promoted
    """,
    row=HeldNode,
)


@dataclass(frozen=True, slots=True)
class SilentNode:
    """An online node that has not been heard of in time, as read without a lock."""

    id: UUID


SILENT = Statement(
    """
    SELECT node.id FROM compute_nodes AS node
    LEFT JOIN node_heartbeats AS beat ON beat.node_id = node.id
    WHERE node.status = 'online'
      AND coalesce(beat.seen_at, node.created_at) < %(now)s::timestamptz - %(silence)s::interval
    ORDER BY node.id
    LIMIT %(limit)s::int
    """,
    row=SilentNode,
)

MARK_OFFLINE = Statement(
    """
    WITH silent AS (
        UPDATE compute_nodes AS node SET status = 'offline'
        WHERE node.id = ANY (%(node_ids)s::uuid[])
          AND node.status = 'online'
          AND NOT EXISTS (
              SELECT 1 FROM node_heartbeats AS beat
              WHERE beat.node_id = node.id
                AND beat.seen_at >= %(now)s::timestamptz - %(silence)s::interval
          )
        RETURNING node.id, node.status
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor, at, data)
        SELECT
            'node', silent.id, silent.id, 'node.offline', 'controller', %(now)s::timestamptz,
            jsonb_build_object('node', jsonb_build_object('status', silent.status))
        FROM silent
    )
    SELECT id, status FROM silent
    """,
    row=HeldNode,
)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many nodes beat."""

    node_count: int


FLEET_SIZE = Statement(
    """
    SELECT count(*)::int AS node_count FROM compute_nodes WHERE status IN ('online', 'draining')
    """,
    row=FleetSize,
)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node as people see it."""

    id: UUID
    name: str
    status: str
    mac: str | None
    session: int
    key_epoch: int
    labels: dict[str, str]
    cpus_milli: int
    memory_bytes: int
    inventory: dict[str, object]
    load: dict[str, object]
    eligible: bool
    eligible_reason: str | None
    held: int
    created_at: datetime
    seen_at: datetime | None


LIST = Statement(
    """
    SELECT
        node.id, node.name, node.status, node.mac, node.session, node.key_epoch, node.labels, node.cpus_milli,
        node.memory_bytes, node.inventory, coalesce(beat.load, '{}'::jsonb) AS load, node.eligible,
        node.eligible_reason,
        (
            SELECT count(*)::int FROM job_assignments AS held
            WHERE held.node_id = node.id
              AND held.released_at IS NULL
        ) AS held,
        node.created_at, beat.seen_at
    FROM compute_nodes AS node
    LEFT JOIN node_heartbeats AS beat ON beat.node_id = node.id
    WHERE (%(name)s::text IS NULL OR node.name = %(name)s::text)
      AND (%(after)s::text IS NULL OR node.name > %(after)s::text)
    ORDER BY node.name
    LIMIT %(limit)s::int
    """,
    row=NodeRow,
)


@dataclass(frozen=True, slots=True)
class StatusCount:
    """How many there are of a status."""

    status: str
    count: int


COUNT_BY_STATUS = Statement(
    """
    SELECT status, count(*)::int AS count FROM compute_nodes GROUP BY status ORDER BY status
    """,
    row=StatusCount,
)
