"""Files and folders by descriptor.

Owns the flags that refuse links, the system calls on one opened thing, and how trouble of a disk is told.
Refuses to know what is stored and where.
"""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

from fleetward.domain.errors import StorageFailed, StorageFull
from fleetward.verify.digest import Digest, Hasher, Measured

OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW
FOLDER: Final = OPEN | os.O_RDONLY | os.O_DIRECTORY
READ: Final = OPEN | os.O_RDONLY | os.O_NONBLOCK  # a pipe in place of a file must not hang us
MEASURE_BYTES: Final = 1024 * 1024  # read at once while hashing; larger gains nothing

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def faults(act: str) -> Generator[None]:
    """Tell what the disk refused as a fault that says what was being done."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.ELOOP:
            reason = "a link lies where a file should be; somebody else writes there"
        if error.errno in _FULL:
            raise StorageFull(f"cannot {act}: {reason}", hint="free space on the controller's disk") from error
        raise StorageFailed(f"cannot {act}: {reason}", hint="look at the controller's disk and its log") from error


def make_folder(name: str, *, within: int) -> int:
    """Open a folder, made if need be."""
    with suppress(FileExistsError):
        os.mkdir(name, mode=0o700, dir_fd=within)
    return os.open(name, FOLDER, dir_fd=within)


@contextmanager
def open_folder(name: str, *, within: int | None = None) -> Generator[int]:
    """Hold a folder open; a link in its place is refused."""
    folder = os.open(name, FOLDER, dir_fd=within)
    try:
        yield folder
    finally:
        os.close(folder)


def require_file(opened: int) -> os.stat_result:
    """Refuse anything but a plain file."""
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode):
        raise StorageFailed("what lies in the artifact store is no plain file; somebody else writes there")
    return found


def unlink(name: str, *, within: int) -> None:
    """Take a name away, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=within)


def write(opened: int, content: bytes) -> None:
    """Write all of it."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(opened, rest) :]


def stamp(opened: int) -> tuple[int, int, int, int]:
    """Tell one state of a file from another: equal stamps, equal bytes."""
    found = os.fstat(opened)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def measure_file(opened: int, *, start: int = 0, end: int | None = None) -> Measured:
    """Hash an opened file, or a part of it, in bounded memory."""
    hasher = Hasher()
    room = memoryview(bytearray(MEASURE_BYTES))
    at = start
    while end is None or at < end:
        wanted = room if end is None else room[: end - at]
        count = os.preadv(opened, [wanted], at)
        if not count:
            break
        hasher.update(wanted[:count])
        at += count
    return hasher.measured()


def holds(name: str, *, within: int, digest: Digest) -> bool:
    """Whether the file of that name has these bytes."""
    stored = os.open(name, READ, dir_fd=within)
    try:
        _ = require_file(stored)
        return measure_file(stored).digest == digest
    finally:
        os.close(stored)
