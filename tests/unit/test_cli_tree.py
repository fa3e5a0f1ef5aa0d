"""The command tree as a whole: every command explains itself with an example and takes the common flags."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.core import TyperCommand, TyperGroup

from fleetward.cli.main import command_tree

EVERYWHERE = {"--url", "--token", "--json", "--quiet"}
COMMANDS = {
    "up", "down", "status", "doctor", "demo", "join", "agent", "run", "node pair", "node ls", "node show", "job submit",
    "job ls", "job show", "job logs", "job events", "job artifacts", "job fetch", "job cancel", "db init", "db url",
    "db psql", "db migrate", "config show",
}  # fmt: skip


def leaves(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            assert isinstance(command, TyperCommand)
            yield prefix + name, command


ALL = dict(leaves(command_tree()))


def test_the_commands_are_those_of_the_contract() -> None:
    assert ALL.keys() == COMMANDS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_shows_an_example_of_itself(name: str) -> None:
    assert ALL[name].epilog is not None
    assert f"fleetward {name}" in str(ALL[name].epilog)
    assert ALL[name].help


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_takes_the_common_flags(name: str) -> None:
    flags = {flag for param in ALL[name].params for flag in param.opts}
    assert flags >= EVERYWHERE


def fleetward(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleetward", "--url", "http://127.0.0.1:1", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": "src", "FLEETWARD_HOME": "/nonexistent", "PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["run", "--replicas", "-1", "--", "true"], 3, "replicas: -1 is out of range"),
        (["run", "--artifact", "../up", "--", "true"], 3, "leaves the working folder"),
        (["run", "--memory", "lots", "--", "true"], 2, "is no size"),
        (["run"], 2, "Missing argument"),
        (["job", "show", "no-uuid"], 2, "Invalid value for 'JOB'"),
        (["job", "fly"], 2, "No such command 'fly'"),
        (["job", "submit", "/nonexistent/job.toml"], 4, "/nonexistent/job.toml: no such file or directory"),
        (["node", "ls"], 4, "no answer from the controller at http://127.0.0.1:1: connection refused"),
        (["agent"], 3, "holds 0 nodes (none)"),
    ],
)
def test_each_kind_of_trouble_has_its_exit_status(arguments: list[str], status: int, said: str) -> None:
    done = fleetward(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


@pytest.mark.parametrize("arguments", [["--json", "node", "ls"], ["node", "--json", "ls"], ["node", "ls", "--json"]])
def test_the_common_flags_stand_before_or_after_the_command(arguments: list[str]) -> None:
    done = fleetward(*arguments)
    assert done.returncode == 4
    assert done.stderr.startswith('{"code":"unreachable"')


def test_what_follows_the_command_of_a_run_is_its_own() -> None:
    done = fleetward("run", "--cpus", "0", "echo", "--json")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("fleetward: resources.cpus: 0 is out of range")
