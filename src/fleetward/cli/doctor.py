"""`fleetward doctor`: what is well here, what is not, and what to do.

Owns the checks. Refuses to repair anything, and names what it did not check.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import localtime
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import typer

from fleetward.cli.nodes import all_nodes, has_sandbox
from fleetward.cli.output import DONE, FAILED, size
from fleetward.cli.processes import lives, read_running
from fleetward.cli.settings import Settings, read_controller_file, settings_of
from fleetward.client import Client
from fleetward.domain.errors import Fault, Refusal
from fleetward.domain.nodes import NodeStatus
from fleetward.wire.messages import Node
from fleetward.wire.problem import RemoteFault

DISK_LOW_BYTES: Final = 1024**3  # below this a database, logs and artifacts soon have no room
CLOCK_APART_SECONDS: Final = 60.0  # a beat is at most some seconds old; the rest is the clocks'
ASK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    result: Literal["ok", "warning", "bad", "not checked"]
    message: str
    hint: str = ""


def doctor(ctx: typer.Context) -> None:
    """Look at the home, the controller, its database, the clock, the disk and the nodes."""
    settings = settings_of(ctx)
    findings: list[Finding] = []
    for finding in examine(settings):
        findings.append(finding)
        if not settings.output.is_json:
            settings.output.line(f"{finding.result.ljust(11)}  {finding.name.ljust(10)}  {finding.message}")
            if finding.hint:
                settings.output.line(f"{' ' * 25}{finding.hint}")
    if settings.output.is_json:
        settings.output.document(findings)
    raise typer.Exit(FAILED if any(finding.result == "bad" for finding in findings) else DONE)


def examine(settings: Settings) -> Iterator[Finding]:
    """All checks, in the order in which one explains the next."""
    yield _home(settings.home)
    yield _disk(settings.home)
    yield _process(settings)
    with settings.client() as client:
        answer = _controller(client)
        yield answer
        if answer.result == "bad":
            yield from (
                Finding(name, "not checked", "the controller does not answer")
                for name in ("key", "database", "clock", "nodes", "sandbox")
            )
            return
        yield _database(client)
        try:
            yield Finding("key", "ok", f"it proves {client.whoami().name}")
            nodes = list(all_nodes(client))
        except Refusal as refusal:
            yield Finding("key", "bad", refusal.message, refusal.hint)
            return
    yield _clock(nodes)
    yield _nodes(nodes)
    yield _sandbox(nodes)
    yield Finding("invariants", "not checked", "the controller has no call for it; the database itself enforces them")


def _home(home: Path) -> Finding:
    if not home.exists():
        return Finding("home", "warning", f"{home} is not there yet", "fleetward up makes it")
    if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        return Finding("home", "bad", f"{home} cannot be read and written by this user", "run as its owner")
    token = home / "token"
    if token.exists() and token.stat().st_mode & 0o077:
        return Finding("home", "bad", f"{token} can be read by others on this machine", f"chmod 600 {token}")
    return Finding("home", "ok", str(home))


def _disk(home: Path) -> Finding:
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < DISK_LOW_BYTES:
        return Finding(
            "disk", "warning", f"{size(free)} free below {there}", "make room; uploads are refused when full"
        )
    return Finding("disk", "ok", f"{size(free)} free below {there}")


def _process(settings: Settings) -> Finding:
    running = read_running(settings.home)
    if running is not None and lives(running.controller):
        return Finding("process", "ok", "`fleetward up` keeps a controller running on this home")
    told = read_controller_file(settings.home)
    if told is not None:
        return Finding("process", "ok", f"a controller runs on this home (process {told.pid}), without `fleetward up`")
    parts = urlsplit(settings.url)
    with socket.socket() as probe:
        probe.settimeout(ASK_SECONDS)
        if probe.connect_ex((parts.hostname or "127.0.0.1", parts.port or 443)) == 0:
            return Finding("process", "ok", f"none on this home; something answers at {settings.url}")
    return Finding("process", "warning", "no controller runs on this home", "fleetward up")


def _controller(client: Client) -> Finding:
    try:
        version = client.version()
    except (Refusal, Fault) as error:
        return Finding("controller", "bad", error.message, error.hint)
    return Finding("controller", "ok", f"version {version.version} at {client.url}")


def _database(client: Client) -> Finding:
    try:
        health = client.readyz()
    except RemoteFault as fault:
        return Finding("database", "bad", fault.message, fault.hint)
    return Finding("database", "ok", ", ".join(f"{name}: {text}" for name, text in health.checks.items()) or "ready")


def _clock(nodes: list[Node]) -> Finding:
    beats = [node.seen_at for node in nodes if node.status == NodeStatus.ONLINE and node.seen_at is not None]
    if not beats:
        return Finding("clock", "not checked", "no node is online to compare with")
    apart = abs((localtime() - max(beats)).total_seconds())
    if apart > CLOCK_APART_SECONDS:
        return Finding(
            "clock", "warning", f"this machine and the database differ by {apart:.0f} s", "check NTP on both"
        )
    return Finding("clock", "ok", "this machine's clock agrees with the database's")


def _nodes(nodes: list[Node]) -> Finding:
    there = [node for node in nodes if node.status not in {NodeStatus.REMOVED, NodeStatus.RETIRED}]
    away = [node.name for node in there if node.status in {NodeStatus.OFFLINE, NodeStatus.PROVISIONING}]
    if not there:
        return Finding("nodes", "warning", "no machine is paired", "fleetward node pair")
    if away:
        return Finding("nodes", "warning", f"not heard of: {', '.join(away)}", "run `fleetward agent` there")
    return Finding("nodes", "ok", f"{len(there)} paired, all heard of")


def _sandbox(nodes: list[Node]) -> Finding:
    online = [node for node in nodes if node.status == NodeStatus.ONLINE]
    if not online:
        return Finding("sandbox", "not checked", "no node is online")
    without = [node.name for node in online if not has_sandbox(node)]
    if without:
        return Finding(
            "sandbox",
            "warning",
            f"commands are not boxed in on {', '.join(without)}",
            "install bubblewrap there, or run only what you trust; `--sandbox require` avoids these nodes",
        )
    return Finding("sandbox", "ok", "commands are boxed in on every node that is online")
