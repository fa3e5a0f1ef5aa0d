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
from typing import Final
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
from fleetward.controller.early import Begun
from fleetward.controller.hints import Hub, Signal
from fleetward.controller.home import BLOBS, KEYRING, OWNERS_KEY, Announcement, Home
from fleetward.controller.keyring import Keyring
from fleetward.controller.loops import POLL_SECONDS, Duties, Loop, Loops, Tempo, loops_of
from fleetward.controller.server import Server, TlsFiles, given_tls
from fleetward.controller.services import access, artifacts, presence
from fleetward.controller.services.sync import SyncCall, look, sync
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
POOL_STOP_SECONDS: Final = 1.0
LOOP_CONNECTIONS: Final = 4  # assign, verify, upkeep and presence each use one at a time
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def bring_up(begun: Begun, *, parts: ExitStack, ended: Callable[[], None]) -> Announcement:
    """Wire everything and answer calls; `parts` takes it all down again. `ended` is told of a sudden end."""
    config, home = begun.config, begun.home
    url = _url(config, begun.bound)
    keyring = Keyring.open(home.path / KEYRING)
    tls = _tls(config, keyring)
    identity = _identity(keyring, url=url, tls=tls)
    blobs = LocalBlobs(config.artifacts_url or home.path / BLOBS, reserve_bytes=config.blob_reserve_bytes)
    parts.callback(blobs.close)
    conninfo = database.prepare(begun)
    pool = open_pool(conninfo, size=config.pool_max, name="fleetward")
    parts.callback(pool.close, timeout=POOL_STOP_SECONDS)
    store = PooledDatabase(pool)
    database.check_keyring(store, fingerprint=keyring.fingerprint())
    _keep_owners_key(store, home, identity)
    duties = _appear(config, store, blobs, parts=parts)
    channel = PostgresChannel(conninfo, controller_id=duties.controller_id.hex)
    channel.join(shares_artifacts=config.artifacts_url is not None)
    if config.artifacts_url is None:
        artifacts.sweep(store, blobs=blobs)
    running = loops_of(duties)
    if begun.database is not None:
        running = (*running, Loop("database", begun.database.keep_up, Signal(), POLL_SECONDS))
    loops = Loops(running, hub=duties.hub, channel=channel)
    parts.callback(loops.stop, timeout=LOOPS_STOP_SECONDS)
    parts.callback(channel.close)
    context = _context(config, duties, identity, parts=parts)
    hosts = LOOPBACK_NAMES | {config.listen.host} if config.listen.is_loopback else None
    application = Application(context, endpoints=ENDPOINTS, handlers=HANDLERS, hosts=hosts)
    server = Server(application, begun.bound, tls=tls, attach=duties.hub.attach, ended=ended)
    server.start()
    parts.callback(server.stop, release=partial(_release, context))
    loops.start()
    announcement = Announcement(
        url=url, pin=identity.pin, pid=os.getpid(), version=VERSION, local_node=config.local_node
    )
    home.announce(announcement)
    _LOG.info("the controller answers at %s", url)
    if config.insecure_http and not config.listen.is_loopback:
        _LOG.warning("it speaks plain HTTP: anyone on the way reads keys and jobs; leave insecure_http out")
    parts.callback(_LOG.info, "the controller stops")
    return announcement


def _url(config: Config, bound: socket.socket) -> str:
    """Where others find this controller: as told, else by the address it listens on."""
    if config.public_url:
        return config.public_url
    port: int = bound.getsockname()[1]
    listen = Listen(socket.gethostname() if config.listen.is_anywhere else config.listen.host, port)
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


def _appear(config: Config, store: Database, blobs: LocalBlobs, *, parts: ExitStack) -> Duties:
    """Be one of the controllers; the first after a silence gives the fleet time to be heard."""
    tempo = Tempo(scale=config.time_scale)
    tempo.refresh(store)
    with store.begin() as tx:
        controller_id = tx.new_id()
    presence.start(store, controller_id=controller_id, rhythm=tempo.rhythm)
    parts.callback(_disappear, store, controller_id)
    return Duties(
        database=store,
        blobs=blobs,
        hub=Hub(),
        tempo=tempo,
        controller_id=controller_id,
        verify_batch_max=config.verify_batch_max,
    )


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
            _LOG.warning("the key in %s proves nobody any more; a new one takes its place", home.path / OWNERS_KEY)
        else:
            return
    owner = access.ensure_owner(store, name=OWNER)
    scopes = [f"{resource}:*" for resource in RESOURCES]
    home.keep_token(
        access.make_key(store, owner=owner, name="this machine", scopes=scopes, hmac_key=identity.api_key_hmac)
    )


def _context(config: Config, duties: Duties, identity: Identity, *, parts: ExitStack) -> Context:
    store, blobs, hub, tempo = duties.database, duties.blobs, duties.hub, duties.tempo
    work = ThreadPoolExecutor(config.pool_max - LOOP_CONNECTIONS, thread_name_prefix="work")
    streams = ThreadPoolExecutor(config.stream_max, thread_name_prefix="stream")
    for executor in (work, streams):
        parts.callback(executor.shutdown, wait=False, cancel_futures=True)

    def transact(calls: Sequence[SyncCall]) -> Sequence[SyncReply | Refusal]:
        return sync(store, calls, blobs=blobs, rhythm=tempo.rhythm)

    def look_again(calls: Sequence[SyncCall]) -> Sequence[SyncReply | Refusal]:
        return look(store, calls, rhythm=tempo.rhythm)

    batcher = Batcher(transact, executor=work, batch_max=config.sync_batch_max)
    looks = Batcher(look_again, executor=work, batch_max=config.sync_batch_max)
    return Context(
        database=store,
        blobs=blobs,
        hub=hub,
        syncs=Syncs(batcher, looks=looks, hub=hub),
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
