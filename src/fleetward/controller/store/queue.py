"""The queue in SQL: what waits, what room there is, and the one statement that makes attempts.

Owns the snapshot that the scheduler sees and the re-count that its plan must survive. Refuses to know
which job is best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from fleetward.controller.store.tx import Later, Statement, Tx


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that may want further attempts, with what its attempts so far say."""

    id: UUID
    owner_id: UUID | None
    shape: str
    priority: int
    created_at: datetime
    cpus_milli: int
    memory_bytes: int
    spec: dict[str, object]
    wanted: int
    taken: list[UUID]
    failed: list[UUID]


# A loose scan walks the index from one (shape, owner) to the next, so that a shape with a million jobs
# costs as much as a shape with one. Jobs without an owner come by shape alone: NULL compares with nothing.
CANDIDATES = Statement(
    """
    WITH RECURSIVE owned AS (
        (
            SELECT shape, owner_id FROM jobs
            WHERE status = 'queued'
              AND runnable_at IS NOT NULL
              AND owner_id IS NOT NULL
            ORDER BY shape, owner_id
            LIMIT 1
        )
        UNION ALL
        SELECT following.shape, following.owner_id
        FROM owned
        CROSS JOIN LATERAL (
            SELECT shape, owner_id FROM jobs
            WHERE status = 'queued'
              AND runnable_at IS NOT NULL
              AND owner_id IS NOT NULL
              AND (jobs.shape, jobs.owner_id) > (owned.shape, owned.owner_id)
            ORDER BY shape, owner_id
            LIMIT 1
        ) AS following
    ), best AS (
        SELECT queued.id
        FROM owned
        CROSS JOIN LATERAL (
            SELECT id FROM jobs
            WHERE status = 'queued'
              AND runnable_at IS NOT NULL
              AND jobs.shape = owned.shape
              AND jobs.owner_id = owned.owner_id
            ORDER BY priority DESC, created_at
            LIMIT %(depth)s::int
        ) AS queued
        UNION ALL
        (
            SELECT id FROM jobs
            WHERE status = 'queued'
              AND runnable_at IS NOT NULL
              AND owner_id IS NULL
            ORDER BY priority DESC, created_at
            LIMIT %(depth)s::int
        )
        UNION ALL
        (
            SELECT id FROM jobs
            WHERE status = 'running'
              AND replicas > 1
              AND runnable_at IS NOT NULL
            ORDER BY id
            LIMIT %(depth)s::int
        )
    )
    SELECT
        jobs.id, jobs.owner_id, jobs.shape, jobs.priority, jobs.created_at, jobs.cpus_milli, jobs.memory_bytes,
        jobs.spec, jobs.replicas - tally.counted AS wanted, tally.taken, tally.failed
    FROM best
    JOIN jobs ON jobs.id = best.id
    CROSS JOIN LATERAL (
        SELECT
            count(*) FILTER (WHERE held.state IN ('assigned', 'running', 'succeeded'))::int AS counted,
            coalesce(
                array_agg(held.node_id) FILTER (WHERE held.state IN ('assigned', 'running', 'succeeded')), '{}'
            ) AS taken,
            coalesce(array_agg(held.node_id) FILTER (WHERE held.state = 'failed'), '{}') AS failed
        FROM job_assignments AS held
        WHERE held.job_id = jobs.id
    ) AS tally
    WHERE jobs.cancel_requested_at IS NULL
      AND jobs.replicas > tally.counted
    ORDER BY jobs.id
    """,
    row=Waiting,
)


@dataclass(frozen=True, slots=True)
class RoomRow:
    """An eligible online node and what it has free."""

    id: UUID
    labels: dict[str, str]
    cpus_milli: int
    memory_bytes: int
    has_sandbox: bool


ROOMS = Statement(
    """
    SELECT
        node.id, node.labels,
        node.cpus_milli - coalesce(held.cpus_milli, 0)::int - coalesce(living.cpus_milli, 0)::int AS cpus_milli,
        node.memory_bytes - coalesce(held.memory_bytes, 0)::bigint - coalesce(living.memory_bytes, 0)::bigint
            AS memory_bytes,
        coalesce(node.inventory -> 'sandbox' ->> 'sandbox', 'none') <> 'none' AS has_sandbox
    FROM compute_nodes AS node
    LEFT JOIN LATERAL (
        SELECT sum(cpus_milli) AS cpus_milli, sum(memory_bytes) AS memory_bytes FROM job_assignments
        WHERE node_id = node.id
          AND released_at IS NULL
    ) AS held ON true
    LEFT JOIN LATERAL (
        SELECT
            sum((resources ->> 'cpus_milli')::bigint) AS cpus_milli,
            sum((resources ->> 'memory_bytes')::bigint) AS memory_bytes
        FROM workspace_residencies
        WHERE node_id = node.id
          AND released_at IS NULL
    ) AS living ON true
    WHERE node.status = 'online'
      AND node.eligible
    ORDER BY node.id
    """,
    row=RoomRow,
)


@dataclass(frozen=True, slots=True)
class OwnerUse:
    """The CPU that an owner's unreleased attempts hold."""

    owner_id: UUID | None
    cpus_milli: int


IN_USE = Statement(
    """
    SELECT jobs.owner_id, sum(held.cpus_milli)::int AS cpus_milli
    FROM job_assignments AS held
    JOIN jobs ON jobs.id = held.job_id
    WHERE held.released_at IS NULL
    GROUP BY jobs.owner_id
    ORDER BY jobs.owner_id
    """,
    row=OwnerUse,
)


@dataclass(frozen=True, slots=True)
class Made:
    """An attempt that was made."""

    id: UUID
    job_id: UUID
    node_id: UUID


ASSIGN = Statement(
    """
    WITH planned AS MATERIALIZED (
        SELECT
            plan.id, plan.job_id, plan.node_id, jobs.cpus_milli, jobs.memory_bytes,
            sum(jobs.cpus_milli) OVER (PARTITION BY plan.node_id ORDER BY plan.nth) AS cpus_running,
            sum(jobs.memory_bytes) OVER (PARTITION BY plan.node_id ORDER BY plan.nth) AS memory_running,
            row_number() OVER (PARTITION BY plan.job_id ORDER BY plan.nth) AS copy,
            row_number() OVER (PARTITION BY plan.job_id, plan.node_id ORDER BY plan.nth) AS twin
        FROM unnest(%(ids)s::uuid[], %(job_ids)s::uuid[], %(node_ids)s::uuid[])
            WITH ORDINALITY AS plan (id, job_id, node_id, nth)
        JOIN jobs ON jobs.id = plan.job_id
        WHERE jobs.status IN ('queued', 'running')
          AND jobs.runnable_at IS NOT NULL
          AND jobs.cancel_requested_at IS NULL
    ), fitting AS MATERIALIZED (
        SELECT planned.*, 1 + tally.before AS attempt
        FROM planned
        JOIN jobs ON jobs.id = planned.job_id
        JOIN compute_nodes AS node ON node.id = planned.node_id
        CROSS JOIN LATERAL (
            SELECT
                count(*) FILTER (WHERE held.state IN ('assigned', 'running', 'succeeded')) AS counted,
                count(*) FILTER (WHERE held.node_id = planned.node_id) AS before,
                count(*) FILTER (
                    WHERE held.node_id = planned.node_id
                      AND held.state IN ('assigned', 'running', 'succeeded')
                ) AS here
            FROM job_assignments AS held
            WHERE held.job_id = planned.job_id
        ) AS tally
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(held.cpus_milli), 0) AS cpus_milli, coalesce(sum(held.memory_bytes), 0) AS memory_bytes
            FROM job_assignments AS held
            WHERE held.node_id = planned.node_id
              AND held.released_at IS NULL
        ) AS busy
        CROSS JOIN LATERAL (
            SELECT
                coalesce(sum((living.resources ->> 'cpus_milli')::bigint), 0) AS cpus_milli,
                coalesce(sum((living.resources ->> 'memory_bytes')::bigint), 0) AS memory_bytes
            FROM workspace_residencies AS living
            WHERE living.node_id = planned.node_id
              AND living.released_at IS NULL
        ) AS resident
        WHERE node.status = 'online'
          AND node.eligible
          AND planned.copy <= jobs.replicas - tally.counted
          AND planned.twin = 1
          AND tally.here = 0
          AND planned.cpus_running <= node.cpus_milli - busy.cpus_milli - resident.cpus_milli
          AND planned.memory_running <= node.memory_bytes - busy.memory_bytes - resident.memory_bytes
    ), made AS (
        INSERT INTO job_assignments (
            id, job_id, node_id, attempt, assigned_at, lease_expires_at, cpus_milli, memory_bytes
        )
        SELECT
            id, job_id, node_id, attempt, %(now)s::timestamptz, %(now)s::timestamptz + %(lease)s::interval,
            cpus_milli, memory_bytes
        FROM fitting
        ORDER BY id
        RETURNING *
    ), moved AS (
        UPDATE jobs SET status = 'running', started_at = coalesce(jobs.started_at, %(now)s::timestamptz)
        WHERE jobs.id IN (SELECT made.job_id FROM made)
          AND jobs.status = 'queued'
        RETURNING jobs.id, jobs.status, jobs.started_at
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            made.job_id, made.id, made.node_id, 'assignment.assigned', 'controller', %(now)s::timestamptz,
            jsonb_strip_nulls(jsonb_build_object('job', to_jsonb(moved) - 'id'))
                || jsonb_build_object('assignment', to_jsonb(made))
        FROM made
        LEFT JOIN moved ON moved.id = made.job_id
    )
    SELECT id, job_id, node_id FROM made
    """,
    row=Made,
)


def assign(
    tx: Tx, *, ids: Sequence[UUID], job_ids: Sequence[UUID], node_ids: Sequence[UUID], lease: timedelta
) -> Later[Made]:
    """Make the planned attempts that still fit, counted again; jobs and nodes are locked by the caller."""
    return tx.later(ASSIGN, ids=ids, job_ids=job_ids, node_ids=node_ids, lease=lease)
