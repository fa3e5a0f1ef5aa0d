"""The database from nothing to the schema that this program speaks.

Owns roles, migrations and the service's self-refusal. Migrations go forward only, are never edited once applied
(their digests are kept), and run one at a time under an advisory lock. Refuses to know what any table is for.
"""

import hashlib
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleetward.controller import store
from fleetward.controller.store import faults
from fleetward.domain.errors import SchemaVersion, ServiceRoleTooStrong

DATABASE: Final = "fleetward"
OWNER: Final = "fleetward_owner"
MIGRATION_LOCK: Final = 0x666C656574  # any number does that nobody else takes: "fleet"
NAME: Final = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
CONNECT_SECONDS: Final = 10

# A migration that waits for a lock holds up everybody behind it, so it gives up soon.
GUARDS: Final[tuple[LiteralString, ...]] = (
    "SET statement_timeout = '10min'",
    "SET lock_timeout = '5s'",
    "SET idle_in_transaction_session_timeout = '60s'",
    "SET timezone = 'UTC'",
    "SET client_min_messages = 'warning'",
)


class Role(StrEnum):
    """A login role of the database, by what it is for."""

    APP = "app"  # the service: named columns, no DDL
    MIGRATE = "migrate"  # becomes the owner to change the schema
    SEAL = "seal"  # the sequencer of the trail
    RO = "ro"  # readers
    OWNER = "owner"  # an operator at a prompt: member of owner, app and ro

    @property
    def login(self) -> str:
        """The name that it logs in with."""
        return "fleetward_admin" if self is Role.OWNER else f"fleetward_{self.value}"


MEMBERSHIPS: Final[Mapping[Role, tuple[str, ...]]] = {
    Role.MIGRATE: (OWNER,),
    Role.OWNER: (OWNER, Role.APP.login, Role.RO.login),
}


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of plain SQL."""

    number: int
    name: str
    text: str
    sha256: str


def migrations() -> list[Migration]:
    """All migrations of this program, in order."""
    found: list[Migration] = []
    for entry in (resources.files(store) / "migrations").iterdir():
        match = NAME.fullmatch(entry.name)
        if match is None:
            assert not entry.name.endswith(".sql"), f"migration {entry.name} is not named NNNN_noun.sql"
            continue
        text = entry.read_text()
        found.append(Migration(int(match[1]), entry.name, text, hashlib.sha256(text.encode()).hexdigest()))
    found.sort(key=lambda migration: migration.number)
    assert [one.number for one in found] == [*range(1, len(found) + 1)], "migrations are numbered without gap"
    return found


def init_cluster(admin_url: str, *, passwords: Mapping[Role, str] | None = None, database: str = DATABASE) -> str:
    """Make roles, database and schema where they are missing, and return the service's URL.

    `admin_url` names a role that may make roles and databases, and a maintenance database. Without a password a login
    role keeps the one that it has; a server that knows its callers by their system user needs none.
    """
    given = passwords or {}
    with _connected(admin_url) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
        _make_roles(connection, given)
        _make_database(connection, database)
    migrate(make_conninfo(admin_url, dbname=database))
    return url_for(admin_url, Role.APP, password=given.get(Role.APP), database=database)


def url_for(url: str, role: Role, *, password: str | None = None, database: str = DATABASE) -> str:
    """The same server's URL for another of the roles."""
    parts = {key: value for key, value in conninfo_to_dict(url).items() if key not in {"user", "password", "dbname"}}
    if password is not None:
        parts["password"] = password
    return make_conninfo("", user=role.login, dbname=database, **parts)


def migrate(url: str) -> list[str]:
    """Apply what is missing, one transaction a file, and return the names of what was applied."""
    with _connected(url) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
        connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(OWNER)))
        applied = _applied(connection)
        _check_history(applied)
        missing = [migration for migration in migrations() if migration.number not in applied]
        for migration in missing:
            _apply(connection, migration)
        return [migration.name for migration in missing]


def check_service(url: str) -> None:
    """Refuse to serve with a role that could undo the rules, or on a schema that is not this program's."""
    with _connected(url) as connection:
        _refuse_strength(connection)
        applied = _applied(connection)
        _check_history(applied)
        missing = [migration.name for migration in migrations() if migration.number not in applied]
        if missing:
            raise SchemaVersion(
                f"the database's schema lacks {len(missing)} migrations, the first of them {missing[0]!r}",
                hint="run `fleetward db migrate` with the URL of a role that may",
            )


@contextmanager
def _connected(url: str) -> Generator[psycopg.Connection]:
    with faults.translated():
        connection = psycopg.connect(
            url, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="fleetward-migrate"
        )
    try:
        with faults.translated():
            for guard in GUARDS:
                connection.execute(guard)
            yield connection
    finally:
        connection.close()


def _make_roles(connection: psycopg.Connection, passwords: Mapping[Role, str]) -> None:
    existing = {row[0] for row in connection.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'fleetward\\_%'")}
    if OWNER not in existing:
        connection.execute(sql.SQL("CREATE ROLE {} NOLOGIN").format(sql.Identifier(OWNER)))
    for role in Role:
        name = sql.Identifier(role.login)
        if role.login not in existing:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
        if role in passwords:
            # A plain text password would be readable in the server's log; this is its verifier only.
            verifier = connection.pgconn.encrypt_password(
                passwords[role].encode(), role.login.encode(), b"scram-sha-256"
            ).decode()
            connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(name, sql.Literal(verifier)))
    for role, groups in MEMBERSHIPS.items():
        for group in groups:
            _grant_membership(connection, group, role.login)
    _grant_membership(connection, OWNER, connection.info.user)
    _let_checks_replicate(connection)


def _grant_membership(connection: psycopg.Connection, group: str, member: str) -> None:
    row = connection.execute(
        "SELECT pg_has_role(%(member)s, %(group)s, 'USAGE')", {"member": member, "group": group}
    ).fetchone()
    if row == (True,):
        return
    connection.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(group), sql.Identifier(member)))


def _let_checks_replicate(connection: psycopg.Connection) -> None:
    """Let the operator's role try what `session_replication_role` can do; only a superuser can allow that."""
    row = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    if row == (True,):
        connection.execute(
            sql.SQL("GRANT SET ON PARAMETER session_replication_role TO {}").format(sql.Identifier(Role.OWNER.login))
        )


def _make_database(connection: psycopg.Connection, database: str) -> None:
    name = sql.Identifier(database)
    if connection.execute("SELECT FROM pg_database WHERE datname = %s", [database]).fetchone() is None:
        connection.execute(
            sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE template0 ENCODING 'UTF8'").format(
                name, sql.Identifier(OWNER)
            )
        )
    close_database(connection, database)


def close_database(connection: psycopg.Connection, database: str) -> None:
    """Let nobody but our roles into a database, and nobody make temporary tables there."""
    name = sql.Identifier(database)
    connection.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(name))
    logins = sql.SQL(", ").join(sql.Identifier(role.login) for role in Role)
    connection.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(name, logins))


def _applied(connection: psycopg.Connection) -> dict[int, tuple[str, str]]:
    row = connection.execute("SELECT to_regclass('app.schema_migrations') IS NOT NULL").fetchone()
    if row != (True,):
        return {}
    return {
        number: (name, digest)
        for number, name, digest in connection.execute("SELECT number, name, sha256 FROM app.schema_migrations")
    }


def _check_history(applied: Mapping[int, tuple[str, str]]) -> None:
    known = {migration.number: migration for migration in migrations()}
    newer = sorted(applied.keys() - known.keys())
    if newer:
        raise SchemaVersion(
            f"the database's schema is newer than this program: it has migration {applied[newer[0]][0]!r}",
            hint="run the newer Fleetward; an older one never writes to a newer schema",
        )
    for number, (name, digest) in sorted(applied.items()):
        if known[number].sha256 != digest:
            raise SchemaVersion(
                f"migration {name!r} was applied with another content than this program's",
                hint="the database was made by a build that was never released; start with a new one",
            )


def _apply(connection: psycopg.Connection, migration: Migration) -> None:
    try:
        with connection.transaction():
            # As bytes, because the driver's text is for literals only; a migration is our own file, whole.
            connection.execute(migration.text.encode())
            connection.execute(
                "INSERT INTO app.schema_migrations (number, name, sha256) VALUES (%s, %s, %s)",
                [migration.number, migration.name, migration.sha256],
            )
    except psycopg.Error as error:
        told = faults.of(error)
        told.message = f"migration {migration.name!r} could not be applied: {told.message}"
        raise told from error


def _refuse_strength(connection: psycopg.Connection) -> None:
    row = connection.execute(
        """
        SELECT
            rolsuper, rolcreaterole, rolbypassrls,
            EXISTS (SELECT FROM pg_roles AS owner WHERE owner.rolname = %(owner)s AND pg_has_role(owner.oid, 'MEMBER')),
            has_parameter_privilege('session_replication_role', 'SET')
        FROM pg_roles WHERE rolname = current_user
        """,
        {"owner": OWNER},
    ).fetchone()
    assert row is not None, "a session has a role"
    reasons = ("is a superuser", "may make roles", "passes row security", "owns the tables", "may switch triggers off")
    found = [reason for reason, is_so in zip(reasons, row, strict=True) if is_so]
    if found:
        raise ServiceRoleTooStrong(
            f"the service will not run as {connection.info.user!r}: that role {' and '.join(found)}",
            hint=f"use the URL that `fleetward db init` printed; its role is {Role.APP.login!r}",
        )
