"""Attempts in SQL: reported on, renewed, released, ended, and what a node should hold.

Owns the statements that move `job_assignments` once they exist; `queue` makes them. Refuses to know
what follows for the job.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from fleetward.controller.store.tx import Statement, Tx


@dataclass(frozen=True, slots=True)
class HeldRow:
    """An assignment that its node has not released."""

    id: UUID
    job_id: UUID
    node_id: UUID
    fence: int
    attempt: int
    state: str
    is_open: bool
    is_cancelling: bool
    lease_expires_at: datetime
    spec: dict[str, object]


UNRELEASED = Statement(
    """
    SELECT
        held.id, held.job_id, held.node_id, held.fence, held.attempt, held.state, held.is_open,
        jobs.cancel_requested_at IS NOT NULL AS is_cancelling,
        coalesce(held.lease_expires_at, held.assigned_at) AS lease_expires_at, jobs.spec
    FROM job_assignments AS held
    JOIN jobs ON jobs.id = held.job_id
    WHERE held.node_id = ANY (%(node_ids)s::uuid[])
      AND held.released_at IS NULL
    ORDER BY held.id
    """,
    row=HeldRow,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """An assignment that has moved, and where to."""

    id: UUID
    job_id: UUID
    node_id: UUID
    state: str
    outcome: str | None


REPORT = Statement(
    """
    WITH reports AS MATERIALIZED (
        SELECT * FROM unnest(
            %(ids)s::uuid[], %(fences)s::bigint[], %(node_ids)s::uuid[], %(sessions)s::bigint[],
            %(key_epochs)s::int[], %(states)s::text[], %(outcomes)s::text[], %(errors)s::text[], %(results)s::jsonb[]
        ) AS report (id, fence, node_id, session, key_epoch, state, outcome, error, result)
    ), held AS MATERIALIZED (
        SELECT held.id, report.state, report.outcome, report.error, report.result
        FROM reports AS report
        JOIN job_assignments AS held ON held.id = report.id
        JOIN compute_nodes AS node ON node.id = report.node_id
        WHERE held.node_id = report.node_id
          AND held.fence = report.fence
          AND held.is_open
          AND held.state <> 'succeeded'
          AND held.state <> report.state
          AND node.session = report.session
          AND node.key_epoch = report.key_epoch
          AND node.status <> 'removed'
        ORDER BY held.id
        FOR NO KEY UPDATE OF held
    ), moved AS (
        UPDATE job_assignments AS moving SET
            state = held.state,
            started_at = CASE
                WHEN held.state IN ('running', 'succeeded') THEN coalesce(moving.started_at, %(now)s::timestamptz)
                ELSE moving.started_at
            END,
            finished_at = CASE
                WHEN held.state <> 'running' THEN greatest(%(now)s::timestamptz, moving.assigned_at)
            END,
            outcome = held.outcome,
            error = held.error,
            result = held.result
        FROM held
        WHERE moving.id = held.id
        RETURNING
            moving.id, moving.job_id, moving.node_id, moving.state, moving.started_at, moving.finished_at,
            moving.outcome, moving.error, moving.result
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            moved.job_id, moved.id, moved.node_id,
            'assignment.' || CASE moved.state
                WHEN 'running' THEN 'started'
                ELSE coalesce(moved.outcome, moved.state)
            END,
            'node:' || moved.node_id, %(now)s::timestamptz,
            jsonb_build_object('assignment', to_jsonb(moved) - 'id' - 'job_id' - 'node_id')
        FROM moved
    )
    SELECT id, job_id, node_id, state, outcome FROM moved
    """,
    row=Ended,
)


@dataclass(frozen=True, slots=True)
class Touched:
    """An assignment that a statement reached."""

    id: UUID


RENEW = Statement(
    """
    WITH holds AS MATERIALIZED (
        SELECT * FROM unnest(
            %(ids)s::uuid[], %(fences)s::bigint[], %(node_ids)s::uuid[], %(sessions)s::bigint[], %(key_epochs)s::int[]
        ) AS hold (id, fence, node_id, session, key_epoch)
    ), held AS MATERIALIZED (
        SELECT held.id
        FROM holds AS hold
        JOIN job_assignments AS held ON held.id = hold.id
        JOIN compute_nodes AS node ON node.id = hold.node_id
        WHERE held.node_id = hold.node_id
          AND held.fence = hold.fence
          AND held.is_open
          AND node.session = hold.session
          AND node.key_epoch = hold.key_epoch
          AND node.status <> 'removed'
        ORDER BY held.id
        FOR NO KEY UPDATE OF held
    )
    UPDATE job_assignments AS renewed SET
        lease_expires_at = greatest(renewed.lease_expires_at, %(now)s::timestamptz + %(lease)s::interval)
    FROM held
    WHERE renewed.id = held.id
    RETURNING renewed.id
    """,
    row=Touched,
)

RELEASE = Statement(
    """
    WITH holds AS MATERIALIZED (
        SELECT * FROM unnest(
            %(ids)s::uuid[], %(fences)s::bigint[], %(node_ids)s::uuid[], %(sessions)s::bigint[], %(key_epochs)s::int[]
        ) AS hold (id, fence, node_id, session, key_epoch)
    ), held AS MATERIALIZED (
        SELECT held.id
        FROM holds AS hold
        JOIN job_assignments AS held ON held.id = hold.id
        JOIN compute_nodes AS node ON node.id = hold.node_id
        WHERE held.node_id = hold.node_id
          AND held.fence = hold.fence
          AND held.released_at IS NULL
          AND held.state NOT IN ('assigned', 'running')
          AND node.session = hold.session
          AND node.key_epoch = hold.key_epoch
          AND node.status <> 'removed'
        ORDER BY held.id
        FOR NO KEY UPDATE OF held
    ), released AS (
        UPDATE job_assignments AS gone SET released_at = %(now)s::timestamptz
        FROM held
        WHERE gone.id = held.id
        RETURNING gone.id, gone.job_id, gone.node_id, gone.released_at
    ), freed AS (
        UPDATE assignment_devices AS device SET released_at = %(now)s::timestamptz
        FROM released
        WHERE device.assignment_id = released.id
          AND device.released_at IS NULL
        RETURNING device.assignment_id
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            released.job_id, released.id, released.node_id, 'assignment.released', 'node:' || released.node_id,
            %(now)s::timestamptz,
            jsonb_build_object('assignment', jsonb_build_object('released_at', released.released_at))
        FROM released
    )
    SELECT id FROM released
    """,
    row=Touched,
)


@dataclass(frozen=True, slots=True)
class OverdueLease:
    """An open assignment whose lease ran out, as read without a lock."""

    id: UUID
    job_id: UUID
    lease_expires_at: datetime


OVERDUE = Statement(
    """
    SELECT id, job_id, lease_expires_at FROM job_assignments
    WHERE lease_expires_at < %(now)s::timestamptz - %(grace)s::interval
      AND state IN ('assigned', 'running')
    ORDER BY lease_expires_at
    LIMIT %(limit)s::int
    """,
    row=OverdueLease,
)

EXPIRE = Statement(
    """
    WITH overdue AS MATERIALIZED (
        SELECT * FROM unnest(%(ids)s::uuid[], %(leases)s::timestamptz[]) AS overdue (id, lease_expires_at)
    ), held AS MATERIALIZED (
        SELECT held.id
        FROM overdue
        JOIN job_assignments AS held ON held.id = overdue.id
        WHERE held.state IN ('assigned', 'running')
          AND held.lease_expires_at = overdue.lease_expires_at
          AND held.lease_expires_at < %(now)s::timestamptz - %(grace)s::interval
        ORDER BY held.id
        FOR NO KEY UPDATE OF held
    ), moved AS (
        UPDATE job_assignments AS moving SET
            state = 'failed',
            outcome = 'lost',
            finished_at = greatest(%(now)s::timestamptz, moving.assigned_at),
            error = 'the lease ran out: the node was not heard of in time'
        FROM held
        WHERE moving.id = held.id
        RETURNING
            moving.id, moving.job_id, moving.node_id, moving.state, moving.outcome, moving.finished_at, moving.error
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            moved.job_id, moved.id, moved.node_id, 'assignment.lost', 'controller', %(now)s::timestamptz,
            jsonb_build_object('assignment', to_jsonb(moved) - 'id' - 'job_id' - 'node_id')
        FROM moved
    )
    SELECT id, job_id, node_id, state, outcome FROM moved
    """,
    row=Ended,
)

REJECT = Statement(
    """
    WITH rejected AS MATERIALIZED (
        SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(errors)s::text[]) AS rejected (id, fence, error)
    ), held AS MATERIALIZED (
        SELECT held.id, rejected.error
        FROM rejected
        JOIN job_assignments AS held ON held.id = rejected.id
        WHERE held.fence = rejected.fence
          AND held.is_open
        ORDER BY held.id
        FOR NO KEY UPDATE OF held
    ), moved AS (
        UPDATE job_assignments AS moving SET
            state = 'failed',
            outcome = 'rejected',
            finished_at = coalesce(moving.finished_at, greatest(%(now)s::timestamptz, moving.assigned_at)),
            error = held.error
        FROM held
        WHERE moving.id = held.id
        RETURNING
            moving.id, moving.job_id, moving.node_id, moving.state, moving.outcome, moving.finished_at, moving.error
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            moved.job_id, moved.id, moved.node_id, 'assignment.rejected', %(actor)s::text, %(now)s::timestamptz,
            jsonb_build_object(
                'assignment', to_jsonb(moved) - 'id' - 'job_id' - 'node_id',
                'artifacts', (
                    SELECT coalesce(jsonb_agg(to_jsonb(file) ORDER BY file.path), '[]'::jsonb)
                    FROM job_artifacts AS file
                    WHERE file.assignment_id = moved.id
                )
            )
        FROM moved
    )
    SELECT id, job_id, node_id, state, outcome FROM moved
    """,
    row=Ended,
)

CANCEL_OPEN = Statement(
    """
    WITH held AS MATERIALIZED (
        SELECT held.id
        FROM job_assignments AS held
        WHERE held.job_id = ANY (%(job_ids)s::uuid[])
          AND held.is_open
        ORDER BY held.id
        FOR NO KEY UPDATE OF held
    ), moved AS (
        UPDATE job_assignments AS moving SET
            state = 'cancelled',
            outcome = 'cancelled',
            finished_at = greatest(%(now)s::timestamptz, moving.assigned_at),
            error = %(reason)s::text
        FROM held
        WHERE moving.id = held.id
        RETURNING
            moving.id, moving.job_id, moving.node_id, moving.state, moving.outcome, moving.finished_at, moving.error
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            moved.job_id, moved.id, moved.node_id, 'assignment.cancelled', %(actor)s::text, %(now)s::timestamptz,
            jsonb_build_object('assignment', to_jsonb(moved) - 'id' - 'job_id' - 'node_id')
        FROM moved
    )
    SELECT id, job_id, node_id, state, outcome FROM moved
    """,
    row=Ended,
)


@dataclass(frozen=True, slots=True)
class AssignmentRow:
    """An attempt as people see it."""

    id: UUID
    job_id: UUID
    node_id: UUID
    node: str
    attempt: int
    fence: int
    state: str
    outcome: str | None
    assigned_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    artifacts_verified_at: datetime | None
    released_at: datetime | None
    lease_expires_at: datetime | None
    result: dict[str, object]
    error: str | None


BY_JOB = Statement(
    """
    SELECT
        attempt.id, attempt.job_id, attempt.node_id, node.name AS node, attempt.attempt, attempt.fence, attempt.state,
        attempt.outcome, attempt.assigned_at, attempt.started_at, attempt.finished_at, attempt.artifacts_verified_at,
        attempt.released_at, attempt.lease_expires_at, attempt.result, attempt.error
    FROM job_assignments AS attempt
    JOIN compute_nodes AS node ON node.id = attempt.node_id
    WHERE attempt.job_id = %(job_id)s::uuid
    ORDER BY attempt.fence
    LIMIT %(limit)s::int
    """,
    row=AssignmentRow,
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A node's right to write for an assignment, as its call claims it."""

    id: UUID
    fence: int
    node_id: UUID
    session: int
    key_epoch: int


@dataclass(frozen=True, slots=True)
class Writable:
    """An assignment that the claiming node may write for, with its job."""

    id: UUID
    job_id: UUID
    state: str
    is_open: bool


WRITABLE = Statement(
    """
    SELECT held.id, held.job_id, held.state, held.is_open
    FROM job_assignments AS held
    JOIN compute_nodes AS node ON node.id = held.node_id
    WHERE held.id = %(id)s::uuid
      AND held.fence = %(fence)s::bigint
      AND held.node_id = %(node_id)s::uuid
      AND (held.released_at IS NULL OR held.released_at > %(now)s::timestamptz - %(after_release)s::interval)
      AND node.session = %(session)s::bigint
      AND node.key_epoch = %(key_epoch)s::int
      AND node.status <> 'removed'
    FOR NO KEY UPDATE OF held
    """,
    row=Writable,
)


def claim_columns(claims: Iterable[Claim]) -> dict[str, list[UUID] | list[int]]:
    """Spread claims into the arrays that the set-based statements take."""
    rows = list(claims)
    return {
        "ids": [claim.id for claim in rows],
        "fences": [claim.fence for claim in rows],
        "node_ids": [claim.node_id for claim in rows],
        "sessions": [claim.session for claim in rows],
        "key_epochs": [claim.key_epoch for claim in rows],
    }


def renew(tx: Tx, claims: Sequence[Claim], *, lease: object) -> None:
    """Lengthen the leases of what these nodes truly hold; the rest is left as it is."""
    if claims:
        tx.later(RENEW, lease=lease, **claim_columns(claims))


def release(tx: Tx, claims: Sequence[Claim]) -> None:
    """Record that these process trees are gone."""
    if claims:
        tx.later(RELEASE, **claim_columns(claims))
