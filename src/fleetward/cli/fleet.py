"""A controller and nodes of this machine, brought up and down in order.

Owns the start of each, the wait until it can work, and the pairing of a node through the API. Refuses
to know why they are wanted: `up` keeps them, `demo` throws them away.
"""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from fleetward.cli.processes import POLL, Asked, Child, Exited, News
from fleetward.cli.settings import ControllerFile, read_controller_file, read_text
from fleetward.client import Client
from fleetward.domain.errors import HomeUnusable, NodeNameNeeded, Unreachable
from fleetward.wire.messages import PairingCodeRequest
from fleetward.wire.problem import Problem, RemoteFault, RemoteRefusal, error_of

READY_LIMIT: Final = timedelta(seconds=120)  # a first start on a slow disk; PostgreSQL's own limit is shorter
PAIR_LIMIT: Final = timedelta(seconds=60)
ASK_LIMIT: Final = timedelta(seconds=5)
LOCAL: Final = "local"
NODE_FILE: Final = "node.json"
NAME_NEEDED: Final = NodeNameNeeded.code


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an agent home that says which node it is."""

    name: str = ""


class StoppedEarly(Exception):
    """A person asked to stop before all was up."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A controller to start; its other settings come from the environment and its own file."""

    home: Path
    flags: Sequence[str] = ()
    environment: Mapping[str, str] | None = None


def make_home(home: Path) -> None:
    """Make the folder that holds everything, for its owner only."""
    # As root, PostgreSQL and every attempt run as users of their own, who have to get through to their part.
    mode = 0o711 if os.geteuid() == 0 else 0o700
    try:
        home.mkdir(mode=mode, parents=True, exist_ok=True)
        (home / "nodes").mkdir(mode=mode, exist_ok=True)
    except OSError as error:
        raise HomeUnusable(
            f"the home {home} cannot be made: {(error.strerror or str(error)).lower()}",
            hint="choose another with --home or FLEETWARD_HOME",
        ) from error


def start_controller(wanted: Wanted) -> Child:
    """Start the controller of a home; it is not ready yet."""
    return Child(
        "controller",
        ["fleetward.controller", "serve", "--home", str(wanted.home), *wanted.flags],
        log=wanted.home / "controller.err",
        environment=wanted.environment,
    )


def wait_until_ready(controller: Child, home: Path, *, news: SimpleQueue[News]) -> ControllerFile:
    """Wait until the controller answers that it can work; raise in its own words when it cannot start."""
    left = READY_LIMIT
    others: list[News] = []
    try:
        while left > timedelta(0):
            try:
                told = news.get(timeout=POLL.total_seconds())
            except Empty:
                left -= POLL
            else:
                _heed(told, controller)
                others.append(told)
            announced = read_controller_file(home)
            if announced is not None and announced.pid == controller.process.pid and _is_ready(announced):
                return announced
    finally:
        # News of other children is for whoever keeps them.
        for told in others:
            news.put(told)
    raise Unreachable(
        f"the controller was not ready after {READY_LIMIT.total_seconds():.0f} s",
        hint=f"its log is {home / 'controller.log'}",
    )


def _heed(told: News, controller: Child) -> None:
    match told:
        case Exited(name=controller.name, status=status):
            raise failure(controller, status=status)
        case Asked():
            raise StoppedEarly
        case _:
            pass


def _is_ready(told: ControllerFile) -> bool:
    try:
        with Client(told.url, pin=told.pin, answer_limit=ASK_LIMIT, repeat_max=0) as client:
            client.readyz()
    except (Unreachable, RemoteFault):
        return False
    return True


def failure(child: Child, *, status: int) -> RemoteRefusal | RemoteFault:
    """What a child said when it ended, as an error of ours."""
    return spoken_failure(child.last_words(), what=f"the {child.name}", status=status, log=child.log)


def spoken_failure(words: str, *, what: str, status: int, log: Path | None = None) -> RemoteRefusal | RemoteFault:
    """Read `fleetward: message` and `hint: …` as a program of ours writes them."""
    message = re.search(r"^fleetward(?:-agent)?: (.+)$", words, re.MULTILINE)
    hint = re.search(r"^\s*hint: (.+)$", words, re.MULTILINE)
    last = words.splitlines()[-1] if words else "it said nothing"
    return error_of(
        Problem(
            code="program_ended",
            status=400 if status == 3 else 500,
            title="program ended",
            detail=message[1] if message else f"{what} ended with status {status}: {last}",
            hint=hint[1] if hint else (f"its log is {log}" if log else ""),
        )
    )


def pair_node(client: Client, home: Path, *, name: str | None, environment: Mapping[str, str] | None = None) -> None:
    """Make a code and have an agent home pair with it; a home that has paired before stays as it is."""
    if (home / NODE_FILE).exists():
        return
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    code = client.make_pairing_code(PairingCodeRequest())
    named = ["--name", name] if name else []
    done = subprocess.run(
        [sys.executable, "-m", "fleetward.agent", "join", "-", "--home", str(home), *named],
        input=code.join_string,
        capture_output=True,
        text=True,
        timeout=PAIR_LIMIT.total_seconds(),
        check=False,
        env=os.environ if environment is None else environment,
    )
    if done.returncode != 0:
        raise spoken_failure(done.stderr.strip(), what="pairing", status=done.returncode)


def start_agent(home: Path, *, name: str = "agent", environment: Mapping[str, str] | None = None) -> Child:
    """Start the agent of a home that has paired."""
    arguments = ["fleetward.agent", "run", "--home", str(home)]
    return Child(name, arguments, log=home / "agent.err", environment=environment)


def pair_local_node(client: Client, home: Path, told: ControllerFile) -> str:
    """Pair this machine's own node, and say what it is called and why."""
    node_home = home / "nodes" / LOCAL
    kept = home / "node_name"
    name = read_text(kept)
    source = "as before" if name or (node_home / NODE_FILE).exists() else "after its network interface"
    try:
        pair_node(client, node_home, name=name or None)
    except RemoteRefusal as refusal:
        if name or NAME_NEEDED not in refusal.problem.detail + refusal.problem.hint:
            raise
        name, source = f"node-{secrets.token_hex(6)}", "made up, for want of a network interface"
        kept.write_text(name + "\n")
        pair_node(client, node_home, name=name)
    point_at(node_home, told)
    return f"{node_name(node_home)} ({source})"


def point_at(home: Path, told: ControllerFile) -> None:
    """Tell this machine's own agent where its controller listens now; who that is, the keys say as before."""
    path = home / NODE_FILE
    kept = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    if (kept["url"], kept["pin"]) == (told.url, told.pin):
        return
    unfinished = path.with_name(f".{path.name}")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(msgspec.json.encode(kept | {"url": told.url, "pin": told.pin}) + b"\n")
    unfinished.rename(path)


def node_name(home: Path) -> str:
    """What a paired agent home is called."""
    return msgspec.json.decode(read_text(home / NODE_FILE) or "{}", type=NodeFile).name
