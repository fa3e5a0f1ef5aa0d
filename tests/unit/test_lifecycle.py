"""The lifecycles as values: what they allow, and how they are walked."""

import pytest

from fleetward.domain.jobs import AssignmentState, JobStatus
from fleetward.domain.lifecycle import ASSIGNMENT, JOB, LIFECYCLES, NODE, ORCHESTRATION
from fleetward.domain.nodes import NodeStatus


@pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda one: one.table)
def test_every_state_can_be_reached(lifecycle):
    for state in lifecycle.states:
        path = lifecycle.path_to(state)
        states = [lifecycle.start, *(edge.end for edge in path)]
        assert states[-1] is state
        assert all(edge.start is before for edge, before in zip(path, states, strict=False))
        assert set(path) <= lifecycle.edges


def test_what_is_final():
    assert {one.table: one.final for one in LIFECYCLES} == {
        "compute_nodes": {"removed"},
        "jobs": {"completed", "failed", "cancelled"},
        "job_assignments": {"failed", "cancelled"},
        "workspace_build_orchestrations": {"completed", "failed", "canceled"},
    }


def test_silence_never_moves_a_draining_node():
    assert NODE.events_from(NodeStatus.DRAINING) == ("drained_resume", "drained_retire", "remove", "undrain")


def test_a_removed_node_goes_nowhere():
    assert not any(NODE.allows(NodeStatus.REMOVED, state) for state in NodeStatus)


def test_only_a_running_job_completes():
    assert [state for state in JobStatus if JOB.allows(state, JobStatus.COMPLETED)] == [JobStatus.RUNNING]


def test_a_shape_says_what_a_row_may_hold():
    assert ASSIGNMENT.fits(AssignmentState.SUCCEEDED, {"started_at", "artifacts_verified_at"})
    assert not ASSIGNMENT.fits(AssignmentState.FAILED, {"artifacts_verified_at"})
    assert not JOB.fits(JobStatus.QUEUED, {"runnable_at", "held_until"})
    assert not ORCHESTRATION.fits(ORCHESTRATION.states[1], ())
