"""The load generator: a process of its own, told by lines on its standard input what to do.

Owns the simulated nodes and the submitting clients, and says after each task how much CPU they took.
Refuses to judge what it sees: it hands back times.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from uuid import UUID

import msgspec
import uvloop

from bench.connection import Connection
from bench.controller import BenchError
from bench.node import ARTIFACT, Node
from fleetward.client import Client
from fleetward.domain.jobs import ArtifactRule, JobSpec
from fleetward.wire.endpoints import ENDPOINTS
from fleetward.wire.messages import JobSubmitted

ROOT: Final = Path(__file__).resolve().parents[1]
SUBMIT: Final = next(endpoint.path for endpoint in ENDPOINTS if endpoint.name == "submit_job")
SUBMITTED: Final = msgspec.json.Decoder(JobSubmitted)
JOB: Final = JobSpec(command=["true"], name="bench", artifacts=[ArtifactRule(path=ARTIFACT)])
TOLD_SECONDS_MAX: Final = 10.0  # from the last submit until its order must have arrived


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the generator plays, and to which controller."""

    url: str
    key: str
    nodes: int
    slots: int
    clients: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Submit so many jobs: as fast as the clients can, or at a rate."""

    jobs: int
    per_second: float | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a task took; `told_seconds` is from each submit's start until a node had the order."""

    cpu_seconds: float
    wall_seconds: float
    told_seconds: list[float]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes are there."""

    nodes: int


class _Told:
    """When which job's order arrived at its node."""

    def __init__(self) -> None:
        self.at: dict[UUID, float] = {}
        self._news = asyncio.Event()

    def hear(self, job_id: UUID, at: float) -> None:
        """Note the first order of a job."""
        self.at.setdefault(job_id, at)
        self._news.set()

    async def all_of(self, jobs: Collection[UUID]) -> None:
        """Return once the orders of all these jobs have arrived."""
        while any(job_id not in self.at for job_id in jobs):
            self._news.clear()
            await self._news.wait()


@dataclass(slots=True)
class _Play:
    """The generator's world."""

    clients: list[Connection]
    told: _Told

    async def submit(self, connection: Connection, began_at: dict[UUID, float]) -> None:
        began = time.perf_counter()
        submitted = SUBMITTED.decode(await connection.post(SUBMIT, JOB))
        began_at[submitted.id] = began

    async def flood(self, count: int) -> dict[UUID, float]:
        """Submit as fast as all clients together can."""
        began_at: dict[UUID, float] = {}
        turns = iter(range(count))

        async def client(connection: Connection) -> None:
            for _ in turns:
                await self.submit(connection, began_at)

        await asyncio.gather(*map(client, self.clients))
        return began_at

    async def pace(self, count: int, *, per_second: float) -> dict[UUID, float]:
        """Submit at a rate, and wait until nodes have all the orders."""
        began_at: dict[UUID, float] = {}
        start = time.perf_counter()
        free = list(self.clients)
        under_way: set[asyncio.Task[None]] = set()

        async def one(connection: Connection) -> None:
            await self.submit(connection, began_at)
            free.append(connection)

        for nth in range(count):
            await asyncio.sleep(start + nth / per_second - time.perf_counter())
            if not free:
                raise BenchError(f"all {len(self.clients)} clients still wait: the rate is more than it can take")
            under_way.add(asyncio.create_task(one(free.pop())))
        await asyncio.gather(*under_way)
        async with asyncio.timeout(TOLD_SECONDS_MAX):
            await self.told.all_of(began_at)
        return began_at


async def _play(fleet: Fleet) -> None:
    told = _Told()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with Client(fleet.url) as client:
        nodes = [
            await Node.join(client, f"bench-{nth}", slots=fleet.slots, owners_key=fleet.key, told=told.hear)
            for nth in range(fleet.nodes)
        ]
    clients = [await Connection.open(fleet.url, token=fleet.key) for _ in range(fleet.clients)]
    play = _Play(clients, told)
    running = [asyncio.create_task(node.run()) for node in nodes]
    tasks = asyncio.create_task(_serve(play, reader))
    _say(Ready(nodes=len(nodes)))
    # Whatever ends first ends all: a node that fails must not leave the bench waiting.
    done, rest = await asyncio.wait({tasks, *running}, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    for task in done:
        task.result()
    for one in (*nodes, *clients):
        one.close()


async def _serve(play: _Play, reader: asyncio.StreamReader) -> None:
    mark = time.perf_counter(), time.process_time()
    while line := await reader.readline():
        if not line.strip():
            # An empty line asks what has been used since the task began.
            _say(_since(mark, []))
            continue
        task = msgspec.json.decode(line, type=Task)
        mark = time.perf_counter(), time.process_time()
        if task.per_second is None:
            await play.flood(task.jobs)
            _say(_since(mark, []))
        else:
            began_at = await play.pace(task.jobs, per_second=task.per_second)
            _say(_since(mark, [play.told.at[job_id] - began for job_id, began in began_at.items()]))


def _since(mark: tuple[float, float], told_seconds: list[float]) -> Done:
    wall, cpu = mark
    return Done(
        cpu_seconds=time.process_time() - cpu, wall_seconds=time.perf_counter() - wall, told_seconds=told_seconds
    )


def _say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


class LoadGenerator:
    """The generator's process, as the bench drives it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None, "it is opened with a pipe"
        assert process.stdout is not None, "it is opened with a pipe"
        self._process = process
        self._in: IO[bytes] = process.stdin
        self._out: IO[bytes] = process.stdout

    def do(self, task: Task) -> Done:
        """Have a task done, and return when its last job is submitted."""
        return self._ask(msgspec.json.encode(task))

    def so_far(self) -> Done:
        """What was used since the last task began."""
        return self._ask(b"")

    def await_ready(self) -> None:
        """Return once all nodes have joined."""
        msgspec.json.decode(self._line(), type=Ready)

    def _ask(self, line: bytes) -> Done:
        self._in.write(line + b"\n")
        self._in.flush()
        return msgspec.json.decode(self._line(), type=Done)

    def _line(self) -> bytes:
        line = self._out.readline()
        if not line:
            raise BenchError(f"the load generator ended with {self._process.wait()}; what it said stands above")
        return line


@contextmanager
def generator(fleet: Fleet) -> Generator[LoadGenerator]:
    """Run the load generator with its nodes joined; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.load"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(fleet),
        cwd=ROOT,
    )
    with process:
        try:
            playing = LoadGenerator(process)
            playing.await_ready()
            yield playing
        finally:
            process.terminate()


def _environment(fleet: Fleet) -> dict[str, str]:
    # The key must not show in the list of processes.
    return {**os.environ, "FLEETWARD_BENCH": msgspec.json.encode(fleet).decode()}


if __name__ == "__main__":
    uvloop.run(_play(msgspec.json.decode(os.environ["FLEETWARD_BENCH"], type=Fleet)))
