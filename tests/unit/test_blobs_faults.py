"""The local store on a disk that fills up, fails to sync, or loses its controller between any two steps."""

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest

from fleetward.controller.blobs import LocalBlobs, Location
from fleetward.domain.errors import StorageFailed, StorageFull, UploadOffset
from fleetward.verify.digest import Digest
from tests.needs import needs

ONE, TWO, THREE, FOUR = (UUID(int=number) for number in range(1, 5))
HELLO = b"hello, world"
ROTTEN = b"these bytes rotted"
MEMBERS = [b"one", HELLO, b""]
TRACED = ("open", "write", "fsync", "link", "rename", "unlink", "mkdir", "close")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Name a folder for a store, with an object whose bytes have rotted."""
    folder = tmp_path / "blobs"
    LocalBlobs(folder, reserve_bytes=0).close()
    empty_but_for_rot(folder)
    return folder


def empty_but_for_rot(folder: Path) -> None:
    """Leave one object in the store, whose bytes have rotted."""
    for path in [*folder.glob("objects/*/*"), *folder.glob("packs/*"), *folder.glob("uploads/*")]:
        path.unlink()
    name = Digest.of(ROTTEN).hex
    shard = folder / "objects" / name[:2]
    shard.mkdir(parents=True, exist_ok=True)
    (shard / name[2:]).write_bytes(b"rot")


def upload(blobs: LocalBlobs, content: bytes, *, upload_id: UUID) -> Location:
    """Go on wherever the upload stands, as a node does after any break."""
    at = blobs.begin(upload_id, size_bytes=len(content))
    chunks = [content[start : start + 4] for start in range(at, len(content), 4)]
    blobs.append(upload_id, offset=at, size_bytes=len(content), chunks=chunks)
    return blobs.finish(upload_id, digest=Digest.of(content), size_bytes=len(content))


def work(blobs: LocalBlobs, told: Callable[[str], object]) -> None:
    """Do everything the store can do once, telling each success."""
    upload(blobs, HELLO, upload_id=ONE)
    told("hello")
    upload(blobs, HELLO, upload_id=TWO)  # the bytes are there already
    upload(blobs, ROTTEN, upload_id=THREE)  # what is there is damaged
    told("rotten")
    pack = blobs.store_pack(MEMBERS)
    told("pack " + pack.name)
    blobs.store_pack(MEMBERS)
    blobs.discard(upload(blobs, b"short-lived", upload_id=FOUR))


def complete(folder: Path, *, but: str = "") -> set[str]:
    """Check that all that can be read is what its name says, and name it."""
    found: set[str] = set()
    for stored in [*(folder / "objects").glob("*/*"), *(folder / "packs").iterdir()]:
        name = stored.name if stored.parent.name == "packs" else stored.parent.name + stored.name
        if name != but:
            assert hashlib.sha256(stored.read_bytes()).hexdigest() == name
            found.add(name)
    return found


# Crashes


class KilledBefore:
    """Counts the system calls of a child and kills it before one of them, or records them all."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.calls: list[str] = []

    def install(self) -> None:
        """Stand between this process and its kernel."""
        for name in TRACED:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def traced(*args: object, **options: object) -> object:
            if len(self.calls) == self.number:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls.append(name)
            return call(*args, **options)

        return traced


def in_child(act: Callable[[], None], *, killed_before: int | None) -> tuple[int, list[str]]:
    """Run an act in a forked child; return how it ended and what it told through the pipe."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            tracer = KilledBefore(killed_before)
            write = os.write
            tracer.install()
            globals()["tell"] = lambda text: write(writer, text.encode() + b"\n")
            act()
            write(writer, f"calls {len(tracer.calls)}\n".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = told.read().splitlines()
    return os.waitpid(pid, 0)[1], lines


def tell(text: str) -> object:
    """Say something to the parent; a child replaces this."""
    raise AssertionError(text)


def test_a_crash_between_any_two_steps_leaves_only_whole_objects_and_loses_nothing_told(folder: Path) -> None:
    rotten = Digest.of(ROTTEN).hex

    def act() -> None:
        work(LocalBlobs(folder, reserve_bytes=0), tell)

    ended, lines = in_child(act, killed_before=None)
    assert ended == 0, lines
    calls = int(lines[-1].split()[1])
    opening = _calls_of_opening(folder)
    moments = range(opening, calls)
    assert len(moments) > 60
    for moment in moments:
        empty_but_for_rot(folder)
        ended, lines = in_child(act, killed_before=moment)
        assert os.WTERMSIG(ended) == signal.SIGKILL, (moment, lines)
        found = complete(folder, but="" if "rotten" in lines else rotten)
        assert "hello" not in lines or Digest.of(HELLO).hex in found, moment
        assert "rotten" not in lines or rotten in found, moment
        assert {line.split()[1] for line in lines if line.startswith("pack")} <= found, moment
        _recovers(folder, rotten)


def test_a_crash_while_a_store_is_made_is_made_good_at_the_next_start(folder: Path) -> None:
    shutil.rmtree(folder)
    # The 256 folders are all alike: every forty-first moment meets each kind of call.
    for moment in range(0, _calls_of_opening(folder), 41):
        shutil.rmtree(folder)
        ended, lines = in_child(lambda: LocalBlobs(folder).close(), killed_before=moment)
        assert os.WTERMSIG(ended) == signal.SIGKILL, (moment, lines)
        empty_but_for_rot(folder)
        _recovers(folder, Digest.of(ROTTEN).hex)


def _calls_of_opening(folder: Path) -> int:
    ended, lines = in_child(lambda: LocalBlobs(folder, reserve_bytes=0).close(), killed_before=None)
    assert ended == 0
    return int(lines[-1].split()[1])


def _recovers(folder: Path, rotten: str) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    blobs.sweep_uploads(keep=[ONE, TWO, THREE, FOUR])
    work(blobs, lambda _text: None)
    assert complete(folder) == {
        Digest.of(HELLO).hex,
        rotten,
        Digest.of(b"".join(MEMBERS)).hex,
    }
    assert list((folder / "uploads").iterdir()) == []
    blobs.close()


# The order that a power cut would test: process crashes alone do not lose what is not synced.


@dataclass
class Syncs:
    """What was written, synced and named since, by file."""

    dirty: set[int] = field(default_factory=set)
    unsynced_names: dict[int, set[str]] = field(default_factory=dict)
    named: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch the calls that matter."""
        write, fsync, link, rename = os.write, os.fsync, os.link, os.rename

        def watched_write(opened: int, content: bytes) -> int:
            self.dirty.add(os.fstat(opened).st_ino)
            return write(opened, content)

        def watched_fsync(opened: int) -> None:
            fsync(opened)
            self.dirty.discard(os.fstat(opened).st_ino)
            self.unsynced_names.pop(os.fstat(opened).st_ino, None)

        def naming(call: Callable[..., None]) -> Callable[..., None]:
            def watched(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, **options: bool) -> None:
                found = os.stat(source, dir_fd=src_dir_fd, follow_symlinks=False)
                assert found.st_ino not in self.dirty, "a name is given to bytes that are not on disk"
                call(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **options)
                self.unsynced_names.setdefault(os.fstat(dst_dir_fd).st_ino, set()).add(target)
                self.named += 1

            return watched

        monkeypatch.setattr(os, "write", watched_write)
        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(os, "link", naming(link))
        monkeypatch.setattr(os, "rename", naming(rename))


def test_bytes_are_on_disk_before_they_get_a_name_and_the_name_before_anyone_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    syncs = Syncs()
    syncs.install(monkeypatch)

    def told(_text: str) -> None:
        assert syncs.unsynced_names == {}, "told before the name was on disk"

    work(blobs, told)
    assert syncs.named == 4  # hello, rotten, the pack and the short-lived one
    blobs.close()


def test_the_folders_of_a_store_are_on_disk_before_it_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda opened: synced.append(os.fstat(opened).st_ino))
    LocalBlobs(folder).close()
    assert {path.stat().st_ino for path in (folder / "objects", folder, folder.parent)} <= set(synced)


def test_a_name_that_was_there_is_synced_again_since_its_giver_may_have_died(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    upload(blobs, HELLO, upload_id=ONE)
    synced: list[int] = []
    fsync = os.fsync

    def watched(opened: int) -> None:
        synced.append(os.fstat(opened).st_ino)
        fsync(opened)

    monkeypatch.setattr(os, "fsync", watched)
    upload(blobs, HELLO, upload_id=TWO)
    assert (folder / "objects" / Digest.of(HELLO).hex[:2]).stat().st_ino in synced
    blobs.close()


# Failing syncs


@dataclass
class FailingSync:
    """A disk that fails one sync, and counts how often each opened file was synced."""

    fails_at: int
    count: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of the kernel's fsync."""
        fsync = os.fsync

        def failing(opened: int) -> None:
            self.count += 1
            if self.count == self.fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(opened)

        monkeypatch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failed_sync_of_file_or_folder_discards_the_upload(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    disk = FailingSync(fails_at)
    disk.install(monkeypatch)
    with pytest.raises(StorageFailed, match="cannot store an upload"):
        upload(blobs, HELLO, upload_id=ONE)
    assert disk.count == fails_at  # nothing was tried a second time
    assert Digest.of(HELLO).hex not in complete(folder, but=Digest.of(ROTTEN).hex)
    assert blobs.begin(ONE, size_bytes=12) == 0
    upload(blobs, HELLO, upload_id=ONE)
    blobs.close()


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failed_sync_discards_the_pack(folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    FailingSync(fails_at).install(monkeypatch)
    with pytest.raises(StorageFailed, match="cannot store a pack"):
        blobs.store_pack(MEMBERS)
    assert list((folder / "packs").iterdir()) == list((folder / "uploads").iterdir()) == []
    blobs.store_pack(MEMBERS)
    blobs.close()


def test_a_failed_sync_does_not_take_away_what_others_were_told_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    location = upload(blobs, HELLO, upload_id=ONE)
    FailingSync(2).install(monkeypatch)
    with pytest.raises(StorageFailed):
        upload(blobs, HELLO, upload_id=TWO)
    assert b"".join(blobs.read(location)) == HELLO
    blobs.close()


def test_a_name_is_not_counted_on_by_others_before_it_is_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    blobs.append(TWO, offset=0, size_bytes=12, chunks=[HELLO])
    others: list[Location] = []
    other = threading.Thread(
        target=lambda: others.append(blobs.finish(TWO, digest=Digest.of(HELLO), size_bytes=12)), daemon=True
    )
    fsync = os.fsync
    shard = (folder / "objects" / Digest.of(HELLO).hex[:2]).stat().st_ino

    def failing(opened: int) -> None:
        if os.fstat(opened).st_ino == shard and other.ident is None:
            other.start()
            other.join(timeout=0.2)  # it can end only if it counts on a name that we are about to take back
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageFailed):
        upload(blobs, HELLO, upload_id=ONE)
    other.join()
    assert b"".join(blobs.read(others[0])) == HELLO
    blobs.close()


def test_an_upload_that_was_finished_just_before_we_got_its_lock_is_not_written_into(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(folder, reserve_bytes=0)
    blobs.append(ONE, offset=0, size_bytes=12, chunks=[HELLO])
    flock = fcntl.flock

    def finished_first(opened: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        blobs.finish(ONE, digest=Digest.of(HELLO), size_bytes=12)
        flock(opened, operation)

    monkeypatch.setattr(fcntl, "flock", finished_first)
    with pytest.raises(UploadOffset, match="has 0 bytes"):
        blobs.append(ONE, offset=12, size_bytes=20, chunks=[b" and more"])
    assert b"".join(blobs.read(Location(Digest.of(HELLO), 12))) == HELLO
    blobs.close()


# Full disks


def test_what_does_not_fit_beside_the_reserve_is_refused_before_it_is_written(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    blobs = LocalBlobs(folder, reserve_bytes=free + (1 << 40))
    refusals = [
        lambda: blobs.begin(ONE, size_bytes=12),
        lambda: blobs.append(ONE, offset=0, size_bytes=12, chunks=[HELLO]),
        lambda: blobs.store_pack(MEMBERS),
    ]
    for refused in refusals:
        with pytest.raises(StorageFull, match="do not fit") as fault:
            refused()
        assert (fault.value.code, fault.value.status) == ("storage_full", 507)
    assert complete(folder, but=Digest.of(ROTTEN).hex) == set()
    blobs.close()


# Fills a disk with uploads, then packs; frees it; goes on. What it prints is what it was refused with.
FILL = """
import resource, sys
from pathlib import Path
from uuid import UUID
from fleetward.controller.blobs import LocalBlobs
from fleetward.domain.errors import StorageFull
from fleetward.verify.digest import Digest

folder, size_bytes = Path(sys.argv[1]), int(sys.argv[2])
blobs = LocalBlobs(folder, reserve_bytes=0)
if sys.argv[3] == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
content = bytes(range(256)) * (size_bytes // 256)
upload_id = UUID(int=1)
small = UUID(int=2)
blobs.append(small, offset=0, size_bytes=5, chunks=[b"small"])
kept = blobs.finish(small, digest=Digest.of(b"small"), size_bytes=5)
try:
    blobs.append(upload_id, offset=0, size_bytes=size_bytes, chunks=[content])
    print("upload fitted")
except StorageFull as fault:
    print(fault.code)
try:
    blobs.store_pack([content])
    print("pack fitted")
except StorageFull as fault:
    print(fault.code)
names = [path.name for path in folder.rglob("*") if path.is_file() and path.parent.name != "uploads"]
print(len(names), b"".join(blobs.read(kept)).decode())
print(len([path for path in (folder / "uploads").iterdir() if path.name.startswith("pack")]))
blobs.abandon(upload_id)
blobs.append(upload_id, offset=0, size_bytes=5, chunks=[b"again"])
blobs.finish(upload_id, digest=Digest.of(b"again"), size_bytes=5)
print("goes on")
"""
OUR_PATH = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
REFUSED_AND_WHOLE = ["storage_full", "storage_full", "1 small", "0", "goes on"]


def fill(command: list[str], folder: Path, *, size_bytes: int, mode: str) -> list[str]:
    argv = [*command, sys.executable, "-c", FILL, str(folder), str(size_bytes), mode]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=OUR_PATH)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_write_that_the_kernel_cuts_off_leaves_nothing_torn(tmp_path: Path) -> None:
    assert fill([], tmp_path / "blobs", size_bytes=2 << 20, mode="limited") == REFUSED_AND_WHOLE


def small_disk(folder: Path, options: str) -> list[str]:
    """Give the command that runs another with a small disk of its own at `folder`, gone when it ends."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"'
    return [*unshare, "sh", "-c", mount, options, str(folder)]


def can_mount(folder: Path) -> bool:
    """Whether this machine lets us have a small disk."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*small_disk(folder, "size=1m"), "true"], capture_output=True, check=False).returncode == 0


def test_a_full_disk_leaves_nothing_torn(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        needs("small-disk", "mounting a tmpfs of its own is not allowed here")
    command = small_disk(tmp_path, "size=2m")
    assert fill(command, tmp_path / "blobs", size_bytes=4 << 20, mode="unlimited") == REFUSED_AND_WHOLE


# Opening takes 260 folders; the disk has room for that many files and a few more.
CROWD = """
import sys
from pathlib import Path
from uuid import UUID
from fleetward.controller.blobs import LocalBlobs
from fleetward.domain.errors import StorageFull

blobs = LocalBlobs(Path(sys.argv[1]), reserve_bytes=0)
taken = 0
try:
    while taken < 1000:
        blobs.append(UUID(int=taken), offset=0, size_bytes=5, chunks=[b"small"])
        taken += 1
except StorageFull as fault:
    print(fault.code, fault)
try:
    blobs.store_pack([b"small"])
except StorageFull as fault:
    print(fault.code, fault)
blobs.sweep_uploads(keep=[])
print(len(blobs.store_pack([b"small"]).offsets))
"""


def test_a_disk_without_room_for_another_file_is_full_too(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        needs("small-disk", "mounting a tmpfs of its own is not allowed here")
    argv = [*small_disk(tmp_path, "size=9m,nr_inodes=300"), sys.executable, "-c", CROWD, str(tmp_path / "blobs")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=OUR_PATH)
    assert ended.stdout.splitlines() == [
        "storage_full cannot open an upload: No space left on device",
        "storage_full cannot store a pack: No space left on device",
        "1",
    ], ended.stderr
