"""Unpacking a job's input: files appear below the working folder, and nowhere else.

Owns the writing. Refuses to know the format: `verify.archive` has checked each name before it comes here.
Every folder is entered through an open descriptor and never through a link, so that a working folder in
which something already lies cannot lead outside.
"""

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

from fleetward.domain.errors import StorageFailed, StorageFull, UnsafeArchive, quoted
from fleetward.verify.archive import File, Limits, Readable, read

_ENTER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(source: Readable, work: Path, *, limits: Limits | None = None) -> int:
    """Write an archive's files below a folder and say how many entries there were. Nothing is overwritten."""
    count = 0
    work_fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in read(source, limits=limits):
            count += 1
            with _as_ours(entry.path):
                if isinstance(entry, File):
                    _write(entry, work_fd)
                else:
                    os.close(_enter(entry.path.split("/"), work_fd))
    finally:
        os.close(work_fd)
    return count


def _write(entry: File, work_fd: int) -> None:
    *folders, name = entry.path.split("/")
    folder_fd = _enter(folders, work_fd)
    try:
        mode = 0o755 if entry.is_executable else 0o644
        fd = os.open(name, _CREATE, mode, dir_fd=folder_fd)
        try:
            for chunk in entry.chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    finally:
        os.close(folder_fd)


def _enter(folders: list[str], work_fd: int) -> int:
    """Go down, making what is missing; a link or a file on the way ends the walk."""
    fd = os.dup(work_fd)
    for part in folders:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o755, dir_fd=fd)
        try:
            below = os.open(part, _ENTER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


@contextlib.contextmanager
def _as_ours(path: str) -> Generator[None]:
    try:
        yield
    except FileExistsError as error:
        raise UnsafeArchive(
            f"archive entry {quoted(path)} is already there", hint="two inputs must not hold the same file"
        ) from error
    except NotADirectoryError as error:
        raise UnsafeArchive(f"archive entry {quoted(path)} lies below something that is no folder") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeArchive(f"archive entry {quoted(path)} lies below a link") from error
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        fault = StorageFull if full else StorageFailed
        raise fault(f"archive entry {quoted(path)} could not be written: {error.strerror}") from error
