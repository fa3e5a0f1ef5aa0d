"""What the session tells the driver to do, and the journal that outlives both.

Owns the commands, as values. Refuses to know how they are carried out. They are carried out in order, and
a `Write` that fails turns the `Start` and the `OpenSession` behind it into `StartFailed` and `Refused`:
nothing follows from a belief that a crash would lose.
"""

from dataclasses import dataclass
from uuid import UUID

from msgspec import Struct, field

from fleetward.agent.events import Blame
from fleetward.domain.jobs import JobSpec
from fleetward.wire.messages import DeclaredArtifact, SyncRequest


class Unstarted(Struct, frozen=True, kw_only=True):
    """Why an attempt never came to have a supervisor, whose folder would tell."""

    blame: Blame
    message: str


class JournalEntry(Struct, frozen=True, kw_only=True):
    """An attempt that this node has taken on."""

    id: UUID
    fence: int
    job_id: UUID
    attempt: int
    spec: JobSpec
    unstarted: Unstarted | None = None


class Journal(Struct, frozen=True, kw_only=True):
    """The session's number, the nonce of a session being opened, and what the node has taken on."""

    last_session: int = 0
    nonce: str = ""
    held: list[JournalEntry] = field(default_factory=list[JournalEntry])


@dataclass(frozen=True, slots=True)
class Write:
    """Put the journal on disk, synced, before any command that follows."""

    journal: Journal


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Ask for the next session with this nonce."""

    last_session: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Send this; a call that is still held may be given up for it."""

    request: SyncRequest


@dataclass(frozen=True, slots=True)
class Start:
    """Fetch the inputs and start the attempt, once; it may run until `margin_seconds` before `deadline`."""

    entry: JournalEntry
    deadline: float
    margin_seconds: float


@dataclass(frozen=True, slots=True)
class Renew:
    """Let the attempt run on towards a later deadline, on the node's clock."""

    id: UUID
    deadline: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the attempt's whole tree: TERM, then KILL after the grace. One that is just starting never gets going."""

    id: UUID
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Collect:
    """Ship the rest of the log, find and hash the files, write the receipt. Without `wants_files` that is all."""

    entry: JournalEntry
    wants_files: bool


@dataclass(frozen=True, slots=True)
class Upload:
    """Store these files with the controller."""

    entry: JournalEntry
    files: tuple[DeclaredArtifact, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what is left of the attempt on disk."""

    id: UUID


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a `Tick` at that time; a later wish replaces an earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class Leave:
    """End the agent. With `forgets_credential`, this machine is nobody's node any more."""

    exit_status: int
    message: str
    forgets_credential: bool = False


Command = Write | OpenSession | Sync | Start | Renew | Stop | Collect | Upload | Forget | WakeAt | Leave
