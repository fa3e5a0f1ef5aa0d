"""The controller's command line: `python -m fleetward.controller`, which the `fleetward` command starts.

Owns its commands, how an error at start is told, and exit statuses: 0 stopped or done, 2 usage, 3 refused,
4 fault. Refuses to know how the parts are wired: `main` does that.
"""

import argparse
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import FrameType
from typing import Final

from fleetward.controller import config
from fleetward.controller.config import SETTINGS, Config
from fleetward.controller.early import begin
from fleetward.domain.errors import Fault, Refusal, Unexpected

DONE: Final = 0
USAGE: Final = 2
REFUSED: Final = 3
FAULT: Final = 4


def main(arguments: Sequence[str]) -> int:
    """Run one command and say how it ended."""
    if not __debug__:
        return _tell("the controller does not run under `python -O`: its own checks are part of it", "", REFUSED)
    parsed = _parser().parse_args(arguments)
    flags = {setting.name: text for setting in SETTINGS if (text := _flag(parsed, setting.name)) is not None}
    try:
        settled = config.load(flags, environment=os.environ, user_id=os.geteuid())
        COMMANDS[parsed.command](settled, parsed)
    except Refusal as refusal:
        return _tell(refusal.message, refusal.hint, REFUSED)
    except Fault as fault:
        return _tell(fault.message, fault.hint, FAULT)
    except BrokenPipeError:
        return DONE
    except Exception as error:  # a bug of ours: the log has all of it, the caller one line
        logging.getLogger(__name__).critical("the controller failed on a bug of ours", exc_info=error)
        return _tell(f"the controller failed on a bug of its own: {type(error).__name__}", "its log says where", FAULT)
    return DONE


def _tell(message: str, hint: str, status: int) -> int:
    print(f"fleetward: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleetward.controller", description="The Fleetward controller.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        command = commands.add_parser(name, help=COMMANDS[name].__doc__, description=COMMANDS[name].__doc__)
        for setting in SETTINGS:
            action = argparse.BooleanOptionalAction if setting.is_claim else "store"
            command.add_argument(setting.flag, action=action, default=None, help=setting.doc)
        if name == "db-url":
            command.add_argument("--role", default="app", help="app, owner or ro")
        if name in {"db-init", "db-migrate"}:
            needed = name == "db-init"
            command.add_argument(
                "--admin-url", required=needed, default="", help="a role that may make roles and databases"
            )
        if name == "config-show":
            command.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def _flag(parsed: argparse.Namespace, name: str) -> str | None:
    value: object = getattr(parsed, name)
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def _serve(settled: Config, _parsed: argparse.Namespace) -> None:
    """Run the controller until it is told to stop."""
    stop, was_told = threading.Event(), threading.Event()

    def told(_number: int, _frame: FrameType | None) -> None:
        was_told.set()
        stop.set()

    # Every held call of a node is an open file.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, told)
    with ExitStack() as parts:
        begun = begin(settled, parts=parts)
        # The database comes up while all this is loaded.
        from fleetward.controller.main import bring_up

        bring_up(begun, parts=parts, ended=stop.set)
        stop.wait()
    if not was_told.is_set():
        raise Unexpected("the HTTP server ended by itself", hint="its log says why")


def _config_show(settled: Config, parsed: argparse.Namespace) -> None:
    """Show each setting, its value and where it came from."""
    shown = [asdict(line) for line in config.show(settled)]
    if parsed.json:
        print(json.dumps(shown))
        return
    for line in shown:
        print(f"{line['name']:20} {line['value']:32} {line['source']:12} {line['doc']}")


def _db_init(settled: Config, parsed: argparse.Namespace) -> None:
    """Make the roles and the database on a PostgreSQL of your own, and print the service's URL."""
    from fleetward.controller import database

    print(database.initialise(settled, admin_url=parsed.admin_url))


def _db_migrate(settled: Config, parsed: argparse.Namespace) -> None:
    """Bring the database's schema up to this program."""
    from fleetward.controller import database

    for name in database.bring_up_to_date(settled, admin_url=parsed.admin_url):
        print(name)


def _db_url(settled: Config, parsed: argparse.Namespace) -> None:
    """Print a URL of the database for one of its roles."""
    from fleetward.controller import database

    print(database.url(settled, role=parsed.role))


def _db_psql_url(settled: Config, _parsed: argparse.Namespace) -> None:
    """Print the URL that psql should take."""
    from fleetward.controller import database

    print(database.url(settled, role="owner"))


COMMANDS: Final[Mapping[str, Callable[[Config, argparse.Namespace], None]]] = {
    "serve": _serve,
    "db-init": _db_init,
    "db-migrate": _db_migrate,
    "db-url": _db_url,
    "db-psql-url": _db_psql_url,
    "config-show": _config_show,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
