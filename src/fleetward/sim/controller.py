"""A simulated controller: the real services on one connection, and a life that may end at any boundary.

Owns what a controller's process would: its database, its hold on the blob store, its identity, the calls it
answers and the duties its loops have. Refuses to know when any of that happens.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID

import psycopg
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetward.controller.blobs import LocalBlobs
from fleetward.controller.services import (
    access,
    artifacts,
    assigning,
    jobs,
    pairing,
    presence,
    sessions,
    sync,
    upkeep,
    verifying,
)
from fleetward.controller.services.sessions import NodeCredential
from fleetward.controller.services.sync import SyncCall
from fleetward.domain.errors import Refusal
from fleetward.domain.ids import NodeId, UserId
from fleetward.domain.jobs import JobSpec
from fleetward.domain.nodes import Rhythm, rhythm
from fleetward.sim.effects import Boundary, Crash, SimBlobs, SimDatabase
from fleetward.wire.handshake import JoinString, pin_of
from fleetward.wire.messages import (
    CancelRequest,
    Challenge,
    DeclareReply,
    DeclareRequest,
    Job,
    JobSubmitted,
    PairingCodeRequest,
    PairReply,
    PairRequest,
    SessionReply,
    SessionRequest,
    SyncReply,
    UploadState,
)

RHYTHM: Final[Rhythm] = rhythm(node_count=3)
URL: Final = "http://controller.invalid"


@dataclass(frozen=True, slots=True)
class Keyring:
    """What all controllers of one fleet share."""

    token_key: bytes
    signing_key: Ed25519PrivateKey

    @classmethod
    def made(cls, rng: random.Random) -> "Keyring":
        """Make one by chance."""
        return cls(token_key=rng.randbytes(32), signing_key=Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)))

    @property
    def public_der(self) -> bytes:
        """The public half of the key that nodes pin."""
        return self.signing_key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def pin(self) -> str:
        """The pin that a join string carries."""
        return pin_of(self.public_der)


@dataclass(slots=True, eq=False)
class Life:
    """One run of a controller's process. What it began dies with it."""

    database: SimDatabase
    blobs: SimBlobs
    is_over: bool = False


@dataclass(slots=True, eq=False)
class SimController:
    """One of the fleet's controllers."""

    name: str
    id: UUID
    connection: psycopg.Connection
    folder: Path
    rng: random.Random
    keyring: Keyring
    reach: Callable[["SimController", Boundary], None]
    life: Life | None = None
    duties: Mapping[str, Callable[[], object]] = field(init=False)

    def __post_init__(self) -> None:
        self.duties = {
            "assign": lambda: assigning.assign(self.database, rhythm=RHYTHM).made,
            "verify": lambda: verifying.verify(self.database, self.blobs, verifier=f"controller:{self.id}").done,
            "expire": lambda: upkeep.expire_leases(self.database, rhythm=RHYTHM),
            "mark_silent": lambda: upkeep.mark_silent(self.database, rhythm=RHYTHM),
            "release_due": lambda: upkeep.release_due(self.database),
            "fail_overdue": lambda: upkeep.fail_overdue(self.database),
            "beat": lambda: presence.beat(self.database, controller_id=self.id),
        }

    @property
    def is_up(self) -> bool:
        """Whether its process runs."""
        return self.life is not None

    @property
    def database(self) -> SimDatabase:
        """The database of this life."""
        assert self.life is not None, "a controller that is down does nothing"
        return self.life.database

    @property
    def blobs(self) -> SimBlobs:
        """The blob store of this life."""
        assert self.life is not None, "a controller that is down does nothing"
        return self.life.blobs

    def boot(self) -> None:
        """Begin a new life; `start` must follow."""
        assert self.life is None, "a controller has one life at a time"
        database = SimDatabase(self.connection, self.rng, self._never)
        blobs = SimBlobs(LocalBlobs(self.folder, reserve_bytes=0), self._never)
        life = self.life = Life(database, blobs)

        def reach(boundary: Boundary) -> None:
            if life.is_over:
                raise Crash
            self.reach(self, boundary)
            if life.is_over:
                raise Crash

        database.reach = blobs.reach = reach

    def start(self) -> None:
        """What a controller does first."""
        presence.start(self.database, controller_id=self.id, rhythm=RHYTHM)

    def crash(self) -> None:
        """End this life, wherever it is."""
        if self.life is not None:
            self.life.is_over = True
            self.life.blobs.store.close()
            self.life = None

    @staticmethod
    def _never(_: Boundary) -> None:
        raise AssertionError("a boundary was reached before the life began")

    # Calls of operators

    def ensure_owner(self) -> UserId:
        """The first user."""
        return access.ensure_owner(self.database, name="operator")

    def make_code(self, by: UserId) -> JoinString:
        """A pairing code."""
        made = pairing.make_code(self.database, PairingCodeRequest(), url=URL, pin=self.keyring.pin, by=by)
        return JoinString.parse(made.join_string)

    def submit(self, spec: JobSpec, *, by: UserId, key: str) -> JobSubmitted:
        """A job."""
        return jobs.submit(self.database, spec, by=by, idempotency_key=key)

    def cancel(self, job_id: UUID, *, by: UserId) -> Job:
        """A wish for a job's end."""
        return jobs.cancel(self.database, job_id, request=CancelRequest(reason="by chance"), by=by)

    # Calls of nodes

    def pair(self, request: PairRequest) -> PairReply:
        """A machine uses a code."""
        return pairing.pair(
            self.database,
            request,
            pin=self.keyring.pin,
            sign=self.keyring.signing_key.sign,
            controller_public=self.keyring.public_der,
        )

    def challenge(self, node_id: UUID) -> Challenge:
        """A node asks for a challenge."""
        return sessions.challenge(self.database, node_id=NodeId(node_id), token_key=self.keyring.token_key)

    def open_session(self, request: SessionRequest) -> SessionReply:
        """A node opens a session."""
        return sessions.open_session(self.database, request, token_key=self.keyring.token_key)

    def sync(self, calls: Sequence[SyncCall]) -> list[SyncReply | Refusal]:
        """Nodes say what they hold."""
        return sync.sync(self.database, calls, blobs=self.blobs, rhythm=RHYTHM)

    def look(self, calls: Sequence[SyncCall]) -> list[SyncReply | Refusal]:
        """Held calls are answered at last."""
        return sync.look(self.database, calls, rhythm=RHYTHM)

    def declare(self, credential: NodeCredential, *, assignment_id: UUID, request: DeclareRequest) -> DeclareReply:
        """A node says what it will upload."""
        return artifacts.declare(
            self.database, credential, assignment_id=assignment_id, request=request, blobs=self.blobs
        )

    def upload(
        self,
        credential: NodeCredential,
        *,
        assignment_id: UUID,
        fence: int,
        path: str,
        offset: int,
        chunks: Iterable[bytes],
    ) -> UploadState:
        """A node sends a piece of a file."""
        return artifacts.upload(
            self.database,
            credential,
            assignment_id=assignment_id,
            fence=fence,
            path=path,
            offset=offset,
            chunks=chunks,
            blobs=self.blobs,
        )
