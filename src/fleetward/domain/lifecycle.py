"""Lifecycles: which moves there are, and which columns a state may hold.

Owns the tables that database, documents and tests agree with; each is written once, here. Refuses to know who may make
a move, and what else it takes: that is for the statement that makes it.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from fleetward.domain.jobs import AssignmentState as A
from fleetward.domain.jobs import JobStatus as J
from fleetward.domain.nodes import NodeStatus as N
from fleetward.domain.workspaces import OrchestrationStatus as O

State = TypeVar("State", bound=StrEnum)


class Edge(NamedTuple, Generic[State]):
    """One move: from a state, by an event, to a state."""

    start: State
    event: str
    end: State


@dataclass(frozen=True, slots=True)
class Lifecycle(Generic[State]):
    """A table's machine: its moves, and the shape of a row in each state."""

    table: str
    column: str
    start: State
    edges: frozenset[Edge[State]]
    may_hold: Mapping[str, frozenset[State]]  # the columns that only some states may have set, and which
    must_hold: Mapping[str, frozenset[State]] = field(default_factory=dict[str, frozenset[State]])
    apart: frozenset[frozenset[str]] = frozenset()  # columns of which a row has at most one set

    @property
    def states(self) -> tuple[State, ...]:
        """All states, in the order of their definition."""
        return tuple(type(self.start))

    @property
    def final(self) -> frozenset[State]:
        """The states that nothing leaves."""
        return frozenset(self.states) - {edge.start for edge in self.edges}

    def allows(self, start: State, end: State) -> bool:
        """Whether any event moves a thing from the one state to the other."""
        return any(edge.start is start and edge.end is end for edge in self.edges)

    def events_from(self, state: State) -> tuple[str, ...]:
        """The events that may happen in a state."""
        return tuple(sorted(edge.event for edge in self.edges if edge.start is state))

    @property
    def shape_columns(self) -> tuple[str, ...]:
        """The columns that states have a say in."""
        return tuple(sorted({*self.may_hold, *self.must_hold}))

    def fits(self, state: State, columns: Collection[str]) -> bool:
        """Whether a row in that state may have these columns set, and none else of `shape_columns`."""
        return (
            all(state in self.may_hold[column] for column in columns if column in self.may_hold)
            and all(column in columns for column, states in self.must_hold.items() if state in states)
            and not any(pair <= set(columns) for pair in self.apart)
        )

    def path_to(self, state: State) -> tuple[Edge[State], ...]:
        """A shortest way from the start to a state."""
        paths: dict[State, tuple[Edge[State], ...]] = {self.start: ()}
        waiting = deque([self.start])
        while waiting:
            here = waiting.popleft()
            for edge in sorted(self.edges):
                if edge.start is here and edge.end not in paths:
                    paths[edge.end] = (*paths[here], edge)
                    waiting.append(edge.end)
        return paths[state]


def _edges(*moves: tuple[State, str, State]) -> frozenset[Edge[State]]:
    edges = frozenset(Edge(*move) for move in moves)
    assert len({(edge.start, edge.event) for edge in edges}) == len(moves), "in a state, an event has one meaning"
    return edges


NODE: Final = Lifecycle(
    table="compute_nodes",
    column="status",
    start=N.PROVISIONING,
    edges=_edges(
        (N.PROVISIONING, "sync", N.ONLINE),
        (N.PROVISIONING, "retire", N.RETIRED),
        (N.PROVISIONING, "remove", N.REMOVED),
        (N.ONLINE, "silence", N.OFFLINE),
        (N.ONLINE, "declare_dead", N.OFFLINE),
        (N.ONLINE, "drain", N.DRAINING),
        (N.ONLINE, "retire", N.RETIRED),
        (N.ONLINE, "remove", N.REMOVED),
        (N.OFFLINE, "sync", N.ONLINE),
        (N.OFFLINE, "drain", N.DRAINING),
        (N.OFFLINE, "retire", N.RETIRED),
        (N.OFFLINE, "remove", N.REMOVED),
        # The next sync makes it online; silence never moves a draining node.
        (N.DRAINING, "undrain", N.OFFLINE),
        (N.DRAINING, "drained_resume", N.OFFLINE),
        (N.DRAINING, "drained_retire", N.RETIRED),
        (N.DRAINING, "remove", N.REMOVED),
        (N.RETIRED, "return", N.OFFLINE),
        (N.RETIRED, "remove", N.REMOVED),
    ),
    may_hold={
        "drain_id": frozenset({N.DRAINING, N.RETIRED, N.REMOVED}),
        "removed_at": frozenset({N.REMOVED}),
    },
)

_J_WAITING: Final = frozenset({J.QUEUED, J.RUNNING})
_J_ENDED: Final = frozenset({J.COMPLETED, J.FAILED, J.CANCELLED})

JOB: Final = Lifecycle(
    table="jobs",
    column="status",
    start=J.QUEUED,
    edges=_edges(
        (J.QUEUED, "assign", J.RUNNING),
        (J.QUEUED, "cancel", J.CANCELLED),
        (J.QUEUED, "fail", J.FAILED),
        (J.RUNNING, "requeue", J.QUEUED),
        (J.RUNNING, "complete", J.COMPLETED),
        (J.RUNNING, "fail", J.FAILED),
        (J.RUNNING, "cancel", J.CANCELLED),
    ),
    may_hold={
        "runnable_at": _J_WAITING,
        "held_until": _J_WAITING,
        "finished_at": _J_ENDED,
        "winning_assignment_id": frozenset({J.COMPLETED}),
    },
    apart=frozenset({frozenset({"runnable_at", "held_until"})}),
)

_A_ENDED: Final = frozenset({A.SUCCEEDED, A.FAILED, A.CANCELLED})

# A succeeded attempt that is verified is final too: the database lets no other state hold the verification.
ASSIGNMENT: Final = Lifecycle(
    table="job_assignments",
    column="state",
    start=A.ASSIGNED,
    edges=_edges(
        (A.ASSIGNED, "start", A.RUNNING),
        (A.ASSIGNED, "succeed", A.SUCCEEDED),
        (A.ASSIGNED, "fail", A.FAILED),
        (A.ASSIGNED, "lose", A.FAILED),
        (A.ASSIGNED, "cancel", A.CANCELLED),
        (A.RUNNING, "succeed", A.SUCCEEDED),
        (A.RUNNING, "fail", A.FAILED),
        (A.RUNNING, "lose", A.FAILED),
        (A.RUNNING, "cancel", A.CANCELLED),
        (A.SUCCEEDED, "reject", A.FAILED),
        (A.SUCCEEDED, "lose", A.FAILED),
        (A.SUCCEEDED, "cancel", A.CANCELLED),
    ),
    may_hold={
        "started_at": frozenset({A.RUNNING}) | _A_ENDED,
        "finished_at": _A_ENDED,
        "released_at": _A_ENDED,
        "outcome": _A_ENDED,
        "artifacts_verified_at": frozenset({A.SUCCEEDED}),
    },
)

ORCHESTRATION: Final = Lifecycle(
    table="workspace_build_orchestrations",
    column="status",
    start=O.PENDING,
    edges=_edges(
        (O.PENDING, "complete", O.COMPLETED),
        (O.PENDING, "fail", O.FAILED),
        (O.PENDING, "cancel", O.CANCELED),
    ),
    may_hold={"next_retry_after": frozenset({O.PENDING})},
    must_hold={"child_build_id": frozenset({O.COMPLETED})},
)

LIFECYCLES: Final = (NODE, JOB, ASSIGNMENT, ORCHESTRATION)
