"""The constant questions, asked of 100,000 jobs: each is answered by an index, under the service's own settings."""

import re
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from typing import LiteralString

import psycopg
import pytest

from fleetward.controller.store import artifacts, assignments, events, jobs, queue
from tests.fix_database import Clone

FILL: tuple[LiteralString, ...] = (
    "SET session_replication_role = 'replica'",
    "INSERT INTO compute_nodes (name, status) SELECT 'n' || n, 'online' FROM generate_series(1, 100) AS n",
    """
    INSERT INTO jobs (id, status, shape, runnable_at, queue_deadline_at)
    SELECT
        md5('job' || n)::uuid, CASE WHEN n %% 10 = 0 THEN 'queued' WHEN n %% 50 = 1 THEN 'running' ELSE 'failed' END,
        'shape' || n %% 20, CASE WHEN n %% 10 = 0 THEN now() END, now() + n * interval '1 s'
    FROM generate_series(1, 100000) AS n
    """,
    """
    INSERT INTO job_assignments (
        id, job_id, node_id, state, fence, released_at, artifacts_verified_at, lease_expires_at
    )
    SELECT
        md5('held' || n)::uuid, md5('job' || n)::uuid, node.id,
        CASE WHEN n %% 50 = 1 THEN 'running' WHEN n %% 100 = 2 THEN 'succeeded' ELSE 'failed' END, n,
        CASE WHEN n %% 50 <> 1 THEN now() END, CASE WHEN n %% 100 = 2 AND n > 1000 THEN now() END, now()
    FROM generate_series(1, 100000) AS n
    JOIN compute_nodes AS node ON node.name = 'n' || (n %% 100 + 1)
    """,
    """
    INSERT INTO job_events (job_id, assignment_id, kind)
    SELECT md5('job' || n)::uuid, md5('held' || n)::uuid, 'assignment.assigned' FROM generate_series(1, 100000) AS n
    """,
    """
    INSERT INTO workspace_build_orchestrations (workspace_id, parent_build_id, status)
    SELECT md5('w' || n)::uuid, md5('b' || n)::uuid, CASE WHEN n %% 100 = 0 THEN 'pending' ELSE 'failed' END
    FROM generate_series(1, 100000) AS n
    """,
    "ANALYZE",
    "SET session_replication_role = 'origin'",
)

# The last two have no statement of their own yet; their indexes stand.
QUESTIONS: dict[str, LiteralString] = {
    "what is this node to do": assignments.UNRELEASED.sql,
    "what is outstanding on this job": assignments.BY_JOB.sql,
    "which assignments are overdue": assignments.OVERDUE.sql,
    "which are succeeded and unverified": artifacts.CLAIM_UNVERIFIED.sql,
    "what is queued, the first of every shape and owner": queue.CANDIDATES.sql,
    "what has waited too long": jobs.FAIL_OVERDUE.sql,
    "whose back-off has ended": jobs.RIPEN.sql,
    "what happened to this job": events.OF_JOB.sql,
    "which orchestrations are pending and due": """
        SELECT id FROM workspace_build_orchestrations
        WHERE status = 'pending' AND (next_retry_after IS NULL OR next_retry_after <= %(now)s::timestamptz)
        ORDER BY created_at LIMIT 10
    """,
    "what happened after a cursor": """
        SELECT id FROM job_events
        WHERE txid < pg_snapshot_xmin(pg_current_snapshot())
          AND (epoch, txid, id) > (%(epoch)s::int, %(txid)s::text::xid8, %(id)s::bigint)
        ORDER BY epoch, txid, id LIMIT 100
    """,
}
GROWING = ("jobs", "job_assignments", "job_events", "workspace_build_orchestrations")


@pytest.fixture(scope="module")
def full(make_clone: Callable[[], AbstractContextManager[Clone]]) -> Generator[psycopg.Connection]:
    with make_clone() as clone:
        with closing(psycopg.connect(clone.admin_url, autocommit=True)) as filler:
            for statement in FILL:
                filler.execute(statement, ())
        with closing(clone.connect()) as connection:
            yield connection


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_constant_question_is_answered_by_an_index(full, question):
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

    text = re.sub(r"%\((\w+)\)s", number, QUESTIONS[question]).replace("%%", "%")
    with full.transaction(force_rollback=True):
        full.execute(f"PREPARE asked AS {text}".encode())
        given = f" ({', '.join(['NULL'] * len(numbers))})" if numbers else ""
        plan = "\n".join(row[0] for row in full.execute(f"EXPLAIN EXECUTE asked{given}".encode()))
        full.execute("DEALLOCATE asked")
    read_whole = [table for table in GROWING if re.search(rf"Seq Scan on {table}\b", plan)]
    assert read_whole == [], plan
