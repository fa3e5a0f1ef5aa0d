"""Transactions: the one way in which anything reaches PostgreSQL.

Owns statements, the pool, and the transaction's single reading of the clock. Refuses to know tables,
policy and who calls. A service takes its locks first; the first use of `now` after that is the time
of the whole transaction.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import NoneType
from typing import Any, Final, Generic, LiteralString, Protocol, TypeVar
from uuid import UUID

import msgspec
import psycopg
from psycopg.rows import class_row
from psycopg_pool import ConnectionPool, PoolTimeout

from fleetward.controller.store import faults
from fleetward.domain.errors import DatabaseUnavailable
from fleetward.domain.ids import ENTROPY_BYTES, uuid7

Row = TypeVar("Row")

BEGIN: Final = "BEGIN"
CHECK: Final = "SET CONSTRAINTS ALL IMMEDIATE"
COMMIT: Final = "COMMIT"
CONNECTION_OPTIONS: Final = " ".join(
    f"-c {name}={value}"
    for name, value in {
        "timezone": "UTC",
        "statement_timeout": "30s",
        "lock_timeout": "10s",
        "idle_in_transaction_session_timeout": "30s",
        # ANALYZE cannot see states that rows only pass through; a custom plan would scan the table.
        "plan_cache_mode": "force_generic_plan",
    }.items()
)


@dataclass(frozen=True, slots=True)
class Statement(Generic[Row]):
    """SQL beside the type of its rows: a frozen dataclass with the columns' names, or NoneType."""

    sql: LiteralString
    row: type[Row]

    @property
    def takes_now(self) -> bool:
        """Whether the statement is bound to the transaction's time."""
        return "%(now)s" in self.sql


@dataclass(frozen=True, slots=True)
class Time:
    """The database's time."""

    at: datetime


NOW: Final = Statement("SELECT app.now() AS at", row=Time)


def as_json(value: object) -> str:
    """Write a value as JSON text, for a parameter that the statement casts to jsonb."""
    return msgspec.json.encode(value).decode()


class Database(Protocol):
    """Where transactions begin, and chance comes from."""

    def begin(self) -> AbstractContextManager["Tx"]:
        """Open a transaction; it commits when the block ends and rolls back when it raises."""
        ...

    def entropy(self, count: int) -> bytes:
        """That many bytes of chance."""
        ...


class Later(Generic[Row]):
    """A statement that was handed over, and its rows once it has run."""

    def __init__(self, statement: Statement[Row], params: dict[str, object]) -> None:
        self.statement: Final = statement
        self.params: Final = params
        self._cursor: psycopg.Cursor[Row] | None = None

    @property
    def rows(self) -> list[Row]:
        """All its rows; to be read once, after the statement has run."""
        cursor = self._ran()
        with faults.translated():
            return cursor.fetchall() if cursor.description is not None else []

    @property
    def count(self) -> int:
        """How many rows it touched."""
        return self._ran().rowcount

    def run(self, connection: psycopg.Connection) -> None:
        """Send it; in a pipeline it has run when that ends."""
        cursor = connection.cursor(row_factory=class_row(self.statement.row))
        self._cursor = cursor.execute(self.statement.sql, self.params, prepare=True)

    def _ran(self) -> psycopg.Cursor[Row]:
        assert self._cursor is not None, "a statement that was handed over runs with the next answer or the commit"
        return self._cursor


class Tx:
    """One transaction. Everything in it happens at one `now`.

    Statements run in the order in which they are given. One whose rows nobody waits for is handed over with
    `later` and travels with the next one, or with the commit: a journey to the database costs more than most
    statements do.
    """

    def __init__(self, connection: psycopg.Connection, *, entropy: "Database") -> None:
        self._connection: Final = connection
        self._database: Final = entropy
        self._now: datetime | None = None
        self._waiting: list[Later[Any]] = []
        self._has_begun = not connection.autocommit

    @property
    def now(self) -> datetime:
        """The database's time, read once: at the first use after the locks are held."""
        if self._now is None:
            (row,) = self.all(NOW)
            self._now = row.at
        return self._now

    def new_id(self) -> UUID:
        """A new identity, ordered by this transaction's time."""
        return uuid7(now=self.now, entropy=self._database.entropy(ENTROPY_BYTES))

    def later(self, statement: Statement[Row], **params: object) -> Later[Row]:
        """Hand a statement over: it runs before the next one, or with the commit, and its rows are there then."""
        if statement.takes_now:
            params["now"] = self.now
        waiting = Later(statement, params)
        self._waiting.append(waiting)
        return waiting

    def all(self, statement: Statement[Row], **params: object) -> list[Row]:
        """Run a statement and return all its rows."""
        answer = self.later(statement, **params)
        self.flush()
        return answer.rows

    def maybe(self, statement: Statement[Row], **params: object) -> Row | None:
        """Run a statement that returns at most one row."""
        rows = self.all(statement, **params)
        assert len(rows) <= 1, "a statement for one thing returned several"
        return rows[0] if rows else None

    def one(self, statement: Statement[Row], **params: object) -> Row:
        """Run a statement that returns exactly one row."""
        row = self.maybe(statement, **params)
        assert row is not None, "a statement that must return a row returned none"
        return row

    def run(self, statement: Statement[NoneType], **params: object) -> int:
        """Run a statement for its effect and return how many rows it touched."""
        answer = self.later(statement, **params)
        self.flush()
        return answer.count

    def flush(self) -> None:
        """Run what was handed over, all in one journey."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        with faults.translated():
            if self._has_begun and len(waiting) == 1:
                waiting[0].run(self._connection)
                return
            self._travel(waiting)

    def commit(self) -> None:
        """Run what was handed over, check what was deferred, and commit, all in one journey."""
        waiting, self._waiting = self._waiting, []
        if not (waiting or self._has_begun):
            return
        with faults.committing(self._connection):
            # A refusal names its constraint in the check, before COMMIT: that fails with the connection only.
            self._travel(waiting, CHECK, COMMIT)

    def _travel(self, waiting: list[Later[Any]], *last: LiteralString) -> None:
        """Send all and receive all; the first error is the one to tell, what follows it is only skipped."""
        failure: psycopg.Error | None = None
        try:
            with self._connection.pipeline():
                try:
                    self._send(waiting, last)
                except psycopg.Error as error:
                    failure = error
        except psycopg.Error as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def _send(self, waiting: list[Later[Any]], last: Sequence[LiteralString]) -> None:
        if not self._has_begun:
            self._connection.execute(BEGIN, prepare=False)
            self._has_begun = True
        for one in waiting:
            one.run(self._connection)
        for sql in last:
            self._connection.execute(sql, prepare=False)


class PooledDatabase:
    """The database behind a pool of connections."""

    def __init__(self, pool: ConnectionPool[psycopg.Connection]) -> None:
        self._pool: Final = pool

    def entropy(self, count: int) -> bytes:
        """Bytes from the operating system."""
        return os.urandom(count)

    @contextmanager
    def begin(self) -> Generator[Tx]:
        """Open a transaction at READ COMMITTED; deferred constraints are checked before COMMIT."""
        try:
            connection = self._pool.getconn()
        except PoolTimeout as error:
            raise DatabaseUnavailable("no database connection became free in time") from error
        except psycopg.OperationalError as error:
            raise faults.of(error) from error
        try:
            with transaction(connection, self) as tx:
                yield tx
        finally:
            self._pool.putconn(connection)


@contextmanager
def transaction(connection: psycopg.Connection, database: Database) -> Generator[Tx]:
    """Run one transaction on a connection."""
    try:
        tx = Tx(connection, entropy=database)
        yield tx
        tx.commit()
    except BaseException:
        with faults.suppressed():
            connection.rollback()
        raise


def open_pool(conninfo: str, *, size: int, name: str) -> ConnectionPool[psycopg.Connection]:
    """Open a pool of connections that are set up for the service."""
    return ConnectionPool(
        conninfo,
        min_size=min(2, size),
        max_size=size,
        timeout=10.0,
        # A transaction begins with its first statement, in the same journey.
        kwargs={"autocommit": True, "options": CONNECTION_OPTIONS, "application_name": name},
        open=True,
    )
