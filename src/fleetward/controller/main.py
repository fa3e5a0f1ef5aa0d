"""The composition root: settings -> home -> database -> services -> loops -> server.

Owns the order in which the parts come up and go down, and nothing else wires them. Refuses to know what
any part does.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Final, Self
from urllib.parse import urlsplit
from uuid import UUID

from fleetward.controller import database
from fleetward.controller.api.app import Application
from fleetward.controller.api.context import Context, Identity
from fleetward.controller.api.handlers import HANDLERS
from fleetward.controller.api.holds import Holds
from fleetward.controller.api.syncs import Batcher, Syncs
from fleetward.controller.blobs import LocalBlobs
from fleetward.controller.config import Config, Listen
from fleetward.controller.hints import Hub
from fleetward.controller.home import LOG, TOKEN, Announcement, Home
from fleetward.controller.keyring import FOLDER as KEYRING
from fleetward.controller.keyring import Keyring
from fleetward.controller.log import start_logging
from fleetward.controller.loops import Duties, Loops, Tempo
from fleetward.controller.server import Server, TlsFiles, bind, given_tls
from fleetward.controller.services import access, presence
from fleetward.controller.services.sync import SyncCall, sync
from fleetward.controller.store.channel import PostgresChannel
from fleetward.controller.store.tx import Database, PooledDatabase, open_pool
from fleetward.domain.access import RESOURCES
from fleetward.domain.errors import Fault, Refusal, Unauthenticated
from fleetward.wire.endpoints import ENDPOINTS
from fleetward.wire.messages import SyncReply
from fleetward.wire.versions import VERSION

_LOG: Final = logging.getLogger(__name__)
OWNER: Final = "owner"
LOOPS_STOP_SECONDS: Final = 1.0  # a round that takes longer is cut off by its connection's end
LOOP_CONNECTIONS: Final = 4  # assign, verify, upkeep and presence each use one at a time
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Controller:
    """A running controller; `url` is where it answers."""

    def __init__(self, *, url: str, pin: str, parts: ExitStack) -> None:
        self.url = url
        self.pin = pin
        self._parts = parts

    @classmethod
    def start(cls, config: Config, *, ended: Callable[[], None]) -> Self:
        """Bring everything up, or take down what came up and say what failed. `ended` is told of a sudden end."""
        with ExitStack() as parts:
            home = Home.hold(config.home)
            parts.callback(home.release)
            start_logging(home.path / LOG, level=config.log_level)
            bound = bind(config.listen)
            parts.callback(bound.close)
            return cls._wire(config, home, bound, parts=parts, ended=ended)

    @classmethod
    def _wire(
        cls, config: Config, home: Home, bound: socket.socket, *, parts: ExitStack, ended: Callable[[], None]
    ) -> Self:
        url = _url(config, bound)
        conninfo = database.open_service(config, parts=parts)
        keyring = Keyring.open(home.path / KEYRING)
        pool = open_pool(conninfo, size=config.pool_max, name="fleetward")
        parts.callback(pool.close, timeout=1.0)
        store = PooledDatabase(pool)
        database.check_keyring(store, fingerprint=keyring.fingerprint())
        blobs = LocalBlobs(config.artifacts_url or home.path / "blobs", reserve_bytes=config.blob_reserve_bytes)
        parts.callback(blobs.close)
        tls = _tls(config, keyring)
        identity = _identity(keyring, url=url, tls=tls)
        tempo = Tempo(scale=config.time_scale)
        tempo.refresh(store)
        controller_id = _appear(store, tempo, parts=parts)
        _keep_owners_key(store, home, identity)
        hub = Hub()
        channel = PostgresChannel(conninfo, controller_id=controller_id.hex)
        channel.join(shares_artifacts=config.artifacts_url is not None)
        duties = Duties(
            database=store,
            blobs=blobs,
            hub=hub,
            tempo=tempo,
            controller_id=controller_id,
            verify_batch_max=config.verify_batch_max,
        )
        loops = Loops(duties, channel=channel)
        parts.callback(loops.stop, timeout=LOOPS_STOP_SECONDS)
        parts.callback(channel.close)
        context = _context(config, store, blobs, hub, tempo, identity, parts=parts)
        hosts = LOOPBACK_NAMES if config.listen.is_loopback else None
        application = Application(context, endpoints=ENDPOINTS, handlers=HANDLERS, hosts=hosts)
        server = Server(application, bound, tls=tls, attach=hub.attach, ended=ended)
        server.start()
        parts.callback(server.stop, release=partial(_release, context))
        loops.start()
        home.announce(
            Announcement(url=url, pin=identity.pin, pid=os.getpid(), version=VERSION, local_node=config.local_node)
        )
        _LOG.info("the controller answers at %s", url)
        return cls(url=url, pin=identity.pin, parts=parts.pop_all())

    def stop(self) -> None:
        """Take everything down, in reverse order; held calls are answered first."""
        _LOG.info("the controller stops")
        self._parts.close()


def _url(config: Config, bound: socket.socket) -> str:
    """Where others find this controller: as told, else by the address it listens on."""
    if config.public_url:
        return config.public_url
    port: int = bound.getsockname()[1]
    is_anywhere = config.listen.host in {"0.0.0.0", "::"}
    listen = Listen(socket.gethostname() if is_anywhere else config.listen.host, port)
    return f"{'https' if config.speaks_tls else 'http'}://{listen.text}"


def _tls(config: Config, keyring: Keyring) -> TlsFiles | None:
    """The certificate to serve: the one that was given, else one of our own, else none."""
    if not config.speaks_tls:
        return None
    if config.tls_cert is not None and config.tls_key is not None:
        return given_tls(config.tls_cert, config.tls_key)
    named = urlsplit(config.public_url).hostname
    hosts = [*filter(None, [named]), config.listen.host, socket.gethostname(), *sorted(LOOPBACK_NAMES)]
    made = keyring.ensure_certificate(hosts)
    return TlsFiles(certificate=made.certificate_path, key=made.key_path, pin=made.pin)


def _identity(keyring: Keyring, *, url: str, tls: TlsFiles | None) -> Identity:
    return Identity(
        url=url,
        pin=keyring.identity_pin if tls is None else tls.pin,
        public_key=keyring.identity_public,
        sign=keyring.sign,
        token_key=keyring.session_hmac,
        api_key_hmac=keyring.api_key_hmac,
    )


def _appear(store: Database, tempo: Tempo, *, parts: ExitStack) -> UUID:
    """Be one of the controllers; the first after a silence gives the fleet time to be heard."""
    with store.begin() as tx:
        controller_id = tx.new_id()
    presence.start(store, controller_id=controller_id, rhythm=tempo.rhythm)
    parts.callback(_disappear, store, controller_id)
    return controller_id


def _disappear(store: Database, controller_id: UUID) -> None:
    try:
        presence.stop(store, controller_id=controller_id)
    except Fault as fault:
        _LOG.warning("the controller leaves without saying so: %s", fault.message)


def _keep_owners_key(store: Database, home: Home, identity: Identity) -> None:
    """Have a key of the owner's in the home that works; a new one when the old proves nobody."""
    key = home.token()
    if key is not None:
        try:
            access.authenticate(store, key, hmac_key=identity.api_key_hmac)
        except Unauthenticated:
            _LOG.warning("the key in %s proves nobody any more; a new one takes its place", home.path / TOKEN)
        else:
            return
    owner = access.ensure_owner(store, name=OWNER)
    scopes = [f"{resource}:*" for resource in RESOURCES]
    home.keep_token(
        access.make_key(store, owner=owner, name="this machine", scopes=scopes, hmac_key=identity.api_key_hmac)
    )


def _context(
    config: Config,
    store: Database,
    blobs: LocalBlobs,
    hub: Hub,
    tempo: Tempo,
    identity: Identity,
    *,
    parts: ExitStack,
) -> Context:
    work = ThreadPoolExecutor(config.pool_max - LOOP_CONNECTIONS, thread_name_prefix="work")
    streams = ThreadPoolExecutor(config.stream_max, thread_name_prefix="stream")
    for executor in (work, streams):
        parts.callback(executor.shutdown, wait=False, cancel_futures=True)

    def transact(calls: Sequence[SyncCall]) -> Sequence[SyncReply | Refusal]:
        return sync(store, calls, blobs=blobs, rhythm=tempo.rhythm)

    batcher = Batcher(transact, executor=work, batch_max=config.sync_batch_max)
    return Context(
        database=store,
        blobs=blobs,
        hub=hub,
        syncs=Syncs(batcher, hub=hub),
        holds=Holds(hub, executor=work),
        identity=identity,
        rhythm=lambda: tempo.rhythm,
        work=work,
        streams=streams,
    )


def _release(context: Context) -> None:
    """Let every held call be answered now."""
    context.syncs.close()
    context.holds.close()
    context.hub.wake_all()
