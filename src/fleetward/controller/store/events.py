"""Events in SQL: reading what is settled, in the one order.

Owns the cursor. Refuses to write: every event is inserted by the statement that makes its change.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from fleetward.controller.store.tx import Statement


@dataclass(frozen=True, slots=True)
class EventRow:
    """One settled event."""

    id: int
    epoch: int
    txid: int
    kind: str
    actor: str
    at: datetime
    job_id: UUID | None
    assignment_id: UUID | None
    node_id: UUID | None
    node: str | None
    data: dict[str, object]


# A row is settled once no transaction that might still commit before it is running; until then it is
# withheld, so that a reader's cursor never passes an event that commits late.
OF_JOB = Statement(
    """
    SELECT
        event.id, event.epoch, event.txid::text::bigint AS txid, event.kind, event.actor, event.at, event.job_id,
        event.assignment_id, event.node_id, node.name AS node, event.data
    FROM job_events AS event
    LEFT JOIN compute_nodes AS node ON node.id = event.node_id
    WHERE event.job_id = %(job_id)s::uuid
      AND (event.txid < pg_snapshot_xmin(pg_current_snapshot()) OR event.epoch < app.epoch())
      AND (event.epoch, event.txid::text::bigint, event.id)
          > (%(after_epoch)s::bigint, %(after_txid)s::bigint, %(after_id)s::bigint)
    ORDER BY event.epoch, event.txid, event.id
    LIMIT %(limit)s::int
    """,
    row=EventRow,
)
