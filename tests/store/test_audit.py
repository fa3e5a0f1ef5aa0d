"""Every invariant finds what breaks it: each is broken by hand, past the guards, and seen by its number."""

import psycopg
import pytest

from fleetward.controller.store import audit
from fleetward.controller.store.tx import Tx
from tests.fix_database import Apart
from tests.store.rows import assignment, build, job, node, orchestration, record, running_job, succeeded, workspace

SAME = "a" * 64


class World:
    """A sound job, its attempts and a workspace, to be broken."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self.job = running_job(connection, quorum=2)
        self.first, self.second = (succeeded(connection, self.job, files={"out": SAME}) for _ in range(2))
        assert [record(connection, attempt) for attempt in (self.first, self.second)] == ["verified", "won"]
        self.queued = job(connection)
        self.node = node(connection)
        self.running = running_job(connection)
        self.open = assignment(connection, job_id=self.running, node_id=self.node)
        self.other_node = node(connection)
        self.workspace = workspace(connection)
        self.build = build(connection, self.workspace)
        self.orchestration = orchestration(connection)
        connection.execute("UPDATE jobs SET runnable_at = now() WHERE status = 'queued'")
        connection.execute(
            "INSERT INTO job_events (job_id, assignment_id, kind)"
            " VALUES (%(job)s, %(first)s, 'assignment.verified'), (%(job)s, %(first)s, 'job.completed')",
            vars(self),
        )

    def broken(self, statements: str) -> set[int]:
        """Which invariants see something, once these are run with every guard off."""
        self._connection.execute("SET LOCAL session_replication_role = 'replica'")
        for table in ("job_events", "compute_nodes"):
            self._connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())
        for statement in statements.split(";"):
            self._connection.execute(statement.encode(), vars(self))
        return self.seen()

    def seen(self) -> set[int]:
        found = audit.violations(Tx(self._connection, entropy=Apart()))
        return {violation.number for violation in found}


@pytest.fixture
def world(owner: psycopg.Connection) -> World:
    return World(owner)


EVENT = "INSERT INTO job_events (job_id, assignment_id, kind, actor, data, txid) VALUES "
BREAKS = [
    (
        1,
        "INSERT INTO job_assignments (id, job_id, node_id, fence) VALUES"
        " ('00000000-0000-7000-8000-000000000001', %(queued)s, %(node)s, 9),"
        " ('00000000-0000-7000-8000-000000000002', %(queued)s, %(other_node)s, 8);"
        + EVENT
        + "(%(queued)s, '00000000-0000-7000-8000-000000000001', 'assignment.assigned', 'controller', '{}', '1'),"
        " (%(queued)s, '00000000-0000-7000-8000-000000000002', 'assignment.assigned', 'controller', '{}', '2')",
    ),
    (1, "UPDATE job_assignments SET fence = fence + (1::bigint << 40)"),
    (2, "INSERT INTO job_assignments (job_id, node_id) VALUES (%(running)s, %(other_node)s)"),
    (3, "UPDATE job_assignments SET lease_expires_at = NULL WHERE id = %(open)s"),
    (3, EVENT + "(%(running)s, %(open)s, 'assignment.lost', 'controller', '{}', '1')"),
    (4, EVENT + "(%(running)s, %(open)s, 'assignment.started', 'node:' || %(other_node)s::text, '{}', '1')"),
    (
        4,
        EVENT + "(%(running)s, %(open)s, 'assignment.failed', 'node:' || %(node)s::text,"
        """ '{"assignment": {"state": "failed"}}', '1'),"""
        " (%(running)s, %(open)s, 'artifact.declared', 'node:' || %(node)s::text, '{}', '2')",
    ),
    (5, "UPDATE job_assignments SET artifacts_verified_at = NULL WHERE id = %(first)s"),
    (5, "UPDATE job_artifacts SET state = 'stored', verified_at = NULL WHERE assignment_id = %(first)s"),
    (5, "DELETE FROM job_artifacts WHERE assignment_id = %(first)s AND is_receipt"),
    (5, "DELETE FROM verifications WHERE assignment_id = %(second)s"),
    (5, "DELETE FROM job_events WHERE kind = 'assignment.verified'"),
    (
        6,
        EVENT + """(%(job)s, NULL, 'job.failed', 'x', '{"job": {"status": "failed"}}', '1'),"""
        """ (%(job)s, NULL, 'job.requeued', 'x', '{"job": {"status": "queued"}}', '2')""",
    ),
    (
        6,
        EVENT + """(%(job)s, %(first)s, 'assignment.failed', 'x', '{"assignment": {"state": "failed"}}', '1')""",
    ),
    (7, "UPDATE jobs SET quorum = 3 WHERE id = %(job)s"),
    (7, "UPDATE jobs SET winning_assignment_id = %(second)s WHERE id = %(job)s"),
    (7, "UPDATE jobs SET status = 'running', winning_assignment_id = NULL, finished_at = NULL WHERE id = %(job)s"),
    (8, "UPDATE jobs SET runnable_at = NULL WHERE id = %(queued)s"),
    (8, "UPDATE jobs SET cancel_requested_at = now() WHERE id = %(queued)s"),
    (9, "UPDATE jobs SET status = 'running' WHERE id = %(queued)s"),
    (9, "UPDATE job_assignments SET state = 'failed' WHERE id = %(open)s"),
    (9, "UPDATE jobs SET status = 'failed' WHERE id = %(running)s"),
    (
        13,
        (
            "INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor)"
            " SELECT 'node', id, id, 'node.paired', 'pairing_code:x' FROM compute_nodes"
        ),
    ),
    (13, "INSERT INTO node_pairing_codes (used_at) VALUES (now())"),
    (
        15,
        (
            "INSERT INTO audit_events (subject_kind, subject_id, kind, data)"
            """ VALUES ('node', %(node)s, 'node.removed', '{"node": {"status": "removed"}}')"""
        ),
    ),
    (
        15,
        (
            "INSERT INTO node_credentials (node_id, public_key) VALUES (%(other_node)s, 'k');"
            "UPDATE compute_nodes SET status = 'removed' WHERE id = %(other_node)s"
        ),
    ),
    (16, "UPDATE compute_nodes SET status = 'removed' WHERE id = %(node)s"),
    (
        16,
        (
            "INSERT INTO node_heartbeats (node_id) VALUES (%(other_node)s);"
            "UPDATE compute_nodes SET status = 'removed' WHERE id = %(other_node)s"
        ),
    ),
    (22, "SELECT 1"),
    (23, "UPDATE jobs SET priority = 1 WHERE id = %(job)s"),
    (25, "UPDATE blobs SET state = 'condemned'"),
    (25, "UPDATE blobs SET size_bytes = 1"),
    (25, "INSERT INTO job_inputs (job_id, path, sha256) VALUES (%(queued)s, 'input.tar', 'x')"),
    (
        25,
        (
            "INSERT INTO blobs (sha256, size_bytes, pack, pack_offset) VALUES"
            " (repeat('c', 64), 5, 'p', 0), (repeat('d', 64), 5, 'p', 4)"
        ),
    ),
    (28, "UPDATE workspace_builds SET build_number = 3 WHERE id = %(build)s"),
    (28, "UPDATE workspace_builds SET ended_at = now() WHERE id = %(build)s"),
    (
        29,
        (
            "UPDATE workspace_build_orchestrations SET status = 'completed', child_build_id = %(build)s"
            " WHERE id = %(orchestration)s"
        ),
    ),
    (29, "UPDATE workspace_build_orchestrations SET child_build_id = %(build)s WHERE id = %(orchestration)s"),
    (35, "INSERT INTO workspace_residencies (workspace_id, node_id) VALUES (%(workspace)s, %(node)s)"),
    (36, "UPDATE job_assignments SET cpus_milli = 1 WHERE id = %(open)s"),
    (36, "UPDATE job_assignments SET memory_bytes = 1 WHERE id = %(open)s"),
    (
        36,
        (
            "INSERT INTO assignment_devices (assignment_id, node_id, device_uuid)"
            " VALUES (%(open)s, %(other_node)s, 'GPU-1')"
        ),
    ),
]


def test_a_new_database_is_sound(tx):
    assert audit.violations(tx) == []


def test_the_world_is_sound_but_for_its_missing_events(world):
    assert world.seen() == {23}


@pytest.mark.parametrize(
    ("number", "statements"), BREAKS, ids=[f"I{number}-{nth}" for nth, (number, _) in enumerate(BREAKS)]
)
def test_an_invariant_sees_what_breaks_it(world, number, statements):
    assert number in world.broken(statements)


def test_every_invariant_is_broken_by_some_test():
    assert {number for number, _ in BREAKS} == {invariant.number for invariant in audit.INVARIANTS}


def test_measurements_are_columns(app):
    columns = {
        f"{table}.{column}"
        for table, column in app.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
        )
    }
    assert set(audit.MEASUREMENTS) <= columns


def test_a_fold_that_differs_says_what_was_told_and_what_is(owner):
    id = job(owner)
    owner.execute(
        "INSERT INTO job_events (job_id, kind, data)"
        " SELECT id, 'job.submitted', jsonb_build_object('job', to_jsonb(jobs)) FROM jobs WHERE id = %s",
        [id],
    )
    tx = Tx(owner, entropy=Apart())
    assert [v for v in audit.violations(tx) if v.number == 23] == []
    owner.execute("UPDATE jobs SET priority = 7 WHERE id = %s", [id])
    told = [str(violation) for violation in audit.violations(tx) if violation.number == 23]
    assert told == [
        f"I23 the fold of a thing's events is its row: jobs {id}: the row's priority is 7, its events say 50"
    ]
