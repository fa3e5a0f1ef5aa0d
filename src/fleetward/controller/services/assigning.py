"""From the queue to the nodes: load, decide, apply.

Owns one round of assignment. Refuses to know which job is best (`scheduler`) and what still fits when
the plan is applied (`store.queue`).
"""

from dataclasses import dataclass
from uuid import UUID

from fleetward.controller.scheduler.plan import Candidate, Room, Snapshot, plan
from fleetward.controller.store import jobs, nodes, queue
from fleetward.controller.store.queue import Waiting
from fleetward.controller.store.tx import Database, Tx
from fleetward.domain.ids import JobId, NodeId, UserId
from fleetward.domain.jobs import stored_spec
from fleetward.domain.nodes import Rhythm

DEPTH = 200  # jobs of one (shape, owner) that a round looks at; more than a round can place on most fleets


@dataclass(frozen=True, slots=True)
class AssignRound:
    """What one round made, for which nodes, and whether another round may find more."""

    made: int
    nodes: frozenset[UUID]
    has_more: bool


def assign(database: Database, *, rhythm: Rhythm) -> AssignRound:
    """Give waiting jobs to nodes with room, as many as one plan places."""
    with database.begin() as tx:
        snapshot = load(tx)
    placements = plan(snapshot)
    if not placements:
        return AssignRound(made=0, nodes=frozenset(), has_more=False)
    with database.begin() as tx:
        jobs.lock(tx, [placement.job_id for placement in placements])
        # Whoever adds to a node's load holds its row alone, or two rounds would each fill the same room.
        nodes.lock(tx, [placement.node_id for placement in placements])
        assigned = queue.assign(
            tx,
            ids=[tx.new_id() for _ in placements],
            job_ids=[placement.job_id for placement in placements],
            node_ids=[placement.node_id for placement in placements],
            lease=rhythm.lease,
        )
    made = assigned.rows
    has_more = len(snapshot.candidates) >= DEPTH or len(made) < len(placements)
    return AssignRound(made=len(made), nodes=frozenset(row.node_id for row in made), has_more=has_more)


def load(tx: Tx) -> Snapshot:
    """Read the queue's best and the fleet's room."""
    waiting, in_use = tx.later(queue.CANDIDATES, depth=DEPTH), tx.later(queue.IN_USE)
    free = rooms(tx)
    return Snapshot(
        candidates=[candidate for row in waiting.rows if (candidate := _candidate(row)) is not None],
        rooms=free,
        in_use={None if row.owner_id is None else UserId(row.owner_id): row.cpus_milli for row in in_use.rows},
    )


def rooms(tx: Tx) -> list[Room]:
    """What each eligible online node has free."""
    return [
        Room(
            node_id=NodeId(row.id),
            labels=row.labels,
            cpus_milli=row.cpus_milli,
            memory_bytes=row.memory_bytes,
            has_sandbox=row.has_sandbox,
        )
        for row in tx.all(queue.ROOMS)
    ]


def _candidate(row: Waiting) -> Candidate | None:
    spec = stored_spec(row.spec)
    if not spec.command:
        return None
    return Candidate(
        id=JobId(row.id),
        owner_id=None if row.owner_id is None else UserId(row.owner_id),
        shape=row.shape,
        priority=row.priority,
        created_at=row.created_at,
        cpus_milli=row.cpus_milli,
        memory_bytes=row.memory_bytes,
        labels=spec.labels,
        sandbox=spec.sandbox,
        wanted=row.wanted,
        taken=frozenset(map(NodeId, row.taken)),
        failed=frozenset(map(NodeId, row.failed)),
    )
