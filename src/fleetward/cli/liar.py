"""The demo's liar: a node that speaks the protocol without a fault and lies about its work.

Owns two lies, told in turn: "succeeded" with nothing handed in, and "succeeded" with other bytes than
it declares. Refuses to run any command. It knows no more of the controller than any program on the
network could: the wire's documents and the client.
"""

import hashlib
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetward.client import Client
from fleetward.domain.artifacts import RECEIPT_PATH
from fleetward.domain.errors import Fault, Refusal
from fleetward.domain.ids import NodeId
from fleetward.domain.nodes import Inventory
from fleetward.wire import messages as m
from fleetward.wire.handshake import JoinString, code_key, encode, pairing_transcript, session_transcript
from fleetward.wire.versions import VERSION

# It boasts: the planner gives work to whoever has most room, and nobody can check that claim beforehand.
CLAIMED_CPUS_MILLI: Final = 256_000
CLAIMED_MEMORY_BYTES: Final = 2**40
WAIT_SECONDS: Final = 20.0

DECLARED: Final = b'{"modules": "all of them, trust me"}\n'
HANDED_IN: Final = b'{"modules": []}\n'


@dataclass(slots=True)
class Liar:
    """What the liar remembers: whom it pretends to be, and what it says of each assignment."""

    client: Client
    node_id: NodeId
    sequence: int = 0
    lies_told: int = 0
    has_news: bool = False
    held: dict[UUID, m.HeldAssignment] = field(default_factory=dict[UUID, m.HeldAssignment])

    def sync(self) -> None:
        """Tell the controller where things stand, and take what it answers."""
        self.sequence += 1
        request = m.SyncRequest(
            sequence=self.sequence,
            held=list(self.held.values()),
            wait_seconds=0.0 if self.has_news else WAIT_SECONDS,
        )
        reply = self.client.sync(request)
        said = self.held
        self.held = {order.id: self._answer(order, said.get(order.id)) for order in reply.assignments}
        self.has_news = self.held != said

    def _answer(self, order: m.AssignmentOrder, held: m.HeldAssignment | None) -> m.HeldAssignment:
        if order.desired == "stop":
            state = "cancelled" if held is None else held.state
            return m.HeldAssignment(id=order.id, fence=order.fence, state=state, known="stop", released=True)
        if held is None:
            return m.HeldAssignment(id=order.id, fence=order.fence, state="running")
        if held.state == "running":
            return self._lie(order)
        return held

    def _lie(self, order: m.AssignmentOrder) -> m.HeldAssignment:
        self.lies_told += 1
        if self.lies_told == 1:
            say("I have done nothing, and say that I succeeded")
            return m.HeldAssignment(id=order.id, fence=order.fence, state="succeeded", exit_code=0)
        say("this time I declare one file and hand in another")
        inline = [_file("index.json", DECLARED, HANDED_IN), _file(RECEIPT_PATH, b"{}\n", b"{}\n")]
        return m.HeldAssignment(id=order.id, fence=order.fence, state="succeeded", exit_code=0, inline=inline)


def _file(path: str, declared: bytes, handed_in: bytes) -> m.InlineArtifact:
    return m.InlineArtifact(
        path=path, size_bytes=len(declared), sha256=hashlib.sha256(declared).hexdigest(), content=handed_in
    )


def say(text: str) -> None:
    """Say aloud what the demo's audience should hear."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def pair(client: Client, join: JoinString, *, name: str, key: Ed25519PrivateKey) -> NodeId:
    """Pair as any machine would: even a liar has to prove that it holds a code."""
    public = key.public_key().public_bytes_raw()
    transcript = pairing_transcript(code_id=join.code_id, pin=join.pin, node_key=public, name=name, mac="")
    request = m.PairRequest(
        code_id=join.code_id,
        name=name,
        mac="",
        node_key=encode(public),
        code_signature=encode(code_key(join.secret).sign(transcript)),
        node_signature=encode(key.sign(transcript)),
        agent_version=VERSION,
    )
    return NodeId(client.pair(request).node_id)


def open_session(client: Client, node_id: NodeId, *, key: Ed25519PrivateKey) -> Client:
    """Open the first session and return a client that carries its token."""
    challenge = client.challenge(m.ChallengeRequest(node_id=node_id)).challenge
    nonce = secrets.token_urlsafe(16)
    transcript = session_transcript(node_id=node_id, challenge=challenge, last_session=0, nonce=nonce)
    request = m.SessionRequest(
        node_id=node_id,
        challenge=challenge,
        last_session=0,
        nonce=nonce,
        signature=encode(key.sign(transcript)),
        inventory=Inventory(
            cpus_milli=CLAIMED_CPUS_MILLI,
            memory_bytes=CLAIMED_MEMORY_BYTES,
            disk_bytes=CLAIMED_MEMORY_BYTES,
            os="linux",
            arch="x86_64",
            agent_version=VERSION,
            boot_id=secrets.token_hex(16),
        ),
    )
    return client.with_token(client.open_session(request).token)


def main(arguments: Sequence[str]) -> int:
    """Pair under a name with the join string in a file, then lie until told to stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    name, secret = arguments
    join = JoinString.parse(Path(secret).read_text())
    key = Ed25519PrivateKey.generate()
    try:
        with Client(join.url, pin=join.pin) as client:
            node_id = pair(client, join, name=name, key=key)
            liar = Liar(client=open_session(client, node_id, key=key), node_id=node_id)
            say("paired")
            while True:
                liar.sync()
    except (Refusal, Fault) as error:
        say(f"I give up: {error.message}")
        return 1


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
