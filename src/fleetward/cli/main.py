"""The command line as a whole.

Owns which commands there are, the flags that all of them take, and the exit status. Refuses to do
anything itself.
"""

import sys
from collections.abc import Iterable
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fleetward.cli import demo, doctor, jobs, machine, nodes, operating, run, up
from fleetward.cli.output import report
from fleetward.cli.settings import Given, JsonFlag, QuietFlag, TokenFlag, UrlFlag
from fleetward.domain.errors import Fault, Refusal

app: Final = typer.Typer(name="fleetward", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(epilog="Example: fleetward up --detach; fleetward run -- uname -a")
def everywhere(url: UrlFlag = None, token: TokenFlag = None, json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Hand work to machines you own, and get proof that it was done."""


app.command("up", epilog="Example: fleetward up --listen 127.0.0.1:7400 --detach")(up.up)
app.command("down", epilog="Example: fleetward down")(up.down)
app.command("status", epilog="Example: fleetward status --json")(operating.status)
app.command("doctor", epilog="Example: fleetward doctor")(doctor.doctor)
app.command("demo", epilog="Example: fleetward demo")(demo.demo)
app.command("join", epilog="Example: fleetward join 'http://10.0.0.5:7400/join#…' --name ada")(machine.join)
app.command("agent", epilog="Example: fleetward agent --home ~/.fleetward/nodes/ada")(machine.agent)
app.command(
    "run",
    epilog="Example: fleetward run --artifact out.txt -- sh -c 'echo hi > out.txt'",
    context_settings={"allow_interspersed_args": False},
)(run.run)
app.add_typer(nodes.app, name="node")
app.add_typer(jobs.app, name="job")
app.add_typer(operating.database, name="db")
app.add_typer(operating.config, name="config")


def command_tree() -> TyperGroup:
    """The whole tree; every command in it takes the flags that stand for all."""
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    shared = [param for param in root.params if param.name in {"url", "token", "json", "quiet"}]
    for command in root.commands.values():
        _share(command, shared)
    return root


def _share(command: Any, shared: Iterable[Any]) -> None:
    command.params = [*command.params, *shared]
    for below in getattr(command, "commands", {}).values():
        _share(below, shared)


def main() -> None:
    """Run the command line and leave with its exit status."""
    given = Given()
    try:
        command_tree().main(prog_name="fleetward", obj=given)
    except (Refusal, Fault, OSError) as error:
        sys.exit(report(error, is_json=given.is_json))
