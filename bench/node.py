"""A simulated node: it speaks the agent's protocol and runs nothing.

Owns pairing, the session and the sync loop of one node, whose every attempt succeeds at once with a small
file. Refuses to know how the controller is measured.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Final, Self
from uuid import UUID

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.connection import Connection
from fleetward.client import Client
from fleetward.domain.artifacts import RECEIPT_PATH
from fleetward.domain.ids import NodeId
from fleetward.domain.nodes import Inventory
from fleetward.wire.endpoints import ENDPOINTS
from fleetward.wire.handshake import JoinString, code_key, encode, pairing_transcript, session_transcript
from fleetward.wire.messages import (
    AssignmentOrder,
    ChallengeRequest,
    HeldAssignment,
    InlineArtifact,
    PairingCodeRequest,
    PairRequest,
    SessionRequest,
    SyncReply,
    SyncRequest,
)
from fleetward.wire.versions import VERSION

ARTIFACT: Final = "result.txt"
NONCE: Final = "n" * 22
HOLD_SECONDS: Final = 20.0  # how long a quiet sync is held
SYNC: Final = next(endpoint.path for endpoint in ENDPOINTS if endpoint.name == "sync")
DECODER: Final = msgspec.json.Decoder(SyncReply)


class Node:
    """A node that has paired and opened its session."""

    def __init__(self, connection: Connection, *, told: Callable[[UUID, float], None]) -> None:
        self._connection = connection
        self._told = told
        self._sequence = 0

    @classmethod
    async def join(
        cls, client: Client, name: str, *, slots: int, owners_key: str, told: Callable[[UUID, float], None]
    ) -> Self:
        """Pair as a new machine with so many CPUs. `told` hears of each job when its order arrives."""
        token = await asyncio.to_thread(_session, client, name, slots=slots, owners_key=owners_key)
        return cls(await Connection.open(client.url, token=token), told=told)

    async def run(self) -> None:
        """Sync for ever: take every order, say that it runs, then that it is done."""
        held: dict[UUID, HeldAssignment] = {}
        while True:
            # A node with more to say does not let itself be held.
            wait = 0.0 if any(one.state == "running" for one in held.values()) else HOLD_SECONDS
            self._sequence += 1
            request = SyncRequest(sequence=self._sequence, held=list(held.values()), wait_seconds=wait)
            reply = DECODER.decode(await self._connection.post(SYNC, request))
            now = time.perf_counter()
            for order in reply.assignments:
                if order.id not in held:
                    self._told(order.job_id, now)
            held = {order.id: _next(order, held.get(order.id)) for order in reply.assignments}

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def _next(order: AssignmentOrder, before: HeldAssignment | None) -> HeldAssignment:
    """What the node says of an order: at first that it runs, from then on that it is done."""
    if before is None:
        return HeldAssignment(id=order.id, fence=order.fence, state="running", known=order.desired)
    receipt = _inline(RECEIPT_PATH, b'{"assignment":"%s","exit_code":0}' % order.id.hex.encode())
    made = _inline(ARTIFACT, f"the work of attempt {order.id}\n".encode())
    return HeldAssignment(
        id=order.id,
        fence=order.fence,
        state="succeeded",
        known=order.desired,
        released=True,
        exit_code=0,
        inline=[receipt, made],
    )


def _inline(path: str, content: bytes) -> InlineArtifact:
    digest = hashlib.sha256(content).hexdigest()
    return InlineArtifact(path=path, size_bytes=len(content), sha256=digest, content=content)


def _session(client: Client, name: str, *, slots: int, owners_key: str) -> str:
    """Pair, open a session, and return its token."""
    code = client.with_token(owners_key).make_pairing_code(PairingCodeRequest())
    join = JoinString.parse(code.join_string)
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    said = pairing_transcript(code_id=join.code_id, pin=join.pin, node_key=public, name=name, mac="")
    paired = client.pair(
        PairRequest(
            code_id=join.code_id,
            name=name,
            mac="",
            node_key=encode(public),
            code_signature=encode(code_key(join.secret).sign(said)),
            node_signature=encode(key.sign(said)),
            agent_version=VERSION,
        )
    )
    challenge = client.challenge(ChallengeRequest(node_id=paired.node_id)).challenge
    said = session_transcript(node_id=NodeId(paired.node_id), challenge=challenge, last_session=0, nonce=NONCE)
    return client.open_session(
        SessionRequest(
            node_id=paired.node_id,
            challenge=challenge,
            last_session=0,
            nonce=NONCE,
            signature=encode(key.sign(said)),
            inventory=Inventory(
                cpus_milli=1000 * slots,
                memory_bytes=1 << 36,
                disk_bytes=1 << 40,
                os="linux",
                arch="x86_64",
                agent_version=VERSION,
                boot_id="bench",
            ),
        )
    ).token
