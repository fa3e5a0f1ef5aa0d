"""What must always hold, as far as SQL can say it: one statement for each invariant, giving the rows that break it.

Owns the invariants and the one list of measurements, the columns that change without an event. Tests, the simulator and
`fleetward doctor` run the same statements. Refuses to repair anything, and to judge what only a run can show.
"""

from dataclasses import dataclass
from typing import Final

from fleetward.controller.store.tx import Statement, Tx

# Columns that events need not tell of: told too often to be kept, derived, or secret.
MEASUREMENTS: Final = (
    "compute_nodes.failures_in_row",
    "job_assignments.is_open",
    "job_assignments.lease_expires_at",
    "job_assignments.log_bytes",
    "job_assignments.verify_claimed_until",
    "node_pairing_codes.tries",
    "users.password_hash",
)
SHOWN_MAX: Final = 20  # rows of one invariant; the first tell enough


@dataclass(frozen=True, slots=True)
class Offence:
    """A row that breaks an invariant."""

    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Invariant:
    """A sentence that always holds, and the statement that finds where it does not."""

    number: int
    sentence: str
    statement: Statement[Offence]


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, and where."""

    number: int
    sentence: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"I{self.number} {self.sentence}: {self.subject}: {self.detail}"


FENCES_GROW = Statement(
    """
    WITH told AS (
        SELECT event.job_id, event.txid, max(event.id) AS id, min(held.fence) AS low, max(held.fence) AS high
        FROM job_events AS event
        JOIN job_assignments AS held ON held.id = event.assignment_id
        WHERE event.kind = 'assignment.assigned'
        GROUP BY event.job_id, event.txid
    ), stepped AS (
        SELECT job_id, low, max(high) OVER (
            PARTITION BY job_id ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS before
        FROM told
    )
    SELECT 'job ' || job_id AS subject, 'fence ' || low || ' was given after ' || before AS detail
    FROM stepped
    WHERE low <= before
    UNION ALL
    SELECT
        'assignment ' || held.id,
        'its fence is of epoch ' || (held.fence >> 40) || ', the database is in ' || cluster.epoch
    FROM job_assignments AS held
    CROSS JOIN cluster
    WHERE held.fence >> 40 > cluster.epoch
    """,
    row=Offence,
)

OPEN_WITHIN_BOUNDS = Statement(
    """
    SELECT
        'job ' || jobs.id AS subject,
        count(*) || ' open assignments on ' || count(DISTINCT held.node_id) || ' nodes, replicas ' || jobs.replicas
            AS detail
    FROM job_assignments AS held
    JOIN jobs ON jobs.id = held.job_id
    WHERE held.is_open
    GROUP BY jobs.id
    HAVING count(*) > jobs.replicas + coalesce((jobs.spec -> 'hedge' ->> 'max_extra')::int, 0)
        OR count(*) <> count(DISTINCT held.node_id)
    """,
    row=Offence,
)

LEASES_END_OPEN_ONES = Statement(
    """
    SELECT 'assignment ' || held.id AS subject, 'it is ' || held.state || ' and has no lease' AS detail
    FROM job_assignments AS held
    WHERE held.state IN ('assigned', 'running')
      AND held.lease_expires_at IS NULL
    UNION ALL
    SELECT 'assignment ' || held.id, 'it was lost at ' || event.at || ', its lease ran until ' || held.lease_expires_at
    FROM job_events AS event
    JOIN job_assignments AS held ON held.id = event.assignment_id
    WHERE event.kind = 'assignment.lost'
      AND event.actor = 'controller'
      AND event.at < held.lease_expires_at
    """,
    row=Offence,
)

ONLY_THE_HOLDER_WRITES = Statement(
    """
    SELECT 'assignment ' || held.id AS subject, event.kind || ' was said by ' || event.actor AS detail
    FROM job_events AS event
    JOIN job_assignments AS held ON held.id = event.assignment_id
    WHERE event.actor LIKE 'node:%%'
      AND event.actor <> 'node:' || held.node_id
    UNION ALL
    SELECT 'assignment ' || event.assignment_id, event.kind || ' after ' || ended.kind
    FROM job_events AS event
    JOIN job_events AS ended ON ended.assignment_id = event.assignment_id AND ended.id < event.id
    WHERE event.kind IN ('artifact.declared', 'artifact.stored')
      AND ended.data -> 'assignment' ->> 'state' IN ('succeeded', 'failed', 'cancelled')
      AND ended.txid <> event.txid
    """,
    row=Offence,
)

COMPLETED_IS_VERIFIED = Statement(
    """
    SELECT 'job ' || jobs.id AS subject, 'completed without a verified winner' AS detail
    FROM jobs
    LEFT JOIN job_assignments AS winner ON winner.id = jobs.winning_assignment_id AND winner.job_id = jobs.id
    WHERE jobs.status = 'completed'
      AND winner.artifacts_verified_at IS NULL
    UNION ALL
    SELECT 'job ' || jobs.id, 'artifact ' || file.path || ' of its winner is ' || file.state
    FROM jobs
    JOIN job_artifacts AS file ON file.assignment_id = jobs.winning_assignment_id
    WHERE file.state <> 'verified' OR file.verified_at IS NULL OR file.stored_at IS NULL
    UNION ALL
    SELECT 'job ' || jobs.id, 'its winner has no receipt'
    FROM jobs
    WHERE jobs.winning_assignment_id IS NOT NULL
      AND NOT EXISTS (
          SELECT FROM job_artifacts AS file
          WHERE file.assignment_id = jobs.winning_assignment_id
            AND file.is_receipt
            AND file.state = 'verified'
      )
    UNION ALL
    SELECT 'assignment ' || held.id, 'verified without a verdict that says so'
    FROM job_assignments AS held
    WHERE held.artifacts_verified_at IS NOT NULL
      AND NOT EXISTS (
          SELECT FROM verifications AS said WHERE said.assignment_id = held.id AND said.verdict = 'verified'
      )
    UNION ALL
    SELECT 'job ' || completed.job_id, 'its completion was told before the verification of its winner'
    FROM job_events AS completed
    WHERE completed.kind = 'job.completed'
      AND NOT EXISTS (
          SELECT FROM job_events AS verified
          WHERE verified.job_id = completed.job_id
            AND verified.assignment_id = completed.assignment_id
            AND verified.kind = 'assignment.verified'
            AND verified.id < completed.id
      )
    """,
    row=Offence,
)

TERMINAL_IS_FINAL = Statement(
    """
    SELECT 'job ' || later.job_id AS subject, later.kind || ' after ' || ended.kind AS detail
    FROM job_events AS ended
    JOIN job_events AS later ON later.job_id = ended.job_id AND later.id > ended.id
    WHERE ended.data -> 'job' ->> 'status' IN ('completed', 'failed', 'cancelled')
      AND later.data -> 'job' ?| ARRAY['status', 'winning_assignment_id']
    UNION ALL
    SELECT 'assignment ' || later.assignment_id, later.kind || ' after ' || ended.kind
    FROM job_events AS ended
    JOIN job_events AS later ON later.assignment_id = ended.assignment_id AND later.id > ended.id
    WHERE (ended.data -> 'assignment' ->> 'state' IN ('failed', 'cancelled') OR ended.kind = 'assignment.verified')
      AND later.data -> 'assignment' ?| ARRAY['state', 'artifacts_verified_at', 'outcome']
    """,
    row=Offence,
)

ONE_WINNER_OF_A_QUORUM = Statement(
    """
    WITH verified AS (
        SELECT
            held.id, held.job_id, held.node_id, held.fence, jobs.quorum, jobs.winning_assignment_id, jobs.status,
            (
                SELECT jsonb_agg(jsonb_build_array(file.path, file.sha256) ORDER BY file.path COLLATE "C")
                FROM job_artifacts AS file
                WHERE file.assignment_id = held.id
                  AND NOT file.is_receipt
            ) AS digests
        FROM job_assignments AS held
        JOIN jobs ON jobs.id = held.job_id
        WHERE held.artifacts_verified_at IS NOT NULL
    ), agreed AS (
        SELECT
            job_id, status, quorum, winning_assignment_id, count(DISTINCT node_id) AS nodes,
            (array_agg(id ORDER BY fence))[1] AS first, bool_or(id = winning_assignment_id) AS has_won
        FROM verified
        GROUP BY job_id, status, quorum, winning_assignment_id, digests
    )
    SELECT 'job ' || job_id AS subject, nodes || ' nodes agree of ' || quorum || ', first ' || first AS detail
    FROM agreed
    WHERE (has_won AND (nodes < quorum OR first <> winning_assignment_id))
       OR (status IN ('queued', 'running') AND nodes >= quorum)
    """,
    row=Offence,
)

NO_ORPHAN = Statement(
    """
    SELECT 'job ' || jobs.id AS subject, 'queued, not runnable, and nothing holds it' AS detail
    FROM jobs
    WHERE jobs.status = 'queued'
      AND jobs.runnable_at IS NULL
      AND jobs.held_until IS NULL
      AND NOT jobs.spec ?| ARRAY['not_before', 'array']
      AND NOT EXISTS (SELECT FROM job_dependencies AS wait WHERE wait.job_id = jobs.id)
    UNION ALL
    SELECT 'job ' || jobs.id, 'cancelled by request at ' || jobs.cancel_requested_at || ' and still queued'
    FROM jobs
    WHERE jobs.status = 'queued'
      AND jobs.cancel_requested_at IS NOT NULL
    """,
    row=Offence,
)

RUNNING_IS_OPEN = Statement(
    """
    SELECT 'job ' || jobs.id AS subject, jobs.status || ' with ' || tally.open_count || ' open assignments' AS detail
    FROM jobs
    CROSS JOIN LATERAL (
        SELECT count(*) AS open_count FROM job_assignments AS held WHERE held.job_id = jobs.id AND held.is_open
    ) AS tally
    WHERE (jobs.status = 'running') <> (tally.open_count > 0)
    """,
    row=Offence,
)

ONE_CODE_ONE_NODE = Statement(
    """
    SELECT event.actor AS subject, count(DISTINCT event.node_id) || ' nodes were paired with it' AS detail
    FROM audit_events AS event
    WHERE event.kind = 'node.paired'
      AND event.actor LIKE 'pairing_code:%%'
    GROUP BY event.actor
    HAVING count(DISTINCT event.node_id) > 1
    UNION ALL
    SELECT 'pairing code ' || code.id, 'used, and nobody knows by which node'
    FROM node_pairing_codes AS code
    WHERE code.used_at IS NOT NULL
      AND code.used_by_node_id IS NULL
    """,
    row=Offence,
)

REMOVED_STAYS = Statement(
    """
    SELECT 'node ' || node.id AS subject, 'removed by its events, and ' || node.status AS detail
    FROM compute_nodes AS node
    WHERE node.status <> 'removed'
      AND EXISTS (
          SELECT FROM audit_events AS event
          WHERE event.subject_kind = 'node'
            AND event.subject_id = node.id
            AND event.data -> 'node' ->> 'status' = 'removed'
      )
    UNION ALL
    SELECT 'node ' || node.id, 'removed, and its key ' || key.id || ' is not revoked'
    FROM compute_nodes AS node
    JOIN node_credentials AS key ON key.node_id = node.id
    WHERE node.status = 'removed'
      AND key.revoked_at IS NULL
    """,
    row=Offence,
)

REMOVED_HOLDS_NOTHING = Statement(
    """
    SELECT 'node ' || node.id AS subject, 'removed, and holds ' || held.thing AS detail
    FROM compute_nodes AS node
    JOIN (
        SELECT node_id, 'assignment ' || id FROM job_assignments WHERE is_open OR released_at IS NULL
        UNION ALL
        SELECT node_id, 'residency ' || id FROM workspace_residencies WHERE released_at IS NULL
        UNION ALL
        SELECT node_id, 'device ' || device_uuid FROM assignment_devices WHERE released_at IS NULL
        UNION ALL
        SELECT node_id, 'the row of device ' || uuid FROM node_devices
        UNION ALL
        SELECT node_id, 'a heartbeat' FROM node_heartbeats
    ) AS held (node_id, thing) ON held.node_id = node.id
    WHERE node.status = 'removed'
    """,
    row=Offence,
)

EVENTS_ONLY_GROW = Statement(
    """
    SELECT wanted.name AS subject, 'the trigger is missing or does not fire always' AS detail
    FROM unnest(ARRAY[
        'job_events_append_only', 'job_events_append_only_truncate', 'audit_events_append_only',
        'audit_events_append_only_truncate', 'trail_leaves_append_only', 'trail_leaves_append_only_truncate',
        'trail_checkpoints_append_only', 'trail_checkpoints_append_only_truncate'
    ]) AS wanted (name)
    WHERE NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = wanted.name AND tgenabled = 'A')
    UNION ALL
    SELECT 'origin ' || origin_id, count(*) || ' leaves, the last of them number ' || max(leaf_index)
    FROM trail_leaves
    GROUP BY origin_id
    HAVING count(*) <> max(leaf_index) + 1
    UNION ALL
    SELECT
        'origin ' || head.origin_id,
        'a head of ' || head.tree_size || ' leaves was signed, and there are ' || tally.leaves
    FROM trail_checkpoints AS head
    CROSS JOIN LATERAL (
        SELECT count(*) AS leaves FROM trail_leaves AS leaf WHERE leaf.origin_id = head.origin_id
    ) AS tally
    WHERE head.tree_size > tally.leaves
    """,
    row=Offence,
)

# The last word of the events on each column is the column. What no event ever set is null.
FOLD_IS_STATE = Statement(
    """
    WITH words AS (
        SELECT 'jobs' AS kind, job_id AS id, event.id AS nth, data -> 'job' AS said
        FROM job_events AS event
        WHERE data ? 'job'
        UNION ALL
        SELECT 'job_assignments', assignment_id, event.id, data -> 'assignment'
        FROM job_events AS event
        WHERE data ? 'assignment'
        UNION ALL
        SELECT 'job_artifacts', (file.value ->> 'id')::uuid, event.id, file.value
        FROM job_events AS event
        CROSS JOIN LATERAL jsonb_array_elements(data -> 'artifacts') AS file (value)
        WHERE data ? 'artifacts'
        UNION ALL
        SELECT
            CASE subject_kind WHEN 'node' THEN 'compute_nodes' WHEN 'user' THEN 'users' ELSE 'node_pairing_codes' END,
            subject_id, event.id, data -> subject_kind
        FROM audit_events AS event
        WHERE subject_kind IN ('node', 'user', 'pairing_code')
          AND data ? subject_kind
    ), folded AS (
        SELECT words.kind, words.id, jsonb_object_agg(word.key, word.value ORDER BY words.nth) AS said
        FROM words
        CROSS JOIN LATERAL jsonb_each(words.said) AS word
        GROUP BY words.kind, words.id
    ), kept AS (
        SELECT 'jobs' AS kind, id, to_jsonb(thing) AS found FROM jobs AS thing
        UNION ALL
        SELECT 'job_assignments', id, to_jsonb(thing) FROM job_assignments AS thing
        UNION ALL
        SELECT 'job_artifacts', id, to_jsonb(thing) FROM job_artifacts AS thing
        UNION ALL
        SELECT 'compute_nodes', id, to_jsonb(thing) FROM compute_nodes AS thing
        UNION ALL
        SELECT 'node_pairing_codes', id, to_jsonb(thing) FROM node_pairing_codes AS thing
        UNION ALL
        SELECT 'users', id, to_jsonb(thing) FROM users AS thing
    )
    SELECT
        coalesce(kept.kind, folded.kind) || ' ' || coalesce(kept.id, folded.id) AS subject,
        coalesce(
            'the row''s ' || field.key || ' is ' || left(field.value::text, 80) || ', its events say '
                || left(coalesce((folded.said -> field.key)::text, 'nothing'), 80),
            'events tell of it, and there is no row'
        ) AS detail
    FROM kept
    FULL JOIN folded ON folded.kind = kept.kind AND folded.id = kept.id
    LEFT JOIN LATERAL jsonb_each(kept.found) AS field ON true
    WHERE kept.id IS NULL
       OR (
           coalesce(folded.said -> field.key, 'null') <> field.value
           AND NOT kept.kind || '.' || field.key = ANY (%(measurements)s::text[])
       )
    """,
    row=Offence,
)

# A damaged blob is there, and known to have rotted on the disk: nobody reads it, and no rule was broken.
OBJECTS_ARE_THERE = Statement(
    """
    SELECT
        'artifact ' || file.id AS subject,
        file.path || ' is ' || file.state || ', and its blob is not there' AS detail
    FROM job_artifacts AS file
    LEFT JOIN blobs AS blob
        ON blob.sha256 = file.sha256 AND blob.size_bytes = file.size_bytes AND blob.state <> 'condemned'
    WHERE file.state IN ('stored', 'verified')
      AND blob.sha256 IS NULL
    UNION ALL
    SELECT 'job ' || jobs.id, 'its input ' || given.path || ' is not there'
    FROM jobs
    JOIN job_inputs AS given ON given.job_id = jobs.id
    LEFT JOIN blobs AS blob ON blob.sha256 = given.sha256 AND blob.state <> 'condemned'
    WHERE jobs.status IN ('queued', 'running')
      AND blob.sha256 IS NULL
    UNION ALL
    SELECT 'pack ' || member.pack, member.sha256 || ' begins at ' || member.pack_offset || ', inside the one before it'
    FROM (
        SELECT sha256, pack, pack_offset, max(pack_offset + size_bytes) OVER (
            PARTITION BY pack ORDER BY pack_offset, size_bytes ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS before
        FROM blobs
        WHERE pack IS NOT NULL
    ) AS member
    WHERE member.pack_offset < member.before
    """,
    row=Offence,
)

BUILDS_ARE_COUNTED = Statement(
    """
    SELECT
        'workspace ' || workspace_id AS subject,
        count(*) || ' builds numbered up to ' || max(build_number) || ', ' || count(*) FILTER (WHERE ended_at IS NULL)
            || ' of them active' AS detail
    FROM workspace_builds
    GROUP BY workspace_id
    HAVING count(*) <> max(build_number) OR count(*) FILTER (WHERE ended_at IS NULL) > 1
    UNION ALL
    SELECT
        'build ' || build.id,
        'its job is ' || jobs.status || ', and it ended at ' || coalesce(build.ended_at::text, 'no time')
    FROM workspace_builds AS build
    JOIN jobs ON jobs.id = build.job_id
    WHERE (build.ended_at IS NOT NULL) <> (jobs.status IN ('completed', 'failed', 'cancelled'))
    """,
    row=Offence,
)

INTENTS_ARE_KEPT = Statement(
    """
    SELECT
        'orchestration ' || intent.id AS subject,
        intent.status || ' with child ' || coalesce(intent.child_build_id::text, 'none') || ', its parent''s job is '
            || coalesce(jobs.status, 'not there') AS detail
    FROM workspace_build_orchestrations AS intent
    JOIN workspace_builds AS parent ON parent.id = intent.parent_build_id
    LEFT JOIN jobs ON jobs.id = parent.job_id
    WHERE (intent.status = 'completed') <> (intent.child_build_id IS NOT NULL)
       OR (intent.status = 'completed' AND jobs.status IS DISTINCT FROM 'completed')
    """,
    row=Offence,
)

RESIDENCIES_ARE_BUILT = Statement(
    """
    SELECT 'workspace ' || workspace_id AS subject, count(*) || ' unreleased residencies' AS detail
    FROM workspace_residencies
    WHERE released_at IS NULL
    GROUP BY workspace_id
    HAVING count(*) > 1
    UNION ALL
    SELECT 'residency ' || stay.id, 'it runs, and its build is no completed start'
    FROM workspace_residencies AS stay
    LEFT JOIN workspace_builds AS build ON build.id = stay.build_id
    LEFT JOIN jobs ON jobs.id = build.job_id
    WHERE stay.released_at IS NULL
      AND stay.desired = 'run'
      AND (build.transition IS DISTINCT FROM 'start' OR jobs.status IS DISTINCT FROM 'completed')
    """,
    row=Offence,
)

NOTHING_TWICE = Statement(
    """
    SELECT
        'node ' || node.id AS subject,
        held.cpus_milli || ' of ' || node.cpus_milli || ' thousandths of a CPU and ' || held.memory_bytes || ' of '
            || node.memory_bytes || ' bytes are held' AS detail
    FROM compute_nodes AS node
    JOIN (
        SELECT node_id, sum(cpus_milli) AS cpus_milli, sum(memory_bytes) AS memory_bytes
        FROM (
            SELECT node_id, cpus_milli, memory_bytes FROM job_assignments WHERE released_at IS NULL
            UNION ALL
            SELECT
                node_id, coalesce((resources ->> 'cpus_milli')::bigint, 0),
                coalesce((resources ->> 'memory_bytes')::bigint, 0)
            FROM workspace_residencies
            WHERE released_at IS NULL
        ) AS part
        GROUP BY node_id
    ) AS held ON held.node_id = node.id
    WHERE held.cpus_milli > node.cpus_milli OR held.memory_bytes > node.memory_bytes
    UNION ALL
    SELECT 'device ' || device.device_uuid, count(*) || ' unreleased attempts have it'
    FROM assignment_devices AS device
    WHERE device.released_at IS NULL
    GROUP BY device.node_id, device.device_uuid
    HAVING count(*) > 1
    UNION ALL
    SELECT
        'device ' || device.device_uuid,
        'it is held for assignment ' || held.id || ', which is released or elsewhere'
    FROM assignment_devices AS device
    JOIN job_assignments AS held ON held.id = device.assignment_id
    WHERE device.released_at IS NULL
      AND (held.released_at IS NOT NULL OR held.node_id <> device.node_id)
    """,
    row=Offence,
)

INVARIANTS: Final = (
    Invariant(1, "for each job the fence strictly grows and is never reused", FENCES_GROW),
    Invariant(2, "open assignments never exceed replicas and hedges, and no node has two of a job", OPEN_WITHIN_BOUNDS),
    Invariant(3, "what is open has a lease, and nothing is lost before its lease has ended", LEASES_END_OPEN_ONES),
    Invariant(4, "only the holding node reports, and only while its assignment is open", ONLY_THE_HOLDER_WRITES),
    Invariant(
        5, "a completed job has a verified winner, verified artifacts, and says so in order", COMPLETED_IS_VERIFIED
    ),
    Invariant(6, "terminal is final", TERMINAL_IS_FINAL),
    Invariant(7, "an agreeing quorum makes exactly one winner, its lowest fence", ONE_WINNER_OF_A_QUORUM),
    Invariant(8, "no job is left where no loop looks", NO_ORPHAN),
    Invariant(9, "a job runs exactly while one of its assignments is open", RUNNING_IS_OPEN),
    Invariant(13, "one code makes one node", ONE_CODE_ONE_NODE),
    Invariant(15, "a removed node stays removed, and its keys prove nothing", REMOVED_STAYS),
    Invariant(16, "a removed node holds nothing", REMOVED_HOLDS_NOTHING),
    Invariant(22, "events only grow", EVENTS_ONLY_GROW),
    Invariant(23, "the fold of a thing's events is its row", FOLD_IS_STATE),
    Invariant(25, "what is stored or needed has its bytes, and packs do not overlap", OBJECTS_ARE_THERE),
    Invariant(28, "a workspace has one active build, and its builds are numbered without gap", BUILDS_ARE_COUNTED),
    Invariant(29, "an intent has its child exactly when it completed, and only of a parent that did", INTENTS_ARE_KEPT),
    Invariant(35, "a workspace lives once, by a completed start", RESIDENCIES_ARE_BUILT),
    Invariant(36, "no device is held twice, and no more of a node than it has", NOTHING_TWICE),
)


def violations(tx: Tx) -> list[Violation]:
    """Everything in this database that breaks an invariant, the first rows of each."""
    return [
        Violation(invariant.number, invariant.sentence, offence.subject, offence.detail)
        for invariant in INVARIANTS
        for offence in tx.all(invariant.statement, measurements=list(MEASUREMENTS))[:SHOWN_MAX]
    ]
