"""Jobs in SQL: made, shown, settled, cancelled, and what is queued.

Owns the statements that read and move `jobs`. Refuses to know when a job should move: policy decides,
these statements say whether it still may.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from fleetward.controller.store.tx import Statement, Tx
from fleetward.domain.ids import JobId, UserId
from fleetward.domain.jobs import JobSpec, JobStatus, Move, Outcome, Standing, cpus_milli, shape


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job as it was made."""

    id: UUID
    name: str
    status: str
    created_at: datetime


INSERT = Statement(
    """
    WITH made AS (
        INSERT INTO jobs (
            id, kind, name, spec, owner_id, priority, shape, replicas, quorum, max_attempts, max_losses,
            cpus_milli, memory_bytes, created_at, runnable_at, queue_deadline_at
        )
        VALUES (
            %(id)s::uuid, %(kind)s::text, %(name)s::text, %(spec)s::jsonb, %(owner_id)s::uuid, %(priority)s::int,
            %(shape)s::text, %(replicas)s::int, %(quorum)s::int, %(max_attempts)s::int, %(max_losses)s::int,
            %(cpus_milli)s::int, %(memory_bytes)s::bigint, %(now)s::timestamptz, %(now)s::timestamptz,
            %(now)s::timestamptz + %(queue_for)s::interval
        )
        RETURNING *
    ), fed AS (
        INSERT INTO job_inputs (job_id, path, sha256)
        SELECT made.id, input.path, input.sha256
        FROM made, unnest(%(input_paths)s::text[], %(input_digests)s::text[]) AS input (path, sha256)
        RETURNING job_id, path, sha256
    ), told AS (
        INSERT INTO job_events (job_id, kind, actor, at, data)
        SELECT
            made.id, 'job.submitted', %(actor)s::text, %(now)s::timestamptz,
            jsonb_build_object(
                'job', to_jsonb(made),
                'inputs', coalesce((SELECT jsonb_agg(to_jsonb(fed)) FROM fed), '[]'::jsonb)
            )
        FROM made
    )
    SELECT id, name, status, created_at FROM made
    """,
    row=Submitted,
)


def insert(tx: Tx, *, id: JobId, kind: str, spec: JobSpec, document: str, owner_id: UserId, actor: str) -> Submitted:
    """Make a queued job with its inputs; `document` is the spec as JSON text."""
    return tx.one(
        INSERT,
        id=id,
        kind=kind,
        name=spec.name,
        spec=document,
        owner_id=owner_id,
        priority=spec.priority,
        shape=shape(spec),
        replicas=spec.replicas,
        quorum=spec.quorum,
        max_attempts=spec.max_attempts,
        max_losses=spec.max_losses,
        cpus_milli=cpus_milli(spec),
        memory_bytes=spec.resources.memory_bytes,
        queue_for=timedelta(seconds=spec.timeouts.queue_seconds),
        input_paths=[archive.path for archive in spec.inputs],
        input_digests=[archive.sha256 for archive in spec.inputs],
        actor=actor,
    )


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as people see it."""

    id: UUID
    kind: str
    name: str
    status: str
    priority: int
    spec: dict[str, object]
    replicas: int
    quorum: int
    failures: int
    losses: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    winning_assignment_id: UUID | None
    error: str | None
    owner_id: UUID | None
    cpus_milli: int
    memory_bytes: int
    held_until: datetime | None
    unreleased: int


SHOW = Statement(
    """
    SELECT
        id, kind, name, status, priority, spec, replicas, quorum, failures, losses, created_at, started_at,
        finished_at, cancel_requested_at, winning_assignment_id, error, owner_id, cpus_milli, memory_bytes, held_until,
        (
            SELECT count(*)::int FROM job_assignments AS held
            WHERE held.job_id = jobs.id
              AND held.released_at IS NULL
        ) AS unreleased
    FROM jobs
    WHERE id = %(job_id)s::uuid
    """,
    row=JobRow,
)

LIST = Statement(
    """
    SELECT
        id, kind, name, status, priority, spec, replicas, quorum, failures, losses, created_at, started_at,
        finished_at, cancel_requested_at, winning_assignment_id, error, owner_id, cpus_milli, memory_bytes, held_until,
        (
            SELECT count(*)::int FROM job_assignments AS held
            WHERE held.job_id = jobs.id
              AND held.released_at IS NULL
        ) AS unreleased
    FROM jobs
    WHERE (%(status)s::text IS NULL OR status = %(status)s::text)
      AND (%(before)s::uuid IS NULL OR id < %(before)s::uuid)
    ORDER BY id DESC
    LIMIT %(limit)s::int
    """,
    row=JobRow,
)


@dataclass(frozen=True, slots=True)
class Locked:
    """A job whose row this transaction now holds."""

    id: UUID
    kind: str
    status: str
    cancel_requested_at: datetime | None


LOCK = Statement(
    """
    SELECT id, kind, status, cancel_requested_at FROM jobs
    WHERE id = ANY (%(job_ids)s::uuid[])
    ORDER BY id
    FOR NO KEY UPDATE
    """,
    row=Locked,
)


def lock(tx: Tx, job_ids: Iterable[UUID]) -> None:
    """Hold these jobs' rows before anything that follows, lowest id first."""
    wanted = sorted(set(job_ids))
    if wanted:
        tx.later(LOCK, job_ids=wanted)


@dataclass(frozen=True, slots=True)
class StandingRow:
    """What a job's attempts add up to."""

    id: UUID
    status: str
    is_cancelling: bool
    replicas: int
    open_count: int
    verified_count: int
    failures: int
    losses: int
    max_attempts: int
    max_losses: int
    last_outcome: str | None
    last_error: str | None


STANDINGS = Statement(
    """
    SELECT
        jobs.id, jobs.status, jobs.cancel_requested_at IS NOT NULL AS is_cancelling, jobs.replicas,
        tally.open_count, tally.verified_count, tally.failures, tally.losses, jobs.max_attempts, jobs.max_losses,
        latest.outcome AS last_outcome, latest.error AS last_error
    FROM jobs
    CROSS JOIN LATERAL (
        SELECT
            count(*) FILTER (WHERE held.is_open)::int AS open_count,
            count(*) FILTER (WHERE held.artifacts_verified_at IS NOT NULL)::int AS verified_count,
            count(*) FILTER (WHERE held.outcome IN ('failed', 'rejected'))::int AS failures,
            count(*) FILTER (WHERE held.outcome = 'lost')::int AS losses
        FROM job_assignments AS held
        WHERE held.job_id = jobs.id
    ) AS tally
    LEFT JOIN LATERAL (
        SELECT ended.outcome, ended.error FROM job_assignments AS ended
        WHERE ended.job_id = jobs.id
          AND ended.state IN ('failed', 'cancelled')
        ORDER BY ended.finished_at DESC, ended.fence DESC
        LIMIT 1
    ) AS latest ON true
    WHERE jobs.id = ANY (%(job_ids)s::uuid[])
      AND jobs.status IN ('queued', 'running')
    ORDER BY jobs.id
    """,
    row=StandingRow,
)


def standings(tx: Tx, job_ids: Iterable[UUID]) -> list[Standing]:
    """Count what the attempts of these (locked) jobs add up to; ended jobs are left out."""
    return [
        Standing(
            id=JobId(row.id),
            status=JobStatus(row.status),
            is_cancelling=row.is_cancelling,
            replicas=row.replicas,
            open_count=row.open_count,
            verified_count=row.verified_count,
            failures=row.failures,
            losses=row.losses,
            max_attempts=row.max_attempts,
            max_losses=row.max_losses,
            last_outcome=Outcome(row.last_outcome or Outcome.CANCELLED.value),
            last_error=row.last_error or "no reason was given",
        )
        for row in tx.all(STANDINGS, job_ids=sorted(set(job_ids)))
    ]


@dataclass(frozen=True, slots=True)
class Moved:
    """A job that has moved."""

    id: UUID
    status: str


MOVE = Statement(
    """
    WITH moves AS MATERIALIZED (
        SELECT * FROM unnest(
            %(job_ids)s::uuid[], %(statuses)s::text[], %(holds)s::interval[], %(errors)s::text[],
            %(failures)s::int[], %(losses)s::int[]
        ) AS move (job_id, status, hold, error, failures, losses)
    ), moved AS (
        UPDATE jobs SET
            status = move.status,
            failures = move.failures,
            losses = move.losses,
            error = move.error,
            held_until = %(now)s::timestamptz + move.hold,
            runnable_at = CASE
                WHEN move.status IN ('queued', 'running') AND move.hold IS NULL THEN %(now)s::timestamptz
            END,
            finished_at = CASE WHEN move.status IN ('failed', 'cancelled') THEN %(now)s::timestamptz END
        FROM moves AS move
        WHERE jobs.id = move.job_id
          AND jobs.status IN ('queued', 'running')
        RETURNING
            jobs.id, jobs.status, jobs.failures, jobs.losses, jobs.error, jobs.held_until, jobs.runnable_at,
            jobs.finished_at
    ), told AS (
        INSERT INTO job_events (job_id, kind, actor, at, data)
        SELECT
            moved.id,
            CASE moved.status
                WHEN 'queued' THEN 'job.requeued'
                WHEN 'running' THEN 'job.settled'
                ELSE 'job.' || moved.status
            END,
            %(actor)s::text, %(now)s::timestamptz, jsonb_build_object('job', to_jsonb(moved) - 'id')
        FROM moved
    )
    SELECT id, status FROM moved
    """,
    row=Moved,
)


def move(tx: Tx, moves: Sequence[tuple[Standing, Move]], *, actor: str) -> list[Moved]:
    """Settle these (locked) jobs as decided."""
    if not moves:
        return []
    return tx.all(
        MOVE,
        job_ids=[standing.id for standing, _ in moves],
        statuses=[move.status.value for _, move in moves],
        holds=[move.held_for for _, move in moves],
        errors=[move.error for _, move in moves],
        failures=[standing.failures for standing, _ in moves],
        losses=[standing.losses for standing, _ in moves],
        actor=actor,
    )


REQUEST_CANCEL = Statement(
    """
    WITH asked AS (
        UPDATE jobs SET cancel_requested_at = %(now)s::timestamptz, cancel_reason = %(reason)s::text
        WHERE id = %(job_id)s::uuid
          AND status IN ('queued', 'running')
          AND cancel_requested_at IS NULL
        RETURNING id, status, cancel_requested_at, cancel_reason
    ), told AS (
        INSERT INTO job_events (job_id, kind, actor, at, data)
        SELECT
            asked.id, 'job.cancel_requested', %(actor)s::text, %(now)s::timestamptz,
            jsonb_build_object('job', to_jsonb(asked) - 'id')
        FROM asked
    )
    SELECT id, status FROM asked
    """,
    row=Moved,
)

CANCEL_QUEUED = Statement(
    """
    WITH ended AS (
        UPDATE jobs SET
            status = 'cancelled', runnable_at = NULL, held_until = NULL, finished_at = %(now)s::timestamptz
        WHERE id = %(job_id)s::uuid
          AND status = 'queued'
        RETURNING id, status, runnable_at, held_until, finished_at
    ), told AS (
        INSERT INTO job_events (job_id, kind, actor, at, data)
        SELECT
            ended.id, 'job.cancelled', %(actor)s::text, %(now)s::timestamptz,
            jsonb_build_object('job', to_jsonb(ended) - 'id')
        FROM ended
    )
    SELECT id, status FROM ended
    """,
    row=Moved,
)

RIPEN = Statement(
    """
    WITH due AS MATERIALIZED (
        SELECT id FROM jobs
        WHERE held_until <= %(now)s::timestamptz
          AND status IN ('queued', 'running')
        ORDER BY id
        LIMIT %(limit)s::int
        FOR NO KEY UPDATE SKIP LOCKED
    ), ripened AS (
        UPDATE jobs SET held_until = NULL, runnable_at = %(now)s::timestamptz
        FROM due
        WHERE jobs.id = due.id
        RETURNING jobs.id, jobs.status, jobs.held_until, jobs.runnable_at
    ), told AS (
        INSERT INTO job_events (job_id, kind, actor, at, data)
        SELECT
            ripened.id, 'job.runnable', 'controller', %(now)s::timestamptz,
            jsonb_build_object('job', to_jsonb(ripened) - 'id')
        FROM ripened
    )
    SELECT id, status FROM ripened
    """,
    row=Moved,
)

FAIL_OVERDUE = Statement(
    """
    WITH overdue AS MATERIALIZED (
        SELECT id FROM jobs
        WHERE status = 'queued'
          AND queue_deadline_at <= %(now)s::timestamptz
        ORDER BY id
        LIMIT %(limit)s::int
        FOR NO KEY UPDATE SKIP LOCKED
    ), failed AS (
        UPDATE jobs SET
            status = 'failed', runnable_at = NULL, held_until = NULL, finished_at = %(now)s::timestamptz,
            error = 'waited in the queue longer than its queue_seconds: no node took it'
        FROM overdue
        WHERE jobs.id = overdue.id
        RETURNING jobs.id, jobs.status, jobs.runnable_at, jobs.held_until, jobs.finished_at, jobs.error
    ), told AS (
        INSERT INTO job_events (job_id, kind, actor, at, data)
        SELECT
            failed.id, 'job.failed', 'controller', %(now)s::timestamptz,
            jsonb_build_object('job', to_jsonb(failed) - 'id')
        FROM failed
    )
    SELECT id, status FROM failed
    """,
    row=Moved,
)


@dataclass(frozen=True, slots=True)
class StatusCount:
    """How many there are of a status."""

    status: str
    count: int


COUNT_BY_STATUS = Statement(
    """
    SELECT status, count(*)::int AS count FROM jobs GROUP BY status ORDER BY status
    """,
    row=StatusCount,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The stored answer to an earlier call with the same idempotency key."""

    request_digest: str
    reply: dict[str, object]


RECALL = Statement(
    """
    SELECT request_digest, reply FROM idempotency_keys
    WHERE owner_id = %(owner_id)s::uuid
      AND key = %(key)s::text
    """,
    row=Answer,
)

REMEMBER = Statement(
    """
    INSERT INTO idempotency_keys (owner_id, key, request_digest, reply, at)
    VALUES (%(owner_id)s::uuid, %(key)s::text, %(request_digest)s::text, %(reply)s::jsonb, %(now)s::timestamptz)
    """,
    row=type(None),
)
