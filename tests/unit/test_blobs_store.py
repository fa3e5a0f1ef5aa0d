"""The local store: what is taken, refused, found again and thrown away."""

import hashlib
import os
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleetward.controller.blobs import PIECE_BYTES, RUNNING_MAX, LocalBlobs, Location
from fleetward.domain.errors import (
    BlobNotFound,
    DigestMismatch,
    MalformedDigest,
    SizeMismatch,
    StorageFailed,
    UploadOffset,
)
from fleetward.verify.digest import Digest, measure

ONE, TWO = UUID(int=1), UUID(int=2)
HELLO = b"hello, world"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Name a folder for a store that is not made yet."""
    return tmp_path / "blobs"


@pytest.fixture
def blobs(folder: Path) -> Iterator[LocalBlobs]:
    """Open a store; when the test ends, everything that can be read in it must be what its name says."""
    store = LocalBlobs(folder, reserve_bytes=0)
    yield store
    store.close()
    assert_addresses_hold(folder)


def assert_addresses_hold(folder: Path) -> None:
    for stored in (folder / "objects").glob("*/*"):
        assert hashlib.sha256(stored.read_bytes()).hexdigest() == stored.parent.name + stored.name
    for stored in (folder / "packs").iterdir():
        assert hashlib.sha256(stored.read_bytes()).hexdigest() == stored.name


def object_file(folder: Path, content: bytes) -> Path:
    name = Digest.of(content).hex
    return folder / "objects" / name[:2] / name[2:]


def upload(blobs: LocalBlobs, content: bytes, *, upload_id: UUID = ONE) -> Location:
    blobs.append(upload_id, offset=0, size_bytes=len(content), chunks=[content])
    return blobs.finish(upload_id, digest=Digest.of(content), size_bytes=len(content))


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


# Uploads


@pytest.mark.parametrize("content", [b"", b"x", HELLO * 100_000])
def test_what_was_uploaded_is_read_rehashed_and_discarded(blobs: LocalBlobs, folder: Path, content: bytes) -> None:
    location = upload(blobs, content)
    assert location == Location(digest=Digest.of(content), size_bytes=len(content))
    assert b"".join(blobs.read(location)) == content
    assert b"".join(blobs.read(location, offset=len(content) // 2)) == content[len(content) // 2 :]
    assert blobs.rehash(location) == measure([content])
    assert everything(folder) == [str(object_file(folder, content).relative_to(folder))]
    blobs.discard(location)
    blobs.discard(location)
    assert everything(folder) == []


def test_an_upload_goes_on_where_it_stopped_also_in_a_store_opened_later(blobs: LocalBlobs, folder: Path) -> None:
    size = len(HELLO)
    assert blobs.begin(ONE, size_bytes=size) == 0
    assert blobs.append(ONE, offset=0, size_bytes=size, chunks=[b"hel", b"lo"]) == 5
    assert blobs.append(ONE, offset=5, size_bytes=size, chunks=[b", "]) == 7
    later = LocalBlobs(folder, reserve_bytes=0)
    assert later.begin(ONE, size_bytes=size) == 7
    assert later.append(ONE, offset=7, size_bytes=size, chunks=[b"world"]) == size
    location = blobs.finish(ONE, digest=Digest.of(HELLO), size_bytes=size)
    assert b"".join(later.read(location)) == HELLO
    later.close()


@pytest.mark.parametrize("offset", [0, 4, 6, 12])
def test_an_upload_at_another_offset_is_refused_with_the_right_one(blobs: LocalBlobs, offset: int) -> None:
    blobs.append(ONE, offset=0, size_bytes=12, chunks=[b"hello"])
    with pytest.raises(UploadOffset, match=f"has 5 bytes, so it cannot go on at {offset}") as refused:
        blobs.append(ONE, offset=offset, size_bytes=12, chunks=[b"never"])
    assert refused.value.hint == "go on at offset 5"
    assert blobs.begin(ONE, size_bytes=12) == 5


def test_a_broken_connection_keeps_what_had_come(blobs: LocalBlobs) -> None:
    def breaks() -> Iterator[bytes]:
        yield b"hello"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        blobs.append(ONE, offset=0, size_bytes=12, chunks=breaks())
    assert blobs.begin(ONE, size_bytes=12) == 5
    blobs.append(ONE, offset=5, size_bytes=12, chunks=[HELLO[5:]])
    blobs.finish(ONE, digest=Digest.of(HELLO), size_bytes=12)


def test_more_bytes_than_declared_are_refused_at_once_and_dropped(blobs: LocalBlobs, folder: Path) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"more"

    with pytest.raises(SizeMismatch, match="has more than 6 bytes, not the 6 that were declared"):
        blobs.append(ONE, offset=0, size_bytes=6, chunks=endless())
    assert everything(folder) == []
    assert blobs.begin(ONE, size_bytes=6) == 0


def test_fewer_bytes_than_declared_are_refused_and_dropped(blobs: LocalBlobs, folder: Path) -> None:
    blobs.append(ONE, offset=0, size_bytes=12, chunks=[b"hello"])
    with pytest.raises(SizeMismatch, match="has 5 bytes, not the 12 that were declared"):
        blobs.finish(ONE, digest=Digest.of(HELLO), size_bytes=12)
    assert everything(folder) == []


def test_other_bytes_than_declared_are_refused_and_dropped(blobs: LocalBlobs, folder: Path) -> None:
    blobs.append(ONE, offset=0, size_bytes=5, chunks=[b"liars"])
    with pytest.raises(DigestMismatch) as refused:
        blobs.finish(ONE, digest=Digest.of(b"truth"), size_bytes=5)
    assert Digest.of(b"liars").hex in refused.value.message
    assert Digest.of(b"truth").hex in refused.value.message
    assert everything(folder) == []


def test_bytes_that_changed_under_the_hash_in_memory_are_noticed(blobs: LocalBlobs, folder: Path) -> None:
    blobs.append(ONE, offset=0, size_bytes=12, chunks=[HELLO])
    (folder / "uploads" / ONE.hex).write_bytes(b"HELLO, WORLD")
    with pytest.raises(DigestMismatch):
        blobs.finish(ONE, digest=Digest.of(HELLO), size_bytes=12)


def test_an_upload_is_written_by_one_call_at_a_time(blobs: LocalBlobs, folder: Path) -> None:
    other = LocalBlobs(folder, reserve_bytes=0)

    def meanwhile() -> Iterator[bytes]:
        yield b"hello"
        for store in (blobs, other):
            with pytest.raises(UploadOffset, match="is being written by another call, which has brought it to 5 bytes"):
                store.append(ONE, offset=5, size_bytes=12, chunks=[b"!"])
            with pytest.raises(UploadOffset):
                store.finish(ONE, digest=Digest.of(b"hello"), size_bytes=5)
            with pytest.raises(UploadOffset):
                store.abandon(ONE)
        yield HELLO[5:]

    blobs.append(ONE, offset=0, size_bytes=12, chunks=meanwhile())
    blobs.finish(ONE, digest=Digest.of(HELLO), size_bytes=12)
    other.close()


def test_an_abandoned_upload_leaves_nothing(blobs: LocalBlobs, folder: Path) -> None:
    blobs.append(ONE, offset=0, size_bytes=12, chunks=[b"hello"])
    blobs.abandon(ONE)
    blobs.abandon(ONE)
    assert everything(folder) == []


def test_the_start_drops_temporaries_that_nobody_goes_on_with(blobs: LocalBlobs, folder: Path) -> None:
    blobs.append(ONE, offset=0, size_bytes=12, chunks=[b"hello"])
    blobs.append(TWO, offset=0, size_bytes=12, chunks=[b"hello"])
    (folder / "uploads" / "pack-left-over").write_bytes(b"torn")
    assert blobs.sweep_uploads(keep=[TWO]) == 2
    assert everything(folder) == [f"uploads/{TWO.hex}"]
    blobs.append(ONE, offset=0, size_bytes=12, chunks=[HELLO])
    blobs.finish(ONE, digest=Digest.of(HELLO), size_bytes=12)


def test_hashes_kept_in_memory_are_bounded(blobs: LocalBlobs) -> None:
    for number in range(RUNNING_MAX + 1):
        blobs.append(UUID(int=number), offset=0, size_bytes=12, chunks=[b"hello"])
    for number in (0, RUNNING_MAX):
        blobs.append(UUID(int=number), offset=5, size_bytes=12, chunks=[HELLO[5:]])
        blobs.finish(UUID(int=number), digest=Digest.of(HELLO), size_bytes=12)


def test_a_large_upload_takes_little_memory(blobs: LocalBlobs) -> None:
    chunk = os.urandom(1 << 20)
    digest = measure(chunk for _ in range(64)).digest
    tracemalloc.start()
    blobs.append(ONE, offset=0, size_bytes=64 << 20, chunks=(chunk for _ in range(64)))
    location = blobs.finish(ONE, digest=digest, size_bytes=64 << 20)
    assert blobs.rehash(location).digest == digest
    assert sum(len(piece) for piece in blobs.read(location)) == 64 << 20
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


# Objects


def test_the_same_bytes_twice_are_one_object_that_is_not_touched(blobs: LocalBlobs, folder: Path) -> None:
    assert upload(blobs, HELLO) == upload(blobs, HELLO, upload_id=TWO)
    before = object_file(folder, HELLO).stat()
    upload(blobs, HELLO)
    after = object_file(folder, HELLO).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_two_uploads_of_the_same_bytes_at_once_are_fine(blobs: LocalBlobs, folder: Path) -> None:
    ids = [UUID(int=number) for number in range(8)]
    for upload_id in ids:
        blobs.append(upload_id, offset=0, size_bytes=12, chunks=[HELLO])
    together = threading.Barrier(len(ids))

    def finish(upload_id: UUID) -> Location:
        together.wait()
        return blobs.finish(upload_id, digest=Digest.of(HELLO), size_bytes=12)

    with ThreadPoolExecutor(max_workers=len(ids)) as threads:
        found = list(threads.map(finish, ids))
    assert found == [Location(digest=Digest.of(HELLO), size_bytes=12)] * len(ids)
    assert everything(folder) == [str(object_file(folder, HELLO).relative_to(folder))]


def test_many_threads_with_packs_and_uploads_get_what_they_gave(blobs: LocalBlobs) -> None:
    def work(number: int) -> None:
        for turn in range(5):
            content = f"{number % 2} {turn}".encode()  # every content comes from several threads
            pack = blobs.store_pack([content, HELLO])
            packed = Location(Digest.of(HELLO), len(HELLO), pack=pack.name, offset=pack.offsets[1])
            assert b"".join(blobs.read(packed)) == HELLO
            location = upload(blobs, content, upload_id=UUID(int=number))
            assert blobs.rehash(location).digest == Digest.of(content)

    with ThreadPoolExecutor(max_workers=6) as threads:
        list(threads.map(work, range(6)))


def test_what_is_not_there_is_refused_before_the_first_piece(blobs: LocalBlobs) -> None:
    missing = Location(Digest.of(b"never"), 5)
    for location in (missing, Location(missing.digest, 5, pack=missing.digest.hex)):
        with pytest.raises(BlobNotFound, match=missing.digest.hex):
            blobs.read(location)
        with pytest.raises(BlobNotFound):
            blobs.rehash(location)


def test_a_reader_holds_one_piece_and_survives_a_discard(blobs: LocalBlobs) -> None:
    content = os.urandom(3 * PIECE_BYTES + 7)
    location = upload(blobs, content)
    pieces = blobs.read(location)
    blobs.discard(location)
    read = list(pieces)
    assert ([len(piece) for piece in read], b"".join(read)) == ([PIECE_BYTES] * 3 + [7], content)


@pytest.mark.parametrize("damage", [b"", b"hello", b"hello, World", HELLO + b"!"])
def test_damaged_bytes_are_told_by_a_rehash_and_repaired_by_the_next_upload(
    blobs: LocalBlobs, folder: Path, damage: bytes
) -> None:
    location = upload(blobs, HELLO)
    object_file(folder, HELLO).write_bytes(damage)
    assert blobs.rehash(location) == measure([damage])
    if len(damage) != len(HELLO):
        with pytest.raises(StorageFailed, match="are damaged"):
            blobs.read(location)
    upload(blobs, HELLO)
    assert b"".join(blobs.read(location)) == HELLO


def test_bytes_cut_off_while_being_read_are_a_fault_not_an_end(blobs: LocalBlobs, folder: Path) -> None:
    location = upload(blobs, HELLO)
    pieces = blobs.read(location)
    object_file(folder, HELLO).write_bytes(b"")
    with pytest.raises(StorageFailed, match="cut off while being read"):
        list(pieces)
    upload(blobs, HELLO)


# Packs


def test_members_of_a_pack_are_read_and_rehashed_alone(blobs: LocalBlobs, folder: Path) -> None:
    members = [b"one", b"", HELLO]
    pack = blobs.store_pack(members)
    assert (pack.name, pack.offsets) == (Digest.of(b"".join(members)).hex, (0, 3, 3))
    for member, offset in zip(members, pack.offsets, strict=True):
        location = Location(Digest.of(member), len(member), pack=pack.name, offset=offset)
        assert b"".join(blobs.read(location)) == member
        assert b"".join(blobs.read(location, offset=1)) == member[1:]
        assert blobs.rehash(location) == measure([member])
    assert everything(folder) == [f"packs/{pack.name}"]
    assert blobs.store_pack(members) == pack
    blobs.discard_pack(pack.name)
    blobs.discard_pack(pack.name)
    assert everything(folder) == []


def test_a_member_beyond_the_end_of_its_pack_is_damage(blobs: LocalBlobs) -> None:
    pack = blobs.store_pack([HELLO])
    with pytest.raises(StorageFailed, match="are damaged"):
        blobs.read(Location(Digest.of(HELLO), len(HELLO), pack=pack.name, offset=1))


def test_a_damaged_pack_is_repaired_by_the_same_members(blobs: LocalBlobs, folder: Path) -> None:
    pack = blobs.store_pack([HELLO])
    (folder / "packs" / pack.name).write_bytes(b"rot")
    assert blobs.store_pack([HELLO]) == pack
    assert (folder / "packs" / pack.name).read_bytes() == HELLO


def test_a_left_over_that_is_the_pack_by_another_name_does_not_harm_it(blobs: LocalBlobs, folder: Path) -> None:
    pack = blobs.store_pack([HELLO])
    os.link(folder / "packs" / pack.name, folder / "uploads" / f"pack-{pack.name}-{threading.get_native_id()}")
    assert blobs.store_pack([HELLO]) == pack
    assert everything(folder) == [f"packs/{pack.name}"]


@pytest.mark.parametrize("name", ["../objects/00", "", "/etc/passwd", "x" * 64])
def test_a_pack_has_no_other_name_than_a_digest(blobs: LocalBlobs, name: str) -> None:
    with pytest.raises(MalformedDigest):
        blobs.discard_pack(name)
    with pytest.raises(MalformedDigest):
        blobs.read(Location(Digest.of(b""), 0, pack=name))


# Links, and what else others may plant


def test_an_upload_left_with_two_names_is_never_written_into(blobs: LocalBlobs, folder: Path) -> None:
    location = upload(blobs, HELLO)
    os.link(object_file(folder, HELLO), folder / "uploads" / ONE.hex)
    assert blobs.begin(ONE, size_bytes=20) == 0
    assert blobs.append(ONE, offset=0, size_bytes=20, chunks=[b"other bytes"]) == 11
    assert b"".join(blobs.read(location)) == HELLO


@pytest.mark.parametrize("plant", ["symlink", "pipe", "folder"])
def test_no_planted_thing_is_followed_or_waited_for(
    blobs: LocalBlobs, folder: Path, tmp_path: Path, plant: str
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(HELLO)
    location = Location(Digest.of(HELLO), len(HELLO))
    upload_file = folder / "uploads" / ONE.hex
    spots = [object_file(folder, HELLO), upload_file]
    for spot in spots:
        if plant == "symlink":
            spot.symlink_to(outside)
        elif plant == "pipe":
            os.mkfifo(spot)
        else:
            spot.mkdir()
    with pytest.raises(StorageFailed):
        list(blobs.read(location))
    with pytest.raises(StorageFailed):
        blobs.rehash(location)
    with pytest.raises(StorageFailed):
        blobs.append(ONE, offset=0, size_bytes=12, chunks=[b"overwritten!"])
    with pytest.raises(StorageFailed):
        upload(blobs, HELLO, upload_id=TWO)
    assert outside.read_bytes() == HELLO
    for spot in spots:
        (Path.rmdir if plant == "folder" else Path.unlink)(spot)


def test_a_link_in_place_of_a_folder_is_refused(blobs: LocalBlobs, folder: Path, tmp_path: Path) -> None:
    location = upload(blobs, HELLO)
    shard = object_file(folder, HELLO).parent
    shard.rename(tmp_path / "moved")
    shard.symlink_to(tmp_path / "moved")
    with pytest.raises(StorageFailed):
        blobs.read(location)
    with pytest.raises(StorageFailed):
        LocalBlobs(folder)
    shard.unlink()
    (tmp_path / "moved").rename(shard)


def test_the_store_itself_is_no_link_but_may_lie_below_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StorageFailed, match="cannot open the artifact store"):
        LocalBlobs(tmp_path / "link")
    LocalBlobs(tmp_path / "link" / "blobs").close()
    assert (tmp_path / "real" / "blobs").stat().st_mode & 0o777 == 0o700


# A model of the store, and any sequence of calls


class StoreMachine(RuleBasedStateMachine):
    """Compare the store with two dictionaries, across re-openings."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name) / "blobs"
        self.blobs = LocalBlobs(self.folder, reserve_bytes=0)
        self.uploads: dict[UUID, bytes] = {}
        self.objects: set[bytes] = set()

    ids = st.sampled_from([ONE, TWO])
    contents = st.binary(max_size=6)

    @rule(
        upload_id=ids,
        ahead=st.sampled_from([0, 0, 0, 1, -1]),
        chunks=st.lists(contents, max_size=3),
        size_bytes=st.integers(6, 24),
    )
    def append(self, upload_id: UUID, ahead: int, chunks: list[bytes], size_bytes: int) -> None:
        """Append, now and then at the wrong offset."""
        have = self.uploads.get(upload_id, b"")
        offset = len(have) + ahead
        if ahead:
            with pytest.raises(UploadOffset):
                self.blobs.append(upload_id, offset=offset, size_bytes=size_bytes, chunks=chunks)
        elif chunks and len(have + b"".join(chunks)) > size_bytes:
            with pytest.raises(SizeMismatch):
                self.blobs.append(upload_id, offset=offset, size_bytes=size_bytes, chunks=chunks)
            self.uploads.pop(upload_id, None)
        else:
            self.uploads[upload_id] = have + b"".join(chunks)
            count = self.blobs.append(upload_id, offset=offset, size_bytes=size_bytes, chunks=chunks)
            assert count == len(self.uploads[upload_id])

    @rule(upload_id=ids)
    def finish(self, upload_id: UUID) -> None:
        """Finish honestly."""
        content = self.uploads.pop(upload_id, b"")
        self.blobs.finish(upload_id, digest=Digest.of(content), size_bytes=len(content))
        self.objects.add(content)

    @rule(upload_id=ids, content=contents)
    def finish_as(self, upload_id: UUID, content: bytes) -> None:
        """Finish with a claim that may be a lie."""
        have = self.uploads.pop(upload_id, b"")
        try:
            self.blobs.finish(upload_id, digest=Digest.of(content), size_bytes=len(content))
            assert have == content
            self.objects.add(content)
        except (DigestMismatch, SizeMismatch):
            assert have != content

    @rule(upload_id=ids)
    def abandon(self, upload_id: UUID) -> None:
        """Give an upload up."""
        self.uploads.pop(upload_id, None)
        self.blobs.abandon(upload_id)

    @rule(content=contents)
    def discard(self, content: bytes) -> None:
        """Throw an object away, there or not."""
        self.objects.discard(content)
        self.blobs.discard(Location(Digest.of(content), len(content)))

    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self.blobs.close()
        self.blobs = LocalBlobs(self.folder, reserve_bytes=0)
        self.blobs.sweep_uploads(keep=self.uploads)

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        """Compare names, bytes and offsets."""
        stored = {path.read_bytes() for path in (self.folder / "objects").glob("*/*")}
        assert stored == self.objects
        for content in self.objects:
            assert b"".join(self.blobs.read(Location(Digest.of(content), len(content)))) == content
        for upload_id in (ONE, TWO):
            assert self.blobs.begin(upload_id, size_bytes=0) == len(self.uploads.get(upload_id, b""))

    def teardown(self) -> None:
        """Leave nothing behind."""
        assert_addresses_hold(self.folder)
        self.blobs.close()
        self.temporary.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
