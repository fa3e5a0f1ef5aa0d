"""PostgreSQL's server process as the machine sees it: its pid file, its command line, its end.

Owns the question "is this process the server of that data folder?", and how to wait for its end. Refuses
to know how a server is started, or what is in the data. A number in `postmaster.pid` alone proves nothing: after a
reboot, or in a container, another process may have it; a zombie that nobody reaps has it for ever.
"""

import hashlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PID_FILE: Final = "postmaster.pid"
READY: Final = "ready"
POLL_SECONDS: Final = 0.005  # how often a pid file or a process is looked at where no signal can be waited on
PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class PidFile:
    """What a server wrote about itself: line 1 its pid, 2 the data folder, 5 the socket folder, 8 its state."""

    pid: int
    data: str
    socket_folder: str
    state: str

    @classmethod
    def read(cls, data: Path) -> "PidFile | None":
        """Read it; None where there is none, or none with a pid."""
        try:
            lines = (data / PID_FILE).read_text(errors="surrogateescape").splitlines()
        except FileNotFoundError:
            return None
        lines += [""] * (8 - len(lines))
        # A standalone backend writes a negative pid.
        digits = lines[0].strip().lstrip("-")
        if not digits.isdigit():
            return None
        return cls(pid=int(digits), data=lines[1], socket_folder=lines[4], state=lines[7].strip())


@dataclass(frozen=True, slots=True)
class Process:
    """A running process: who runs it, and the words it was started with (or shows instead)."""

    pid: int
    uid: int
    command: str


def cluster_name(data: Path) -> str:
    """The name that a server's backends show, so that they can be told from another cluster's."""
    return "fleetward-" + hashlib.sha256(os.fsencode(data)).hexdigest()[:12]


def is_server_of(pid: int, data: Path, *, uid: int) -> bool:
    """Whether the process is the server of this data folder, and runs as that user."""
    process = _look(pid)
    return process is not None and process.uid == uid and f"postgres -D {data} " in f"{process.command} "


def backends_of(data: Path, *, uid: int) -> list[int]:
    """The processes that still work on this data folder, besides its server."""
    mark = f"postgres: {cluster_name(data)}: "
    return [process.pid for process in _processes() if process.uid == uid and process.command.startswith(mark)]


def is_alive(pid: int) -> bool:
    """Whether a process has this pid and has not ended; one that nobody has reaped has ended."""
    return _look(pid) is not None


def wait_for_end(pid: int, *, seconds: float) -> bool:
    """Wait until the process has ended, reaped or not; False when the time ran out first."""
    if hasattr(os, "pidfd_open"):
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        with os.fdopen(watch, "rb", buffering=0) as file:
            return bool(select.select([file], [], [], seconds)[0])
    until = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def send(pid: int, sent: signal.Signals) -> None:
    """Signal a process that may have ended meanwhile."""
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        return


def _look(pid: int) -> Process | None:
    if PROC.joinpath("self", "cmdline").exists():
        return _look_in_proc(pid)
    return next(_ps("-p", str(pid)), None)


def _processes() -> Iterator[Process]:
    if not PROC.joinpath("self", "cmdline").exists():
        yield from _ps("-ax")
        return
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (process := _look_in_proc(int(folder.name))) is not None:
            yield process


def _look_in_proc(pid: int) -> Process | None:
    folder = PROC / str(pid)
    try:
        command = (folder / "cmdline").read_bytes()
        uid = folder.stat().st_uid
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # A zombie has no command line; a server's title is padded with zeros.
    words = command.rstrip(b"\0").replace(b"\0", b" ")
    return Process(pid, uid, os.fsdecode(words)) if words else None


def _ps(*which: str) -> Iterator[Process]:
    listing = subprocess.run(
        ["/bin/ps", "-ww", *which, "-o", "pid=,uid=,stat=,command="], capture_output=True, check=False, timeout=30
    )
    for line in os.fsdecode(listing.stdout).splitlines():
        words = line.split(None, 3)
        if len(words) == 4 and not words[2].startswith("Z"):
            yield Process(int(words[0]), int(words[1]), words[3].rstrip())
