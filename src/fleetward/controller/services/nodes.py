"""How the fleet looks to people.

Owns reading nodes. Refuses to change them.
"""

import msgspec

from fleetward.controller.services.jobs import page
from fleetward.controller.store import jobs, nodes, presence
from fleetward.controller.store.tx import Database
from fleetward.domain.errors import NodeNotFound, quoted
from fleetward.domain.nodes import Rhythm
from fleetward.wire.messages import Node, NodeList, Status
from fleetward.wire.versions import VERSION


def listing(database: Database, *, limit: int, after: str | None) -> NodeList:
    """A page of nodes by name."""
    limit = page(limit)
    with database.begin() as tx:
        rows = tx.all(nodes.LIST, name=None, after=after, limit=limit + 1)
    items = [msgspec.convert(row, Node, from_attributes=True) for row in rows[:limit]]
    return NodeList(items=items, next=items[-1].name if len(rows) > limit else None)


def show(database: Database, name: str) -> Node:
    """One node, by name."""
    with database.begin() as tx:
        row = next(iter(tx.all(nodes.LIST, name=name, after=None, limit=1)), None)
    if row is None:
        raise NodeNotFound(f"no node is named {quoted(name)}", hint="`fleetward node ls` lists them")
    return msgspec.convert(row, Node, from_attributes=True)


def status(database: Database, *, rhythm: Rhythm) -> Status:
    """The fleet in numbers."""
    with database.begin() as tx:
        by_node = tx.all(nodes.COUNT_BY_STATUS)
        by_job = tx.all(jobs.COUNT_BY_STATUS)
        present = tx.one(presence.PRESENT, beat=3 * rhythm.beat)
        version = tx.one(presence.SERVER)
    return Status(
        version=VERSION,
        nodes={row.status: row.count for row in by_node},
        jobs={row.status: row.count for row in by_job},
        database=version.version,
        controllers=present.count,
    )
