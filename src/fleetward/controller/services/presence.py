"""That a controller is here, and what the first one after silence owes the fleet.

Owns a controller's presence row. Refuses to know processes.
"""

from uuid import UUID

from fleetward.controller.store import presence
from fleetward.controller.store.tx import Database
from fleetward.domain.nodes import Rhythm


def start(database: Database, *, controller_id: UUID, rhythm: Rhythm) -> None:
    """Appear. If no controller was here for a beat, no lease ends before nodes had time to be heard."""
    with database.begin() as tx:
        if tx.one(presence.PRESENT, beat=rhythm.beat).count == 0:
            tx.run(presence.GRACE, grace=rhythm.silence + rhythm.beat)
        tx.run(presence.SEEN, id=controller_id)


def beat(database: Database, *, controller_id: UUID) -> None:
    """Say that this controller is still here."""
    with database.begin() as tx:
        tx.run(presence.SEEN, id=controller_id)


def stop(database: Database, *, controller_id: UUID) -> None:
    """Leave."""
    with database.begin() as tx:
        tx.run(presence.GONE, id=controller_id)
