"""Real PostgreSQL for tests: one server a run (and worker), a migrated template, a clone for each test.

`database` is the service's own Database on a clone of its own; `tx` is a transaction on a shared clone that is rolled
back; `clone` gives the URLs of a clone's roles; `owner` is a connection of an operator, rolled back. Nothing here is
durable. FLEETWARD_TEST_POSTGRES=15 takes the machine's own PostgreSQL of that version instead of the embedded one.
"""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleetward.controller.clusterfiles import Account, Binaries, find_binaries, server_account
from fleetward.controller.store import migrate
from fleetward.controller.store.migrate import Role
from fleetward.controller.store.tx import CONNECTION_OPTIONS, PooledDatabase, Tx, open_pool
from tests.needs import needs

VERSION: Final = "FLEETWARD_TEST_POSTGRES"
TEMPLATE: Final = "fleetward_template"
READY_SECONDS: Final = 30
SETTINGS: Final = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "shared_buffers": "64MB",
    "max_connections": "60",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "log_min_error_statement": "panic",
    "log_timezone": "UTC",
    "jit": "off",
}


@dataclass(frozen=True, slots=True)
class Server:
    """A running PostgreSQL that trusts whoever reaches its private socket."""

    socket_folder: Path

    def url(self, *, user: str = "postgres", database: str = "postgres") -> str:
        return make_conninfo("", host=str(self.socket_folder), user=user, dbname=database)

    def copy(self, template: str, name: str) -> None:
        """Make a database from a template, as closed as the service's own."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(
                    sql.Identifier(name), sql.Identifier(template), sql.Identifier(migrate.OWNER)
                )
            )
            migrate.close_database(connection, name)

    def drop(self, name: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@dataclass(frozen=True, slots=True)
class Clone:
    """A private copy of the migrated template."""

    server: Server
    name: str

    @property
    def admin_url(self) -> str:
        return self.server.url(database=self.name)

    def url(self, role: Role = Role.APP) -> str:
        return migrate.url_for(self.server.url(), role, database=self.name)

    def connect(self, role: Role = Role.APP) -> psycopg.Connection:
        """A connection set up as the service's are."""
        return psycopg.connect(self.url(role), options=CONNECTION_OPTIONS)


@pytest.fixture(scope="session")
def postgres() -> Generator[Server]:
    """The run's server."""
    account = server_account([])
    binaries = _binaries(account)
    folder = Path(tempfile.mkdtemp(prefix="fw-pg-", dir="/tmp"))
    try:
        folder.chmod(0o700)
        account.owns(folder)
        data = folder / "data"
        _run(account, [binaries.program("initdb"), "-D", str(data), *_INITDB])
        with _serving(account, binaries, data, folder):
            yield Server(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def template(postgres: Server) -> str:
    """The name of the migrated database that clones are made from."""
    migrate.init_cluster(postgres.url(), database=TEMPLATE)
    return TEMPLATE


@pytest.fixture(scope="session")
def make_clone(postgres: Server, template: str) -> Callable[[], AbstractContextManager[Clone]]:
    """A maker of private clones of the template."""
    numbers = itertools.count(1)

    @contextmanager
    def clone() -> Generator[Clone]:
        name = f"clone_{next(numbers)}"
        postgres.copy(template, name)
        try:
            yield Clone(postgres, name)
        finally:
            postgres.drop(name)

    return clone


@pytest.fixture
def clone(make_clone: Callable[[], AbstractContextManager[Clone]]) -> Generator[Clone]:
    """A clone for one test."""
    with make_clone() as made:
        yield made


@pytest.fixture(scope="session")
def shared_clone(make_clone: Callable[[], AbstractContextManager[Clone]]) -> Generator[Clone]:
    """A clone for all tests that roll back."""
    with make_clone() as made:
        yield made


@pytest.fixture
def database(clone: Clone) -> Generator[PooledDatabase]:
    """The service's database, on a clone for one test."""
    with closing(open_pool(clone.url(), size=8, name="fleetward-test")) as pool:
        yield PooledDatabase(pool)


@pytest.fixture
def tx(shared_clone: Clone) -> Generator[Tx]:
    """A transaction of the service that is rolled back."""
    with closing(shared_clone.connect()) as connection:
        yield Tx(connection, entropy=Apart())
        connection.rollback()


@pytest.fixture
def owner(shared_clone: Clone) -> Generator[psycopg.Connection]:
    """A connection of the operator's role, rolled back."""
    with closing(shared_clone.connect(Role.OWNER)) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def app(shared_clone: Clone) -> Generator[psycopg.Connection]:
    """A connection of the service's role, rolled back."""
    with closing(shared_clone.connect()) as connection:
        yield connection
        connection.rollback()


class Apart:
    """Chance for a transaction that no pool has begun."""

    def begin(self) -> AbstractContextManager[Tx]:
        raise AssertionError("this transaction stands alone")

    def entropy(self, count: int) -> bytes:
        return os.urandom(count)


_INITDB: Final = [
    *("-U", "postgres", "--auth=trust", "--no-sync", "--no-instructions", "-E", "UTF8", "--locale=C"),
]


def _binaries(account: Account) -> Binaries:
    wanted = os.environ.get(VERSION, "")
    if not wanted:
        return find_binaries(account)
    folder = Path("/usr/lib/postgresql", wanted, "bin")
    if not (folder / "postgres").exists():
        needs(f"postgres{wanted}", f"there is no {folder}/postgres")
    return Binaries(folder, wanted)


def _run(account: Account, argv: list[str]) -> None:
    status, said = account.run(argv, seconds=120)
    assert status == 0, f"{argv[0]} ended with {status}: {said}"


@contextmanager
def _serving(account: Account, binaries: Binaries, data: Path, folder: Path) -> Generator[None]:
    settings = {**SETTINGS, "unix_socket_directories": str(folder), "unix_socket_permissions": "0700"}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with (folder / "log").open("wb") as log:
        server = account.spawn([binaries.program("postgres"), "-D", str(data), *options], log=log.fileno())
    try:
        _wait_until_ready(server, data, folder)
        yield
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGQUIT)
            server.wait(30)


def _wait_until_ready(server: "subprocess.Popen[bytes]", data: Path, folder: Path) -> None:
    """Read the server's own word on its state, which is the last line of its pid file."""
    for _ in range(READY_SECONDS * 100):
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.01)
            raise AssertionError(f"PostgreSQL did not start: {(folder / 'log').read_text()}")
        with suppress(FileNotFoundError):
            if (data / "postmaster.pid").read_text().rstrip().endswith("ready"):
                return
    raise AssertionError(f"PostgreSQL was not ready after {READY_SECONDS} s: {(folder / 'log').read_text()}")
