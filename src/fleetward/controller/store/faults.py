"""What PostgreSQL's refusals mean.

Owns the one table from constraint names and SQLSTATEs to refusals and faults. Refuses to know statements: whoever
ran one gets the meaning of its failure. What no line explains is a Fault that names its constraint.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg.errors import CheckViolation, ForeignKeyViolation, NotNullViolation, UniqueViolation

from fleetward.domain.errors import (
    ArtifactConflict,
    DatabaseUnavailable,
    Fault,
    IdempotencyKeyReused,
    IllegalMove,
    NodeExists,
    NodeRemoved,
    OutcomeUnknown,
    Refusal,
    StorageFull,
    UnexpectedConstraint,
)

ILLEGAL_MOVE: Final = "FW001"
FROZEN: Final = "FW002"
NODE_REMOVED: Final = "FW003"
NO_WINNER: Final = "FW004"
BORN_BEYOND: Final = "FW005"

Meaning = Callable[[str], Refusal]

BY_CONSTRAINT: Final[Mapping[str, Meaning]] = {
    "compute_nodes_name_key": lambda told: NodeExists(
        f"another node took that name first: {told}", hint="give this machine another name with --name"
    ),
    "job_artifacts_assignment_id_path_key": lambda told: ArtifactConflict(
        f"that artifact was declared before with other bytes: {told}"
    ),
    "idempotency_keys_pkey": lambda _: IdempotencyKeyReused(
        "another call with the same idempotency key is being answered", hint="repeat the call; it gets the same answer"
    ),
}

BY_STATE: Final[Mapping[str, Meaning]] = {
    ILLEGAL_MOVE: IllegalMove,
    FROZEN: IllegalMove,
    NODE_REMOVED: NodeRemoved,
}

# Whoever meets one of these may run the whole transaction again: nothing of it has happened.
RETRYABLE: Final = frozenset({"40001", "40P01", "55P03"})
WORLD_CLASSES: Final = frozenset({"08", "53", "57", "58", "XX"})
DISK_FULL: Final = "53100"


def is_retryable(error: BaseException | None) -> bool:
    """Whether the same transaction may be run again at once: a deadlock, a lock not had in time, a lost race."""
    while error is not None:
        if isinstance(error, psycopg.Error):
            return error.sqlstate in RETRYABLE
        error = error.__cause__
    return False


def of(error: psycopg.Error) -> Refusal | Fault:
    """The meaning of what the database or its driver said."""
    state = error.sqlstate or ""
    told = (error.diag.message_primary or str(error)).strip()
    hint = error.diag.message_hint or ""
    meaning = BY_CONSTRAINT.get(error.diag.constraint_name or "") or BY_STATE.get(state)
    if meaning is not None:
        refusal = meaning(told)
        refusal.hint = refusal.hint or hint
        return refusal
    if state == DISK_FULL:
        return StorageFull(f"the database has no room left: {told}", hint="make room on the database's disk")
    if state in RETRYABLE or state[:2] in WORLD_CLASSES or not state:
        return DatabaseUnavailable(f"the database did not answer as it should: {told}")
    if isinstance(error, (CheckViolation, ForeignKeyViolation, NotNullViolation, UniqueViolation)):
        return UnexpectedConstraint(f"the database refused a row by {error.diag.constraint_name or state}: {told}")
    return UnexpectedConstraint(f"the database refused a statement with {state}: {told}", hint=hint)


@contextmanager
def translated() -> Generator[None]:
    """Turn the database's errors into refusals and faults."""
    try:
        yield
    except psycopg.Error as error:
        raise of(error) from error


@contextmanager
def suppressed() -> Generator[None]:
    """Let a clean-up fail: the error that it follows is the one to tell."""
    with contextlib.suppress(psycopg.Error):
        yield


@contextmanager
def committing(connection: psycopg.Connection) -> Generator[None]:
    """Around COMMIT and what travels with it: a connection lost there leaves open whether the change happened."""
    try:
        yield
    except psycopg.Error as error:
        if not connection.closed:
            raise of(error) from error
        raise OutcomeUnknown(
            "the connection was lost during COMMIT: the change may or may not have happened",
            hint="look whether it did, or repeat the call with its idempotency key",
        ) from error
