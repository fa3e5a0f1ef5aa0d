"""What is said: the documents that travel between controller, agent and client.

Owns the form of every request and reply. Refuses to know who sends them and what follows.
Times are RFC 3339 in UTC, sizes bytes, durations seconds.
"""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta, Struct, field

from fleetward.domain.jobs import JobSpec
from fleetward.domain.nodes import Inventory, Load

Counted = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # what the database can count


class Empty(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to say."""


# Pairing and sessions


class PairingCodeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for a one-time code; it lapses after `expires_seconds`."""

    labels: dict[str, str] = field(default_factory=dict[str, str])
    expires_seconds: int = 600


class PairingCode(Struct, frozen=True, kw_only=True):
    """A one-time code; `join_string` is shown once and kept nowhere. `code` is its public id."""

    id: UUID
    join_string: str
    code: str
    expires_at: datetime


class PairRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine presents its own key under a code. Keys and signatures are base64url."""

    code_id: UUID
    name: str
    mac: str
    node_key: str
    code_signature: str
    node_signature: str
    agent_version: str


class PairReply(Struct, frozen=True, kw_only=True):
    """The node that the machine now is; the controller signs the same transcript with its pinned key."""

    node_id: UUID
    name: str
    key_epoch: int
    controller_key: str
    controller_signature: str


class ChallengeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for a challenge to sign."""

    node_id: UUID


class Challenge(Struct, frozen=True, kw_only=True):
    """A challenge that proves by itself that it is ours and recent."""

    challenge: str


class SessionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Open a session. The same nonce gets the same answer, so a lost reply costs nothing."""

    node_id: UUID
    challenge: str
    last_session: Counted
    nonce: str
    signature: str
    inventory: Inventory


class SessionReply(Struct, frozen=True, kw_only=True):
    """The session's number and the token that all its calls carry."""

    session: int
    token: str
    expires_at: datetime


# Sync


class InlineArtifact(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small file that travels inside the report."""

    path: str
    size_bytes: int
    sha256: str
    content: bytes
    media_type: str = "application/octet-stream"


class HeldAssignment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node knows of one assignment. `known` is what it was last told to do with it."""

    id: UUID
    fence: int
    state: Literal["assigned", "running", "succeeded", "failed", "cancelled", "lost"]
    known: Literal["run", "stop"] = "run"
    released: bool = False
    exit_code: int | None = None
    error: str = ""
    inline: list[InlineArtifact] = field(default_factory=list[InlineArtifact])


class SyncRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a node holds. Sequences grow within a session; a quiet call may be held for `wait_seconds`."""

    sequence: Counted
    load: Load = field(default_factory=Load)
    held: list[HeldAssignment] = field(default_factory=list[HeldAssignment])
    wait_seconds: float = 0.0


class AssignmentOrder(Struct, frozen=True, kw_only=True):
    """One assignment that the node should hold; `spec` comes until the node reports that it holds it.

    `lease_seconds` is what is left of its lease, which the node trusts from when it asked.
    """

    id: UUID
    fence: int
    job_id: UUID
    attempt: int
    desired: Literal["run", "stop"]
    lease_seconds: float = 0.0
    spec: JobSpec | None = None


class SyncReply(Struct, frozen=True, kw_only=True):
    """The whole set that the node should hold. What it holds beyond that, it stops and forgets."""

    assignments: list[AssignmentOrder]
    sequence: int
    lease_seconds: float
    beat_seconds: float
    server_time: datetime


# Artifacts and logs


class DeclaredArtifact(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that an attempt will upload, and what its bytes will be."""

    path: str
    size_bytes: int
    sha256: str
    media_type: str = "application/octet-stream"


class DeclareRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Declare the files of an attempt, under its fence; the same declaration twice is no news."""

    fence: Counted
    artifacts: list[DeclaredArtifact]


class UploadState(Struct, frozen=True, kw_only=True):
    """How much of a declared file the controller has."""

    path: str
    received_bytes: int
    stored: bool


class DeclareReply(Struct, frozen=True, kw_only=True):
    """Where each upload goes on."""

    uploads: list[UploadState]


class LogState(Struct, frozen=True, kw_only=True):
    """How much of an attempt's log the controller has."""

    received_bytes: int


class Log(Struct, frozen=True, kw_only=True):
    """A piece of an attempt's log from `offset`; `ended` when nothing will follow `next_offset`."""

    assignment_id: UUID | None
    offset: int
    next_offset: int
    content: bytes
    ended: bool


# Jobs


class JobSubmitted(Struct, frozen=True, kw_only=True):
    """The job that was made."""

    id: UUID
    name: str
    status: str
    created_at: datetime


class Job(Struct, frozen=True, kw_only=True):
    """A job as it stands. `cancelling` says what a requested cancel still waits for."""

    id: UUID
    kind: str
    name: str
    status: str
    priority: int
    spec: JobSpec
    replicas: int
    quorum: int
    failures: int
    losses: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    winning_assignment_id: UUID | None
    error: str | None
    why: str = ""


class Assignment(Struct, frozen=True, kw_only=True):
    """One attempt as it stands."""

    id: UUID
    job_id: UUID
    node_id: UUID
    node: str
    attempt: int
    fence: int
    state: str
    outcome: str | None
    assigned_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    artifacts_verified_at: datetime | None
    released_at: datetime | None
    lease_expires_at: datetime | None
    result: dict[str, object]
    error: str | None


class Artifact(Struct, frozen=True, kw_only=True):
    """One file of an attempt."""

    id: UUID
    job_id: UUID
    assignment_id: UUID
    path: str
    size_bytes: int
    sha256: str
    media_type: str
    state: str
    is_receipt: bool
    stored_at: datetime | None
    verified_at: datetime | None


class Event(Struct, frozen=True, kw_only=True):
    """One recorded change. `cursor` is where to go on from."""

    cursor: str
    id: int
    kind: str
    actor: str
    at: datetime
    job_id: UUID | None
    assignment_id: UUID | None
    node_id: UUID | None
    node: str | None
    data: dict[str, object]


class Events(Struct, frozen=True, kw_only=True):
    """Settled events in order; `next` is the cursor to go on from."""

    items: list[Event]
    next: str


class JobList(Struct, frozen=True, kw_only=True):
    """A page of jobs, newest first; `next` is null on the last page."""

    items: list[Job]
    next: str | None


class AssignmentList(Struct, frozen=True, kw_only=True):
    """All attempts of a job, oldest first."""

    items: list[Assignment]


class ArtifactList(Struct, frozen=True, kw_only=True):
    """All artifacts of a job, the winner's first."""

    items: list[Artifact]


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cancel a job; with `expect_status`, only while it has that status."""

    reason: str = ""
    expect_status: str | None = None


class BlobStored(Struct, frozen=True, kw_only=True):
    """Bytes that the controller now holds for the caller."""

    sha256: str
    size_bytes: int


# Nodes


class Node(Struct, frozen=True, kw_only=True):
    """A node as it stands; `held` counts what it has not released."""

    id: UUID
    name: str
    status: str
    mac: str | None
    session: int
    key_epoch: int
    labels: dict[str, str]
    cpus_milli: int
    memory_bytes: int
    inventory: dict[str, object]
    load: dict[str, object]
    eligible: bool
    eligible_reason: str | None
    held: int
    created_at: datetime
    seen_at: datetime | None


class NodeList(Struct, frozen=True, kw_only=True):
    """A page of nodes by name; `next` is null on the last page."""

    items: list[Node]
    next: str | None


# The controller itself


class Health(Struct, frozen=True, kw_only=True):
    """Whether the controller can do its work, and what is missing if not."""

    status: str
    checks: dict[str, str] = field(default_factory=dict[str, str])


class Version(Struct, frozen=True, kw_only=True):
    """What runs there."""

    version: str
    api: str


class Status(Struct, frozen=True, kw_only=True):
    """The fleet in numbers: nodes by status, jobs by status."""

    version: str
    nodes: dict[str, int]
    jobs: dict[str, int]
    database: str
    controllers: int


class Who(Struct, frozen=True, kw_only=True):
    """Whom the caller's credential proves."""

    user_id: UUID
    name: str
    scopes: list[str]
