"""`fleetward up` and `down`: a controller and a node on this machine, kept running.

Owns the order of start and stop, and starting again what has died. Refuses to know how a controller or
an agent works.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from signal import SIGTERM
from typing import Annotated, Final, NoReturn
from urllib.parse import urlsplit

import msgspec
import typer

from fleetward.cli import fleet, processes
from fleetward.cli.output import DONE, INTERRUPTED
from fleetward.cli.output import UNREACHABLE as FAULT
from fleetward.cli.processes import Asked, Child, Due, Exited, News, Running
from fleetward.cli.settings import (
    ControllerFile,
    Given,
    Settings,
    home_folder,
    is_in_the_clear,
    read_controller_file,
    settings_of,
)
from fleetward.client import Client
from fleetward.domain.errors import HomeLocked, Refusal, Unreachable
from fleetward.wire.problem import Problem, RemoteFault, RemoteRefusal, error_of

REMOVED: Final = 5
TOO_OLD: Final = 6
RESTART_FIRST: Final = timedelta(seconds=1)
RESTART_MAX: Final = timedelta(seconds=30)

Home = Annotated[Path | None, typer.Option(help="The folder that holds everything local.")]


def up(
    ctx: typer.Context,
    home: Home = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the controller listens.")] = None,
    database_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A PostgreSQL >= 15 of your own; else an embedded one.")
    ] = None,
    local_node: Annotated[
        bool | None, typer.Option("--local-node/--no-local-node", help="Whether this machine is a node too.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when all is ready.")] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The key of --tls-cert (PEM).")] = None,
    insecure_http: Annotated[bool, typer.Option("--insecure-http", help="Plain HTTP beyond this machine.")] = False,
) -> None:
    """Start a controller and a node on this machine, and keep them running."""
    settings = settings_of(ctx, home=home)
    flags: list[str] = []
    for flag, value in (("--listen", listen), ("--tls-cert", tls_cert), ("--tls-key", tls_key)):
        if value is not None:
            flags += [flag, str(value)]
    if local_node is not None:
        flags.append("--local-node" if local_node else "--no-local-node")
    if insecure_http:
        flags.append("--insecure-http")
    # By the environment: a command line, with the password in the URL, is open to all on this machine.
    environment = dict(os.environ)
    if database_url is not None:
        environment["FLEETWARD_DATABASE_URL"] = database_url
    fleet.make_home(settings.home)
    _refuse_second(settings.home)
    if detach:
        _start_detached(settings, flags, environment)
        return
    wanted = fleet.Wanted(home=settings.home, flags=flags, environment=environment)
    raise typer.Exit(_Keeper(settings, wanted).keep())


def _refuse_second(home: Path) -> None:
    running = processes.read_running(home)
    if running is None:
        return
    for name, mark in (("fleetward up", running.up), ("controller", running.controller), ("agent", running.agent)):
        if mark is not None and processes.lives(mark):
            raise HomeLocked(
                f"{name} already runs on {home} (process {mark.pid})",
                hint="stop it with `fleetward down`, or give this one a home of its own with --home",
            )


def _start_detached(settings: Settings, flags: list[str], environment: Mapping[str, str]) -> None:
    log = settings.home / "up.log"
    with processes.open_log(log) as errors:
        start = errors.seek(0, os.SEEK_END)
        keeper = subprocess.Popen(
            [sys.executable, "-m", "fleetward", "up", "--json", "--home", str(settings.home), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    assert keeper.stdout is not None, "asked for a pipe"
    try:
        ready = keeper.stdout.readline()
    except KeyboardInterrupt:
        keeper.terminate()
        keeper.wait()
        raise
    if not ready:
        raise _failure(log.read_bytes()[start:].decode(errors="replace"), status=keeper.wait(), log=log)
    if settings.output.is_json:
        sys.stdout.write(ready.decode())
        return
    told = read_controller_file(settings.home)
    assert told is not None, "the controller was ready"
    settings.output.line(f"fleetward runs at {told.url}; stop it with: fleetward down")
    _say_next(settings, told)


def _failure(words: str, *, status: int, log: Path) -> RemoteRefusal | RemoteFault:
    """The error that the process in the background ended with; it was asked for JSON."""
    *_, last = ["", *words.splitlines()]
    try:
        return error_of(msgspec.json.decode(last, type=Problem))
    except msgspec.DecodeError:
        return fleet.spoken_failure(words, what="`fleetward up`", status=status, log=log)


class _Keeper:
    """Starts the children, starts them again when they die, and stops them in order."""

    def __init__(self, settings: Settings, wanted: fleet.Wanted) -> None:
        self._settings = settings
        self._wanted = wanted
        self._news: SimpleQueue[News] = SimpleQueue()
        self._controller: Child | None = None
        self._agent: Child | None = None
        self._restarts = {"controller": 0, "agent": 0}

    def keep(self) -> int:
        """Run until asked to stop; returns the exit status."""
        processes.hear_signals(self._news)
        try:
            told = self._start_controller()
            self._wanted = _at_the_same_place(self._wanted, told)
            node = self._pair(told) if told.local_node else None
            if node is not None:
                self._start_agent()
            self._say_ready(told, node)
            return self._attend()
        except fleet.StoppedEarly:
            return INTERRUPTED
        finally:
            self._stop()

    def _start_controller(self) -> ControllerFile:
        self._controller = fleet.start_controller(self._wanted)
        self._controller.tell_end(self._news)
        self._note_running()
        return fleet.wait_until_ready(self._controller, self._settings.home, news=self._news)

    def _pair(self, told: ControllerFile) -> str | None:
        settings = self._settings
        token = (settings.home / "token").read_text().strip()
        try:
            with Client(told.url, token=token, pin=told.pin) as client:
                return fleet.pair_local_node(client, settings.home, told)
        except Refusal as refusal:
            # The controller is of use without it: other machines can still pair.
            settings.output.note(f"this machine is no node: {refusal.message}")
            if refusal.hint:
                settings.output.note(f"  {refusal.hint}")
            return None

    def _start_agent(self) -> None:
        self._agent = fleet.start_agent(self._settings.home / "nodes" / fleet.LOCAL)
        self._agent.tell_end(self._news)
        self._note_running()

    def _note_running(self) -> None:
        processes.write_running(
            self._settings.home,
            Running(
                up=processes.mark_of(os.getpid()),
                controller=None if self._controller is None else self._controller.mark,
                agent=None if self._agent is None else self._agent.mark,
            ),
        )

    def _say_ready(self, told: ControllerFile, node: str | None) -> None:
        settings = self._settings
        if settings.output.is_json:
            settings.output.document(
                {"url": told.url, "pin": told.pin, "home": str(settings.home), "node": node, "pid": os.getpid()}
            )
            return
        settings.output.fields(
            (("controller", told.url), ("home", str(settings.home)), ("node", node or "none on this machine"))
        )
        _say_next(settings, told)
        settings.output.note("Ctrl-C stops it.")

    def _attend(self) -> int:
        while True:
            match self._news.get():
                case Asked():
                    return DONE
                case Exited(name=name, status=status):
                    self._after_exit(name, status)
                case Due(name="agent"):
                    self._start_agent()
                case Due():
                    self._restart_controller()

    def _after_exit(self, name: str, status: int) -> None:
        child = self._agent if name == "agent" else self._controller
        assert child is not None, "only a child that was started ends"
        if name == "agent" and status in {REMOVED, TOO_OLD}:
            self._settings.output.note(f"the agent ended and is not started again: {child.last_words()}")
            return
        delay = min(RESTART_MAX, RESTART_FIRST * 2 ** min(self._restarts[name], 10))
        self._restarts[name] += 1
        self._settings.output.note(
            f"the {name} ended with status {status}; starting it again in {delay.total_seconds():g} s ({child.log})"
        )
        timer = threading.Timer(delay.total_seconds(), self._news.put, (Due(name),))
        timer.daemon = True
        timer.start()

    def _restart_controller(self) -> None:
        try:
            self._start_controller()
        except (RemoteRefusal, RemoteFault) as error:
            self._settings.output.note(f"the controller does not start: {error.message}")
            self._after_exit("controller", FAULT)
        except Unreachable as error:
            # It lives, but does not answer; its end is news, and starts it again.
            self._settings.output.note(f"the controller does not start: {error.message}")
            if self._controller is not None:
                self._controller.stop()

    def _stop(self) -> None:
        # The agent first: it reports what it holds while there is somebody to report to.
        if self._agent is not None:
            self._agent.stop(how=processes.LEAVE)
        if self._controller is not None:
            self._controller.stop()
        processes.forget_running(self._settings.home)


def _at_the_same_place(wanted: fleet.Wanted, told: ControllerFile) -> fleet.Wanted:
    """Keep the port that was taken: nodes know the controller by it, also when it is started again."""
    parts = urlsplit(told.url)
    if parts.hostname is None or parts.port is None or not any(flag.endswith(":0") for flag in wanted.flags):
        return wanted
    flags = [flag.removesuffix(":0") + f":{parts.port}" if flag.endswith(":0") else flag for flag in wanted.flags]
    return replace(wanted, flags=flags)


def _say_next(settings: Settings, told: ControllerFile) -> None:
    if is_in_the_clear(told.url):
        settings.output.note("Plain HTTP:       anyone on the way reads keys and jobs; start without --insecure-http")
    prefix = "" if home_folder(Given()) == settings.home else f"FLEETWARD_HOME={settings.home} "
    settings.output.note(f"Try it:           {prefix}fleetward run -- uname -a")
    settings.output.note(f"Another machine:  {prefix}fleetward node pair")


def down(ctx: typer.Context, home: Home = None) -> None:
    """Stop what `up` runs on this machine; jobs go on elsewhere."""
    settings = settings_of(ctx, home=home)
    running = processes.read_running(settings.home)
    was_running = running is not None and any(map(processes.lives, (running.up, running.controller, running.agent)))
    if running is not None:
        # `up` stops its children itself; they are left to end only where it was killed.
        ways = ((running.up, SIGTERM), (running.agent, processes.LEAVE), (running.controller, SIGTERM))
        for mark, how in ways:
            if not processes.end(mark, how=how):
                _refuse_to_kill(mark)
        processes.forget_running(settings.home)
    if settings.output.is_json:
        settings.output.document({"home": str(settings.home), "stopped": was_running})
    else:
        settings.output.line(f"stopped {settings.home}" if was_running else f"nothing runs on {settings.home}")


def _refuse_to_kill(mark: processes.Mark | None) -> NoReturn:
    pid = 0 if mark is None else mark.pid
    raise Unreachable(
        f"process {pid} did not end within {processes.STOP_LIMIT.total_seconds():.0f} s",
        hint=f"look at its log; `kill -9 {pid}` ends it by force, and the next `fleetward up` recovers",
    )
