"""`fleetward join` and `agent`: this machine's part as a node.

Owns the flags. Refuses to do the work: it becomes the agent program.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fleetward.cli.output import DONE
from fleetward.cli.settings import given_of, home_folder
from fleetward.cli.words import parse_pairs
from fleetward.domain.errors import HomeUnusable

Home = Annotated[
    Path | None, typer.Option(help="The agent's own folder; else the only one below $FLEETWARD_HOME/nodes.")
]


def join(
    ctx: typer.Context,
    join_string: Annotated[str, typer.Argument(help="What `fleetward node pair` printed; - reads it.")],
    home: Home = None,
    name: Annotated[str | None, typer.Option(help="The node's name; else made from its hardware address.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Refused; `node pair --label` gives them.")
    ] = None,
    interface: Annotated[str | None, typer.Option(help="The network interface that names it.")] = None,
    agent: Annotated[bool, typer.Option("--agent/--no-agent", help="Whether to run the agent afterwards.")] = True,
) -> None:
    """Pair this machine with a controller, then run its agent."""
    folder = home or _agent_home(ctx, name or "this-machine")
    flags = ["--home", str(folder)]
    for flag, value in (("--name", name), ("--interface", interface)):
        if value is not None:
            flags += [flag, value]
    for key, value in parse_pairs(label or []).items():
        flags += ["--label", f"{key}={value}"]
    text = sys.stdin.readline() if join_string == "-" else join_string
    # By a pipe: the secret in it must not show in the list of processes.
    done = subprocess.run(
        [sys.executable, "-m", "fleetward.agent", "join", "-", *flags], input=text.encode(), check=False
    )
    if done.returncode != DONE or not agent:
        raise typer.Exit(done.returncode)
    _become_agent(folder)


def agent(ctx: typer.Context, home: Home = None) -> None:
    """Run this machine's agent in the foreground."""
    _become_agent(home or _only_home(ctx))


def _become_agent(home: Path) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "fleetward.agent", "run", "--home", str(home)])


def _agent_home(ctx: typer.Context, name: str) -> Path:
    return home_folder(given_of(ctx)) / "nodes" / name


def _only_home(ctx: typer.Context) -> Path:
    nodes = home_folder(given_of(ctx)) / "nodes"
    paired = sorted(path.parent for path in nodes.glob("*/node.json"))
    if len(paired) == 1:
        return paired[0]
    found = ", ".join(path.name for path in paired) or "none"
    raise HomeUnusable(
        f"{nodes} holds {len(paired)} nodes ({found}), so that --home has to say which one runs",
        hint=f"fleetward agent --home {nodes}/NAME" if paired else "pair first: fleetward join '…'",
    )
