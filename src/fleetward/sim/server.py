"""A throw-away PostgreSQL for simulated worlds: one server, one template, a database for each world.

Owns the server's life, the template whose `app.now()` reads a row instead of a clock, and its copies.
Refuses to know what happens in a world. Nothing here is durable, and nothing is left behind.
"""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleetward.controller.clusterfiles import Account, Binaries, find_binaries, server_account
from fleetward.controller.store import migrate
from fleetward.controller.store.migrate import Role
from fleetward.controller.store.tx import CONNECTION_OPTIONS

BEGINNING: Final = datetime(2030, 1, 1, tzinfo=UTC)  # when every world begins; any day far from today shows a leak
READY_SECONDS: Final = 60.0
MIGRATED: Final = "fleetward_migrated"
TEMPLATE: Final = "fleetward_sim"
MEMORY: Final = Path("/", "dev", "shm")  # files that nobody needs to outlive the machine
SETTINGS: Final = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "shared_buffers": "64MB",
    "max_connections": "40",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "max_wal_size": "64MB",
    "log_min_messages": "panic",
    "log_min_error_statement": "panic",
    "log_timezone": "UTC",
    "jit": "off",
    # A worker that does or does not come would change the order of rows, and costs more than it gives.
    "max_parallel_workers_per_gather": "0",
}
CLOCK: Final = """
CREATE SCHEMA sim;
CREATE TABLE sim.clock (at timestamptz NOT NULL) WITH (fillfactor = 10);
INSERT INTO sim.clock VALUES ('2030-01-01T00:00:00Z');
GRANT USAGE ON SCHEMA sim TO PUBLIC;
GRANT SELECT ON sim.clock TO PUBLIC;
CREATE OR REPLACE FUNCTION app.now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT clock.at FROM sim.clock $$;
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running PostgreSQL that trusts whoever reaches its private socket."""

    folder: Path

    def url(self, *, user: str = "postgres", database: str = "postgres") -> str:
        """Where it is reached."""
        return make_conninfo("", host=str(self.folder), user=user, dbname=database)

    @contextmanager
    def world(self, name: str) -> Generator["WorldDatabase"]:
        """A database for one world, dropped after it."""
        identifier = sql.Identifier(name)
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {} STRATEGY file_copy").format(
                    identifier, sql.Identifier(TEMPLATE), sql.Identifier(migrate.OWNER)
                )
            )
            migrate.close_database(connection, name)
            try:
                yield WorldDatabase(self, name)
            finally:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))


@dataclass(frozen=True, slots=True)
class WorldDatabase:
    """The database of one world."""

    server: Server
    name: str

    def connect_service(self) -> psycopg.Connection:
        """A connection as the service has it."""
        url = migrate.url_for(self.server.url(), Role.APP, database=self.name)
        return psycopg.connect(url, options=CONNECTION_OPTIONS, application_name="fleetward-sim")

    def connect_observer(self) -> psycopg.Connection:
        """A connection that sees everything and sets the clock."""
        return psycopg.connect(self.server.url(database=self.name), options=CONNECTION_OPTIONS, autocommit=True)


@contextmanager
def scratch(prefix: str) -> Generator[Path]:
    """A folder for the time of a run, in memory where the machine has room for that."""
    above = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**30 else None
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=above))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving() -> Generator[Server]:
    """Start a server with the template of all worlds; stop it in the end."""
    account = server_account([])
    binaries = find_binaries(account)
    with scratch("fleetward-sim-pg-") as folder:
        folder.chmod(0o700)
        account.owns(folder)
        data = folder / "data"
        initdb = [binaries.program("initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync"]
        status, said = account.run([*initdb, "--no-instructions", "-E", "UTF8", "--locale=C"], seconds=120)
        assert status == 0, f"initdb ended with {status}: {said}"
        with _running(account, binaries, data=data, folder=folder):
            server = Server(folder)
            _make_template(server)
            yield server


def _make_template(server: Server) -> None:
    migrate.init_cluster(server.url(), database=MIGRATED)
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(
                sql.Identifier(TEMPLATE), sql.Identifier(MIGRATED), sql.Identifier(migrate.OWNER)
            )
        )
    with psycopg.connect(server.url(database=TEMPLATE), autocommit=True) as connection:
        connection.execute(CLOCK)


@contextmanager
def _running(account: Account, binaries: Binaries, *, data: Path, folder: Path) -> Generator[None]:
    settings = {**SETTINGS, "unix_socket_directories": str(folder), "unix_socket_permissions": "0700"}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with (folder / "log").open("wb") as log:
        server = account.spawn([binaries.program("postgres"), "-D", str(data), *options], log=log.fileno())
    try:
        _wait_until_ready(server, data=data, log=folder / "log")
        yield
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGQUIT)
            server.wait(30)


def _wait_until_ready(server: "subprocess.Popen[bytes]", *, data: Path, log: Path) -> None:
    """Read the server's own word on its state, which is the last line of its pid file."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.01)
            raise AssertionError(f"PostgreSQL did not start: {log.read_text()}")
        with suppress(FileNotFoundError):
            if (data / "postmaster.pid").read_text().rstrip().endswith("ready"):
                return
    raise AssertionError(f"PostgreSQL was not ready after {READY_SECONDS:.0f} s: {log.read_text()}")
