"""Artifacts in SQL: declared, stored, judged; and the blobs that hold their bytes.

Owns the statements on `job_artifacts`, `blobs` and `verifications`. Refuses to know bytes: they are
on disk before a row says so.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from fleetward.controller.store.tx import Statement


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """One file of an attempt."""

    id: UUID
    job_id: UUID
    assignment_id: UUID
    path: str
    size_bytes: int
    sha256: str
    media_type: str
    state: str
    is_receipt: bool
    stored_at: datetime | None
    verified_at: datetime | None


OF_ASSIGNMENT = Statement(
    """
    SELECT
        id, job_id, assignment_id, path, size_bytes, sha256, media_type, state, is_receipt, stored_at, verified_at
    FROM job_artifacts
    WHERE assignment_id = %(assignment_id)s::uuid
    ORDER BY path
    """,
    row=ArtifactRow,
)

OF_JOB = Statement(
    """
    SELECT
        artifact.id, artifact.job_id, artifact.assignment_id, artifact.path, artifact.size_bytes, artifact.sha256,
        artifact.media_type, artifact.state, artifact.is_receipt, artifact.stored_at, artifact.verified_at
    FROM job_artifacts AS artifact
    JOIN jobs ON jobs.id = artifact.job_id
    WHERE artifact.job_id = %(job_id)s::uuid
    ORDER BY artifact.assignment_id = jobs.winning_assignment_id DESC NULLS LAST, artifact.assignment_id, artifact.path
    LIMIT %(limit)s::int
    """,
    row=ArtifactRow,
)


@dataclass(frozen=True, slots=True)
class Where:
    """Where the bytes of an artifact or input lie."""

    sha256: str
    size_bytes: int
    pack: str | None
    pack_offset: int | None


OF_WINNER = Statement(
    """
    SELECT blob.sha256, blob.size_bytes, blob.pack, blob.pack_offset
    FROM jobs
    JOIN job_artifacts AS artifact ON artifact.assignment_id = jobs.winning_assignment_id
    JOIN blobs AS blob ON blob.sha256 = artifact.sha256
    WHERE jobs.id = %(job_id)s::uuid
      AND artifact.path = %(path)s::text
      AND artifact.verified_at IS NOT NULL
      AND blob.state = 'stored'
    """,
    row=Where,
)

OF_INPUT = Statement(
    """
    SELECT blob.sha256, blob.size_bytes, blob.pack, blob.pack_offset
    FROM blobs AS blob
    WHERE blob.sha256 = %(sha256)s::text
      AND blob.state = 'stored'
      AND EXISTS (
          SELECT 1
          FROM job_inputs AS input
          JOIN job_assignments AS held ON held.job_id = input.job_id
          JOIN compute_nodes AS node ON node.id = held.node_id
          WHERE input.sha256 = blob.sha256
            AND held.node_id = %(node_id)s::uuid
            AND held.released_at IS NULL
            AND node.session = %(session)s::bigint
            AND node.key_epoch = %(key_epoch)s::int
            AND node.status <> 'removed'
      )
    """,
    row=Where,
)

DECLARE_HELD = Statement(
    """
    WITH declared AS (
        INSERT INTO job_artifacts (
            id, job_id, assignment_id, path, size_bytes, sha256, media_type, is_receipt, declared_at
        )
        SELECT
            file.id, held.job_id, held.id, file.path, file.size_bytes, file.sha256, file.media_type,
            file.path = %(receipt_path)s::text, %(now)s::timestamptz
        FROM unnest(
            %(ids)s::uuid[], %(assignment_ids)s::uuid[], %(fences)s::bigint[], %(paths)s::text[], %(sizes)s::bigint[],
            %(digests)s::text[], %(media_types)s::text[]
        ) AS file (id, assignment_id, fence, path, size_bytes, sha256, media_type)
        JOIN job_assignments AS held ON held.id = file.assignment_id
        WHERE held.fence = file.fence
          AND held.state IN ('assigned', 'running')
        ORDER BY file.id
        ON CONFLICT (assignment_id, path) DO NOTHING
        RETURNING *
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            declared.job_id, declared.assignment_id, held.node_id, 'artifact.declared', 'node:' || held.node_id,
            %(now)s::timestamptz, jsonb_build_object('artifacts', jsonb_agg(to_jsonb(declared) ORDER BY declared.path))
        FROM declared
        JOIN job_assignments AS held ON held.id = declared.assignment_id
        GROUP BY declared.job_id, declared.assignment_id, held.node_id
    )
    SELECT
        id, job_id, assignment_id, path, size_bytes, sha256, media_type, state, is_receipt, stored_at, verified_at
    FROM declared
    """,
    row=ArtifactRow,
)


@dataclass(frozen=True, slots=True)
class Unstored:
    """The first file that an attempt declared and never stored."""

    assignment_id: UUID
    path: str


UNSTORED = Statement(
    """
    SELECT assignment_id, min(path) AS path FROM job_artifacts
    WHERE assignment_id = ANY (%(assignment_ids)s::uuid[])
      AND state = 'declared'
    GROUP BY assignment_id
    ORDER BY assignment_id
    """,
    row=Unstored,
)

KEEP_BLOBS = Statement(
    """
    INSERT INTO blobs (sha256, size_bytes, state, pack, pack_offset, created_at)
    SELECT DISTINCT ON (file.sha256)
        file.sha256, file.size_bytes, 'stored', file.pack, file.pack_offset, %(now)s::timestamptz
    FROM unnest(%(digests)s::text[], %(sizes)s::bigint[], %(packs)s::text[], %(offsets)s::bigint[])
        AS file (sha256, size_bytes, pack, pack_offset)
    ORDER BY file.sha256
    ON CONFLICT (sha256) DO UPDATE SET
        state = 'stored', pack = excluded.pack, pack_offset = excluded.pack_offset, created_at = excluded.created_at
    WHERE blobs.state <> 'stored'
    """,
    row=type(None),
)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A declared file that an open attempt may still upload."""

    id: UUID


UNFINISHED = Statement(
    """
    SELECT artifact.id FROM job_artifacts AS artifact
    JOIN job_assignments AS held ON held.id = artifact.assignment_id
    WHERE artifact.state = 'declared'
      AND held.state IN ('assigned', 'running')
    ORDER BY artifact.id
    """,
    row=Unfinished,
)

# Bytes that are not what their row says: nobody reads them again, and the next good copy takes the row over.
DAMAGE = Statement(
    """
    UPDATE blobs SET state = 'damaged'
    FROM unnest(%(digests)s::text[], %(packs)s::text[]) AS rotten (sha256, pack)
    WHERE blobs.sha256 = rotten.sha256
      AND blobs.pack IS NOT DISTINCT FROM rotten.pack
      AND blobs.state = 'stored'
    """,
    row=type(None),
)

STORED = Statement(
    """
    WITH stored AS (
        UPDATE job_artifacts AS artifact SET state = 'stored', stored_at = %(now)s::timestamptz
        FROM unnest(%(assignment_ids)s::uuid[], %(paths)s::text[], %(digests)s::text[], %(sizes)s::bigint[])
            AS file (assignment_id, path, sha256, size_bytes)
        WHERE artifact.assignment_id = file.assignment_id
          AND artifact.path = file.path
          AND artifact.sha256 = file.sha256
          AND artifact.size_bytes = file.size_bytes
          AND artifact.state = 'declared'
        RETURNING artifact.id, artifact.job_id, artifact.assignment_id, artifact.path, artifact.size_bytes,
            artifact.sha256, artifact.media_type, artifact.state, artifact.is_receipt, artifact.stored_at,
            artifact.verified_at
    ), told AS (
        INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
        SELECT
            stored.job_id, stored.assignment_id, held.node_id, 'artifact.stored', 'node:' || held.node_id,
            %(now)s::timestamptz,
            jsonb_build_object('artifacts', jsonb_agg(
                jsonb_build_object(
                    'id', stored.id, 'path', stored.path, 'state', stored.state, 'stored_at', stored.stored_at
                ) ORDER BY stored.path
            ))
        FROM stored
        JOIN job_assignments AS held ON held.id = stored.assignment_id
        GROUP BY stored.job_id, stored.assignment_id, held.node_id
    )
    SELECT
        id, job_id, assignment_id, path, size_bytes, sha256, media_type, state, is_receipt, stored_at, verified_at
    FROM stored
    """,
    row=ArtifactRow,
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A succeeded assignment that this verifier has claimed for a while."""

    id: UUID
    job_id: UUID
    node_id: UUID
    fence: int


CLAIM_UNVERIFIED = Statement(
    """
    WITH due AS MATERIALIZED (
        SELECT held.id FROM job_assignments AS held
        WHERE held.state = 'succeeded'
          AND held.artifacts_verified_at IS NULL
          AND (held.verify_claimed_until IS NULL OR held.verify_claimed_until < %(now)s::timestamptz)
        ORDER BY held.id
        LIMIT %(limit)s::int
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE job_assignments AS claimed SET verify_claimed_until = %(now)s::timestamptz + %(claim)s::interval
    FROM due
    WHERE claimed.id = due.id
    RETURNING claimed.id, claimed.job_id, claimed.node_id, claimed.fence
    """,
    row=Claimed,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A declared file of a claimed assignment, and where its bytes lie if they are stored."""

    assignment_id: UUID
    path: str
    size_bytes: int
    sha256: str
    media_type: str
    state: str
    blob_size_bytes: int | None
    pack: str | None
    pack_offset: int | None


EVIDENCE = Statement(
    """
    SELECT
        artifact.assignment_id, artifact.path, artifact.size_bytes, artifact.sha256, artifact.media_type,
        artifact.state, blob.size_bytes AS blob_size_bytes, blob.pack, blob.pack_offset
    FROM job_artifacts AS artifact
    LEFT JOIN blobs AS blob ON blob.sha256 = artifact.sha256 AND blob.state = 'stored'
    WHERE artifact.assignment_id = ANY (%(assignment_ids)s::uuid[])
    ORDER BY artifact.assignment_id, artifact.path
    """,
    row=Evidence,
)


@dataclass(frozen=True, slots=True)
class Promise:
    """What a job promised to hand in."""

    job_id: UUID
    spec: dict[str, object]


PROMISES = Statement(
    """
    SELECT id AS job_id, spec FROM jobs
    WHERE id = ANY (%(job_ids)s::uuid[])
    ORDER BY id
    """,
    row=Promise,
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the database made of a verdict."""

    id: UUID
    outcome: str


RECORD = Statement(
    """
    SELECT recorded.assignment AS id, recorded.outcome
    FROM app.record_verifications(
        %(ids)s::uuid[], %(fences)s::bigint[], %(verdicts)s::text[], %(checks)s::jsonb[], %(verifier)s::text
    ) AS recorded
    """,
    row=Recorded,
)

TELL_VERIFIED = Statement(
    """
    INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
    SELECT
        held.job_id, held.id, held.node_id, 'assignment.verified', %(actor)s::text, %(now)s::timestamptz,
        jsonb_build_object(
            'assignment', jsonb_build_object(
                'artifacts_verified_at', held.artifacts_verified_at, 'outcome', held.outcome
            ),
            'artifacts', (
                SELECT coalesce(jsonb_agg(to_jsonb(artifact) ORDER BY artifact.path), '[]'::jsonb)
                FROM job_artifacts AS artifact
                WHERE artifact.assignment_id = held.id
            )
        )
    FROM job_assignments AS held
    WHERE held.id = ANY (%(ids)s::uuid[])
    ORDER BY held.id
    """,
    row=type(None),
)

TELL_COMPLETED = Statement(
    """
    INSERT INTO job_events (job_id, assignment_id, kind, actor, at, data)
    SELECT
        jobs.id, jobs.winning_assignment_id, 'job.completed', %(actor)s::text, %(now)s::timestamptz,
        jsonb_build_object('job', jsonb_build_object(
            'status', jobs.status, 'winning_assignment_id', jobs.winning_assignment_id, 'finished_at', jobs.finished_at,
            'runnable_at', jobs.runnable_at, 'held_until', jobs.held_until, 'error', jobs.error
        ))
    FROM jobs
    WHERE jobs.id = ANY (%(job_ids)s::uuid[])
    ORDER BY jobs.id
    """,
    row=type(None),
)

# After trouble of the verifier's own the claim is shortened, so that the attempt is looked at again soon.
LET_GO = Statement(
    """
    UPDATE job_assignments SET verify_claimed_until = %(now)s::timestamptz + %(pause)s::interval
    WHERE id = ANY (%(ids)s::uuid[])
      AND state = 'succeeded'
      AND artifacts_verified_at IS NULL
    """,
    row=type(None),
)

OWN_BLOB = Statement(
    """
    INSERT INTO blob_owners (sha256, user_id, created_at)
    VALUES (%(sha256)s::text, %(user_id)s::uuid, %(now)s::timestamptz)
    ON CONFLICT DO NOTHING
    """,
    row=type(None),
)


@dataclass(frozen=True, slots=True)
class OwnedBlob:
    """A blob that a user has shown the bytes of."""

    sha256: str


OWNED = Statement(
    """
    SELECT owned.sha256 FROM blob_owners AS owned
    JOIN blobs ON blobs.sha256 = owned.sha256
    WHERE owned.user_id = %(user_id)s::uuid
      AND owned.sha256 = ANY (%(digests)s::text[])
      AND blobs.state = 'stored'
    FOR SHARE OF blobs
    """,
    row=OwnedBlob,
)
