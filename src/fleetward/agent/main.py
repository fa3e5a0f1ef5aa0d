"""The agent program: `join` makes this machine a node, `run` is the node.

Owns the command line, the signals, the exit statuses and the wiring of all parts. Refuses to hold any of
their knowledge.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Final

import msgspec

from fleetward.agent import identity, journal, sandbox
from fleetward.agent.driver import Driver, Events
from fleetward.agent.events import StopRequested
from fleetward.agent.hands import Hands
from fleetward.agent.home import AgentHome
from fleetward.agent.identity import Identity
from fleetward.agent.inventory import mac_address
from fleetward.agent.log import start_logging
from fleetward.agent.session import Session
from fleetward.agent.transfers import Line
from fleetward.client import Client
from fleetward.domain.errors import Fault, InvalidSetting, Refusal, Unreachable
from fleetward.domain.nodes import MAC
from fleetward.wire.handshake import JoinString

REFUSED: Final = 3
FAULT: Final = 4
PAIR_TRIES: Final = 3  # the same key under the same code gets the same answer, so a lost one may be asked for again
PAIR_PAUSE: Final = 0.5  # seconds

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    asked = _parser().parse_args(arguments)
    act: Callable[[argparse.Namespace], int] = asked.act
    try:
        return act(asked)
    except Refusal as refusal:
        _complain(refusal)
        return REFUSED
    except Fault as fault:
        _complain(fault)
        return FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleetward.agent", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run the agent of a home that has paired", allow_abbrev=False)
    run.set_defaults(act=_run)
    join = commands.add_parser("join", help="make this machine a node", allow_abbrev=False)
    join.set_defaults(act=_join)
    for command in (run, join):
        command.add_argument("--home", type=Path, required=True, help="the agent's own folder")
    join.add_argument("join_string", help="what `fleetward node pair` printed; - reads it from the input")
    join.add_argument("--name", help="the node's name; else made from its hardware address")
    join.add_argument("--interface", help="the network interface that names it")
    join.add_argument("--label", action="append", default=[], metavar="K=V", help="a label of the node")
    join.add_argument("--json", action="store_true", help="print the node as a JSON document")
    return parser


def _complain(error: Refusal | Fault) -> None:
    sys.stderr.write(f"fleetward: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"hint: {error.hint}\n")


# Joining


def _join(asked: argparse.Namespace) -> int:
    if asked.label:
        raise InvalidSetting(
            "a machine cannot choose its own labels: they would decide which jobs it is trusted with",
            hint="whoever makes the code gives them: fleetward node pair --label K=V",
            field="label",
        )
    text = sys.stdin.readline() if asked.join_string == "-" else asked.join_string
    join = JoinString.parse(text)
    mac = mac_address() if asked.interface is None else _mac_of(asked.interface)
    name = identity.choose_name(asked.name, mac=mac)
    home = AgentHome.hold(asked.home)
    try:
        with Client(join.url, pin=join.pin) as client:
            who = _pair(client, join, home, name=name, mac=mac)
    finally:
        home.release()
    if asked.json:
        told = {"id": str(who.node_id), "name": who.name, "url": who.url, "home": str(home.path)}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    else:
        sys.stdout.write(f"this machine is now node {who.name} of {who.url}\n")
    return 0


def _pair(client: Client, join: JoinString, home: AgentHome, *, name: str, mac: str | None) -> Identity:
    for _ in range(PAIR_TRIES - 1):
        with suppress(Unreachable):
            return identity.pair(client, join, home, name=name, mac=mac)
        time.sleep(PAIR_PAUSE)
    return identity.pair(client, join, home, name=name, mac=mac)


def _mac_of(interface: str) -> str:
    path = Path("/sys/class/net") / interface / "address"
    try:
        mac = path.read_text("ascii").strip().lower() if "/" not in interface else ""
    except OSError:
        mac = ""
    if not MAC.fullmatch(mac):
        raise InvalidSetting(
            f"this machine has no network interface {interface!r} with a hardware address",
            hint="`ip link` lists them; or give a name with --name",
            field="interface",
        )
    return mac


# Running


def _run(asked: argparse.Namespace) -> int:
    who = identity.load(asked.home)
    home = AgentHome.hold(asked.home)
    start_logging(home.log)
    key = identity.load_key(home.path)
    rng = secrets.SystemRandom()
    events: Events = SimpleQueue()
    _hear_signals(events)
    with Client(who.url, pin=who.pin) as client:
        line = Line(client)
        features = sandbox.probe()
        hands = Hands(
            attempts=home.attempts,
            hidden=_hidden(home.path),
            node_name=who.name,
            line=line,
            features=features,
            rng=rng,
            tell=events.put,
        )
        driver = Driver(
            session=Session(rng=rng, journal=journal.read(home.journal)),
            home=home,
            who=who,
            key=key,
            line=line,
            hands=hands,
            features=features,
            events=events,
        )
        left = driver.run()
    if left.forgets_credential:
        identity.forget(home)
        log.info("the key of %s is removed from %s: this machine is nobody's node any more", who.name, home.path)
    log.log(logging.ERROR if left.exit_status else logging.INFO, "%s", left.message)
    if left.exit_status:
        sys.stderr.write(f"fleetward: {left.message}\n")
    home.release()
    return left.exit_status


def _hidden(home: Path) -> list[Path]:
    """Folders that no command should see: agents' homes, a controller's, and the rooms of its database."""
    above = [home.parent.parent] if home.parent.name == "nodes" else []
    known = [os.environ.get("FLEETWARD_HOME", ""), "~/.fleetward", "/var/lib/fleetward"]
    return [home, *above, *(Path(text).expanduser() for text in known if text)]


def _hear_signals(events: Events) -> None:
    """SIGTERM: finish, then leave; again, or Ctrl-C: leave at once, what runs goes on under its supervisors."""
    asked: list[int] = []

    def heard(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        events.put(StopRequested(at_once=number == signal.SIGINT or len(asked) > 1))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, heard)
    # A terminal that goes away is no reason to leave.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
