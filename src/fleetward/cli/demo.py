"""`fleetward demo`: a throw-away fleet of three nodes, one of which lies.

Owns the order of the play and what is said of it. Refuses to pretend: the controller, the agents and the
liar are processes like any others, and every line that is shown comes from an event of the controller.
"""

import contextlib
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Final
from uuid import UUID

import typer

from fleetward.cli import fetch, fleet
from fleetward.cli.output import FAILED, Output, instant, visible
from fleetward.cli.processes import LEAVE, Child, News
from fleetward.cli.run import submit
from fleetward.cli.settings import Settings, settings_of
from fleetward.cli.story import is_quiet, paths, reason, sentence
from fleetward.cli.watch import events, follow_events, log_tail
from fleetward.client import Client
from fleetward.domain.errors import HomeUnusable, Unreachable
from fleetward.domain.jobs import ArtifactRule, JobSpec, JobStatus, Resources
from fleetward.domain.nodes import NodeStatus
from fleetward.verify.archive import Member
from fleetward.wire.messages import Event, Job, PairingCodeRequest

if TYPE_CHECKING:
    from rich.console import Console

LIAR: Final = "mallory"
HONEST: Final = ("ada", "grace")
WORK: Final = Path(__file__).with_name("stdlib_index.py")
FOLDER: Final = "fleetward-demo"
FOLDERS_MAX: Final = 1000
ONLINE_LIMIT: Final = timedelta(seconds=30)
RELEASE_LIMIT: Final = timedelta(seconds=20)
EMPTY_IN_A_SANDBOX: Final = tuple(Path(os.sep, name) for name in ("tmp", "var/tmp", "dev/shm", "run"))
POLL: Final = timedelta(milliseconds=100)


def demo(
    ctx: typer.Context,
    output: Annotated[Path | None, typer.Option(help="Where the results are left; else ./fleetward-demo.")] = None,
) -> None:
    """Show the point in a minute: three nodes do one job, one of them lies, and only proof counts."""
    settings = settings_of(ctx)
    # Like Ctrl-C, so that all is taken down whoever ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = _free_folder(output)
    with tempfile.TemporaryDirectory(prefix="fleetward-demo-", ignore_cleanup_errors=True) as home:
        play = _Play(settings=settings, home=Path(home), console=_console(settings))
        with contextlib.closing(play):
            job = play.perform(folder)
    if settings.output.is_json:
        settings.output.document(play.summary(job, folder))
    raise typer.Exit(0 if job.status == JobStatus.COMPLETED else FAILED)


def _console(settings: Settings) -> "Console":
    from rich.console import Console

    return Console(stderr=settings.output.is_json, quiet=settings.output.is_quiet, highlight=False, soft_wrap=True)


def _free_folder(output: Path | None) -> Path:
    if output is not None:
        fetch.check_free(output, is_named=False)
        return output
    if not os.access(".", os.W_OK):
        return Path(tempfile.mkdtemp(prefix="fleetward-demo-result-"))
    names = [FOLDER, *(f"{FOLDER}-{number}" for number in range(2, FOLDERS_MAX))]
    return Path(next(name for name in names if not os.path.lexists(name)))


def _interpreter() -> str:
    """A Python that an attempt can run: as root each is a user of its own, and a sandbox has a /tmp of its own."""
    own = os.path.realpath(sys.executable)  # a virtual environment may lie anywhere, and the work needs none
    for candidate in (own, "/usr/bin/python3", "/usr/local/bin/python3"):
        program = Path(os.path.realpath(candidate))
        if program.exists() and _is_open_to_all(program) and not any(map(program.is_relative_to, EMPTY_IN_A_SANDBOX)):
            return candidate
    if os.geteuid() != 0:
        return own
    raise HomeUnusable(
        f"{sys.executable} lies where only root may go, and the demo's attempts run as users of their own",
        hint="install a Python for all users (/usr/bin/python3), or run the demo as an ordinary user",
    )


def _is_open_to_all(program: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in program.parents)


@dataclass(slots=True)
class _Play:
    """One performance. Whatever it started, `close` ends."""

    settings: Settings
    home: Path
    console: "Console"
    news: SimpleQueue[News] = field(default_factory=SimpleQueue[News])
    children: list[Child] = field(default_factory=list[Child])
    standing: dict[str, str] = field(default_factory=dict[str, str])
    refused: list[str] = field(default_factory=list[str])
    told: int = 0
    fetched: fetch.Fetched | None = None

    def perform(self, folder: Path) -> Job:
        """Play it all and return the job as it ended."""
        with self._raise_fleet() as client:
            made = submit(client, self._silent(), self._spec(), members=[_work()])
            self._title(f"One job, two nodes at once: index Python's standard library ({made.id})")
            with self.console.status("") as standing:
                for event in follow_events(client, made.id):
                    self._tell(event)
                    self._maybe_send_for_grace(event)
                    standing.update(self._standing(event))
            job = client.show_job(made.id)
            self._wait_until_released(client, made.id)
            if job.status == JobStatus.COMPLETED:
                self._show_result(client, job, folder)
            else:
                self._say(f"the job {job.status}: {job.error or 'for no given reason'}", style="red")
                for line in log_tail(client, made.id):
                    self._say(line, style="dim")
            self._show_trail(client, made.id)
        return job

    def close(self) -> None:
        """Stop everything, the last first."""
        with self.console.status("taking it all down"):
            for child in reversed(self.children):
                child.stop(how=signal.SIGTERM if child.name == "controller" else LEAVE)
        self.console.print("Nothing is left running.", style="dim")

    def summary(self, job: Job, folder: Path) -> dict[str, object]:
        """The performance as one document."""
        return {
            "job_id": job.id,
            "status": job.status,
            "refused": self.refused,
            "events": self.told,
            "output": str(folder.absolute()) if self.fetched is not None else None,
            "artifacts": () if self.fetched is None else self.fetched.paths,
        }

    @contextlib.contextmanager
    def _raise_fleet(self) -> Generator[Client]:
        self._title("A throw-away fleet")
        fleet.make_home(self.home)
        flags = ("--listen", "127.0.0.1:0", "--no-local-node")
        wanted = fleet.Wanted(home=self.home, flags=flags, environment=_environment())
        with self.console.status("starting PostgreSQL and the controller"):
            controller = fleet.start_controller(wanted)
            self.children.append(controller)
            controller.tell_end(self.news)
            told = fleet.wait_until_ready(controller, self.home, news=self.news)
        self._say(f"controller at {told.url}, with a PostgreSQL of its own")
        token = (self.home / "token").read_text().strip()
        with Client(told.url, token=token, pin=told.pin) as client:
            with self.console.status("pairing three nodes"):
                self._pair_all(client)
                self.children.append(fleet.start_agent(self._node_home("ada"), environment=_environment()))
                self._wait_until_online(client, {"ada", LIAR})
            yield client

    def _pair_all(self, client: Client) -> None:
        threads = [threading.Thread(target=self._pair, args=(client, name)) for name in HONEST]
        for thread in threads:
            thread.start()
        self._start_liar(client)
        for thread in threads:
            thread.join()

    def _pair(self, client: Client, name: str) -> None:
        fleet.pair_node(client, self._node_home(name), name=name, environment=_environment())

    def _start_liar(self, client: Client) -> None:
        code = client.make_pairing_code(PairingCodeRequest())
        secret = self.home / "nodes" / "mallory.join"
        secret.write_text(code.join_string + "\n")
        secret.chmod(0o600)
        arguments = ["fleetward.cli.liar", LIAR, str(secret)]
        self.children.append(Child(LIAR, arguments, log=self.home / "mallory.err", environment=_environment()))

    def _node_home(self, name: str) -> Path:
        return self.home / "nodes" / name

    def _wait_until_online(self, client: Client, names: set[str]) -> None:
        left = ONLINE_LIMIT
        while left > timedelta(0):
            online = {node.name for node in client.list_nodes().items if node.status == NodeStatus.ONLINE}
            if names <= online:
                self._say(f"nodes online: {', '.join(sorted(online))}; {LIAR} is a liar, and nobody knows it yet")
                return
            time.sleep(POLL.total_seconds())
            left -= POLL
        logs = ", ".join(str(child.log) for child in self.children)
        raise Unreachable(f"the nodes {sorted(names)} did not all come online", hint=f"their logs were {logs}")

    def _spec(self) -> JobSpec:
        return JobSpec(
            name="stdlib-index",
            command=[_interpreter(), WORK.name, "index.json", "index.svg"],
            artifacts=[
                ArtifactRule(path="index.json", min_bytes=1000),
                ArtifactRule(path="index.svg", min_bytes=1000, media_type="image/svg+xml"),
            ],
            # Little, so that a machine with one CPU can play all three nodes.
            resources=Resources(cpus=0.25),
            replicas=2,
            max_attempts=6,
        )

    def _silent(self) -> Settings:
        return replace(self.settings, output=Output(is_json=False, is_quiet=True))

    def _tell(self, event: Event) -> None:
        if event.kind == "artifact.stored" and event.node != LIAR:
            self._say(f"{event.node} handed in {', '.join(paths(event))}: stored, hashed, not believed yet")
        if is_quiet(event):
            return
        style = {"assignment.rejected": "red", "assignment.verified": "green", "job.completed": "bold green"}
        if event.kind == "assignment.rejected" and event.node == LIAR:
            self.refused.append(reason(event))
        self._say(sentence(event), style=style.get(event.kind, ""))

    def _standing(self, event: Event) -> str:
        """Where each node stands, on one line."""
        if event.node is not None and event.kind.startswith("assignment."):
            self.standing[event.node] = event.kind.removeprefix("assignment.")
        return "   ".join(f"{node}: {state}" for node, state in sorted(self.standing.items()))

    def _maybe_send_for_grace(self, event: Event) -> None:
        """The third node comes to work when the liar is about to lie again, and takes her place after that."""
        is_again = event.kind == "assignment.assigned" and event.node == LIAR and self.refused
        if is_again and not any(child.name == "grace" for child in self.children):
            self._say("grace comes online", style="dim")
            self.children.append(fleet.start_agent(self._node_home("grace"), name="grace", environment=_environment()))

    def _wait_until_released(self, client: Client, job_id: UUID) -> None:
        left = RELEASE_LIMIT
        with self.console.status("waiting until every node has stopped its processes"):
            while left > timedelta(0):
                if all(held.released_at is not None for held in client.list_assignments(job_id).items):
                    return
                time.sleep(POLL.total_seconds())
                left -= POLL

    def _show_result(self, client: Client, job: Job, folder: Path) -> None:
        self._title("What came of it")
        self.fetched = fetch.fetch(client, job, folder=folder, is_named=False)
        winner = next(held for held in client.list_assignments(job.id).items if held.id == job.winning_assignment_id)
        for file in client.list_artifacts(job.id).items:
            if file.path in self.fetched.paths and file.assignment_id == winner.id:
                with (folder / file.path).open("rb") as content:
                    found = hashlib.file_digest(content, "sha256").hexdigest()
                assert found == file.sha256, "checked on arrival"
                self._say(f"{(folder / file.path).absolute()}", style="bold")
                self._say(
                    f"  {file.size_bytes} bytes by {winner.node}, SHA-256 {found[:16]}…, as verified", style="dim"
                )

    def _show_trail(self, client: Client, job_id: UUID) -> None:
        self._title("The trail: every change, recorded with it, never edited")
        for event in events(client, job_id):
            self.told += 1
            self._say(f"{instant(event.at)[11:]}  {event.kind:<22}  {event.node or ''}", style="dim")

    def _title(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold", markup=False)

    def _say(self, text: str, *, style: str = "") -> None:
        self.console.print(f"  {visible(text)}", style=style or None, markup=False)


def _work() -> Member:
    return Member(path=WORK.name, size_bytes=WORK.stat().st_size, is_executable=False, open=lambda: WORK.open("rb"))


def _environment() -> Mapping[str, str]:
    """Without the person's own settings: the demo must not touch their fleet or database."""
    return {key: value for key, value in os.environ.items() if not key.startswith("FLEETWARD_")}
