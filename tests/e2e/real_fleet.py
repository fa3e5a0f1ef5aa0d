"""A real controller and real agents for the tests that kill them: each agent is a process of its own.

Owns the way to make a node, to hear what it says, and to kill it as a machine dies. Refuses to wait by the
clock: it waits for events of the controller and for lines of the agents.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from command_line import House, a_house

from fleetward.client import Client
from fleetward.domain.jobs import ArtifactRule, JobSpec, JobStatus
from fleetward.wire.messages import Assignment, Event, Job, PairingCodeRequest

PATIENCE = 60.0
TIME_SCALE = "0.1"  # a lease is 9 s
ENDINGS = frozenset({"job.completed", "job.failed", "job.cancelled"})


@dataclass
class Agent:
    """One agent process, and what it says."""

    home: Path
    name: str
    environment: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)
    said: list[str] = field(default_factory=list)
    _lines: "queue.SimpleQueue[str | None]" = field(init=False)
    _listener: threading.Thread = field(init=False)

    def start(self) -> None:
        """Start it, or start it again."""
        self._lines = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fleetward.agent", "run", "--home", str(self.home)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put(None)

    def hear(self, words: str) -> str:
        """Wait for a line that holds these words."""
        ends = time.monotonic() + PATIENCE
        while True:
            line = self._lines.get(timeout=max(0.1, ends - time.monotonic()))
            assert line is not None, f"{self.name} ended before it said {words!r}: {self.said}"
            self.said.append(line)
            if words in line:
                return line

    def kill(self) -> None:
        """Kill the agent alone, as the kernel does when memory is short."""
        self.process.kill()
        self._reap()

    def kill_all(self) -> list[int]:
        """Kill the agent, every supervisor and every job below its home, as when a machine loses its power."""
        victims = self.tree()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reap()
        return victims

    def tree(self, *, below: Path | None = None) -> list[int]:
        """All processes of this node, or of one attempt: their command line or environment names its folder."""
        mark = os.fsencode(below or self.home)
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes():
                        found.append(int(folder.name))
        return found

    def leave(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to leave and say its exit status."""
        self.process.send_signal(how)
        return self._reap()

    def _reap(self) -> int:
        status = self.process.wait(timeout=PATIENCE)
        self._listener.join(timeout=PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def attempt(self, assignment_id: UUID) -> Path:
        """The folder of one attempt."""
        return self.home / "attempts" / str(assignment_id)


@dataclass
class Fleet:
    """A controller, its owner's client, and a way to get nodes."""

    house: House
    client: Client
    agents: list[Agent] = field(default_factory=list)

    def join(self, name: str, *, labels: dict[str, str] | None = None) -> Agent:
        """Make a node; its agent does not run yet. Jobs find it by the label `who`."""
        code = self.client.make_pairing_code(PairingCodeRequest(labels=labels or {"who": name}))
        agent = Agent(self.house.home / "nodes" / name, name, self.house.environment)
        done = subprocess.run(
            [sys.executable, "-m", "fleetward.agent", "join", "-", "--home", str(agent.home), "--name", name],
            input=code.join_string,
            capture_output=True,
            text=True,
            env=agent.environment,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.agents.append(agent)
        return agent

    def node(self, name: str, *, labels: dict[str, str] | None = None) -> Agent:
        """Make a node and start it."""
        agent = self.join(name, labels=labels)
        agent.start()
        return agent

    def submit(self, *command: str, artifacts: tuple[str, ...] = (), **fields: Any) -> UUID:
        """Hand a job to the fleet; unless told otherwise it has one attempt, so that a failure is its end."""
        rules = [ArtifactRule(path=path) for path in artifacts]
        spec = JobSpec(command=list(command), artifacts=rules, **{"max_attempts": 1, **fields})
        return self.client.submit_job(spec).id

    def wait_for(self, job_id: UUID, is_it: Callable[[Event], bool]) -> Event:
        """Wait for one event of a job; the controller holds the question."""
        ends = time.monotonic() + PATIENCE
        after: str | None = None
        seen: list[str] = []
        while time.monotonic() < ends:
            events = self.client.job_events(job_id, after=after, wait_seconds=10.0)
            for event in events.items:
                seen.append(event.kind)
                if is_it(event):
                    return event
            after = events.next
        said = {agent.name: agent.said for agent in self.agents}
        raise AssertionError(f"job {job_id} did not come to that: {seen}; {said}")

    def end(self, job_id: UUID) -> Job:
        """Wait for the end of a job."""
        self.wait_for(job_id, lambda event: event.kind in ENDINGS)
        job = self.client.show_job(job_id)
        assert JobStatus(job.status).is_ended
        return job

    def attempts(self, job_id: UUID) -> list[Assignment]:
        """All attempts of a job, oldest first."""
        return self.client.list_assignments(job_id).items

    def released(self, job_id: UUID, assignment_id: UUID) -> None:
        """Wait until the node has let go of an attempt."""
        self.wait_for(
            job_id, lambda event: event.kind == "assignment.released" and event.assignment_id == assignment_id
        )

    def hear_log(self, job_id: UUID, words: bytes, *, assignment_id: UUID | None = None) -> Assignment:
        """Wait until one attempt, or the newest, has written these words; gives the newest attempt."""
        ends = time.monotonic() + PATIENCE
        content, offset = b"", 0
        while words not in content:
            assert time.monotonic() < ends, f"job {job_id} has written only {content!r}"
            log = self.client.job_log(job_id, assignment=assignment_id, offset=offset, wait_seconds=10.0)
            content, offset = content + log.content, log.next_offset
            assert words in content or not log.ended, f"job {job_id} has written only {content!r}"
        return self.attempts(job_id)[-1]

    def log(self, job_id: UUID) -> bytes:
        """Read the whole log of an ended job."""
        content = b""
        while True:
            log = self.client.job_log(job_id, offset=len(content), wait_seconds=10.0)
            content += log.content
            if log.ended:
                return content

    def file(self, job_id: UUID, path: str) -> bytes:
        """Fetch a verified artifact."""
        with self.client.read_artifact(job_id, path=path) as download:
            return b"".join(download)


@contextlib.contextmanager
def a_fleet() -> Generator[Fleet]:
    """A controller that runs, without a node; gone afterwards with all its nodes."""
    with a_house() as house:
        up = subprocess.run(
            [
                sys.executable,
                "-m",
                "fleetward",
                "up",
                "--no-local-node",
                "--detach",
                "--json",
                "--listen",
                "127.0.0.1:0",
            ],
            capture_output=True,
            text=True,
            env=house.environment | {"FLEETWARD_TIME_SCALE": TIME_SCALE},
            timeout=PATIENCE,
            check=False,
        )
        assert up.returncode == 0, up.stderr
        told = json.loads(up.stdout)
        with Client(told["url"], pin=told["pin"], token=(house.home / "token").read_text().strip()) as client:
            fleet = Fleet(house, client)
            try:
                yield fleet
            finally:
                for agent in fleet.agents:
                    if hasattr(agent, "process"):
                        agent.kill_all()
