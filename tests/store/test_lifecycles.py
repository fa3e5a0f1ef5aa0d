"""The database and domain/lifecycle.py agree: shown by trying every move and every shape."""

from itertools import combinations
from typing import LiteralString
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import CheckViolation

from fleetward.controller.store import faults
from fleetward.domain.lifecycle import ASSIGNMENT, JOB, LIFECYCLES, NODE, ORCHESTRATION, Lifecycle
from tests.store.rows import assignment, job, node, one, orchestration, verify

MAKERS = {NODE.table: node, JOB.table: job, ASSIGNMENT.table: assignment, ORCHESTRATION.table: orchestration}
BY_TABLE = pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda lifecycle: lifecycle.table)


@BY_TABLE
def test_the_rows_of_the_database_are_the_edges_of_the_domain(app, lifecycle):
    rows = {
        tuple(row)
        for row in app.execute(
            "SELECT from_state, event, to_state FROM lifecycle_edges WHERE table_name = %s", [lifecycle.table]
        )
    }
    edges = {(str(edge.start), edge.event, str(edge.end)) for edge in lifecycle.edges}
    paste = [f"('{lifecycle.table}', '{start}', '{event}', '{end}')" for start, event, end in sorted(edges - rows)]
    assert not paste, "INSERT INTO lifecycle_edges (table_name, from_state, event, to_state) VALUES " + ", ".join(paste)
    assert rows == edges


def _all_tables(connection: psycopg.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT DISTINCT table_name FROM lifecycle_edges")}


def test_the_database_knows_no_other_lifecycle(app):
    assert _all_tables(app) == {lifecycle.table for lifecycle in LIFECYCLES}


def _ask(connection: psycopg.Connection, lifecycle: Lifecycle, id: UUID, state: str) -> str | None:
    """Try one move with all that it takes, and give the SQLSTATE of a refusal."""
    extra = sql.SQL("")
    if lifecycle is JOB and state == "completed":
        winner = one(
            connection,
            "SELECT id FROM job_assignments WHERE job_id = %s AND artifacts_verified_at IS NOT NULL",
            [id],
        )
        extra = sql.SQL(", winning_assignment_id = {}").format(winner)
    if lifecycle is ORCHESTRATION and state == "completed":
        child = one(
            connection,
            "SELECT child.id FROM workspace_builds AS child JOIN workspace_build_orchestrations USING (workspace_id)"
            " WHERE workspace_build_orchestrations.id = %s AND build_number = 2",
            [id],
        )
        extra = sql.SQL(", child_build_id = {}").format(child)
    statement = sql.SQL("UPDATE {} SET {} = {}{} WHERE id = {}").format(
        sql.Identifier(lifecycle.table), sql.Identifier(lifecycle.column), state, extra, id
    )
    try:
        with connection.transaction():
            connection.execute(statement)
    except psycopg.Error as error:
        return error.sqlstate
    return None


def _prepare(connection: psycopg.Connection, lifecycle: Lifecycle) -> UUID:
    """A row at its start, with whatever its later moves need."""
    id = MAKERS[lifecycle.table](connection)
    if lifecycle is JOB:
        verify(connection, assignment(connection, job_id=id))
    return id


@BY_TABLE
def test_every_pair_of_states_moves_exactly_when_there_is_an_edge(owner, lifecycle):
    for start in lifecycle.states:
        for end in lifecycle.states:
            if start is end:
                continue
            with owner.transaction(force_rollback=True):
                id = _prepare(owner, lifecycle)
                for edge in lifecycle.path_to(start):
                    assert _ask(owner, lifecycle, id, edge.end) is None
                expected = None if lifecycle.allows(start, end) else faults.ILLEGAL_MOVE
                assert _ask(owner, lifecycle, id, end) == expected, f"{start} -> {end}"


@BY_TABLE
def test_a_word_that_is_no_state_is_refused_by_the_tables_own_constraint(owner, lifecycle):
    id = _prepare(owner, lifecycle)
    with pytest.raises(CheckViolation) as refused, owner.transaction():
        owner.execute(
            sql.SQL("UPDATE {} SET {} = 'bogus' WHERE id = {}").format(
                sql.Identifier(lifecycle.table), sql.Identifier(lifecycle.column), id
            )
        )
    assert refused.value.diag.constraint_name == f"{lifecycle.table}_{lifecycle.column}_check"


VALUES: dict[str, LiteralString] = {
    "winning_assignment_id": "(SELECT id FROM job_assignments WHERE job_id = {id})",
    "child_build_id": (
        "(SELECT id FROM workspace_builds AS child"
        " WHERE child.workspace_id = {table}.workspace_id AND child.build_number = 2)"
    ),
    "drain_id": "gen_random_uuid()",
    "outcome": "'lost'",
}
UNTYPED: LiteralString = "app.now()"


@BY_TABLE
def test_every_state_holds_exactly_the_columns_of_its_shape(owner, lifecycle):
    id = _prepare(owner, lifecycle)
    owner.execute(sql.SQL("ALTER TABLE {} DISABLE TRIGGER USER").format(sql.Identifier(lifecycle.table)))
    columns = lifecycle.shape_columns
    for state in lifecycle.states:
        for count in range(len(columns) + 1):
            for chosen in combinations(columns, count):
                assert _fits(owner, lifecycle, id, state, chosen) == lifecycle.fits(state, chosen), (state, chosen)


def _fits(connection: psycopg.Connection, lifecycle: Lifecycle, id: UUID, state: str, chosen: tuple[str, ...]) -> bool:
    table = sql.Identifier(lifecycle.table)
    settings = [
        sql.SQL("{} = {}").format(
            sql.Identifier(column),
            sql.SQL(VALUES.get(column, UNTYPED)).format(id=id, table=table) if column in chosen else sql.NULL,
        )
        for column in lifecycle.shape_columns
    ]
    statement = sql.SQL("UPDATE {} SET {} = {}, {} WHERE id = {}").format(
        table, sql.Identifier(lifecycle.column), state, sql.SQL(", ").join(settings), id
    )
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement)
    except CheckViolation:
        return False
    return True


def test_a_verified_assignment_moves_nowhere(owner):
    id = assignment(owner)
    verify(owner, id)
    for state in ASSIGNMENT.states:
        if state != "succeeded":
            assert _ask(owner, ASSIGNMENT, id, state) in {faults.ILLEGAL_MOVE, CheckViolation.sqlstate}


def test_a_refused_move_says_from_where_to_where_and_what_there_is(owner):
    id = job(owner)
    owner.execute("UPDATE jobs SET status = 'failed' WHERE id = %s", [id])
    with pytest.raises(psycopg.Error) as refused:
        owner.execute("UPDATE jobs SET status = 'queued' WHERE id = %s", [id])
    assert refused.value.diag.message_primary == f"jobs {id} cannot go from failed to queued"
    assert refused.value.diag.message_hint == "failed is final"
