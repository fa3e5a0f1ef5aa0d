"""The removal of a node as page 4 describes it, for worlds in which no service does it yet.

Owns that one transaction. Refuses to end assignments: a node that has an open one must be refused by the
database itself.
"""

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fleetward.controller.store import nodes
from fleetward.controller.store.tx import Database, Statement


@dataclass(frozen=True, slots=True)
class Removed:
    """A node that was removed."""

    id: UUID


REVOKE: Final = Statement(
    """
    UPDATE node_credentials SET revoked_at = %(now)s::timestamptz
    WHERE node_id = %(node_id)s::uuid
      AND revoked_at IS NULL
    """,
    row=type(None),
)

FORGET_BEATS: Final = Statement(
    "DELETE FROM node_heartbeats WHERE node_id = %(node_id)s::uuid",
    row=type(None),
)

RELEASE_ALL: Final = Statement(
    """
    WITH released AS (
        UPDATE job_assignments AS gone SET released_at = %(now)s::timestamptz
        WHERE gone.node_id = %(node_id)s::uuid
          AND gone.released_at IS NULL
          AND gone.state NOT IN ('assigned', 'running')
        RETURNING gone.id, gone.job_id, gone.node_id, gone.released_at
    )
    INSERT INTO job_events (job_id, assignment_id, node_id, kind, actor, at, data)
    SELECT
        released.job_id, released.id, released.node_id, 'assignment.released', 'operator', %(now)s::timestamptz,
        jsonb_build_object('assignment', jsonb_build_object('released_at', released.released_at))
    FROM released
    """,
    row=type(None),
)

REMOVE: Final = Statement(
    """
    WITH removed AS (
        UPDATE compute_nodes SET status = 'removed', removed_at = %(now)s::timestamptz
        WHERE id = %(node_id)s::uuid
          AND status <> 'removed'
        RETURNING id, status, removed_at
    ), told AS (
        INSERT INTO audit_events (subject_kind, subject_id, node_id, kind, actor, at, data)
        SELECT
            'node', removed.id, removed.id, 'node.removed', 'operator', %(now)s::timestamptz,
            jsonb_build_object('node', to_jsonb(removed) - 'id')
        FROM removed
    )
    SELECT id FROM removed
    """,
    row=Removed,
)


def remove(database: Database, node_id: UUID) -> bool:
    """Remove a node for good; the database refuses while an assignment is open there."""
    with database.begin() as tx:
        nodes.lock(tx, [node_id])
        tx.run(REVOKE, node_id=node_id)
        tx.run(FORGET_BEATS, node_id=node_id)
        tx.run(RELEASE_ALL, node_id=node_id)
        return tx.maybe(REMOVE, node_id=node_id) is not None
