"""Which PostgreSQL: the embedded one of the home, or one by URL; prepared, checked and named for each role.

Owns that choice, and the passwords that `db init` gives out. Refuses to know what is in the database, and how
a server is run.
"""

import secrets
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

import msgspec
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleetward.controller import embedded
from fleetward.controller.clusterfiles import open_home, write_durably
from fleetward.controller.config import Config
from fleetward.controller.early import Begun
from fleetward.controller.store import cluster, migrate
from fleetward.controller.store.migrate import Role
from fleetward.controller.store.tx import Database
from fleetward.domain.errors import DatabaseUnavailable, HomeUnusable, InvalidSetting, KeyringMismatch, quoted

PASSWORDS: Final = "database_passwords"
PASSWORD_BYTES: Final = 24


def prepare(begun: Begun) -> str:
    """Have roles and schema in place, and return where the service finds its database."""
    if begun.database is not None:
        return migrate.init_cluster(begun.database.admin_url())
    migrate.check_service(begun.config.database_url)
    return begun.config.database_url


def check_keyring(database: Database, *, fingerprint: str) -> None:
    """Refuse a keyring that is not the one this database was made with: its keys would prove nobody."""
    with database.begin() as tx:
        tx.run(cluster.CLAIM_KEYRING, fingerprint=fingerprint)
        found = tx.one(cluster.KEYRING).keyring_fingerprint
    if found != fingerprint:
        raise KeyringMismatch(
            f"the keyring of this home is {fingerprint}, but the database was made with {found}",
            hint="copy the folder `keyring` from the home of the controller that made the database",
        )


def initialise(config: Config, *, admin_url: str) -> str:
    """Make roles, database and schema on an outside server, and return the service's URL; again, it changes nothing."""
    passwords = _passwords(open_home(config.home))
    return as_url(migrate.init_cluster(admin_url, passwords=passwords))


def bring_up_to_date(config: Config, *, admin_url: str) -> list[str]:
    """Apply the migrations that are missing, and return their names."""
    if config.database_url and not admin_url:
        raise InvalidSetting(
            "a database of one's own is migrated with the URL of a role that may, and none was given",
            hint="give the one that `fleetward db init` was given, as --admin-url",
            field="admin_url",
        )
    return migrate.migrate(make_conninfo(admin_url or _running(config), dbname=migrate.DATABASE))


def url(config: Config, *, role: str) -> str:
    """The URL of the database for one of its roles."""
    if role not in set(Role):
        raise InvalidSetting(f"{quoted(role)} is no role of the database: {', '.join(Role)}", field="role")
    wanted = Role(role)
    if config.database_url:
        if wanted is Role.APP:
            return config.database_url
        password = _passwords(config.home).get(wanted)
        return as_url(migrate.url_for(config.database_url, wanted, password=password))
    return as_url(migrate.url_for(_running(config), wanted))


def _running(config: Config) -> str:
    running = embedded.running_url(config.home)
    if running is None:
        raise DatabaseUnavailable(
            f"the embedded database of {config.home} does not run",
            hint="start the controller, which also migrates it: `fleetward up`",
        )
    return running


def _passwords(home: Path) -> dict[Role, str]:
    """The passwords of the login roles on an outside server; made once, so that doing it again changes nothing."""
    path = home / PASSWORDS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[Role, str])
    except FileNotFoundError:
        made = {role: secrets.token_urlsafe(PASSWORD_BYTES) for role in Role}
        write_durably(path, msgspec.json.encode(made).decode(), mode=0o600)
        return made
    except (OSError, msgspec.DecodeError) as error:
        raise HomeUnusable(
            f"the passwords in {path} cannot be read: {error}", hint="restore the file, or remove it to make new ones"
        ) from error


def as_url(conninfo: str) -> str:
    """Write connection parameters as a URL, which every tool takes."""
    parts = {name: str(value) for name, value in conninfo_to_dict(conninfo).items() if value is not None}
    user = quote(parts.pop("user", ""), safe="")
    password = quote(parts.pop("password", ""), safe="")
    name = quote(parts.pop("dbname", ""), safe="")
    who = f"{user}:{password}@" if password else f"{user}@" if user else ""
    where = ""
    if not parts.get("host", "/").startswith("/"):
        host, port = parts.pop("host"), parts.pop("port", "5432")
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    query = urlencode(parts, quote_via=quote)
    return f"postgresql://{who}{where}/{name}" + (f"?{query}" if query else "")
