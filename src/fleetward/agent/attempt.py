"""An attempt's folder: what lies in it, in which form, and how it is written so that a crash leaves sense.

Owns the order, the status and the names that agent and supervisor share. Refuses to know who runs, and to
import anything beyond the standard library: the supervisor must start in a few hundredths of a second.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

WORK: Final = "work"
ORDER: Final = "order.json"
STATUS: Final = "status.json"
LOG: Final = "log"
LOCK: Final = "lock"  # flocked for as long as the supervisor lives
CONTROL: Final = "control"  # a FIFO: lines reach the supervisor whole and in order, at any length of path
RECEIPT: Final = "receipt.json"
RESERVE: Final = "reserve"  # given up to write the last status on a full disk
SUPERVISOR_LOG: Final = "supervisor.log"
CHANGES: Final = ".changes"  # beside the attempts: a FIFO on which supervisors say that there is news

LOG_BYTES_MAX: Final = 64 * 1024 * 1024
RESERVE_BYTES: Final = 64 * 1024
MARK: Final = "FLEETWARD_ASSIGNMENT_ID"  # in each command's environment; by it, orphans are recognised

USER_FIRST: Final = 64_000  # each attempt under a root agent runs as a user of its own
USER_LAST: Final = 64_999
USER_PLACEHOLDER: Final = "{user}"  # in the sandbox's arguments, for the user that the supervisor claims


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDocument:
    """What a supervisor is to run, written once before it starts. Deadlines are seconds of `boottime`."""

    assignment_id: str
    fence: int
    boot_id: str
    command: tuple[str, ...]
    env: dict[str, str]
    working_dir: str
    prefix: tuple[str, ...]  # the sandbox's own command, put before the job's
    has_pid_namespace: bool
    own_user: bool
    deadline: float | None
    margin_seconds: float
    grace_seconds: float
    run_seconds: float | None
    log_bytes_max: int
    memory_bytes: int
    cpus_milli: int
    in_force: dict[str, str]


@dataclass(slots=True, kw_only=True)
class StatusDocument:
    """How far an attempt has come. `gone` is written only when no process of it is left and its log is on disk."""

    boot_id: str
    supervisor_pid: int
    phase: str = "starting"
    pid: int | None = None
    pid_ticks: int | None = None
    user: int | None = None
    started_at: float | None = None  # the node's wall clock: for people, never for a decision
    finished_at: float | None = None
    started_boottime: float | None = None
    finished_boottime: float | None = None
    exit_code: int | None = None
    ended_by: str | None = None
    message: str = ""
    log_bytes: int = 0
    log_written_bytes: int = 0
    lingering: int = 0
    cpu_seconds: float = 0.0
    memory_peak_bytes: int = 0
    warnings: list[str] = field(default_factory=list[str])


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Seconds of a clock that nobody can set and that counts suspend (on macOS, CLOCK_MONOTONIC does)."""
    return time.clock_gettime(_CLOCK)


def wall_time() -> float:
    """Seconds since 1970 as this machine believes; shown to people and compared with nothing."""
    return time.clock_gettime(time.CLOCK_REALTIME)


def boot_id() -> str:
    """Name the running of this machine's kernel; after a reboot nothing of an attempt can be left."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # macOS keeps no boot id; the second in which it booted serves as one.
        return str(round(wall_time() - boottime()))


def write_atomically(name: str, text: str, *, folder_fd: int) -> None:
    """Replace a file so that a reader and a crash see the old or the new one whole."""
    temporary = f"{name}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder_fd)
        raise
    finally:
        os.close(fd)
    os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    os.fsync(folder_fd)


def dump(document: OrderDocument | StatusDocument) -> str:
    """Write a document as JSON."""
    return json.dumps(asdict(document), indent=1)


def load_order(text: str) -> OrderDocument:
    """Read an order back; it is our own writing, so a wrong form is a bug and raises TypeError."""
    document = json.loads(text)
    document["command"] = tuple(document["command"])
    document["prefix"] = tuple(document["prefix"])
    return OrderDocument(**document)


def load_status(text: str) -> StatusDocument:
    """Read a status back."""
    return StatusDocument(**json.loads(text))
