"""Stored bytes, addressed by their SHA-256.

Owns the folders of the local store and the order of system calls that makes a readable object a complete
one: write to a temporary, hash, compare, sync the file, link it to its digest, sync the folder. Refuses to
know whose bytes they are, what refers to them and when they may go.

    blobs/uploads/<upload id>        being written; may be torn, has no reader
    blobs/objects/ab/cdef…           one file each, named by its digest, never written again
    blobs/packs/<digest>             many small files end to end, one sync for all of them

Folders are opened once and everything below them by name with O_NOFOLLOW, so a link planted in the store
is refused, not followed. Locks are `flock` on the very file or folder, so they hold between threads and
processes and vanish with their holder.
"""

import fcntl
import os
import threading
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final
from uuid import UUID

from fleetward.controller import disk
from fleetward.domain.errors import BlobNotFound, DigestMismatch, SizeMismatch, StorageFailed, StorageFull, UploadOffset
from fleetward.verify.digest import Digest, Hasher, Measured

RESERVE_BYTES: Final = 64 * 1024 * 1024  # left free, since the database's own disk may be the same one
PIECE_BYTES: Final = 256 * 1024  # what a reader gets at once, and so what one slow reader holds in memory
RUNNING_MAX: Final = 1024  # unfinished uploads whose hash is kept in memory; others are hashed again at the end


@dataclass(frozen=True, slots=True)
class Location:
    """Where stored bytes lie: in a file of their own, or in a pack from `offset` on."""

    digest: Digest
    size_bytes: int
    pack: str | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Pack:
    """Many small files, stored as one; `offsets` are in the order they were given."""

    name: str
    offsets: tuple[int, ...]


class BlobStore(Protocol):
    """What the services need of any place that keeps bytes. Whatever returns normally is on disk."""

    def begin(self, upload_id: UUID, *, size_bytes: int) -> int:
        """Say where an upload of so many bytes goes on, or refuse it for want of room."""
        ...

    def append(self, upload_id: UUID, *, offset: int, size_bytes: int, chunks: Iterable[bytes]) -> int:
        """Take the next bytes of an upload declared to have `size_bytes`; return how many are there now."""
        ...

    def finish(self, upload_id: UUID, *, digest: Digest, size_bytes: int) -> Location:
        """Turn a whole upload into an object, or drop it because it is not what was declared."""
        ...

    def abandon(self, upload_id: UUID) -> None:
        """Drop an upload that nobody will go on with."""
        ...

    def sweep_uploads(self, *, keep: Collection[UUID]) -> int:
        """Drop all other temporaries and count them. For the start, before anyone writes."""
        ...

    def store_pack(self, members: Sequence[bytes]) -> Pack:
        """Store small files together."""
        ...

    def read(self, location: Location, *, offset: int = 0) -> Iterator[bytes]:
        """Open stored bytes, now, and hand them out piece by piece."""
        ...

    def rehash(self, location: Location) -> Measured:
        """Read stored bytes again and say what they are."""
        ...

    def discard(self, location: Location) -> None:
        """Remove an object. The caller has made sure that nothing refers to it and nothing is about to."""
        ...

    def discard_pack(self, name: str) -> None:
        """Remove a pack with all its members, on the same condition."""
        ...


@final
class LocalBlobs:
    """A store in a folder of this machine, with room for everything but the last `reserve_bytes` of its disk."""

    def __init__(self, folder: Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._reserve_bytes = reserve_bytes
        # Hashes of unfinished uploads, each with the stamp of the file when it covered all of it.
        self._running: dict[UUID, tuple[Hasher, tuple[int, int, int, int]]] = {}
        self._running_lock = threading.Lock()
        with disk.faults(f"open the artifact store {str(folder)!r}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = os.open(folder, disk.FOLDER)
            self._objects, self._packs, self._uploads = (
                disk.make_folder(name, within=self._folder) for name in ("objects", "packs", "uploads")
            )
            for number in range(256):
                os.close(disk.make_folder(f"{number:02x}", within=self._objects))
            os.fsync(self._objects)
            os.fsync(self._folder)
            with suppress(PermissionError), disk.open_folder("..", within=self._folder) as parent:
                os.fsync(parent)

    def close(self) -> None:
        """Let go of the folders; nothing is left to be written."""
        for folder in (self._objects, self._packs, self._uploads, self._folder):
            os.close(folder)

    # Uploads

    def begin(self, upload_id: UUID, *, size_bytes: int) -> int:
        """Say where an upload of so many bytes goes on, or refuse it for want of room."""
        with disk.faults("begin an upload"):
            try:
                found = os.stat(upload_id.hex, dir_fd=self._uploads, follow_symlinks=False)
                received = found.st_size if found.st_nlink == 1 else 0
            except FileNotFoundError:
                received = 0
        self._require_room(max(0, size_bytes - received))
        return received

    def append(self, upload_id: UUID, *, offset: int, size_bytes: int, chunks: Iterable[bytes]) -> int:
        """Take the next bytes of an upload declared to have `size_bytes`; return how many are there now."""
        with self._upload(upload_id) as upload:
            received = os.fstat(upload).st_size
            if offset != received:
                raise UploadOffset(
                    f"upload {upload_id} has {received} bytes, so it cannot go on at {offset}",
                    hint=f"go on at offset {received}",
                )
            hasher = self._take_running(upload_id, upload) if received else Hasher()
            try:
                for chunk in chunks:
                    received += len(chunk)
                    if received > size_bytes:
                        self._drop(upload_id.hex)
                        raise _wrong_size(upload_id, found=f"more than {size_bytes}", declared=size_bytes)
                    self._require_room(len(chunk))
                    with disk.faults("write an upload"):
                        disk.write(upload, chunk)
                    if hasher is not None:
                        hasher.update(chunk)
            finally:
                self._keep_running(upload_id, upload, hasher)
        return received

    def finish(self, upload_id: UUID, *, digest: Digest, size_bytes: int) -> Location:
        """Turn a whole upload into an object, or drop it because it is not what was declared."""
        with self._upload(upload_id) as upload:
            # Whatever happens from here on, the temporary goes: published, not what was declared, or
            # no longer to be trusted because a sync of it failed.
            try:
                with disk.faults("read an upload"):
                    hasher = self._take_running(upload_id, upload)
                    found = disk.measure_file(upload) if hasher is None else hasher.measured()
                if found.size_bytes != size_bytes:
                    raise _wrong_size(upload_id, found=str(found.size_bytes), declared=size_bytes)
                if found.digest != digest:
                    raise DigestMismatch(
                        f"upload {upload_id} has sha256 {found.digest.hex}, not {digest.hex} as declared",
                        hint="upload the bytes that were declared; those that came were dropped",
                    )
                with disk.faults("store an upload"):
                    os.fsync(upload)
                    with self._shard(digest) as shard:
                        self._publish(upload_id.hex, shard=shard, name=digest.hex[2:], digest=digest)
            finally:
                self._drop(upload_id.hex)
        return Location(digest=digest, size_bytes=size_bytes)

    def abandon(self, upload_id: UUID) -> None:
        """Drop an upload that nobody will go on with."""
        with self._upload(upload_id) as upload:
            _ = self._take_running(upload_id, upload)
            self._drop(upload_id.hex)

    def sweep_uploads(self, *, keep: Collection[UUID]) -> int:
        """Drop all other temporaries and count them. For the start, before anyone writes."""
        kept = {upload_id.hex for upload_id in keep}
        with disk.faults("clean up unfinished uploads"):
            with os.scandir(self._uploads) as found:
                stale = [entry.name for entry in found if entry.name not in kept]
            for name in stale:
                self._drop(name)
        return len(stale)

    @contextmanager
    def _upload(self, upload_id: UUID) -> Generator[int]:
        with disk.faults("open an upload"):
            upload = self._open_upload(upload_id)
        try:
            yield upload
        finally:
            os.close(upload)

    def _open_upload(self, upload_id: UUID) -> int:
        name = upload_id.hex
        while True:
            upload = os.open(name, disk.OPEN | os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600, dir_fd=self._uploads)
            try:
                fcntl.flock(upload, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = disk.require_file(upload)
                if self._is_named(name, found):
                    if found.st_nlink == 1:
                        return upload
                    # A finish was cut off between giving the object its name and taking this one away:
                    # writing here would write into the object.
                    self._drop(name)
            except BlockingIOError as error:
                size_bytes = os.fstat(upload).st_size
                os.close(upload)
                raise UploadOffset(
                    f"upload {upload_id} is being written by another call, which has brought it to {size_bytes} bytes",
                    hint="ask where the upload goes on, then try again",
                ) from error
            except BaseException:
                os.close(upload)
                raise
            os.close(upload)

    def _is_named(self, name: str, found: os.stat_result) -> bool:
        """Whether the name still means the file that was opened; a finish may have ended it before we had the lock."""
        try:
            now = os.stat(name, dir_fd=self._uploads, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(now, found)

    def _take_running(self, upload_id: UUID, upload: int) -> Hasher | None:
        with self._running_lock:
            hasher, taken = self._running.pop(upload_id, (None, None))
        return hasher if taken == disk.stamp(upload) else None

    def _keep_running(self, upload_id: UUID, upload: int, hasher: Hasher | None) -> None:
        found = os.fstat(upload)
        if hasher is None or hasher.size_bytes != found.st_size or found.st_nlink == 0:
            return
        with self._running_lock:
            if len(self._running) >= RUNNING_MAX:
                del self._running[next(iter(self._running))]
            self._running[upload_id] = hasher, disk.stamp(upload)

    # Packs

    def store_pack(self, members: Sequence[bytes]) -> Pack:
        """Store small files together."""
        hasher = Hasher()
        offsets: list[int] = []
        for member in members:
            offsets.append(hasher.size_bytes)
            hasher.update(member)
        digest = hasher.measured().digest
        # No living thread shares the id, so what has this name is left over from a dead one. It may be
        # the pack itself by a second name: unlink, never truncate.
        temporary = f"pack-{digest.hex}-{threading.get_native_id()}"
        self._drop(temporary)
        self._require_room(hasher.size_bytes)
        try:
            with disk.faults("store a pack"):
                flags = disk.OPEN | os.O_WRONLY | os.O_CREAT | os.O_EXCL
                pack = os.open(temporary, flags, 0o600, dir_fd=self._uploads)
                try:
                    for member in members:
                        disk.write(pack, member)
                    os.fsync(pack)
                finally:
                    os.close(pack)
                with disk.open_folder(".", within=self._packs) as packs:
                    fcntl.flock(packs, fcntl.LOCK_EX)
                    self._publish(temporary, shard=packs, name=digest.hex, digest=digest)
        finally:
            self._drop(temporary)
        return Pack(name=digest.hex, offsets=tuple(offsets))

    # Objects

    def read(self, location: Location, *, offset: int = 0) -> Iterator[bytes]:
        """Open stored bytes, now, and hand them out piece by piece."""
        assert offset >= 0, "the form of a range is the caller's to check"
        pieces = self._pieces(location, offset=offset)
        _ = next(pieces)  # opens, so that what is missing is refused before a reply has begun
        return pieces

    def _pieces(self, location: Location, *, offset: int) -> Iterator[bytes]:
        with self._open_stored(location) as stored:
            at, end = location.offset + offset, location.offset + location.size_bytes
            size_bytes = os.fstat(stored).st_size
            if size_bytes < end or (location.pack is None and size_bytes != end):
                raise StorageFailed(
                    f"the stored bytes of {location.digest.hex} are damaged: {size_bytes} bytes, not {end}",
                    hint="run `fleetward doctor`; uploading the same bytes again repairs them",
                )
            yield b""
            while at < end:
                with disk.faults("read stored bytes"):
                    piece = os.pread(stored, min(PIECE_BYTES, end - at), at)
                if not piece:
                    raise StorageFailed(f"the stored bytes of {location.digest.hex} were cut off while being read")
                yield piece
                at += len(piece)

    def rehash(self, location: Location) -> Measured:
        """Read stored bytes again and say what they are."""
        with self._open_stored(location) as stored, disk.faults("read stored bytes"):
            if location.pack is None:
                return disk.measure_file(stored)
            return disk.measure_file(stored, start=location.offset, end=location.offset + location.size_bytes)

    def discard(self, location: Location) -> None:
        """Remove an object. The caller has made sure that nothing refers to it and nothing is about to."""
        assert location.pack is None, "a pack goes as a whole, by discard_pack"
        with disk.faults("discard an object"), self._shard(location.digest) as shard:
            disk.unlink(location.digest.hex[2:], within=shard)
            os.fsync(shard)

    def discard_pack(self, name: str) -> None:
        """Remove a pack with all its members, on the same condition."""
        with disk.faults("discard a pack"), disk.open_folder(".", within=self._packs) as packs:
            fcntl.flock(packs, fcntl.LOCK_EX)
            disk.unlink(Digest.parse(name).hex, within=packs)
            os.fsync(packs)

    @contextmanager
    def _shard(self, digest: Digest) -> Generator[int]:
        with disk.open_folder(digest.hex[:2], within=self._objects) as shard:
            fcntl.flock(shard, fcntl.LOCK_EX)
            yield shard

    @contextmanager
    def _open_stored(self, location: Location) -> Generator[int]:
        folder, within, name = location.digest.hex[:2], self._objects, location.digest.hex[2:]
        if location.pack is not None:
            folder, within, name = ".", self._packs, Digest.parse(location.pack).hex
        with disk.faults("open stored bytes"):
            try:
                with disk.open_folder(folder, within=within) as opened:
                    stored = os.open(name, disk.READ, dir_fd=opened)
            except FileNotFoundError as error:
                raise BlobNotFound(f"no stored bytes have sha256 {location.digest.hex}") from error
        try:
            with disk.faults("open stored bytes"):
                _ = disk.require_file(stored)
            yield stored
        finally:
            os.close(stored)

    def _publish(self, temporary: str, *, shard: int, name: str, digest: Digest) -> None:
        """Give synced bytes their name. The caller holds the folder's lock, so no one counts on a name we take back."""
        is_new = True
        try:
            os.link(temporary, name, src_dir_fd=self._uploads, dst_dir_fd=shard, follow_symlinks=False)
        except FileExistsError:
            is_new = False
            if not disk.holds(name, within=shard, digest=digest):
                # Not replacing an object: what lies there is damaged, and these are its bytes.
                os.rename(temporary, name, src_dir_fd=self._uploads, dst_dir_fd=shard)
        # Also when the name was there before: whoever gave it may have died before this line.
        try:
            os.fsync(shard)
        except OSError:
            if is_new:
                disk.unlink(name, within=shard)
            raise

    def _drop(self, temporary: str) -> None:
        with disk.faults("drop an upload"):
            disk.unlink(temporary, within=self._uploads)

    def _require_room(self, size_bytes: int) -> None:
        with disk.faults("ask for free space"):
            found = os.fstatvfs(self._folder)
        free = found.f_bavail * found.f_frsize
        if free - size_bytes < self._reserve_bytes:
            raise StorageFull(
                f"{size_bytes} bytes do not fit: {free} are free, and {self._reserve_bytes} stay in reserve",
                hint="free space on the controller's disk; the upload can go on where it stopped",
            )


def _wrong_size(upload_id: UUID, *, found: str, declared: int) -> SizeMismatch:
    return SizeMismatch(
        f"upload {upload_id} has {found} bytes, not the {declared} that were declared",
        hint="declare the file as it is; the bytes that came were dropped",
    )
