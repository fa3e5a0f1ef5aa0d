"""What the database itself refuses, tried as the role that the service logs in with."""

import json
import threading
from collections.abc import Callable
from contextlib import closing
from uuid import UUID

import psycopg
import pytest
from psycopg import errors

from fleetward.controller.store import faults
from fleetward.controller.store.migrate import Role
from tests.fix_database import Clone
from tests.store.rows import (
    artifact,
    assignment,
    job,
    node,
    one,
    record,
    running_job,
    succeeded,
    verify,
)

SAME = "a" * 64
OTHER = "b" * 64


def state_of(refused: pytest.ExceptionInfo[psycopg.Error]) -> str | None:
    return refused.value.sqlstate


# What only the verification step may say


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job_assignments SET artifacts_verified_at = now()",
        "INSERT INTO job_assignments (job_id, node_id, artifacts_verified_at) VALUES (NULL, NULL, now())",
        "UPDATE jobs SET winning_assignment_id = gen_random_uuid()",
        "INSERT INTO jobs (kind, winning_assignment_id) VALUES ('command', gen_random_uuid())",
        "UPDATE job_artifacts SET verified_at = now()",
        "INSERT INTO job_artifacts (path, verified_at) VALUES ('a', now())",
        "INSERT INTO verifications (assignment_id, verdict) VALUES (gen_random_uuid(), 'verified')",
        "UPDATE verifications SET verdict = 'verified'",
        "UPDATE job_assignments SET fence = 1",
        "INSERT INTO job_assignments (job_id, node_id, fence) VALUES (NULL, NULL, 1)",
        "INSERT INTO job_events (id, job_id, kind) VALUES (1, gen_random_uuid(), 'k')",
        "INSERT INTO job_events (epoch, job_id, kind) VALUES (1, gen_random_uuid(), 'k')",
        "INSERT INTO job_events (txid, job_id, kind) VALUES ('1', gen_random_uuid(), 'k')",
        "INSERT INTO audit_events (id, subject_kind, kind) VALUES (1, 'node', 'k')",
        "UPDATE job_events SET kind = 'k'",
        "DELETE FROM job_events",
        "TRUNCATE job_events",
        "TRUNCATE jobs CASCADE",
        "DELETE FROM compute_nodes",
        "DELETE FROM jobs",
        "UPDATE workspace_builds SET ended_at = now()",
        "UPDATE compute_nodes SET name = 'another'",
        "UPDATE cluster SET epoch = 2",
        "CREATE TABLE mine (id int)",
        "CREATE TEMPORARY TABLE mine (id int)",
        "ALTER TABLE job_events DISABLE TRIGGER ALL",
        "SET session_replication_role = 'replica'",
        "SET ROLE fleetward_owner",
        "SELECT setval('app.fence_numbers', 1)",
        "SELECT app.lock_for_verdicts(NULL)",
    ],
)
def test_the_services_role_may_not(app, statement):
    with pytest.raises(errors.InsufficientPrivilege):
        app.execute(statement)


def test_a_job_is_not_completed_without_a_winner(app):
    id = running_job(app)
    with pytest.raises(psycopg.Error) as refused:
        app.execute("UPDATE jobs SET status = 'completed' WHERE id = %s", [id])
    assert state_of(refused) == faults.NO_WINNER


def test_a_job_is_not_completed_with_an_unverified_winner_even_by_the_owner(owner):
    id = running_job(owner)
    winner = succeeded(owner, id)
    with pytest.raises(psycopg.Error) as refused:
        owner.execute("UPDATE jobs SET status = 'completed', winning_assignment_id = %s WHERE id = %s", [winner, id])
    assert state_of(refused) == faults.NO_WINNER


def test_a_winner_is_of_its_own_job(owner):
    id, stranger = running_job(owner), assignment(owner)
    verify(owner, stranger)
    with pytest.raises(psycopg.Error) as refused:
        owner.execute("UPDATE jobs SET status = 'completed', winning_assignment_id = %s WHERE id = %s", [stranger, id])
    assert state_of(refused) == faults.NO_WINNER


def test_there_is_no_second_winner(owner):
    id = running_job(owner)
    first, second = succeeded(owner, id), succeeded(owner, id)
    assert record(owner, first) == "won"
    assert record(owner, second) == "refused: the job is completed"
    verify(owner, second)
    with pytest.raises(psycopg.Error) as refused:
        owner.execute("UPDATE jobs SET winning_assignment_id = %s WHERE id = %s", [second, id])
    assert state_of(refused) == faults.FROZEN


def test_a_verified_assignment_stays_verified(owner):
    id = assignment(owner)
    verify(owner, id)
    with pytest.raises(psycopg.Error) as refused:
        owner.execute("UPDATE job_assignments SET artifacts_verified_at = NULL WHERE id = %s", [id])
    assert state_of(refused) == faults.FROZEN


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("INSERT INTO job_assignments (job_id, node_id, state) VALUES (%(job)s, %(node)s, 'succeeded')", "FW005"),
        (
            "INSERT INTO job_assignments (job_id, node_id, artifacts_verified_at) VALUES (%(job)s, %(node)s, now())",
            "FW002",
        ),
        ("INSERT INTO jobs (kind, status) VALUES ('command', 'running')", "FW005"),
        ("INSERT INTO jobs (kind, status) VALUES ('command', 'completed')", "FW005"),
        (
            (
                "INSERT INTO job_artifacts (job_id, assignment_id, path, state)"
                " VALUES (%(job)s, %(assignment)s, 'a', 'stored')"
            ),
            "FW005",
        ),
    ],
)
def test_no_row_is_born_beyond_its_start_even_by_the_owner(owner, statement, state):
    id = job(owner)
    names = {"job": id, "node": node(owner), "assignment": assignment(owner, job_id=id)}
    with pytest.raises(psycopg.Error) as refused:
        owner.execute(statement, names)
    assert state_of(refused) == state


@pytest.mark.parametrize(
    ("table", "column"), [("jobs", "status"), ("job_assignments", "state"), ("job_artifacts", "state")]
)
def test_a_row_born_as_nothing_known_is_refused_by_the_tables_own_constraint(owner, table, column):
    id = job(owner)
    names = {"job": id, "node": node(owner), "assignment": assignment(owner, job_id=id)}
    statement = {
        "jobs": "INSERT INTO jobs (kind, status) VALUES ('command', 'bogus')",
        "job_assignments": "INSERT INTO job_assignments (job_id, node_id, state) VALUES (%(job)s, %(node)s, 'bogus')",
        "job_artifacts": (
            "INSERT INTO job_artifacts (job_id, assignment_id, path, state)"
            " VALUES (%(job)s, %(assignment)s, 'a', 'bogus')"
        ),
    }[table]
    with pytest.raises(errors.CheckViolation) as refused:
        owner.execute(statement, names)
    assert refused.value.diag.constraint_name == f"{table}_{column}_check"


# The verification step


def test_a_verified_attempt_completes_its_job(app):
    id = running_job(app)
    winner = succeeded(app, id, files={"out.txt": SAME})
    assert record(app, winner) == "won"
    row = app.execute("SELECT status, winning_assignment_id, finished_at FROM jobs WHERE id = %s", [id]).fetchone()
    assert row[:2] == ("completed", winner)
    assert row[2] is not None
    states = app.execute("SELECT DISTINCT state FROM job_artifacts WHERE assignment_id = %s", [winner]).fetchall()
    assert states == [("verified",)]


def test_a_quorum_is_won_by_the_lowest_fence_that_agrees(app):
    id = running_job(app, quorum=2)
    first, liar, third = (succeeded(app, id, files={"out": digest}) for digest in (SAME, OTHER, SAME))
    assert record(app, third) == "verified"
    assert record(app, liar) == "verified"
    assert record(app, first) == "won"
    assert one(app, "SELECT winning_assignment_id FROM jobs WHERE id = %s", [id]) == first


def test_verdicts_row_by_row_see_each_other(app):
    id = running_job(app, quorum=2)
    attempts = [succeeded(app, id, files={"out": SAME}) for _ in range(2)]
    rows = app.execute(
        "SELECT app.record_verification(id, fence, 'verified', '[]', 'a test') FROM job_assignments"
        " WHERE id = ANY (%s) ORDER BY fence",
        [attempts],
    ).fetchall()
    assert rows == [("verified",), ("won",)]


def test_verdicts_given_together_are_weighed_together(app):
    agreed, alone, lost = running_job(app, quorum=2), running_job(app), running_job(app)
    late, early = (succeeded(app, agreed, files={"out": SAME}) for _ in range(2))
    single = succeeded(app, alone)
    refused = succeeded(app, lost)
    app.execute("UPDATE job_assignments SET state = 'failed' WHERE id = %s", [refused])
    attempts = [early, refused, single, late]
    rows = app.execute(
        "SELECT * FROM app.record_verifications("
        "  %(ids)s, ARRAY(SELECT fence FROM unnest(%(ids)s::uuid[]) WITH ORDINALITY AS given (id, nth)"
        "    JOIN job_assignments USING (id) ORDER BY nth), array_fill('verified'::text, ARRAY[4]), '{}', 'a test')",
        {"ids": attempts},
    ).fetchall()
    assert rows == [
        (early, "won"),
        (refused, "refused: the assignment is failed"),
        (single, "won"),
        (late, "won"),
    ]
    winner = one(app, "SELECT winning_assignment_id FROM jobs WHERE id = %s", [agreed])
    assert winner == one(app, "SELECT id FROM job_assignments WHERE job_id = %s ORDER BY fence LIMIT 1", [agreed])


def test_one_assignment_has_one_verdict_at_a_time(app):
    attempt = succeeded(app, running_job(app))
    with pytest.raises(errors.InvalidParameterValue, match="two verdicts at once"):
        app.execute(
            "SELECT app.record_verifications(ARRAY[id, id], ARRAY[fence, fence], '{verified,rejected}', '{}', '')"
            " FROM job_assignments WHERE id = %s",
            [attempt],
        )


def test_a_rejection_marks_the_artifacts_whose_checks_failed(app):
    id = running_job(app)
    attempt = succeeded(app, id, files={"bad": SAME, "good": OTHER})
    checks = [{"path": "bad", "passed": False}, {"path": "good", "passed": True}]
    assert record(app, attempt, "rejected", json.dumps(checks)) == "rejected"
    rows = app.execute(
        "SELECT path, state FROM job_artifacts WHERE assignment_id = %s ORDER BY path", [attempt]
    ).fetchall()
    assert rows == [(".fleetward/receipt.json", "stored"), ("bad", "rejected"), ("good", "stored")]
    assert one(app, "SELECT verdict FROM verifications WHERE assignment_id = %s", [attempt]) == "rejected"


def test_our_own_trouble_is_recorded_and_changes_nothing(app):
    attempt = succeeded(app, running_job(app))
    assert record(app, attempt, "error") == "error"
    assert record(app, attempt) == "won"
    assert one(app, "SELECT count(*) FROM verifications WHERE assignment_id = %s", [attempt]) == 2


Spoil = Callable[[psycopg.Connection, UUID, UUID], object]
SPOILS: dict[str, Spoil] = {
    "refused: the fence is not the assignment's own": lambda *_: None,
    "refused: there is no such assignment": lambda *_: None,
    "refused: the attempt handed in no receipt": lambda owner, _, attempt: owner.execute(
        "DELETE FROM job_artifacts WHERE assignment_id = %s AND is_receipt", [attempt]
    ),
    "refused: artifact 'out' was declared and is not stored": lambda owner, _, attempt: owner.execute(
        "UPDATE blobs SET state = 'condemned' FROM job_artifacts AS file"
        " WHERE file.assignment_id = %s AND file.path = 'out' AND file.sha256 = blobs.sha256",
        [attempt],
    ),
    "refused: artifact 'late' was declared and is not stored": lambda owner, its_job, attempt: owner.execute(
        "INSERT INTO job_artifacts (job_id, assignment_id, path) VALUES (%s, %s, 'late')", [its_job, attempt]
    ),
    "refused: required artifact 'dir/model.bin' was not handed in": lambda owner, its_job, _: owner.execute(
        """
        UPDATE jobs SET spec = '{"artifacts": [{"path": "log/*"}, {"path": "./x"}, {"path": "opt", "required": false},
        {"path": "dir/model.bin"}]}' WHERE id = %s
        """,
        [its_job],
    ),
    "refused: the assignment is failed": lambda owner, _, attempt: owner.execute(
        "UPDATE job_assignments SET state = 'failed' WHERE id = %s", [attempt]
    ),
    "refused: the job is cancelled": lambda owner, its_job, _: owner.execute(
        "UPDATE jobs SET status = 'cancelled' WHERE id = %s", [its_job]
    ),
    "refused: the job is queued": lambda owner, its_job, _: owner.execute(
        "UPDATE jobs SET status = 'queued' WHERE id = %s", [its_job]
    ),
}


@pytest.mark.parametrize("reason", SPOILS)
def test_nothing_is_recorded_when(owner, reason):
    id = running_job(owner)
    attempt = succeeded(owner, id, files={"out": SAME})
    SPOILS[reason](owner, id, attempt)
    wrong_fence = 1 if "fence" in reason else 0
    found = one(
        owner,
        "SELECT app.record_verification("
        "  CASE WHEN %s THEN gen_random_uuid() ELSE id END, fence + %s, 'verified', '[]', 'a test')"
        " FROM job_assignments WHERE id = %s",
        ["no such" in reason, wrong_fence, attempt],
    )
    assert found == reason
    assert one(owner, "SELECT count(*) FROM verifications WHERE assignment_id = %s", [attempt]) == 0
    assert one(owner, "SELECT artifacts_verified_at FROM job_assignments WHERE id = %s", [attempt]) is None


def test_a_verdict_is_one_of_three_words(app):
    attempt = succeeded(app, running_job(app))
    with pytest.raises(errors.InvalidParameterValue, match=r"not one of \{fine\}"):
        record(app, attempt, "fine")


def test_artifacts_are_write_once(owner):
    attempt = assignment(owner)
    id = artifact(owner, attempt, "out", sha256=SAME)
    for change, state in {
        f"sha256 = '{OTHER}'": faults.FROZEN,
        "size_bytes = 1": faults.FROZEN,
        "path = 'b'": faults.FROZEN,
        "state = 'declared', stored_at = NULL": faults.ILLEGAL_MOVE,
    }.items():
        with pytest.raises(psycopg.Error) as refused, owner.transaction():
            owner.execute(f"UPDATE job_artifacts SET {change} WHERE id = %s".encode(), [id])
        assert state_of(refused) == state


# The trail


@pytest.mark.parametrize("table", ["job_events", "audit_events"])
@pytest.mark.parametrize("role", ["origin", "replica"])
@pytest.mark.parametrize("verb", ["UPDATE {} SET kind = 'k'", "DELETE FROM {}", "TRUNCATE {}"])
def test_an_event_is_never_changed_even_by_the_owner_as_a_replica(owner, table, role, verb):
    columns = "job_id, kind" if table == "job_events" else "subject_id, subject_kind, kind"
    values = "gen_random_uuid(), 'k'" if table == "job_events" else "gen_random_uuid(), 'node', 'k'"
    owner.execute(f"INSERT INTO {table} ({columns}) VALUES ({values})".encode())
    owner.execute(f"SET LOCAL session_replication_role = '{role}'".encode())
    with pytest.raises(psycopg.Error) as refused:
        owner.execute(verb.format(table).encode())
    assert state_of(refused) == faults.FROZEN


def test_a_job_that_the_trail_tells_of_is_not_deleted(owner):
    id = job(owner)
    owner.execute("INSERT INTO job_events (job_id, kind) VALUES (%s, 'job.submitted')", [id])
    with pytest.raises(psycopg.Error) as refused:
        owner.execute("DELETE FROM jobs WHERE id = %s", [id])
    assert state_of(refused) == faults.FROZEN


def test_both_kinds_of_event_are_one_order(app):
    first = one(app, "INSERT INTO job_events (job_id, kind) VALUES (gen_random_uuid(), 'k') RETURNING id")
    second = one(app, "INSERT INTO audit_events (subject_kind, kind) VALUES ('node', 'k') RETURNING id")
    assert second == first + 1


# Fences


def test_fences_only_grow_and_carry_the_epoch(owner):
    id = job(owner)
    fences = [
        one(owner, "SELECT fence FROM job_assignments WHERE id = %s", [assignment(owner, job_id=id)]) for _ in range(5)
    ]
    assert fences == sorted(set(fences))
    assert {fence >> 40 for fence in fences} == {1}
    owner.execute("UPDATE cluster SET epoch = 2")
    restored = one(owner, "SELECT fence FROM job_assignments WHERE id = %s", [assignment(owner, job_id=id)])
    assert restored > fences[-1]
    assert restored >> 40 == 2


# Removed nodes


def test_a_removed_node_never_comes_back(app):
    id = node(app)
    app.execute("UPDATE compute_nodes SET status = 'removed' WHERE id = %s", [id])
    with pytest.raises(psycopg.Error, match="stays removed: it cannot go from removed to online") as refused:
        app.execute("UPDATE compute_nodes SET status = 'online' WHERE id = %s", [id])
    assert state_of(refused) == faults.ILLEGAL_MOVE


@pytest.mark.parametrize("change", ["name = 'another'", 'labels = \'{"a": "b"}\'', "session = 7"])
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_a_removed_node_is_frozen_even_for_the_owner_as_a_replica(owner, change, role):
    id = node(owner)
    owner.execute("UPDATE compute_nodes SET status = 'removed' WHERE id = %s", [id])
    owner.execute(f"SET LOCAL session_replication_role = '{role}'".encode())
    with pytest.raises(psycopg.Error) as refused:
        owner.execute(f"UPDATE compute_nodes SET {change} WHERE id = %s".encode(), [id])
    assert state_of(refused) == faults.FROZEN


def test_no_node_is_deleted_even_by_the_owner(owner):
    id = node(owner)
    with pytest.raises(psycopg.Error) as refused:
        owner.execute("DELETE FROM compute_nodes WHERE id = %s", [id])
    assert state_of(refused) == faults.FROZEN


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO job_assignments (job_id, node_id) VALUES (%(job)s, %(node)s)",
        "INSERT INTO node_devices (node_id, uuid) VALUES (%(node)s, 'GPU-1')",
        "INSERT INTO node_heartbeats (node_id) VALUES (%(node)s)",
        "INSERT INTO node_credentials (node_id, public_key) VALUES (%(node)s, 'k')",
        "INSERT INTO workspace_residencies (workspace_id, node_id) VALUES (%(workspace)s, %(node)s)",
    ],
)
def test_a_removed_node_takes_no_row(app, statement):
    names = {"job": job(app), "node": node(app)}
    names["workspace"] = one(app, "INSERT INTO workspaces DEFAULT VALUES RETURNING id")
    app.execute(statement, names)
    app.execute("UPDATE job_assignments SET state = 'failed' WHERE node_id = %(node)s", names)
    app.execute("DELETE FROM node_heartbeats WHERE node_id = %(node)s", names)
    app.execute("UPDATE compute_nodes SET status = 'removed' WHERE id = %(node)s", names)
    with pytest.raises(psycopg.Error) as refused:
        app.execute(statement, names)
    assert state_of(refused) == faults.NODE_REMOVED


def _open_on(connection: psycopg.Connection, node_id: UUID) -> int:
    return one(
        connection,
        "SELECT count(*) FROM job_assignments JOIN compute_nodes AS node ON node.id = node_id"
        " WHERE node_id = %s AND is_open AND node.status = 'removed'",
        [node_id],
    )


class Waiting:
    """A statement in another session that waits for a lock, and what came of it."""

    def __init__(self, connection: psycopg.Connection, text: str, values: dict[str, UUID]) -> None:
        self._connection = connection
        self._text = text.encode()
        self._values = values
        self.refused: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._connection.execute(self._text, self._values)
            self._connection.commit()
        except psycopg.Error as error:
            self.refused = error
            self._connection.rollback()

    def finish(self) -> str | None:
        self._thread.join()
        return self.refused.sqlstate if self.refused is not None else None


def _until_blocked(watcher: psycopg.Connection, waiting: psycopg.Connection) -> None:
    """Ask the server itself until the other session waits for a lock."""
    while not one(watcher, "SELECT pg_blocking_pids(%s) <> '{}'", [waiting.info.backend_pid]):
        watcher.rollback()
    watcher.rollback()


@pytest.mark.parametrize("first", ["assign", "remove"])
def test_a_removal_and_an_assignment_in_two_open_transactions(clone: Clone, first: str):
    statements = {
        "assign": "INSERT INTO job_assignments (job_id, node_id) VALUES (%(job)s, %(node)s)",
        "remove": "UPDATE compute_nodes SET status = 'removed' WHERE id = %(node)s",
    }
    later = statements["remove" if first == "assign" else "assign"]
    with (
        closing(clone.connect()) as one_session,
        closing(clone.connect()) as other_session,
        closing(clone.connect(Role.OWNER)) as watcher,
    ):
        values = {"job": job(one_session), "node": node(one_session)}
        one_session.commit()
        one_session.execute(statements[first].encode(), values)
        waiting = Waiting(other_session, later, values)
        _until_blocked(watcher, other_session)
        one_session.commit()
        # Whoever comes second is refused: an insertion at once, a removal when it would commit.
        assert waiting.finish() == {"assign": faults.FROZEN, "remove": faults.NODE_REMOVED}[first]
        assert _open_on(watcher, values["node"]) == 0


def test_a_removal_that_ends_its_assignments_passes(app):
    id = node(app)
    assignment(app, node_id=id)
    app.execute("UPDATE compute_nodes SET status = 'removed' WHERE id = %s", [id])
    app.execute("UPDATE job_assignments SET state = 'failed', outcome = 'lost' WHERE node_id = %s", [id])
    app.execute("SET CONSTRAINTS ALL IMMEDIATE")


# One of each


def test_an_assignment_is_open_once_for_each_job_and_node(app):
    id, machine = job(app), node(app)
    assignment(app, job_id=id, node_id=machine)
    with pytest.raises(errors.UniqueViolation) as refused:
        assignment(app, job_id=id, node_id=machine)
    assert refused.value.diag.constraint_name == "job_assignments_open_per_node"


def test_a_device_has_one_holder(app):
    holders = [assignment(app) for _ in range(2)]
    machine = node(app)
    insert = "INSERT INTO assignment_devices (assignment_id, node_id, device_uuid) VALUES (%s, %s, 'GPU-1')"
    app.execute(insert, [holders[0], machine])
    with pytest.raises(errors.UniqueViolation), app.transaction():
        app.execute(insert, [holders[1], machine])
    app.execute("UPDATE assignment_devices SET released_at = now()")
    app.execute(insert, [holders[1], machine])


def test_an_assignment_does_not_finish_before_it_was_made(app):
    id = assignment(app)
    with pytest.raises(errors.CheckViolation) as refused:
        app.execute(
            "UPDATE job_assignments SET state = 'failed', finished_at = assigned_at - interval '1 s' WHERE id = %s",
            [id],
        )
    assert refused.value.diag.constraint_name == "job_assignments_finished_at_check"


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("UPDATE node_credentials SET revoked_at = NULL WHERE id = %(credential)s", faults.FROZEN),
        ("UPDATE node_pairing_codes SET used_at = NULL, used_by_node_id = NULL", faults.FROZEN),
    ],
)
def test_what_is_set_once_stays(app, statement, state):
    machine = node(app)
    credential = one(app, "INSERT INTO node_credentials (node_id, public_key) VALUES (%s, 'k') RETURNING id", [machine])
    app.execute("UPDATE node_credentials SET revoked_at = now() WHERE id = %s", [credential])
    app.execute("INSERT INTO node_pairing_codes (public_key) VALUES ('k')")
    app.execute("UPDATE node_pairing_codes SET used_at = now(), used_by_node_id = %s", [machine])
    with pytest.raises(psycopg.Error) as refused:
        app.execute(statement, {"credential": credential})
    assert state_of(refused) == state


def test_a_keyring_is_claimed_once(app):
    app.execute("UPDATE cluster SET keyring_fingerprint = 'a'")
    with pytest.raises(psycopg.Error) as refused:
        app.execute("UPDATE cluster SET keyring_fingerprint = 'b'")
    assert state_of(refused) == faults.FROZEN
