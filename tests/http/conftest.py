"""A controller that really runs: its own home, its own embedded PostgreSQL, its own port."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from asking import Api, Node

from fleetward.controller import config, database
from fleetward.controller.early import begin
from fleetward.controller.embedded import remove_cluster
from fleetward.controller.home import OWNERS_KEY
from fleetward.controller.keyring import Keyring
from fleetward.controller.main import bring_up
from fleetward.controller.services import access
from fleetward.controller.store.tx import PooledDatabase, open_pool


@contextmanager
def throwaway() -> Iterator[Path]:
    """A home whose folders PostgreSQL's own user can enter, gone afterwards with all that it made elsewhere."""
    folder = Path(tempfile.mkdtemp(prefix="fleetward-http-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        remove_cluster(folder)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """The home of the controller that the tests ask."""
    with throwaway() as folder:
        yield folder


@pytest.fixture
def fresh() -> Iterator[Path]:
    """A home of the test's own."""
    with throwaway() as folder:
        yield folder


@pytest.fixture(scope="session")
def settled(home: Path) -> config.Config:
    """The settings of the controller that the tests ask."""
    flags = {"home": str(home), "listen": "127.0.0.1:0", "log_level": "warning"}
    return config.load(flags, environment={}, user_id=os.geteuid())


@pytest.fixture(scope="session")
def api(settled: config.Config) -> Iterator[Api]:
    """A running controller, the owner's key, a node's token, and keys with any scope."""
    with ExitStack() as parts:
        announced = bring_up(begin(settled, parts=parts), parts=parts, ended=lambda: None)
        pool = open_pool(database.url(settled, role="app"), size=2, name="tests")
        parts.callback(pool.close)
        store, keyring = PooledDatabase(pool), Keyring.open(settled.home / "keyring")
        owner = access.ensure_owner(store, name="owner")

        def key(*scopes: str) -> str:
            return access.make_key(store, owner=owner, name="test", scopes=scopes, hmac_key=keyring.api_key_hmac)

        bare = Api(announced.url, (settled.home / OWNERS_KEY).read_text().strip(), "", key)
        first = Node(bare, "first")
        parts.callback(first.close)
        yield Api(bare.url, bare.owner, first.token, key)


@pytest.fixture
def node(api: Api, request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the test's own."""
    made = Node(api, f"node-{abs(hash(request.node.nodeid)):x}")
    try:
        yield made
    finally:
        made.close()
