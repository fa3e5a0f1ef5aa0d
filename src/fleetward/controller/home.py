"""The controller's home folder: who runs on it, the owner's key, and how others on this machine find it.

Owns `controller.pid`, `controller.json` and `token`. Refuses to know what else lies
in the folder.
"""

import fcntl
import os
from pathlib import Path
from typing import Final, Self

import msgspec

from fleetward.controller.clusterfiles import explained, minding, open_home, write_durably
from fleetward.domain.errors import HomeLocked

PID: Final = "controller.pid"  # also the lock: it is held for as long as the process lives
ANNOUNCEMENT: Final = "controller.json"
OWNERS_KEY: Final = "token"
LOG: Final = "controller.log"
KEYRING: Final = "keyring"
BLOBS: Final = "blobs"
FILE_BYTES_MAX: Final = 64 * 1024
PID_BYTES_MAX: Final = 16


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What programs on this machine read to find the controller."""

    url: str
    pin: str
    pid: int
    version: str
    local_node: bool


class Home:
    """The home folder, held by this process until it ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def hold(cls, folder: Path) -> Self:
        """Make the folder if need be and hold it, or say who does."""
        path = open_home(folder)
        try:
            lock = os.open(path / PID, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise explained(error.errno or 0, error.strerror or str(error), path / PID) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(lock, PID_BYTES_MAX).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise HomeLocked(
                f"another controller already runs on {path} (process {holder})",
                hint="stop it with `fleetward down`, or give this one a home of its own with --home",
            ) from error
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return cls(path, lock)

    def release(self) -> None:
        """Let another controller have the folder."""
        (self.path / ANNOUNCEMENT).unlink(missing_ok=True)
        # The file stays: whoever waits for its lock must not hold the lock of a file that is gone.
        os.truncate(self._lock, 0)
        os.close(self._lock)

    def announce(self, announcement: Announcement) -> None:
        """Say where the controller can be reached."""
        self._write(ANNOUNCEMENT, msgspec.json.encode(announcement).decode())

    def token(self) -> str | None:
        """The owner's key, if one is kept here."""
        try:
            with (self.path / OWNERS_KEY).open("rb") as file:
                return file.read(FILE_BYTES_MAX).decode("ascii", "replace").strip() or None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explained(error.errno or 0, error.strerror or str(error), self.path) from error

    def keep_token(self, key: str) -> None:
        """Keep the owner's key for the commands of this machine's user."""
        self._write(OWNERS_KEY, key)

    def _write(self, name: str, text: str) -> None:
        with minding(self.path / name):
            write_durably(self.path / name, text + "\n", mode=0o600)
