"""The agent's side of its supervisors: start one, find it again, hear from it, tell it to stop.

Owns the way to them: the folder, the lock that shows who lives, the two FIFOs. Refuses to know leases and
the controller. Whatever it says comes from disk, so a restarted agent knows as much as one that never fell.
"""

import contextlib
import fcntl
import os
import select
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, Self, cast
from uuid import UUID

import fleetward
from fleetward.agent import attempt, sandbox
from fleetward.agent.attempt import boottime
from fleetward.agent.sandbox import Plan
from fleetward.domain.errors import Fault, StorageFailed

__all__ = [
    "AttemptFolder",
    "Changes",
    "Observation",
    "Order",
    "Supervised",
    "boottime",
    "find",
    "launch",
    "prepare",
]

LAUNCH_TIMEOUT: Final = timedelta(seconds=30)

Phase = Literal["starting", "running", "ended", "gone", "orphaned"]
EndedBy = Literal["exited", "stopped", "deadline", "timeout", "start_failed", "lost"]


class SupervisorFailed(Fault):
    """The process that should mind an attempt could not be started."""

    code = "supervisor_failed"


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Where one attempt lives on disk."""

    path: Path

    @property
    def work(self) -> Path:
        """The command's working folder and HOME."""
        return self.path / attempt.WORK

    @property
    def log(self) -> Path:
        """What the command wrote."""
        return self.path / attempt.LOG

    @property
    def receipt(self) -> Path:
        """What the node attests of the attempt, out of the command's reach."""
        return self.path / attempt.RECEIPT


def prepare(attempts: Path, assignment_id: UUID) -> AttemptFolder:
    """Make the folder of an attempt. Closed to others, but a user of its own must be able to pass through."""
    folder = AttemptFolder(attempts / str(assignment_id))
    folder.path.mkdir(mode=0o711, exist_ok=True)
    folder.path.chmod(0o711)
    folder.work.mkdir(mode=0o700, exist_ok=True)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be run. `deadline` is in seconds of `boottime`, from when the lease was asked for; None never ends."""

    assignment_id: UUID
    fence: int
    command: tuple[str, ...]
    env: dict[str, str]
    plan: Plan
    deadline: float | None
    run_seconds: float | None
    working_dir: str = "."
    margin_seconds: float = 10.0
    grace_seconds: float = 10.0
    log_bytes_max: int = attempt.LOG_BYTES_MAX
    memory_bytes: int = 0
    cpus_milli: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How an attempt stands. Released means: no process is left, and the log is whole and on disk."""

    phase: Phase
    ended_by: EndedBy | None
    exit_code: int | None
    message: str
    log_bytes: int
    log_written_bytes: int
    is_released: bool
    started_at: datetime | None
    finished_at: datetime | None
    lingering: int
    cpu_seconds: float
    memory_peak_bytes: int
    user: int | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Supervised:
    """One attempt and the way to its supervisor."""

    folder: AttemptFolder
    order: attempt.OrderDocument

    @property
    def assignment_id(self) -> UUID:
        """Which assignment it works for."""
        return UUID(self.order.assignment_id)

    @property
    def fence(self) -> int:
        """Under which fence it was started."""
        return self.order.fence

    def observe(self) -> Observation:
        """Read how it stands. The lock is looked at first: a supervisor that ends in between has written all."""
        is_alive = self._has_supervisor()
        status = self._read_status()
        phase, ended_by, message = status.phase, status.ended_by, status.message
        if phase != "gone" and not is_alive:
            if status.boot_id != attempt.boot_id():
                phase, message = "gone", "the machine was restarted while the attempt ran"
                ended_by = ended_by or "lost"
            else:
                phase, message = "orphaned", "the supervisor of this attempt was killed"
        return Observation(
            phase=cast("Phase", phase),
            ended_by=cast("EndedBy | None", ended_by),
            exit_code=status.exit_code,
            message=message,
            log_bytes=self._log_bytes(),
            log_written_bytes=status.log_written_bytes,
            is_released=phase == "gone",
            started_at=_as_datetime(status.started_at),
            finished_at=_as_datetime(status.finished_at),
            lingering=status.lingering,
            cpu_seconds=status.cpu_seconds,
            memory_peak_bytes=status.memory_peak_bytes,
            user=status.user,
            warnings=tuple(status.warnings),
        )

    def renew(self, deadline: float | None) -> bool:
        """Hand on a later end of the lease; false when nobody is there to take it."""
        return self._say("renew none" if deadline is None else f"renew {deadline!r}")

    def stop(self, grace_seconds: float) -> bool:
        """End the whole tree: TERM now, KILL after the grace. Said again, it can only shorten the grace."""
        return self._say(f"stop {max(0.0, grace_seconds)!r}")

    def sweep(self) -> None:
        """Clear up after a supervisor that was killed: a new one ends what is left and reports the attempt lost."""
        _start_supervisor(self.folder)

    def read_log(self, *, offset: int, limit_bytes: int) -> bytes:
        """Read on in the log; what was read once never changes."""
        try:
            with self.folder.log.open("rb") as file:
                file.seek(offset)
                return file.read(limit_bytes)
        except FileNotFoundError:
            return b""

    def forget(self) -> None:
        """Remove everything of an attempt of which nothing is left."""
        assert self.observe().is_released, "an attempt that may still run is not to be forgotten"
        remove_folder(self.folder.path)

    def _has_supervisor(self) -> bool:
        try:
            fd = os.open(self.folder.path / attempt.LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _read_status(self) -> attempt.StatusDocument:
        try:
            return attempt.load_status((self.folder.path / attempt.STATUS).read_text())
        except FileNotFoundError:
            return attempt.StatusDocument(boot_id=self.order.boot_id, supervisor_pid=0)

    def _log_bytes(self) -> int:
        try:
            return self.folder.log.stat().st_size
        except FileNotFoundError:
            return 0

    def _say(self, line: str) -> bool:
        try:
            fd = os.open(self.folder.path / attempt.CONTROL, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            # Shorter than PIPE_BUF, so it arrives whole or not at all.
            os.write(fd, line.encode() + b"\n")
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


def launch(folder: AttemptFolder, order: Order) -> Supervised:
    """Start the supervisor of an attempt and return once it lives. An attempt is never started twice."""
    document = attempt.OrderDocument(
        assignment_id=str(order.assignment_id),
        fence=order.fence,
        boot_id=attempt.boot_id(),
        command=order.command,
        env=_environment(folder, order),
        working_dir=order.working_dir,
        prefix=order.plan.prefix_in(order.working_dir),
        has_pid_namespace=order.plan.has_pid_namespace,
        own_user=order.plan.own_user,
        deadline=order.deadline,
        margin_seconds=order.margin_seconds,
        grace_seconds=order.grace_seconds,
        run_seconds=order.run_seconds,
        log_bytes_max=order.log_bytes_max,
        memory_bytes=order.memory_bytes,
        cpus_milli=order.cpus_milli,
        in_force=dict(order.plan.in_force),
    )
    supervised = _load(folder.path)
    if supervised is None:
        _write_order(folder, document)
        supervised = Supervised(folder, document)
    _start_supervisor(folder)
    return supervised


def find(attempts: Path) -> list[Supervised]:
    """Find every attempt on disk. One that never got its order is removed: nothing of it has run."""
    found: list[Supervised] = []
    for path in sorted(attempts.iterdir() if attempts.is_dir() else ()):
        if not path.is_dir() or path.is_symlink():
            continue
        supervised = _load(path)
        if supervised is None:
            remove_folder(path)
        else:
            found.append(supervised)
    return found


def _load(path: Path) -> Supervised | None:
    try:
        order = attempt.load_order((path / attempt.ORDER).read_text())
    except FileNotFoundError:
        return None
    return Supervised(AttemptFolder(path), order)


def _write_order(folder: AttemptFolder, document: attempt.OrderDocument) -> None:
    fd = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        attempt.write_atomically(attempt.ORDER, attempt.dump(document), folder_fd=fd)
    except OSError as error:
        raise StorageFailed(f"the order of attempt {folder.path.name} cannot be written: {error.strerror}") from error
    finally:
        os.close(fd)


def _environment(folder: AttemptFolder, order: Order) -> dict[str, str]:
    """The command's whole environment: nothing of the agent's comes through but its search path."""
    home = str(folder.work)
    return {
        "PATH": sandbox.search_path(os.environ.get("PATH", ""), own_user=order.plan.own_user),
        "LANG": "C.UTF-8",
        **order.env,
        "HOME": home,
        "PWD": home if order.working_dir == "." else f"{home}/{order.working_dir}",
        attempt.MARK: str(order.assignment_id),
    }


def _start_supervisor(folder: AttemptFolder) -> None:
    package_root = str(Path(fleetward.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": package_root}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "fleetward.agent.supervisor", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment,
            cwd="/",
            timeout=LAUNCH_TIMEOUT.total_seconds(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SupervisorFailed(f"the supervisor of attempt {folder.path.name} cannot be started: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise SupervisorFailed(
            f"the supervisor of attempt {folder.path.name} did not come up: {''.join(said) or 'it said nothing'}"
        )


def remove_folder(path: Path) -> None:
    """Remove a folder that a job could write in, also where it closed folders to itself; links are not followed."""
    for _, folders, _, fd in os.fwalk(path, topdown=True, follow_symlinks=False):
        for name in folders:
            entry = os.stat(name, dir_fd=fd, follow_symlinks=False)
            # Through the open folder and never through a link, though chmod itself would follow one.
            if stat.S_ISDIR(entry.st_mode) and entry.st_mode & 0o700 != 0o700:
                os.chmod(name, 0o700, dir_fd=fd)
    shutil.rmtree(path)


def _as_datetime(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


class Changes:
    """Hints that some attempt has news. What the news is stands on disk; a lost hint costs nothing but time."""

    def __init__(self, attempts: Path) -> None:
        path = attempts / attempt.CHANGES
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For reading and writing: so it never reports an end when the last supervisor leaves.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor that is readable when there is news."""
        return self._fd

    def take(self) -> set[str]:
        """Take the assignments that had news since the last time."""
        content = self._rest
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._fd, 65536):
                content += chunk
        *lines, self._rest = content.split(b"\n")
        return {line.decode(errors="replace") for line in lines}

    def wait(self, timeout: timedelta) -> set[str]:
        """Wait for news, at most so long."""
        select.select([self._fd], [], [], max(0.0, timeout.total_seconds()))
        return self.take()

    def close(self) -> None:
        """Stop listening."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
