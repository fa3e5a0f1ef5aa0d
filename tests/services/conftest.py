"""The fleet fixture, which holds every story against the invariants when it ends.

Owns nothing else. Refuses to know what a story is about.
"""

from collections.abc import Generator
from pathlib import Path

import pytest

from fleetward.controller.store.tx import PooledDatabase
from tests.services.fleet import Fleet


@pytest.fixture
def fleet(database: PooledDatabase, tmp_path: Path) -> Generator[Fleet]:
    """A controller's services; the invariants must hold when the test is over."""
    fleet = Fleet.on(database, tmp_path)
    yield fleet
    fleet.check()
    fleet.blobs.close()
