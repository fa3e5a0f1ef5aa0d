"""An agent's home folder: what lies where, and that one process at a time runs on it.

Owns the layout, the lock and the durable replacing of a small file. Refuses to know what is in the files.
"""

import errno
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from fleetward.agent import attempt
from fleetward.domain.errors import HomeLocked, HomeUnusable, StorageFailed, StorageFull

LOCK: Final = "lock"
PID_BYTES_MAX: Final = 16
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class AgentHome:
    """The folder of one node, held by this process until it ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def hold(cls, folder: Path) -> Self:
        """Make the folder if need be and hold it, or say who does."""
        path = folder.absolute()
        # As root every attempt runs as a user of its own, who has to get through to its working folder.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            for part in (path, path / "attempts"):
                part.mkdir(mode=mode, exist_ok=True)
                part.chmod(mode)
            (path / "journal").mkdir(mode=0o700, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise HomeUnusable(
                f"the agent's home {path} cannot be used: {error.strerror}",
                hint="choose another with --home",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(lock, PID_BYTES_MAX).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise HomeLocked(
                f"another agent already runs on {path} (process {holder})",
                hint="stop it, or give this one a home of its own with --home",
            ) from error
        with suppress(OSError):
            # Only for people who ask who it is; on a full disk the lock holds all the same.
            os.truncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
        return cls(path, lock)

    def release(self) -> None:
        """Let another process have the folder."""
        with suppress(OSError):
            os.truncate(self._lock, 0)
        os.close(self._lock)

    @property
    def attempts(self) -> Path:
        """Where the attempts' folders are."""
        return self.path / "attempts"

    @property
    def journal(self) -> Path:
        """Where the journal is."""
        return self.path / "journal"

    @property
    def log(self) -> Path:
        """Where the agent writes what it does."""
        return self.path / "agent.log"


@contextmanager
def minding(what: str) -> Generator[None]:
    """Tell what the disk refused as a fault that says what was being done."""
    try:
        yield
    except OSError as error:
        fault = StorageFull if error.errno in _FULL else StorageFailed
        raise fault(f"{what}: {error.strerror or error}", hint="look at this machine's disk") from error


def replace_durably(path: Path, text: str) -> None:
    """Replace a file so that a reader and a crash see the old or the new one whole; it is its owner's alone."""
    with minding(f"{path} cannot be written"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            attempt.write_atomically(path.name, text, folder_fd=folder)
        finally:
            os.close(folder)
