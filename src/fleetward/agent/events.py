"""What the driver tells the session.

Owns the events, as values. Refuses to know what follows from them.
"""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from fleetward.wire.messages import DeclaredArtifact, InlineArtifact, SyncReply

EndedBy = Literal["exited", "stopped", "deadline", "timeout", "start_failed", "lost"]
Blame = Literal["failed", "lost"]  # the job's own doing, or the node's


@dataclass(frozen=True, slots=True)
class Started:
    """The agent is up; every supervisor found on disk has been observed before this."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The controller gave this run its number."""

    session: int


@dataclass(frozen=True, slots=True)
class Replied:
    """A sync was answered."""

    reply: SyncReply


@dataclass(frozen=True, slots=True)
class Refused:
    """A sync (by its sequence) or the opening of a session (sequence 0) was refused, or had no answer in time."""

    sequence: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """A supervisor was looked at. `is_gone`: no process of the attempt is left."""

    id: UUID
    is_running: bool
    is_gone: bool = False
    ended_by: EndedBy | None = None
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The attempt could not be started at all; no process of it exists."""

    id: UUID
    message: str
    blame: Blame = "failed"


@dataclass(frozen=True, slots=True)
class Collected:
    """What an ended attempt hands in: small files with their bytes, large ones to upload. Its log is complete there."""

    id: UUID
    inline: tuple[InlineArtifact, ...]
    large: tuple[DeclaredArtifact, ...]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """All large files of the attempt are stored."""

    id: UUID


@dataclass(frozen=True, slots=True)
class HandInFailed:
    """The files of an ended attempt cannot be collected or stored."""

    id: UUID
    message: str
    blame: Blame = "failed"


@dataclass(frozen=True, slots=True)
class Tick:
    """A time that was asked for with `WakeAt` has come."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone asked the agent to leave: after its work, or at once and leaving its work to the supervisors."""

    at_once: bool


OfAttempt = Observed | StartFailed | Collected | Uploaded | HandInFailed
Event = Started | SessionOpened | Replied | Refused | OfAttempt | Tick | StopRequested
