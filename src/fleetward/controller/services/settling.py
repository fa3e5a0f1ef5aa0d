"""What becomes of jobs when their attempts end.

Owns the one path from ended attempts to a job's next status. Refuses to know why an attempt ended.
"""

import random
from collections.abc import Iterable
from uuid import UUID

from fleetward.controller.store import jobs
from fleetward.controller.store.jobs import Moved
from fleetward.controller.store.tx import Tx
from fleetward.domain.jobs import settle as decide


def settle(tx: Tx, job_ids: Iterable[UUID], *, actor: str = "controller") -> list[Moved]:
    """Move these jobs on; the caller holds their rows and has ended their attempts in this transaction."""
    wanted = set(job_ids)
    if not wanted:
        return []
    rng = random.Random(tx.new_id().int)
    moves = [(standing, decide(standing, rng=rng)) for standing in jobs.standings(tx, wanted)]
    return jobs.move(tx, moves, actor=actor)
