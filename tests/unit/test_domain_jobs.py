"""Job documents and what follows an attempt's end."""

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from fleetward.domain.errors import InvalidJob
from fleetward.domain.ids import JobId
from fleetward.domain.jobs import (
    BACKOFF_MAX,
    LOSS_HOLD_MAX,
    JobStatus,
    Move,
    Next,
    Outcome,
    Standing,
    after_attempt,
    attempts_wanted,
    cpus_milli,
    parse_spec,
    retry_delay,
    settle,
    shape,
    summary_line,
)


def test_a_small_document_gets_the_documented_defaults():
    spec = parse_spec({"command": ["true"]})
    assert (spec.replicas, spec.quorum, spec.max_attempts, spec.max_losses) == (1, 1, 3, 20)
    assert (spec.priority, spec.network, spec.sandbox, spec.on_disconnect) == (50, "on", "auto", "stop")
    assert cpus_milli(spec) == 1000
    assert summary_line(spec.command) == "true"


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"command": []}, "command"),
        ({"command": ["a"] * 5000}, "command"),
        ({"command": ["a" * 200_000]}, "command"),
        ({"command": ["a\0b"]}, "command"),
        ({"command": ["a"], "name": "a/b"}, "name"),
        ({"command": ["a"], "name": "a\nb"}, "name"),
        ({"command": ["a"], "env": {"A=B": "c"}}, "env"),
        ({"command": ["a"], "env": {f"K{n}": "v" for n in range(2000)}}, "env"),
        ({"command": ["a"], "labels": {"": "v"}}, "labels"),
        ({"command": ["a"], "labels": {f"k{n}": "v" for n in range(100)}}, "labels"),
        ({"command": ["a"], "replicas": -1}, "replicas"),
        ({"command": ["a"], "replicas": 2, "quorum": 3}, "quorum"),
        ({"command": ["a"], "resources": {"cpus": -1}}, "resources.cpus"),
        ({"command": ["a"], "resources": {"memory_bytes": -1}}, "resources.memory_bytes"),
        ({"command": ["a"], "timeouts": {"run_seconds": 0}}, "timeouts.run_seconds"),
        ({"command": ["a"], "artifacts": [{"path": "../x"}]}, "artifacts[0].path"),
        ({"command": ["a"], "artifacts": [{"path": "/x"}]}, "artifacts[0].path"),
        ({"command": ["a"], "artifacts": [{"path": "x", "sha256": "zz"}]}, "artifacts[0].sha256"),
        ({"command": ["a"], "artifacts": [{"path": "x", "min_bytes": 2, "max_bytes": 1}]}, "artifacts[0].max_bytes"),
        ({"command": ["a"], "artifacts": [{"path": "x"}] * 300}, "artifacts"),
        ({"command": ["a"], "inputs": [{"sha256": "0" * 64}] * 100}, "inputs"),
        ({"command": ["a"], "inputs": [{"sha256": "0" * 64, "path": "/x"}]}, "inputs[0].path"),
        ({"command": ["a"], "working_dir": "../up"}, "working_dir"),
        ({"command": ["a"], "array": "0-9"}, "array"),
        ({"command": ["a"], "hedge": {"after_seconds": 3}}, "hedge"),
    ],
)
def test_a_document_that_cannot_work_is_refused_naming_its_field(document: dict[str, Any], field: str):
    with pytest.raises(InvalidJob) as refused:
        parse_spec(document)
    assert refused.value.field == field
    assert refused.value.message.startswith(field)


def test_an_unknown_field_is_refused_by_its_name():
    with pytest.raises(InvalidJob, match="replcas"):
        parse_spec({"command": ["a"], "replcas": 2})


def test_jobs_that_need_the_same_have_one_shape_whatever_they_run():
    first = parse_spec({"command": ["a"], "labels": {"a": "1", "b": "2"}})
    second = parse_spec({"command": ["b"], "labels": {"b": "2", "a": "1"}, "priority": 3})
    assert shape(first) == shape(second)
    assert shape(first) != shape(parse_spec({"command": ["a"], "resources": {"cpus": 2}}))


@pytest.mark.parametrize(
    ("outcome", "failures", "losses", "following"),
    [
        (Outcome.FAILED, 2, 0, Next.RETRY),
        (Outcome.FAILED, 3, 0, Next.GIVE_UP),
        (Outcome.REJECTED, 3, 0, Next.GIVE_UP),
        (Outcome.LOST, 3, 20, Next.RETRY),
        (Outcome.LOST, 0, 21, Next.GIVE_UP),
        (Outcome.CANCELLED, 9, 99, Next.RETRY),
    ],
)
def test_only_the_jobs_own_failures_are_charged_to_its_attempts(
    outcome: Outcome, failures: int, losses: int, following: Next
):
    assert after_attempt(outcome, failures=failures, losses=losses, max_attempts=3, max_losses=20) is following


def test_the_wait_after_a_failure_has_full_jitter_and_a_bound():
    rng = random.Random(1)
    waits = [retry_delay(failures, rng=rng) for failures in range(1, 60)]
    assert all(timedelta(0) <= wait <= BACKOFF_MAX for wait in waits)
    assert max(waits) > timedelta(minutes=5)
    assert waits[0] <= timedelta(seconds=1)


def test_attempts_are_wanted_up_to_the_replicas_that_are_neither_open_nor_verified():
    assert attempts_wanted(replicas=3, verified=1, open_count=1) == 1
    assert attempts_wanted(replicas=1, verified=1, open_count=1) == 0


STANDING = Standing(
    id=JobId(UUID(int=1)),
    status=JobStatus.RUNNING,
    is_cancelling=False,
    replicas=1,
    open_count=0,
    verified_count=0,
    failures=0,
    losses=1,
    max_attempts=3,
    max_losses=20,
    last_outcome=Outcome.LOST,
    last_error="silence",
)


def test_a_job_that_lost_its_attempt_is_queued_at_once():
    assert settle(STANDING, rng=random.Random(0)) == Move(JobStatus.QUEUED)


def test_a_job_that_is_lost_again_and_again_waits_a_little_each_time():
    holds = [settle(replace(STANDING, losses=losses), rng=random.Random(3)).held_for for losses in range(2, 20)]
    assert all(hold is not None and hold <= LOSS_HOLD_MAX for hold in holds)
    assert LOSS_HOLD_MAX in holds


def test_a_job_whose_attempt_failed_is_queued_and_held_back():
    failed = replace(STANDING, last_outcome=Outcome.FAILED, failures=1)
    move = settle(failed, rng=random.Random(0))
    assert move.status is JobStatus.QUEUED
    assert move.held_for is not None


def test_a_job_with_an_open_attempt_goes_on_running():
    assert settle(replace(STANDING, open_count=1), rng=random.Random(0)) == Move(JobStatus.RUNNING)


def test_a_cancelled_job_ends_only_when_nothing_is_open():
    cancelling = replace(STANDING, is_cancelling=True)
    assert settle(cancelling, rng=random.Random(0)) == Move(JobStatus.CANCELLED)
    assert settle(replace(cancelling, open_count=1), rng=random.Random(0)).status is JobStatus.RUNNING


def test_a_job_that_has_used_up_its_attempts_fails_with_the_last_reason():
    spent = replace(STANDING, last_outcome=Outcome.FAILED, failures=3, last_error="exit code 3")
    assert settle(spent, rng=random.Random(0)) == Move(
        JobStatus.FAILED, error="given up after 3 failed attempts; the last one: exit code 3"
    )
    lost = replace(STANDING, losses=21)
    assert settle(lost, rng=random.Random(0)) == Move(
        JobStatus.FAILED, error="given up after 21 lost attempts; the last one: silence"
    )


def test_a_job_whose_verified_attempts_cannot_agree_fails():
    apart = replace(STANDING, replicas=2, verified_count=2, last_outcome=Outcome.CANCELLED)
    move = settle(apart, rng=random.Random(0))
    assert move.status is JobStatus.FAILED
    assert move.error is not None
    assert move.error.startswith("quorum_disagrees")
