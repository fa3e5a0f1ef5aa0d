"""Following a job while it runs: its events and its attempts' logs, live.

Owns the two long polls and the order in which they end. Refuses to know how a job was made. Stopping
to watch never stops the job.
"""

import codecs
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar
from uuid import UUID

from fleetward.cli.output import Output, visible, visible_log
from fleetward.cli.story import IS_OVER, is_quiet, sentence
from fleetward.client import Client
from fleetward.domain.errors import Fault, Refusal, Unreachable
from fleetward.domain.jobs import JobStatus
from fleetward.wire.messages import Event, Job
from fleetward.wire.problem import RemoteFault

FIRST_WAIT_SECONDS: Final = 2.0  # soon enough to say why a job still waits
WAIT_SECONDS: Final = 20.0  # one long poll; the controller holds none longer than a minute
LOG_LAST_WAIT_SECONDS: Final = 5.0  # how long a log may lag behind the end of its job
PATIENCE: Final = timedelta(seconds=60)  # a controller that was killed is back within some seconds
FIRST_DELAY: Final = timedelta(milliseconds=500)
DELAY_MAX: Final = timedelta(seconds=4)
EVENT_PAGE: Final = 200
TAIL_BYTES: Final = 64 * 1024
TAIL_LINES: Final = 20

R = TypeVar("R")


def events(client: Client, job_id: UUID, *, after: str | None = None) -> Iterator[Event]:
    """Every event of a job that is recorded by now."""
    while True:
        page = client.job_events(job_id, after=after, limit=EVENT_PAGE)
        yield from page.items
        if not page.items or page.next == after:
            return
        after = page.next


def follow_events(
    client: Client, job_id: UUID, *, after: str | None = None, on_idle: Callable[[Job], None] | None = None
) -> Iterator[Event]:
    """Every event of a job as it comes, until the job has ended and told all; `on_idle` hears of long silence."""
    wait_seconds = FIRST_WAIT_SECONDS
    while True:
        page = _patiently(
            lambda after=after, wait=wait_seconds: client.job_events(
                job_id, after=after, limit=EVENT_PAGE, wait_seconds=wait
            )
        )
        yield from page.items
        after = page.next
        if any(event.kind in IS_OVER for event in page.items):
            return
        if not page.items:
            job = _patiently(lambda: client.show_job(job_id))
            if JobStatus(job.status).is_ended:
                yield from events(client, job_id, after=after)
                return
            if on_idle is not None:
                on_idle(job)
            wait_seconds = WAIT_SECONDS


class LogPrinter:
    """Writes what attempts print to one place, a piece at a time; after `close` nothing more."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._is_terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._is_open = True
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}

    def write(self, content: bytes, *, source: str) -> None:
        """Write a piece of one attempt's log; `source` keeps the pieces of several apart."""
        with self._lock:
            if not self._is_open or not content:
                return
            if self._is_terminal:
                decoder = self._decoders.get(source)
                if decoder is None:
                    decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
                    self._decoders[source] = decoder
                self._stream.write(visible_log(decoder.decode(content).encode()))
                self._stream.flush()
            else:
                self._stream.flush()
                self._stream.buffer.write(content)
                self._stream.buffer.flush()

    def close(self) -> None:
        """Let no thread write any more."""
        with self._lock:
            self._is_open = False


@dataclass(frozen=True, slots=True)
class _Attempt:
    id: UUID
    node: str


class Watcher:
    """Shows a job's life: states on standard error, logs where the printer writes."""

    def __init__(self, client: Client, *, output: Output, printer: LogPrinter) -> None:
        self._client = client
        self._output = output
        self._printer = printer
        self._threads: dict[UUID, threading.Thread] = {}
        self._why = ""

    def until_ended(self, job_id: UUID, *, on_event: Callable[[Event], None] | None = None) -> Job:
        """Follow the job to its end and return it."""
        for event in follow_events(self._client, job_id, on_idle=self._say_why):
            if event.kind == "assignment.started" and event.assignment_id is not None:
                self._follow_log(job_id, _Attempt(event.assignment_id, event.node or "a node"))
            if not is_quiet(event):
                self._output.note(f"· {visible(sentence(event))}")
            if on_event is not None:
                on_event(event)
        job = self._client.show_job(job_id)
        self._drain()
        return job

    def _say_why(self, job: Job) -> None:
        if job.why and job.why != self._why:
            self._why = job.why
            self._output.note(f"· {job.status}: {visible(job.why)}")

    def _follow_log(self, job_id: UUID, attempt: _Attempt) -> None:
        if attempt.id in self._threads:
            return
        thread = threading.Thread(target=self._copy_log, args=(job_id, attempt), daemon=True)
        self._threads[attempt.id] = thread
        thread.start()

    def _copy_log(self, job_id: UUID, attempt: _Attempt) -> None:
        try:
            copy_log(self._client, job_id, attempt.id, printer=self._printer)
        except (Refusal, Fault) as error:
            self._output.note(f"· the log of {visible(attempt.node)} cannot be followed: {visible(error.message)}")

    def _drain(self) -> None:
        for thread in self._threads.values():
            thread.join(LOG_LAST_WAIT_SECONDS)
        self._printer.close()


def copy_log(client: Client, job_id: UUID, assignment_id: UUID | None, *, printer: LogPrinter) -> None:
    """Write a log as it grows, until it has ended."""
    offset = 0
    while True:
        piece = _patiently(
            lambda offset=offset: client.job_log(
                job_id, assignment=assignment_id, offset=offset, wait_seconds=WAIT_SECONDS
            )
        )
        printer.write(piece.content, source=str(assignment_id))
        offset = piece.next_offset
        if piece.ended:
            return


def _patiently(ask: Callable[[], R]) -> R:
    """Ask again while the controller is away: the job goes on without it, and so may whoever watches."""
    left, delay = PATIENCE, FIRST_DELAY
    while True:
        try:
            return ask()
        except (Unreachable, RemoteFault):
            if left <= timedelta(0):
                raise
        time.sleep(delay.total_seconds())
        left -= delay
        delay = min(DELAY_MAX, delay * 2)


def log_tail(client: Client, job_id: UUID) -> list[str]:
    """The last lines of the newest attempt's log."""
    offset, tail = 0, b""
    while True:
        piece = client.job_log(job_id, offset=offset)
        tail = (tail + piece.content)[-TAIL_BYTES:]
        if not piece.content:
            return visible_log(tail).splitlines()[-TAIL_LINES:]
        offset = piece.next_offset
