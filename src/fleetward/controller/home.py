"""The controller's home folder: who runs on it, the owner's key, and how others on this machine find it.

Owns `controller.lock`, `controller.pid`, `controller.json` and `token`. Refuses to know what else lies
in the folder.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final, Self

import msgspec

from fleetward.domain.errors import HomeLocked, HomeUnusable

LOCK: Final = "controller.lock"
PID: Final = "controller.pid"
ANNOUNCEMENT: Final = "controller.json"
TOKEN: Final = "token"
LOG: Final = "controller.log"
FILE_BYTES_MAX: Final = 64 * 1024


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
    def hold(cls, path: Path) -> Self:
        """Make the folder if need be and hold it, or say who does."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise HomeLocked(
                f"another controller already runs on {path} (process {_holder(path)})",
                hint="stop it with `fleetward down`, or give this one a home of its own with --home",
            ) from error
        home = cls(path, lock)
        home.write(PID, f"{os.getpid()}\n".encode())
        return home

    def release(self) -> None:
        """Let another controller have the folder."""
        for name in (ANNOUNCEMENT, PID):
            (self.path / name).unlink(missing_ok=True)
        os.close(self._lock)

    def announce(self, announcement: Announcement) -> None:
        """Say where the controller can be reached."""
        self.write(ANNOUNCEMENT, msgspec.json.encode(announcement) + b"\n")

    def token(self) -> str | None:
        """The owner's key, if one is kept here."""
        try:
            with (self.path / TOKEN).open("rb") as file:
                return file.read(FILE_BYTES_MAX).decode("ascii", "replace").strip() or None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(self.path, error) from error

    def keep_token(self, key: str) -> None:
        """Keep the owner's key for the commands of this machine's user."""
        self.write(TOKEN, key.encode() + b"\n")

    def write(self, name: str, content: bytes) -> None:
        """Write a file whole or not at all, for this user's eyes only."""
        target, temporary = self.path / name, self.path / f".{name}.{secrets.token_hex(4)}"
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _unusable(self.path, error) from error


def _holder(path: Path) -> str:
    try:
        return (path / PID).read_text()[:16].strip()
    except OSError:
        return "unknown"


def _unusable(path: Path, error: OSError) -> HomeUnusable:
    return HomeUnusable(
        f"the home folder {path} cannot be used: {error.strerror or error}",
        hint="give another one with --home, or make this one writable for the user who runs the controller",
    )
