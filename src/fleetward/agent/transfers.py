"""Bytes between this node and its controller: inputs come, logs and files go.

Owns the pieces, the offsets at which they go on, and how long trouble is borne. Refuses to know what an
attempt is for. Whoever waits here can be called off at any moment, and what is begun twice is no harm:
every transfer asks first how far the other side has come.
"""

import hashlib
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event, Lock
from typing import BinaryIO, Final, Protocol, TypeVar
from uuid import UUID

from fleetward.agent.home import minding
from fleetward.client import Client
from fleetward.domain.errors import DigestMismatch, Fault, Refusal, StorageFailed, Unreachable
from fleetward.wire.endpoints import CHUNK_BYTES_MAX, LOG_BYTES_MAX
from fleetward.wire.messages import DeclaredArtifact, DeclareRequest, UploadState
from fleetward.wire.problem import RemoteFault, code_of

PAUSE_FIRST: Final = timedelta(milliseconds=200)
PAUSE_MAX: Final = timedelta(seconds=15)
REFUSED_FOR: Final = timedelta(seconds=20)  # as long as a session may take to be renewed under a busy controller
DECLARED_AT_ONCE: Final = 500  # files; with the longest paths half of what one call may carry

# While a session is being renewed, calls of the old one are refused in these words; a lost assignment's for good.
_PASSING: Final = frozenset({"session_stale", "unauthenticated", "assignment_lost"})
# The controller is there, but cannot work at the moment.
_AWAY: Final = frozenset({502, 503, 504})

R = TypeVar("R")


class CalledOff(Exception):
    """Nobody wants the rest of this transfer any more."""


class Line:
    """The connection to the controller, with the token of the session that is open now."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def client(self) -> Client:
        """The client to call with; ask for it at every call."""
        return self._client

    def renew(self, token: str) -> None:
        """Go on with the token of a new session."""
        self._client = self._client.with_token(token)


def persist(call: Callable[[], R], *, called_off: Event, patience: timedelta, rng: random.Random) -> R:
    """Repeat a call until it succeeds: for as long as nobody can be reached, else as long as trouble may last."""
    pause, borne = PAUSE_FIRST, timedelta(0)
    while True:
        try:
            return call()
        except (Refusal, Fault) as error:
            is_away = _is_away(error)
            if not is_away and borne >= _bearable(error, patience=patience):
                raise
        wait = pause * (0.5 + rng.random() / 2)
        if called_off.wait(wait.total_seconds()):
            raise CalledOff
        borne += timedelta(0) if is_away else wait
        pause = min(PAUSE_MAX, pause * 2)


def _is_away(error: Refusal | Fault) -> bool:
    if isinstance(error, RemoteFault):
        # A controller whose own disk fails is there all right, and may stay so.
        return error.problem.status in _AWAY and error.problem.code != StorageFailed.code
    return isinstance(error, Unreachable)


def _bearable(error: Refusal | Fault, *, patience: timedelta) -> timedelta:
    if isinstance(error, Fault):
        return patience
    return REFUSED_FOR if code_of(error) in _PASSING else timedelta(0)


# Inputs


def fetch_input(line: Line, sha256: str, target: Path) -> None:
    """Bring an input onto this disk, going on where an earlier try ended; on return its digest is right."""
    with minding(f"the input {sha256} cannot be kept"):
        hasher = hashlib.sha256()
        with target.open("a+b") as file:
            file.seek(0)
            while chunk := file.read(1024 * 1024):
                hasher.update(chunk)
            with line.client.read_input(sha256, offset=file.tell()) as download:
                for piece in download:
                    hasher.update(piece)
                    file.write(piece)
        if hasher.hexdigest() != sha256:
            target.unlink()
            raise DigestMismatch(f"the input {sha256} arrived with other bytes: their SHA-256 is {hasher.hexdigest()}")


# Logs


class HasLog(Protocol):
    """What can be read on from an offset."""

    def read_log(self, *, offset: int, limit_bytes: int) -> bytes:
        """Give what follows, at most so much."""
        ...


@dataclass(slots=True)
class LogShipper:
    """Brings one attempt's log to the controller, in order, from wherever the controller has got to."""

    line: Line
    assignment_id: UUID
    fence: int
    source: HasLog
    _lock: Lock
    _offset: int = 0

    def ship_piece(self) -> bool:
        """Send the next piece; false when there is none yet."""
        with self._lock:
            content = self.source.read_log(offset=self._offset, limit_bytes=LOG_BYTES_MAX)
            if not content:
                return False
            try:
                state = self.line.client.append_log(
                    self.assignment_id, fence=self.fence, offset=self._offset, content=content
                )
            except Refusal as refusal:
                if code_of(refusal) == "upload_offset":
                    # The controller has less than we were told: begin again, what it has is passed over.
                    self._offset = 0
                raise
            self._offset = state.received_bytes
            return True

    def ship_all(self, *, called_off: Event, patience: timedelta, rng: random.Random) -> None:
        """Send all that is left. A log that is no longer ours to write stays here, and that is no failure."""
        with suppress(Refusal):
            while persist(self.ship_piece, called_off=called_off, patience=patience, rng=rng):
                pass


def log_shipper(line: Line, assignment_id: UUID, *, fence: int, source: HasLog) -> LogShipper:
    """Make the shipper of one attempt's log."""
    return LogShipper(line, assignment_id, fence, source, Lock())


# Files


@dataclass(frozen=True, slots=True)
class Uploads:
    """The large files of one attempt on their way to the controller."""

    line: Line
    assignment_id: UUID
    fence: int
    open: Callable[[DeclaredArtifact], BinaryIO]
    called_off: Event
    patience: timedelta
    rng: random.Random

    def run(self, files: Iterable[DeclaredArtifact]) -> None:
        """Declare the files and bring them over; on return the controller has all of them on disk."""
        waiting = list(files)
        for first in range(0, len(waiting), DECLARED_AT_ONCE):
            batch = waiting[first : first + DECLARED_AT_ONCE]
            states = {state.path: state for state in self._declare(batch)}
            for file in batch:
                self._bring(file, states[file.path])

    def _declare(self, files: list[DeclaredArtifact]) -> list[UploadState]:
        request = DeclareRequest(fence=self.fence, artifacts=files)
        return self._persist(lambda: self.line.client.declare_artifacts(self.assignment_id, request).uploads)

    def _bring(self, file: DeclaredArtifact, state: UploadState) -> None:
        while not state.stored:
            state = self._persist(lambda at=state: self._piece(file, at))

    def _piece(self, file: DeclaredArtifact, state: UploadState) -> UploadState:
        if self.called_off.is_set():
            raise CalledOff
        with self.open(file) as stream:
            stream.seek(state.received_bytes)
            content = stream.read(CHUNK_BYTES_MAX)
        if not content and file.size_bytes > state.received_bytes:
            raise StorageFailed(f"artifact {file.path!r} ends before its {file.size_bytes} bytes")
        try:
            return self.line.client.upload_artifact(
                self.assignment_id, fence=self.fence, path=file.path, offset=state.received_bytes, content=content
            )
        except Refusal as refusal:
            if code_of(refusal) != "upload_offset":
                raise
        [state] = self.line.client.declare_artifacts(
            self.assignment_id, DeclareRequest(fence=self.fence, artifacts=[file])
        ).uploads
        return state

    def _persist(self, call: Callable[[], R]) -> R:
        return persist(call, called_off=self.called_off, patience=self.patience, rng=self.rng)
