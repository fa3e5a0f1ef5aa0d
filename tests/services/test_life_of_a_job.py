"""One job through the services, and what each guard on its way refuses."""

from pathlib import Path
from uuid import uuid4

import pytest

from fleetward.controller.services import jobs, sync, upkeep
from fleetward.controller.store.migrate import Role
from fleetward.controller.store.tx import PooledDatabase
from fleetward.domain.errors import IdempotencyKeyReused, PreconditionFailed, Refusal
from fleetward.domain.jobs import parse_spec
from fleetward.wire.messages import CancelRequest, SyncReply
from tests.fix_database import Clone
from tests.services.fleet import RHYTHM, Fleet, holds, inline, succeeded

OUT = inline("out.txt", b"hi\n")


def test_a_job_is_assigned_run_verified_and_completed_with_every_change_told(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit(artifacts=[{"path": "out.txt"}])
    assert fleet.assign() == 1
    (order,) = fleet.sync(ada).assignments
    assert (order.job_id, order.desired, order.attempt) == (job_id, "run", 1)
    assert order.spec is not None
    fleet.sync(ada, holds(order))
    assert fleet.sync(ada, succeeded(order, OUT)).assignments == []
    assert fleet.status(job_id) == "running"
    assert fleet.verify() == 1
    assert fleet.status(job_id) == "completed"
    assert fleet.kinds(job_id) == [
        "job.submitted",
        "assignment.assigned",
        "assignment.started",
        "artifact.declared",
        "artifact.stored",
        "assignment.succeeded",
        "assignment.released",
        "assignment.verified",
        "job.completed",
    ]


def test_a_nodes_word_completes_nothing(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit(artifacts=[{"path": "out.txt"}], max_attempts=1)
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, succeeded(order))
    assert fleet.status(job_id) == "running"
    fleet.verify()
    job = jobs.show(fleet.database, job_id)
    assert job.status == "failed"
    assert "out.txt" in str(job.error)


def test_bytes_that_are_not_as_declared_fail_the_attempt_and_say_so(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit(artifacts=[{"path": "out.txt"}], max_attempts=1)
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, succeeded(order, inline("out.txt", b"other", sha256=OUT.sha256)))
    (attempt,) = jobs.assignments(fleet.database, job_id).items
    assert (attempt.state, attempt.outcome) == ("failed", "rejected")
    assert OUT.sha256 in str(attempt.error)
    assert fleet.status(job_id) == "failed"


def test_the_first_verified_attempt_wins_and_the_other_is_stopped(fleet: Fleet):
    ada, bob = fleet.node("ada"), fleet.node("bob")
    job_id = fleet.submit(replicas=2)
    assert fleet.assign() == 2
    (first,), (second,) = fleet.sync(ada).assignments, fleet.sync(bob).assignments
    fleet.sync(bob, holds(second))
    fleet.sync(ada, succeeded(first))
    fleet.verify()
    assert fleet.status(job_id) == "completed"
    (told,) = fleet.sync(bob, holds(second)).assignments
    assert told.desired == "stop"
    assert fleet.sync(bob, holds(second, "cancelled", known="stop", released=True)).assignments == []
    states = {attempt.node: attempt.state for attempt in jobs.assignments(fleet.database, job_id).items}
    assert states == {"ada": "succeeded", "bob": "cancelled"}


def test_an_old_fence_changes_nothing(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit()
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, holds(order, "failed", exit_code=3, error="exit code 3", released=True))
    assert fleet.status(job_id) == "queued"
    stale = holds(order, "succeeded", released=True)
    assert fleet.sync(ada, stale).assignments == []
    assert fleet.status(job_id) == "queued"


def test_a_call_overtaken_by_a_newer_one_is_refused(fleet: Fleet):
    ada = fleet.node("ada")
    fleet.sync(ada)
    late = fleet.call(ada, sequence=1)
    (reply,) = sync.sync(fleet.database, [late], blobs=fleet.blobs, rhythm=RHYTHM)
    assert isinstance(reply, Refusal)
    assert reply.code == "session_stale"


def test_of_two_calls_of_one_node_in_a_batch_only_the_newer_counts(fleet: Fleet):
    ada = fleet.node("ada")
    old, new = fleet.call(ada), fleet.call(ada)
    replies = sync.sync(fleet.database, [new, old], blobs=fleet.blobs, rhythm=RHYTHM)
    assert isinstance(replies[0], SyncReply)
    assert isinstance(replies[1], Refusal)


def test_a_started_attempt_that_its_node_no_longer_knows_is_lost_and_given_again(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit()
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, holds(order))
    assert fleet.sync(ada).assignments == []
    assert fleet.status(job_id) == "queued"
    (attempt,) = jobs.assignments(fleet.database, job_id).items
    assert (attempt.state, attempt.outcome) == ("failed", "lost")
    assert fleet.assign() == 1
    (again,) = fleet.sync(ada).assignments
    assert again.attempt == 2
    assert again.fence > order.fence


def test_an_undelivered_order_is_told_again(fleet: Fleet):
    ada = fleet.node("ada")
    fleet.submit()
    fleet.assign()
    (first,), (second,) = fleet.sync(ada).assignments, fleet.sync(ada).assignments
    assert (first.id, first.fence, first.spec) == (second.id, second.fence, second.spec)


def test_an_order_says_what_is_left_of_its_lease_and_only_its_holder_renews_it(fleet: Fleet):
    ada = fleet.node("ada")
    fleet.submit()
    fleet.assign()
    (undelivered,) = fleet.sync(ada).assignments
    (again,) = fleet.sync(ada).assignments
    assert 0 < again.lease_seconds < undelivered.lease_seconds < RHYTHM.lease.total_seconds()
    (renewed,) = fleet.sync(ada, holds(again, "assigned")).assignments
    assert renewed.lease_seconds == RHYTHM.lease.total_seconds()


def test_a_failed_attempt_is_retried_after_its_wait_and_given_up_in_the_end(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit(max_attempts=1)
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, holds(order, "failed", exit_code=3, error="exit code 3", released=True))
    job = jobs.show(fleet.database, job_id)
    assert (job.status, job.failures) == ("failed", 1)
    assert "exit code 3" in str(job.error)


def test_a_queued_job_is_cancelled_at_once_and_a_running_one_when_it_has_stopped(fleet: Fleet):
    ada = fleet.node("ada")
    waiting = fleet.submit(resources={"cpus": 64})
    assert jobs.cancel(fleet.database, waiting, request=CancelRequest(), by=fleet.owner).status == "cancelled"
    running = fleet.submit()
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, holds(order))
    job = jobs.cancel(fleet.database, running, request=CancelRequest(reason="enough"), by=fleet.owner)
    assert (job.status, job.why) == ("running", "cancelling (1 attempt(s) not known gone)")
    (told,) = fleet.sync(ada, holds(order)).assignments
    assert told.desired == "stop"
    fleet.sync(ada, holds(order, "cancelled", known="stop", released=True))
    assert fleet.status(running) == "cancelled"


def test_a_job_that_finished_before_it_saw_the_cancel_is_completed(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit()
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, holds(order))
    jobs.cancel(fleet.database, job_id, request=CancelRequest(), by=fleet.owner)
    fleet.sync(ada, succeeded(order))
    fleet.verify()
    assert fleet.status(job_id) == "completed"


def test_a_cancel_that_expects_another_status_is_refused(fleet: Fleet):
    job_id = fleet.submit()
    with pytest.raises(PreconditionFailed):
        jobs.cancel(fleet.database, job_id, request=CancelRequest(expect_status="running"), by=fleet.owner)


def test_the_same_idempotency_key_gives_the_same_job_and_another_document_is_refused(fleet: Fleet):
    key, spec = str(uuid4()), parse_spec({"command": ["true"]})
    first = jobs.submit(fleet.database, spec, by=fleet.owner, idempotency_key=key)
    assert jobs.submit(fleet.database, spec, by=fleet.owner, idempotency_key=key) == first
    with pytest.raises(IdempotencyKeyReused):
        jobs.submit(fleet.database, parse_spec({"command": ["false"]}), by=fleet.owner, idempotency_key=key)


def test_a_node_is_never_given_more_than_it_has(fleet: Fleet):
    fleet.node("ada")
    for _ in range(6):
        fleet.submit()
    assert fleet.assign() == 4
    assert fleet.assign() == 0


def test_no_lease_that_still_runs_is_ended(fleet: Fleet):
    ada = fleet.node("ada")
    job_id = fleet.submit()
    fleet.assign()
    fleet.sync(ada)
    assert upkeep.expire_leases(fleet.database, rhythm=RHYTHM) == 0
    assert fleet.status(job_id) == "running"


def test_a_held_call_is_answered_anew_without_being_taken_in_again(fleet: Fleet):
    ada = fleet.node("ada")
    call = fleet.call(ada)
    (reply,) = sync.sync(fleet.database, [call], blobs=fleet.blobs, rhythm=RHYTHM)
    assert isinstance(reply, SyncReply)
    assert not sync.has_news(call.request, reply)
    job_id = fleet.submit()
    fleet.assign()
    (again,) = sync.look(fleet.database, [call], rhythm=RHYTHM)
    assert isinstance(again, SyncReply)
    assert sync.has_news(call.request, again)
    assert [order.job_id for order in again.assignments] == [job_id]
    fleet.sync(ada)
    (late,) = sync.look(fleet.database, [call], rhythm=RHYTHM)
    assert isinstance(late, Refusal)


def test_a_row_that_no_service_wrote_stops_nobody(database: PooledDatabase, clone: Clone, tmp_path: Path):
    # Not the fixture: such a row has no events, which the invariants rightly find.
    fleet = Fleet.on(database, tmp_path)
    fleet.node("ada")
    with clone.connect(Role.OWNER) as connection:
        connection.execute("INSERT INTO jobs (kind, spec, runnable_at) VALUES ('command', '{}', app.now())")
    job_id = fleet.submit()
    assert fleet.assign() == 1
    assert fleet.status(job_id) == "running"
    assert len(jobs.listing(fleet.database, limit=10, after=None, status=None).items) == 2
