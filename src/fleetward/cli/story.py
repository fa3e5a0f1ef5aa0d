"""Events, told in words.

Owns one sentence for each kind of event. Refuses to know where events come from and how they are shown.
"""

from typing import cast

from fleetward.wire.messages import Event

IS_OVER = frozenset({"job.completed", "job.failed", "job.cancelled"})

_PLAIN = {
    "job.submitted": "submitted",
    "job.requeued": "waits for another attempt",
    "job.runnable": "may be tried again",
    "job.settled": "goes on with its other attempts",
    "job.completed": "completed: the winner's artifacts hold",
    "job.cancel_requested": "asked to stop",
    "job.cancelled": "cancelled",
    "assignment.assigned": "assigned to {node}",
    "assignment.started": "{node} started",
    "assignment.succeeded": "{node} says that it succeeded",
    "assignment.verified": "{node}'s artifacts verified",
    "assignment.released": "{node} holds nothing of it any more",
}
_WITH_REASON = {
    "job.failed": "failed",
    "assignment.failed": "{node} failed",
    "assignment.rejected": "{node}'s claim refused",
    "assignment.lost": "{node} was lost",
    "assignment.cancelled": "{node}'s attempt cancelled",
}
_ARTIFACTS = {"artifact.declared": "{node} declares {what}", "artifact.stored": "stored from {node}: {what}"}


def sentence(event: Event) -> str:
    """Tell one event; a kind that this version does not know is named as it is."""
    node = event.node or "a node"
    if event.kind in _PLAIN:
        return _PLAIN[event.kind].format(node=node)
    if event.kind in _WITH_REASON:
        why = reason(event)
        return _WITH_REASON[event.kind].format(node=node) + (f": {why}" if why else "")
    if event.kind in _ARTIFACTS:
        return _ARTIFACTS[event.kind].format(node=node, what=", ".join(paths(event)) or "nothing")
    return event.kind


def is_quiet(event: Event) -> bool:
    """Whether only the full trail needs the event: it says nothing of how the job fares."""
    return event.kind in {"artifact.declared", "artifact.stored", "assignment.released", "job.settled", "job.runnable"}


def reason(event: Event) -> str:
    """Why a thing ended, in the words recorded with it."""
    for subject in ("assignment", "job"):
        error = _table(event.data.get(subject)).get("error")
        if isinstance(error, str) and error:
            return error
    return ""


def paths(event: Event) -> list[str]:
    """The artifacts that an event speaks of."""
    files = event.data.get("artifacts")
    if not isinstance(files, list):
        return []
    return [str(_table(file).get("path", "?")) for file in cast("list[object]", files)]


def _table(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}
