"""Which node gets which job: a pure function of a snapshot.

Owns order, fit and choice. Refuses to know the clock, the database and how a plan is applied: the
store re-counts everything under its locks and drops what no longer fits.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from fleetward.domain.ids import JobId, NodeId, UserId


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that wants `wanted` further attempts opened at once."""

    id: JobId
    owner_id: UserId | None
    shape: str
    priority: int
    created_at: datetime
    cpus_milli: int
    memory_bytes: int
    labels: Mapping[str, str]
    sandbox: Literal["auto", "require", "none"]
    wanted: int
    # Nodes that hold the job or have verified it: two replicas never share a node.
    taken: frozenset[NodeId] = frozenset()
    failed: frozenset[NodeId] = frozenset()


@dataclass(frozen=True, slots=True)
class Room:
    """What an eligible online node has free: what it has, less what is unreleased on it."""

    node_id: NodeId
    labels: Mapping[str, str]
    cpus_milli: int
    memory_bytes: int
    has_sandbox: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet and its queue at one moment; `in_use` is the CPU that each owner's attempts hold."""

    candidates: Sequence[Candidate]
    rooms: Sequence[Room]
    in_use: Mapping[UserId | None, int] = field(default_factory=dict[UserId | None, int])


@dataclass(frozen=True, slots=True)
class Placement:
    """One attempt to open."""

    job_id: JobId
    node_id: NodeId


@dataclass(slots=True)
class _Free:
    room: Room
    cpus_milli: int
    memory_bytes: int


Reason = Literal["labels", "cpus", "memory", "sandbox", "already holds it"]


def plan(snapshot: Snapshot) -> tuple[Placement, ...]:
    """Give each wanted attempt, best job first, to the fittest node with room. Same input, same plan."""
    free = [_Free(room, room.cpus_milli, room.memory_bytes) for room in snapshot.rooms]
    placements: list[Placement] = []
    hopeless: set[str] = set()
    for job in _in_order(snapshot):
        # A fresh job of a shape that found no room finds none either: room only shrinks in one plan.
        if job.shape in hopeless:
            continue
        taken = set(job.taken)
        for _ in range(job.wanted):
            best = _fittest(job, free, taken)
            if best is None:
                if not job.taken:
                    hopeless.add(job.shape)
                break
            best.cpus_milli -= job.cpus_milli
            best.memory_bytes -= job.memory_bytes
            taken.add(best.room.node_id)
            placements.append(Placement(job.id, best.room.node_id))
    return tuple(placements)


def why_not(job: Candidate, rooms: Iterable[Room]) -> Counter[Reason]:
    """Count, for each constraint, the nodes that it excludes; a node counts for its first reason only."""
    reasons: Counter[Reason] = Counter()
    for room in rooms:
        reason = _reason(job, _Free(room, room.cpus_milli, room.memory_bytes), set(job.taken))
        if reason is not None:
            reasons[reason] += 1
    return reasons


def _in_order(snapshot: Snapshot) -> Iterable[Candidate]:
    """Priority first, then the owner who holds least, then age."""
    in_use: Counter[UserId | None] = Counter(dict(snapshot.in_use))
    by_priority: dict[int, dict[UserId | None, deque[Candidate]]] = {}
    for job in sorted(snapshot.candidates, key=lambda job: (job.created_at, job.id)):
        by_priority.setdefault(job.priority, {}).setdefault(job.owner_id, deque()).append(job)
    for priority in sorted(by_priority, reverse=True):
        queues = by_priority[priority]
        while queues:
            owner = min(queues, key=lambda owner: (in_use[owner], queues[owner][0].created_at, str(owner)))
            job = queues[owner].popleft()
            if not queues[owner]:
                del queues[owner]
            in_use[owner] += job.cpus_milli * job.wanted
            yield job


def _fittest(job: Candidate, free: Sequence[_Free], taken: set[NodeId]) -> _Free | None:
    fit = [room for room in free if _reason(job, room, taken) is None]
    if not fit:
        return None
    # A node that failed this job comes last; most room first spreads load; the id breaks ties so replays agree.
    return max(fit, key=lambda room: (room.room.node_id not in job.failed, room.cpus_milli, -room.room.node_id.int))


def _reason(job: Candidate, free: _Free, taken: set[NodeId]) -> Reason | None:
    if free.room.node_id in taken:
        return "already holds it"
    if job.sandbox == "require" and not free.room.has_sandbox:
        return "sandbox"
    if any(free.room.labels.get(key) != value for key, value in job.labels.items()):
        return "labels"
    if free.cpus_milli < job.cpus_milli:
        return "cpus"
    if free.memory_bytes < job.memory_bytes:
        return "memory"
    return None
