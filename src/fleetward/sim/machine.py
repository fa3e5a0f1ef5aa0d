"""A machine without hardware: a clock of its own, a disk that survives, and processes that outlive the agent.

Owns what a supervisor and its command would do: run for their time, end by themselves before the lease
does, leave files. Refuses to know the agent and the controller.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

from fleetward.agent.commands import Journal
from fleetward.agent.events import EndedBy
from fleetward.domain.jobs import JobSpec
from fleetward.domain.nodes import Inventory
from fleetward.wire.messages import DeclaredArtifact, InlineArtifact

DRIFT_MAX: Final = 0.01  # of a node's clock; twenty times the worst crystal
CHUNK_BYTES: Final = 64  # so that even a small file takes several pieces


@dataclass(frozen=True, slots=True)
class FakeFile:
    """A file that an attempt leaves behind. `claim` is what its node says of it, true or not."""

    path: str
    content: bytes
    claim: bytes
    is_large: bool

    @property
    def declared(self) -> DeclaredArtifact:
        """What the node declares."""
        return DeclaredArtifact(path=self.path, size_bytes=len(self.claim), sha256=_sha256(self.claim))

    @property
    def inline(self) -> InlineArtifact:
        """The file as it travels inside a report."""
        return InlineArtifact(
            path=self.path, size_bytes=len(self.claim), sha256=_sha256(self.claim), content=self.content
        )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(slots=True)
class Process:
    """An attempt under its supervisor. All times are of the machine's own clock."""

    id: UUID
    fence: int
    job_id: UUID
    spec: JobSpec
    runs_for: float
    exit_code: int
    deadline: float
    margin_seconds: float
    files: tuple[FakeFile, ...]
    runs_until: float = 0.0
    stop_at: float | None = None
    is_gone: bool = False
    ended_by: EndedBy | None = None
    deadline_lag: float = 0.0  # how long the tree takes to die once the deadline's margin is reached

    def begin(self, now: float) -> None:
        """Start to run."""
        self.runs_until = now + self.runs_for

    @property
    def phase(self) -> str:
        """How its supervisor says it stands."""
        return "gone" if self.is_gone else "running"

    @property
    def ends_at(self) -> float:
        """When it will be gone, as things are."""
        return min(self._ends())[0]

    def _ends(self) -> list[tuple[float, EndedBy]]:
        ends: list[tuple[float, EndedBy]] = [
            (self.runs_until, "exited"),
            (self.deadline - self.margin_seconds + self.deadline_lag, "deadline"),
        ]
        return ends if self.stop_at is None else [*ends, (self.stop_at, "stopped")]

    def advance(self, now: float) -> None:
        """Let time pass: the earliest end counts."""
        at, ended_by = min(self._ends())
        if not self.is_gone and at <= now:
            self.is_gone, self.ended_by = True, ended_by

    def kill(self) -> None:
        """The machine goes down under it."""
        if not self.is_gone:
            self.is_gone, self.ended_by = True, "lost"


@dataclass(slots=True)
class Disk:
    """What outlives the agent, and the machine too unless it is lost."""

    journal: Journal = field(default_factory=Journal)
    attempts: dict[UUID, Process] = field(default_factory=dict[UUID, Process])


@dataclass(slots=True)
class Machine:
    """A computer of the fleet, or of a stranger."""

    name: str
    rng: random.Random
    cpus_milli: int
    memory_bytes: int
    started_at: datetime
    disk: Disk = field(default_factory=Disk)
    boot: int = 1
    starts: dict[UUID, int] = field(default_factory=dict[UUID, int])
    _drift: float = 0.0
    _offset: float = 0.0

    def __post_init__(self) -> None:
        self.set_clock()

    def set_clock(self) -> None:
        """A clock begins at any number at each boot, and runs a little too fast or too slow."""
        self._drift = self.rng.uniform(-DRIFT_MAX, DRIFT_MAX)
        self._offset = self.rng.uniform(0.0, 1e6)

    def clock(self, now: datetime) -> float:
        """What the machine's own clock shows."""
        return self._offset + (now - self.started_at).total_seconds() * (1.0 + self._drift)

    @property
    def inventory(self) -> Inventory:
        """What its agent says it has."""
        return Inventory(
            cpus_milli=self.cpus_milli,
            memory_bytes=self.memory_bytes,
            disk_bytes=2**40,
            os="linux",
            arch="x86_64",
            agent_version="0.1.0",
            boot_id=f"boot-{self.boot}",
        )

    def living(self) -> Iterator[Process]:
        """The attempts that have processes."""
        return (process for process in self.disk.attempts.values() if not process.is_gone)

    def advance(self, now: datetime) -> None:
        """Let time pass for all processes."""
        local = self.clock(now)
        for process in self.disk.attempts.values():
            process.advance(local)

    def run(self, process: Process) -> None:
        """Start an attempt; a second start finds the first one's supervisor."""
        if process.id in self.disk.attempts:
            return
        self.starts[process.id] = self.starts.get(process.id, 0) + 1
        self.disk.attempts[process.id] = process

    def reboot(self, *, loses_attempts: bool) -> None:
        """Everything that ran is gone; the disk may have lost what is not synced."""
        self.boot += 1
        for process in self.disk.attempts.values():
            process.kill()
        if loses_attempts:
            # Nothing tells the next agent that these ever ran, so it may rightly start them.
            for id in self.disk.attempts:
                del self.starts[id]
            self.disk.attempts.clear()
        self.set_clock()

    def make_process(
        self, *, id: UUID, fence: int, job_id: UUID, spec: JobSpec, deadline: float, margin_seconds: float
    ) -> Process:
        """Throw the dice for one attempt: how long it runs, how it ends, what it leaves."""
        fails = self.rng.random() < float(spec.env.get("SIM_FAILS", "0"))
        return Process(
            id=id,
            fence=fence,
            job_id=job_id,
            spec=spec,
            runs_for=float(spec.env["SIM_SECONDS"]) * self.rng.uniform(0.5, 1.0),
            exit_code=3 if fails else 0,
            deadline=deadline,
            margin_seconds=margin_seconds,
            files=tuple(self._files(job_id, spec)),
            deadline_lag=self.rng.uniform(0.0, margin_seconds * 2 / 3),
        )

    def _files(self, job_id: UUID, spec: JobSpec) -> Iterator[FakeFile]:
        """The promised files, some of which are missing, are lies or differ from what another node makes."""
        lies = self.rng.random() < float(spec.env.get("SIM_LIES", "0"))
        differs = self.rng.random() < float(spec.env.get("SIM_DIFFERS", "0"))
        for number, rule in enumerate(spec.artifacts):
            made_by = self.name if differs else "any"
            content = hashlib.shake_128(f"{job_id} {rule.path} {made_by}".encode()).digest(150 + 10 * number)
            if lies and self.rng.random() < 0.5:
                continue
            claim = content[:-1] if lies else content
            yield FakeFile(path=rule.path, content=content, claim=claim, is_large=rule.path.endswith(".bin"))
