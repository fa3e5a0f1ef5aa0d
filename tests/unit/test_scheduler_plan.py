"""The plan: order, fit and choice, as values in and values out."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from fleetward.controller.scheduler.plan import Candidate, Placement, Room, Snapshot, plan, why_not
from fleetward.domain.ids import JobId, NodeId, UserId

T0 = datetime(2026, 12, 1, tzinfo=UTC)
ANN, BOB = UserId(UUID(int=1)), UserId(UUID(int=2))


def node(number: int) -> NodeId:
    return NodeId(UUID(int=1000 + number))


def job(number: int, **more: object) -> Candidate:
    plain = Candidate(
        id=JobId(UUID(int=number)),
        owner_id=ANN,
        shape="small",
        priority=50,
        created_at=T0 + timedelta(seconds=number),
        cpus_milli=1000,
        memory_bytes=0,
        labels={},
        sandbox="auto",
        wanted=1,
    )
    return replace(plain, **more)


def room(number: int, *, cpus_milli: int = 1000, memory_bytes: int = 0, labels: dict[str, str] | None = None) -> Room:
    return Room(
        node_id=node(number), labels=labels or {}, cpus_milli=cpus_milli, memory_bytes=memory_bytes, has_sandbox=False
    )


def test_the_oldest_job_comes_first_and_the_roomiest_node_takes_it():
    snapshot = Snapshot(candidates=[job(2), job(1)], rooms=[room(1), room(2, cpus_milli=1500)])
    assert plan(snapshot) == (Placement(job(1).id, node(2)), Placement(job(2).id, node(1)))


def test_a_higher_priority_goes_before_age():
    snapshot = Snapshot(candidates=[job(1), job(2, priority=60)], rooms=[room(1)])
    assert plan(snapshot) == (Placement(job(2).id, node(1)),)


def test_the_owner_who_holds_less_goes_first():
    snapshot = Snapshot(candidates=[job(1), job(2, owner_id=BOB)], rooms=[room(1)], in_use={ANN: 2000})
    assert plan(snapshot) == (Placement(job(2).id, node(1)),)


def test_two_replicas_never_share_a_node():
    snapshot = Snapshot(candidates=[job(1, wanted=3)], rooms=[room(1, cpus_milli=4000), room(2)])
    assert plan(snapshot) == (Placement(job(1).id, node(1)), Placement(job(1).id, node(2)))


def test_a_node_that_failed_the_job_is_tried_last():
    failed = job(1, failed=frozenset({node(1)}))
    assert plan(Snapshot(candidates=[failed], rooms=[room(1, cpus_milli=9000), room(2)])) == (
        Placement(job(1).id, node(2)),
    )
    assert plan(Snapshot(candidates=[failed], rooms=[room(1)])) == (Placement(job(1).id, node(1)),)


def test_a_shape_that_fits_nowhere_holds_up_nobody():
    large = [job(number, shape="large", cpus_milli=64_000) for number in range(1, 50)]
    snapshot = Snapshot(candidates=[*large, job(99)], rooms=[room(1)])
    assert plan(snapshot) == (Placement(job(99).id, node(1)),)


def test_a_job_held_by_some_node_does_not_condemn_its_shape():
    held = job(1, taken=frozenset({node(1)}))
    snapshot = Snapshot(candidates=[held, job(2)], rooms=[room(1)])
    assert plan(snapshot) == (Placement(job(2).id, node(1)),)


def test_why_not_counts_each_excluded_node_once_by_its_first_reason():
    asked = job(1, labels={"zone": "lab"}, cpus_milli=2000, memory_bytes=10, sandbox="auto")
    lab = {"zone": "lab"}
    rooms = [
        room(1),
        room(2, labels=lab),
        room(3, labels=lab, cpus_milli=2000),
        room(4, labels=lab, cpus_milli=2000, memory_bytes=10),
    ]
    assert why_not(asked, rooms) == {"labels": 1, "cpus": 1, "memory": 1}
    assert why_not(replace(asked, sandbox="require", taken=frozenset({node(1)})), rooms) == {
        "already holds it": 1,
        "sandbox": 3,
    }


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)), max_size=12),
    st.lists(st.integers(0, 6), max_size=5),
)
def test_a_plan_never_gives_more_than_there_is_and_does_not_depend_on_the_order_of_its_input(
    asked: list[tuple[int, int, int]], rooms: list[int]
):
    jobs = [
        job(number, cpus_milli=cpus * 1000, wanted=wanted, priority=priority, shape=f"{cpus}")
        for number, (cpus, wanted, priority) in enumerate(asked)
    ]
    fleet = [room(number, cpus_milli=cpus * 1000) for number, cpus in enumerate(rooms)]
    placements = plan(Snapshot(candidates=jobs, rooms=fleet))
    assert placements == plan(Snapshot(candidates=jobs[::-1], rooms=fleet[::-1]))
    assert len(set(placements)) == len(placements)
    needs = {one.id: one for one in jobs}
    for one in fleet:
        given_here = [needs[p.job_id].cpus_milli for p in placements if p.node_id == one.node_id]
        assert sum(given_here) <= one.cpus_milli
    for one in jobs:
        assert sum(p.job_id == one.id for p in placements) <= one.wanted
