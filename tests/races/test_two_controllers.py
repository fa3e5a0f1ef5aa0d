"""Two controllers at the same thing in the same instant, on real connections and threads."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from fleetward.controller.services import assigning, jobs, upkeep, verifying
from fleetward.controller.store import assignments
from fleetward.controller.store.tx import PooledDatabase
from fleetward.wire.messages import CancelRequest
from tests.services.fleet import RHYTHM, Fleet, holds, succeeded

ROUNDS = 20
CANCEL = CancelRequest()
LAPSED = replace(
    RHYTHM, lease=timedelta(microseconds=1), grace=timedelta(0)
)  # a lease that has ended when it is looked at


@pytest.fixture
def fleet(database: PooledDatabase, tmp_path: Path) -> Generator[Fleet]:
    """A controller's services; the invariants must hold when the test is over."""
    fleet = Fleet.on(database, tmp_path)
    yield fleet
    fleet.check()
    fleet.blobs.close()


@contextmanager
def together(*acts: Callable[[], object]) -> Generator[list[object]]:
    """Run the acts at once, each in a thread of its own, and collect what they return."""
    barrier = threading.Barrier(len(acts))
    results: list[object] = []

    def run(act: Callable[[], object]) -> None:
        barrier.wait()
        results.append(act())

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == len(acts), "an act did not come to its end"


def test_two_planners_never_fill_the_same_room_twice(fleet: Fleet):
    fleet.node("ada")
    fleet.node("bob")
    for _ in range(20):
        fleet.submit()
    for _ in range(ROUNDS):
        with together(
            lambda: assigning.assign(fleet.database, rhythm=RHYTHM),
            lambda: assigning.assign(fleet.database, rhythm=RHYTHM),
        ):
            pass
        fleet.check()
    running = [
        job for job in jobs.listing(fleet.database, limit=100, after=None, status=None).items if job.status == "running"
    ]
    assert len(running) == 8


def test_of_two_attempts_verified_in_the_same_instant_one_wins(fleet: Fleet):
    ada, bob = fleet.node("ada"), fleet.node("bob")
    for _ in range(ROUNDS):
        job_id = fleet.submit(replicas=2)
        fleet.assign()
        (first,), (second,) = fleet.sync(ada).assignments, fleet.sync(bob).assignments
        fleet.sync(ada, succeeded(first))
        fleet.sync(bob, succeeded(second))
        with together(
            lambda: verifying.verify(fleet.database, fleet.blobs, verifier="controller:one", limit=1),
            lambda: verifying.verify(fleet.database, fleet.blobs, verifier="controller:two", limit=1),
        ):
            pass
        assert fleet.status(job_id) == "completed"
        assert fleet.kinds(job_id).count("job.completed") == 1
        fleet.check()


def test_a_renewal_that_committed_first_outlives_a_stale_list_of_the_overdue(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit()
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    with fleet.database.begin() as tx:
        (attempt,) = tx.all(assignments.BY_JOB, job_id=job_id, limit=1)
    fleet.sync(ada, holds(order))
    with fleet.database.begin() as tx:
        ended = tx.all(
            assignments.EXPIRE, ids=[attempt.id], leases=[attempt.lease_expires_at], grace=-10 * RHYTHM.lease
        )
    assert ended == []
    assert fleet.status(job_id) == "running"


def test_two_who_read_the_same_overdue_list_end_each_attempt_once(fleet: Fleet):
    ada = fleet.node("ada")
    fleet.rhythm = LAPSED
    job_ids = [fleet.submit() for _ in range(4)]
    fleet.assign()
    fleet.sync(ada)
    with together(
        lambda: upkeep.expire_leases(fleet.database, rhythm=LAPSED),
        lambda: upkeep.expire_leases(fleet.database, rhythm=LAPSED),
    ) as counts:
        pass
    assert sum(int(str(count)) for count in counts) == 4
    for job_id in job_ids:
        assert fleet.kinds(job_id).count("assignment.lost") == 1
        assert fleet.status(job_id) == "queued"


def test_a_report_and_the_end_of_its_lease_in_the_same_instant_leave_one_story(fleet: Fleet):
    ada = fleet.node("ada")
    fleet.rhythm = LAPSED
    for _ in range(ROUNDS):
        job_id = fleet.submit()
        fleet.assign()
        (order,) = [one for one in fleet.sync(ada).assignments if one.job_id == job_id]
        with together(
            lambda order=order: fleet.sync(ada, succeeded(order)),
            lambda: upkeep.expire_leases(fleet.database, rhythm=LAPSED),
        ):
            pass
        (attempt,) = jobs.assignments(fleet.database, job_id).items
        assert (attempt.state, attempt.outcome) in {("succeeded", None), ("failed", "lost")}
        fleet.check()
        fleet.verify()
        jobs.cancel(fleet.database, job_id, request=CANCEL, by=fleet.owner)
        fleet.sync(ada)
