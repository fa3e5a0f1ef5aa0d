"""Transactions: the one way in which anything reaches PostgreSQL.

Owns statements, the pool, and the transaction's single reading of the clock. Refuses to know tables,
policy and who calls. A service takes its locks first; the first use of `now` after that is the time
of the whole transaction.
"""

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import NoneType
from typing import Final, Generic, LiteralString, Protocol, TypeVar
from uuid import UUID

import msgspec
import psycopg
from psycopg.rows import class_row
from psycopg_pool import ConnectionPool, PoolTimeout

from fleetward.controller.store import faults
from fleetward.domain.errors import DatabaseUnavailable
from fleetward.domain.ids import ENTROPY_BYTES, uuid7

Row = TypeVar("Row")

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


NOW: Final = "SELECT app.now()"


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


class Tx:
    """One transaction. Everything in it happens at one `now`."""

    def __init__(self, connection: psycopg.Connection, *, entropy: "Database") -> None:
        self._connection: Final = connection
        self._database: Final = entropy
        self._now: datetime | None = None

    @property
    def now(self) -> datetime:
        """The database's time, read once: at the first use after the locks are held."""
        if self._now is None:
            with faults.translated():
                row = self._connection.execute(NOW).fetchone()
            assert row is not None, "the database tells the time"
            self._now = row[0]
            assert isinstance(self._now, datetime), "app.now() is a timestamptz"
        return self._now

    def new_id(self) -> UUID:
        """A new identity, ordered by this transaction's time."""
        return uuid7(now=self.now, entropy=self._database.entropy(ENTROPY_BYTES))

    def all(self, statement: Statement[Row], **params: object) -> list[Row]:
        """Run a statement and return all its rows."""
        with self._run(statement, params) as cursor:
            return cursor.fetchall()

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
        if statement.takes_now:
            params["now"] = self.now
        with faults.translated():
            return self._connection.execute(statement.sql, params, prepare=True).rowcount

    @contextmanager
    def _run(self, statement: Statement[Row], params: dict[str, object]) -> Generator[psycopg.Cursor[Row]]:
        if statement.takes_now:
            params["now"] = self.now
        with faults.translated(), self._connection.cursor(row_factory=class_row(statement.row)) as cursor:
            yield cursor.execute(statement.sql, params, prepare=True)


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
        yield Tx(connection, entropy=database)
        with faults.translated():
            # Only a lost connection may fail in COMMIT itself: a refusal must name its constraint here.
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    except BaseException:
        with faults.suppressed():
            connection.rollback()
        raise
    with faults.committing():
        connection.commit()


def open_pool(conninfo: str, *, size: int, name: str) -> ConnectionPool[psycopg.Connection]:
    """Open a pool of connections that are set up for the service."""
    return ConnectionPool(
        conninfo,
        min_size=min(2, size),
        max_size=size,
        timeout=10.0,
        kwargs={"options": CONNECTION_OPTIONS, "application_name": name},
        open=True,
    )
