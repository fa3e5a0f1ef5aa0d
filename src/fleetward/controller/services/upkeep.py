"""What time itself brings about: leases that run out, nodes that fall silent, waits that end.

Owns these bounded rounds; each may run on any number of controllers at once. Refuses to know timers.
"""

from uuid import UUID

from fleetward.controller.services import settling
from fleetward.controller.store import assignments, jobs, nodes
from fleetward.controller.store.tx import Database
from fleetward.domain.nodes import Rhythm, rhythm

BATCH = 500  # rows a round touches, so that no round holds locks for long


def fleet_rhythm(database: Database, *, scale: float) -> Rhythm:
    """The beat that the fleet's present size asks for."""
    with database.begin() as tx:
        size = tx.one(nodes.FLEET_SIZE)
    return rhythm(node_count=size.node_count, scale=scale)


def expire_leases(database: Database, *, rhythm: Rhythm) -> int:
    """End the attempts whose lease and grace have run out; a renewal that came first wins."""
    with database.begin() as tx:
        overdue = tx.all(assignments.OVERDUE, grace=rhythm.grace, limit=BATCH)
    if not overdue:
        return 0
    with database.begin() as tx:
        jobs.lock(tx, [lease.job_id for lease in overdue])
        ended = tx.all(
            assignments.EXPIRE,
            ids=[lease.id for lease in overdue],
            leases=[lease.lease_expires_at for lease in overdue],
            grace=rhythm.grace,
        )
        settling.settle(tx, {row.job_id for row in ended})
    return len(ended)


def mark_silent(database: Database, *, rhythm: Rhythm) -> int:
    """Call online nodes offline that have not been heard of in time."""
    with database.begin() as tx:
        silent: list[UUID] = [node.id for node in tx.all(nodes.SILENT, silence=rhythm.silence, limit=BATCH)]
    if not silent:
        return 0
    with database.begin() as tx:
        nodes.lock(tx, silent)
        return len(tx.all(nodes.MARK_OFFLINE, node_ids=silent, silence=rhythm.silence))


def release_due(database: Database) -> int:
    """Let jobs whose back-off has ended be assigned again."""
    with database.begin() as tx:
        return len(tx.all(jobs.RIPEN, limit=BATCH))


def fail_overdue(database: Database) -> int:
    """Fail the jobs that waited longer than their queue timeout."""
    with database.begin() as tx:
        return len(tx.all(jobs.FAIL_OVERDUE, limit=BATCH))
