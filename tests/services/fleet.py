"""A fleet for service tests: nodes that pair, open sessions and sync through the real services.

Owns what every story would have to repeat. Refuses to stand in for anything: database, services and blob
store are the real ones.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetward.controller.blobs import LocalBlobs
from fleetward.controller.services import access, assigning, jobs, pairing, sessions, sync, verifying
from fleetward.controller.services.sessions import NodeCredential
from fleetward.controller.services.sync import SyncCall
from fleetward.controller.store.audit import violations
from fleetward.controller.store.tx import PooledDatabase
from fleetward.domain.artifacts import RECEIPT_PATH
from fleetward.domain.ids import NodeId, UserId
from fleetward.domain.jobs import parse_spec
from fleetward.domain.nodes import Inventory, Rhythm
from fleetward.wire.handshake import JoinString, code_key, encode, pairing_transcript, session_transcript
from fleetward.wire.messages import (
    AssignmentOrder,
    HeldAssignment,
    InlineArtifact,
    PairingCodeRequest,
    PairReply,
    PairRequest,
    SessionRequest,
    SyncReply,
    SyncRequest,
)
from fleetward.wire.versions import VERSION

TOKEN_KEY = b"t" * 32
PIN = "pin"
RHYTHM = Rhythm(
    beat=timedelta(seconds=10), silence=timedelta(seconds=40), lease=timedelta(seconds=90), grace=timedelta(seconds=15)
)
INVENTORY = Inventory(
    cpus_milli=4000,
    memory_bytes=8 << 30,
    disk_bytes=100 << 30,
    os="linux",
    arch="x86_64",
    agent_version=VERSION,
    boot_id="boot",
)


def inline(path: str, content: bytes, *, sha256: str | None = None) -> InlineArtifact:
    """A small file as it travels; another digest than its own makes it a lie."""
    digest = sha256 or hashlib.sha256(content).hexdigest()
    return InlineArtifact(path=path, size_bytes=len(content), sha256=digest, content=content)


RECEIPT = inline(RECEIPT_PATH, b"{}")


@dataclass(slots=True)
class Machine:
    """A machine with a key, as the agent's side of the protocol has it."""

    name: str
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    node_id: NodeId | None = None
    last_session: int = 0
    sequence: int = 0
    credential: NodeCredential | None = None


@dataclass(slots=True)
class Fleet:
    """One controller's services over one database."""

    database: PooledDatabase
    blobs: LocalBlobs
    owner: UserId
    rhythm: Rhythm = RHYTHM

    @classmethod
    def on(cls, database: PooledDatabase, folder: Path) -> "Fleet":
        """Begin with an owner and an empty blob store."""
        return cls(database, LocalBlobs(folder / "blobs", reserve_bytes=0), access.ensure_owner(database, name="ann"))

    def code(self, *, expires_seconds: int = 600) -> JoinString:
        """Make a pairing code."""
        request = PairingCodeRequest(expires_seconds=expires_seconds)
        made = pairing.make_code(self.database, request, url="http://127.0.0.1:1", pin=PIN, by=self.owner)
        return JoinString.parse(made.join_string)

    def pair(self, machine: Machine, join: JoinString, *, mac: str = "", secret: bytes | None = None) -> PairReply:
        """Let a machine use a code."""
        public = machine.key.public_key().public_bytes_raw()
        transcript = pairing_transcript(code_id=join.code_id, pin=PIN, node_key=public, name=machine.name, mac=mac)
        request = PairRequest(
            code_id=join.code_id,
            name=machine.name,
            mac=mac,
            node_key=encode(public),
            code_signature=encode(code_key(secret or join.secret).sign(transcript)),
            node_signature=encode(machine.key.sign(transcript)),
            agent_version=VERSION,
        )
        reply = pairing.pair(
            self.database, request, pin=PIN, sign=lambda message: message[:64], controller_public=b"key"
        )
        machine.node_id = NodeId(reply.node_id)
        return reply

    def open_session(self, machine: Machine, *, nonce: str = "nonce", last_session: int | None = None) -> int:
        """Open the machine's next session."""
        assert machine.node_id is not None
        last = machine.last_session if last_session is None else last_session
        challenge = sessions.challenge(self.database, node_id=machine.node_id, token_key=TOKEN_KEY).challenge
        message = session_transcript(node_id=machine.node_id, challenge=challenge, last_session=last, nonce=nonce)
        reply = sessions.open_session(
            self.database,
            SessionRequest(
                node_id=machine.node_id,
                challenge=challenge,
                last_session=last,
                nonce=nonce,
                signature=encode(machine.key.sign(message)),
                inventory=INVENTORY,
            ),
            token_key=TOKEN_KEY,
        )
        machine.last_session, machine.sequence = reply.session, 0
        machine.credential = sessions.read_token(reply.token, token_key=TOKEN_KEY)
        return reply.session

    def node(self, name: str) -> Machine:
        """A machine that is paired, has a session and is online."""
        machine = Machine(name)
        self.pair(machine, self.code())
        self.open_session(machine)
        self.sync(machine)
        return machine

    def call(self, machine: Machine, held: Sequence[HeldAssignment] = (), *, sequence: int | None = None) -> SyncCall:
        """The machine's next sync call."""
        assert machine.credential is not None
        machine.sequence = machine.sequence + 1 if sequence is None else sequence
        return SyncCall(machine.credential, SyncRequest(sequence=machine.sequence, held=list(held)))

    def sync(self, machine: Machine, *held: HeldAssignment) -> SyncReply:
        """Sync, and expect to be answered."""
        (reply,) = sync.sync(self.database, [self.call(machine, held)], blobs=self.blobs, rhythm=self.rhythm)
        assert isinstance(reply, SyncReply), reply
        return reply

    def submit(self, **document: object) -> UUID:
        """Submit a job."""
        spec = parse_spec({"command": ["true"], **document})
        return jobs.submit(self.database, spec, by=self.owner).id

    def assign(self) -> int:
        """Run one round of assignment."""
        return assigning.assign(self.database, rhythm=self.rhythm).made

    def verify(self) -> int:
        """Run one round of verification."""
        return verifying.verify(self.database, self.blobs, verifier="controller:test").done

    def status(self, job_id: UUID) -> str:
        """The job's status."""
        return jobs.show(self.database, job_id).status

    def kinds(self, job_id: UUID) -> list[str]:
        """The kinds of the job's events, in order."""
        return [event.kind for event in jobs.events(self.database, job_id, after="", limit=1000).items]

    def check(self) -> None:
        """Hold the whole database against the invariants."""
        with self.database.begin() as tx:
            found = violations(tx)
        assert not found, found


def holds(order: AssignmentOrder, state: str = "running", **more: object) -> HeldAssignment:
    """What a node says of an order that it holds."""
    return HeldAssignment(id=order.id, fence=order.fence, state=state, **more)  # pyright: ignore[reportArgumentType]


def succeeded(order: AssignmentOrder, *files: InlineArtifact) -> HeldAssignment:
    """A node's word that it is done, with its receipt and files."""
    return holds(order, "succeeded", released=True, exit_code=0, inline=[RECEIPT, *files])
