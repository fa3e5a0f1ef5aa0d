"""Seeds in, outcomes out.

Owns one run of one seed and what is told of it. Refuses to know how many there are.
"""

import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Final

from fleetward.sim import bugs
from fleetward.sim.checks import Violated
from fleetward.sim.server import Server, scratch
from fleetward.sim.world import BUGS, make_world

STORY_LINES: Final = 40  # of the end of a story; its beginning is in the trace


@dataclass(frozen=True, slots=True)
class Ran:
    """How a seed went."""

    seed: int
    steps: int
    seconds: float
    digest: str
    story: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict[str, int])
    jobs: dict[str, int] = field(default_factory=dict[str, int])
    violation: str = ""
    number: int | None = None

    @property
    def told(self) -> str:
        """What a person needs in order to look into a failure."""
        tail = "\n".join(self.story[-STORY_LINES:])
        return (
            f"seed {self.seed} violates {self.violation}\n"
            f"the last of its {len(self.story)} lines:\n{tail}\n"
            f"replay: make sim SEED={self.seed}    whole story: python -m fleetward.sim --seed {self.seed} --trace"
        )


def run_all(server: Server, seeds: Sequence[int], *, jobs: int, bug: str | None = None) -> Iterator[Ran]:
    """Live through many worlds, some of them at once; their outcomes come in the order of the seeds."""
    if jobs == 1 or len(seeds) == 1:
        for seed in seeds:
            yield run(seed, server=server, bug=bug)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_one, [(server, seed, bug) for seed in seeds])


def _one(asked: tuple[Server, int, str | None]) -> Ran:
    server, seed, bug = asked
    return run(seed, server=server, bug=bug)


def run(seed: int, *, server: Server, bug: str | None = None) -> Ran:
    """Live through one world, with a bug planted in it or none."""
    with bugs.planted(bug):
        return _run(seed, server=server)


def _run(seed: int, *, server: Server) -> Ran:
    begun = time.monotonic()
    violation, number = "", None
    with server.world(f"world_{seed}") as database, scratch("fleetward-sim-") as folder, ExitStack() as stack:
        world = make_world(seed, database=database, folder=folder, stack=stack)
        try:
            world.run()
        except Violated as violated:
            violation, number = str(violated), violated.number
        except BUGS as error:
            where = "".join(traceback.format_exception(error)[-4:])
            violation, number = f"I0 nothing of ours breaks: {type(error).__name__}: {error}\n{where}", 0
        jobs: dict[str, int] = {}
        for job in world.checks.standing.jobs.values():
            jobs[job.status] = jobs.get(job.status, 0) + 1
        return Ran(
            seed=seed,
            steps=world.step,
            seconds=time.monotonic() - begun,
            digest=world.digest(),
            story=tuple(world.story),
            counts=world.counts,
            jobs=jobs,
            violation=violation,
            number=number,
        )
