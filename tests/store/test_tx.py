"""One transaction: one time, all or nothing, and every refusal in words."""

from dataclasses import dataclass
from datetime import datetime
from types import NoneType

import psycopg
import pytest

from fleetward.controller.store import faults
from fleetward.controller.store.tx import PooledDatabase, Statement
from fleetward.domain.errors import (
    DatabaseUnavailable,
    IllegalMove,
    NodeExists,
    NodeRemoved,
    OutcomeUnknown,
    Refusal,
    StorageFull,
)


@dataclass(frozen=True, slots=True)
class Name:
    name: str


@dataclass(frozen=True, slots=True)
class Time:
    at: datetime


MAKE = Statement("INSERT INTO compute_nodes (name) VALUES (%(name)s::text) RETURNING name", row=Name)
ALL = Statement("SELECT name FROM compute_nodes ORDER BY name", row=Name)
REMOVE = Statement("UPDATE compute_nodes SET status = 'removed' WHERE name = %(name)s::text", row=NoneType)
ASSIGN = Statement(
    """
    WITH made AS (INSERT INTO jobs (kind) VALUES ('command') RETURNING id)
    INSERT INTO job_assignments (job_id, node_id)
    SELECT made.id, node.id FROM made, compute_nodes AS node WHERE node.name = %(name)s::text
    """,
    row=NoneType,
)
TOLD = Statement("SELECT %(now)s::timestamptz AS at", row=Time)
SLEEPLESS = Statement("SELECT pg_terminate_backend(pg_backend_pid())::text AS name", row=Name)


def names(database: PooledDatabase) -> list[str]:
    with database.begin() as tx:
        return [row.name for row in tx.all(ALL)]


def test_a_block_that_ends_is_kept(database: PooledDatabase):
    with database.begin() as tx:
        assert tx.one(MAKE, name="a").name == "a"
    assert names(database) == ["a"]


def test_a_block_that_raises_leaves_nothing(database: PooledDatabase):
    def fail() -> None:
        with database.begin() as tx:
            tx.one(MAKE, name="a")
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert names(database) == []


def test_a_transaction_has_one_time(tx):
    first = tx.now
    assert tx.one(TOLD).at == first
    assert tx.now == first
    assert first.utcoffset().total_seconds() == 0


def test_ids_are_ordered_by_the_transactions_time(tx):
    id = tx.new_id()
    assert id.version == 7
    assert id.int >> 80 == int(tx.now.timestamp() * 1000)


def test_how_many_rows_a_statement_touched(tx):
    tx.one(MAKE, name="a")
    assert tx.run(REMOVE, name="a") == 1
    assert tx.run(REMOVE, name="nobody") == 0


def test_a_name_that_is_taken_is_a_refusal_of_its_own(tx):
    tx.one(MAKE, name="a")
    with pytest.raises(NodeExists):
        tx.one(MAKE, name="a")


def test_a_removed_node_takes_nothing(tx):
    tx.one(MAKE, name="a")
    tx.run(REMOVE, name="a")
    with pytest.raises(NodeRemoved):
        tx.run(ASSIGN, name="a")


def test_what_is_checked_last_is_still_refused_in_words(database: PooledDatabase):
    def remove() -> None:
        with database.begin() as tx:
            tx.one(MAKE, name="a")
            tx.run(ASSIGN, name="a")
            tx.run(REMOVE, name="a")

    with pytest.raises(IllegalMove, match="cannot be removed while its assignment") as refused:
        remove()
    assert refused.value.hint == "end its open assignments in the same transaction"
    assert names(database) == []


def test_a_connection_that_breaks_is_a_fault_and_the_next_one_works(database: PooledDatabase):
    def break_off() -> None:
        with database.begin() as tx:
            tx.one(SLEEPLESS)

    with pytest.raises(DatabaseUnavailable):
        break_off()
    assert names(database) == []


def test_the_service_plans_once_and_lives_in_utc(app):
    settings = {
        name: app.execute("SELECT current_setting(%s)", [name]).fetchone()[0]
        for name in ("plan_cache_mode", "TimeZone", "statement_timeout", "lock_timeout")
    }
    assert settings == {
        "plan_cache_mode": "force_generic_plan",
        "TimeZone": "UTC",
        "statement_timeout": "30s",
        "lock_timeout": "10s",
    }
    idle = app.execute("SELECT current_setting('idle_in_transaction_session_timeout')").fetchone()
    assert idle == ("30s",)


def raised(connection: psycopg.Connection, state: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as error, connection.transaction():
        connection.execute(f"DO $$ BEGIN RAISE EXCEPTION 'told' USING ERRCODE = '{state}'; END $$".encode())
    return error.value


@pytest.mark.parametrize(
    ("state", "kind", "again"),
    [
        ("40P01", DatabaseUnavailable, True),
        ("40001", DatabaseUnavailable, True),
        ("55P03", DatabaseUnavailable, True),
        ("57014", DatabaseUnavailable, False),
        ("53100", StorageFull, False),
        ("FW001", IllegalMove, False),
        ("FW002", IllegalMove, False),
        ("FW003", NodeRemoved, False),
    ],
)
def test_what_a_state_means_and_whether_to_try_again(owner, state, kind, again):
    error = raised(owner, state)
    meaning = faults.of(error)
    assert type(meaning) is kind
    meaning.__cause__ = error
    assert faults.is_retryable(meaning) is again


@pytest.mark.parametrize("state", ["FW004", "FW005", "22012"])
def test_what_nobody_should_meet_is_our_own_bug(owner, state):
    meaning = faults.of(raised(owner, state))
    assert meaning.code == "unexpected_constraint"
    assert state in meaning.message


def test_no_database_error_at_all_is_not_retryable():
    assert not faults.is_retryable(Refusal("no"))
    assert not faults.is_retryable(None)


def test_statements_that_are_handed_over_run_in_order_with_the_next_one(tx):
    tx.later(MAKE, name="a")
    made = tx.later(MAKE, name="b")
    assert [row.name for row in tx.all(ALL)][-2:] == ["a", "b"]
    assert made.rows == [Name("b")]


def test_what_is_handed_over_last_travels_with_the_commit(database: PooledDatabase):
    with database.begin() as tx:
        made = tx.later(MAKE, name="a")
    assert made.rows == [Name("a")]
    assert names(database) == ["a"]


def test_the_time_is_read_after_what_was_handed_over_before(database: PooledDatabase):
    with database.begin() as tx:
        asked = tx.later(Statement("SELECT app.now() AS at", row=Time))
        assert tx.now > asked.rows[0].at


def test_what_is_refused_at_the_commit_is_told_in_its_own_words_and_nothing_is_kept(database: PooledDatabase):
    def make_twice() -> None:
        with database.begin() as tx:
            tx.later(MAKE, name="a")
            tx.later(MAKE, name="a")
            tx.later(MAKE, name="b")

    with pytest.raises(NodeExists):
        make_twice()
    assert names(database) == []


def test_a_block_that_raises_drops_what_was_handed_over(database: PooledDatabase):
    def fail() -> None:
        with database.begin() as tx:
            tx.later(MAKE, name="a")
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert names(database) == []


def test_a_connection_that_breaks_with_the_commit_leaves_the_outcome_open(database: PooledDatabase):
    def break_off() -> None:
        with database.begin() as tx:
            tx.one(MAKE, name="a")
            tx.later(SLEEPLESS)

    with pytest.raises(OutcomeUnknown):
        break_off()
    assert names(database) == []
