"""What the operator of a world wants done.

Owns the kinds of jobs that a world knows. Their environment tells the simulated machine how they go, so that
nothing but the job document itself travels. Refuses to know when they are submitted.
"""

import random
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fleetward.domain.jobs import ArtifactRule, JobSpec, Resources, Timeouts

# How long, how likely to fail, to lie about files, to make other files on another node.
KINDS: Final = (
    {"SIM_SECONDS": "3"},
    {"SIM_SECONDS": "20", "SIM_FAILS": "0.4"},
    {"SIM_SECONDS": "8", "SIM_LIES": "0.5"},
    {"SIM_SECONDS": "150"},
    {"SIM_SECONDS": "12", "SIM_DIFFERS": "0.4"},
)
PATHS: Final = ("out.txt", "out/table.csv", "big.bin", "bigger.bin")


@dataclass(slots=True, eq=False)
class Submission:
    """A job that the operator wants: said again under the same key until it is answered."""

    spec: JobSpec
    key: str
    job_id: UUID | None = None


def some_job(rng: random.Random) -> JobSpec:
    """Throw the dice for a job."""
    replicas = rng.choices([1, 2, 3], [60, 30, 10])[0]
    quorum = 2 if replicas >= 2 and rng.random() < 0.4 else 1
    return JobSpec(
        command=["simulated"],
        env=dict(rng.choices(KINDS, [40, 20, 20, 5, 15])[0]),
        artifacts=[ArtifactRule(path=path) for path in PATHS if rng.random() < 0.4],
        resources=Resources(cpus=rng.choices([1.0, 2.0], [75, 25])[0]),
        replicas=replicas,
        quorum=quorum,
        max_attempts=rng.choices([1, 2, 3], [1, 2, 4])[0],
        max_losses=rng.choices([0, 2, 20], [1, 2, 7])[0],
        timeouts=Timeouts(queue_seconds=rng.choices([100, 86_400], [1, 9])[0]),
        priority=rng.randrange(0, 101, 25),
    )
