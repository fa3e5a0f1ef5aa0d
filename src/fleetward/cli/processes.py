"""The other two programs, as processes of this one.

Owns starting, recognising and stopping them. Refuses to know what they do, and never signals a bare
pid: a process is recognised by its pid and the moment it started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Final

import msgspec

from fleetward.cli.settings import read_text

POLL: Final = timedelta(milliseconds=50)
STOP_LIMIT: Final = timedelta(seconds=30)  # longer than a clean stop of either program takes
# An agent finishes its attempts at SIGTERM; at SIGINT it leaves, and they go on under their supervisors.
LEAVE: Final = signal.SIGINT
STATE_FILE: Final = "up.json"
MESSAGE_BYTES_MAX: Final = 64 * 1024


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One process and no other: its pid, and the moment it started in the system's own words."""

    pid: int
    started: str


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What `up` runs on a home, kept there for `down` and for a second `up`."""

    up: Mark
    controller: Mark | None = None
    agent: Mark | None = None


@dataclass(frozen=True, slots=True)
class Exited:
    """A child has ended."""

    name: str
    status: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A person or the system asked to stop."""

    signal: int


@dataclass(frozen=True, slots=True)
class Due:
    """A child that ended may be started again."""

    name: str


News = Exited | Asked | Due


class Child:
    """A process that this one started; its end is told to a queue."""

    def __init__(
        self, name: str, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        with open_log(log) as errors:
            self._log_start = errors.seek(0, os.SEEK_END)
            # A session of its own: Ctrl-C reaches this program only, which then stops the others in order.
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=os.environ if environment is None else environment,
                start_new_session=True,
            )
        self.mark = mark_of(self.process.pid)

    def tell_end(self, news: SimpleQueue[News]) -> None:
        """Put `Exited` on the queue when the process has ended."""
        threading.Thread(target=lambda: news.put(Exited(self.name, self.process.wait())), daemon=True).start()

    def last_words(self) -> str:
        """What it wrote to its log since it was started."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - MESSAGE_BYTES_MAX))
            return file.read(MESSAGE_BYTES_MAX).decode(errors="replace").strip()

    def stop(self, *, how: signal.Signals = signal.SIGTERM, limit: timedelta = STOP_LIMIT) -> None:
        """Ask it to end, and end it when it does not."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(how)
        try:
            self.process.wait(limit.total_seconds())
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def open_log(path: Path) -> BinaryIO:
    """Open a log to write on at its end; it is its owner's alone."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


def mark_of(pid: int) -> Mark:
    """Recognise a process that lives now; `started` is empty when there is none."""
    return Mark(pid=pid, started=_started(pid))


def lives(mark: Mark | None) -> bool:
    """Whether that very process still lives."""
    return mark is not None and bool(mark.started) and _started(mark.pid) == mark.started


def _started(pid: int) -> str:
    if not Path("/proc/self/stat").exists():
        asked = ["/bin/ps", "-o", "lstart=", "-p", str(pid)]
        shown = subprocess.run(asked, capture_output=True, text=True, check=False)
        return shown.stdout.strip()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # Field 3 is the state, field 22 the start in clock ticks since boot; a zombie has ended already.
    return "" if fields[0] in {"Z", "X"} else fields[19]


def end(mark: Mark | None, *, how: signal.Signals = signal.SIGTERM, limit: timedelta = STOP_LIMIT) -> bool:
    """Ask that very process to end and wait; returns whether it is gone."""
    if mark is None or not lives(mark):
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(mark.pid, how)
    left = limit
    while lives(mark) and left > timedelta(0):
        time.sleep(POLL.total_seconds())
        left -= POLL
    return not lives(mark)


def read_running(home: Path) -> Running | None:
    """What `up` noted in this home, if that can be read."""
    text = read_text(home / STATE_FILE)
    try:
        return msgspec.json.decode(text, type=Running) if text else None
    except msgspec.DecodeError:
        return None


def write_running(home: Path, running: Running) -> None:
    """Note what runs here, whole or not at all."""
    unfinished = home / f".{STATE_FILE}"
    unfinished.write_bytes(msgspec.json.encode(running) + b"\n")
    unfinished.rename(home / STATE_FILE)


def forget_running(home: Path) -> None:
    """Nothing runs here any more."""
    (home / STATE_FILE).unlink(missing_ok=True)


def hear_signals(news: SimpleQueue[News]) -> None:
    """Put a request to stop on the queue instead of dying of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A shell that starts this in the background, or nohup, has it ignore some of them; that stays.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: news.put(Asked(number)))
