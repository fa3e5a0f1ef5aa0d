"""Who this machine is: its key, the node it became, and how it proves both.

Owns `node_key` and `node.json`, the pairing and the opening of a session. Refuses to know what a session is
used for; only that a new node begins with an empty journal. The key is made here and on disk before anybody
hears of it, so a lost answer can be asked for again: the same key under the same code gets the same node.
"""

from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key

from fleetward.agent import journal
from fleetward.agent.commands import Journal
from fleetward.agent.home import AgentHome, minding, replace_durably
from fleetward.client import Client
from fleetward.domain.errors import HomeUnusable, NodeNameNeeded, Unauthenticated, WrongPin
from fleetward.domain.ids import NodeId
from fleetward.domain.nodes import Inventory, check_name, name_from_mac
from fleetward.wire import messages as m
from fleetward.wire.handshake import (
    JoinString,
    check_signature,
    code_key,
    decode,
    encode,
    pairing_transcript,
    pin_of,
    session_transcript,
)
from fleetward.wire.versions import VERSION

KEY: Final = "node_key"
NODE: Final = "node.json"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The node that this machine is, and the controller it belongs to."""

    name: str
    node_id: UUID
    url: str
    pin: str
    key_epoch: int
    controller_key: str


def load(home: Path) -> Identity:
    """Read who this machine is, or say that it has not paired."""
    path = home / NODE
    with minding(f"{path} cannot be read"):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise HomeUnusable(
                f"{home} belongs to no node yet", hint="pair this machine first: fleetward join '…'"
            ) from None
    try:
        return msgspec.json.decode(content, type=Identity)
    except msgspec.DecodeError as error:
        raise HomeUnusable(f"{path} cannot be read: {error}", hint="move the home away and pair again") from error


def forget(home: AgentHome) -> None:
    """Be nobody's node any more: the key is removed first, for it is what proves something."""
    with minding(f"the credential in {home.path} cannot be removed"):
        for path in (home.path / KEY, home.path / NODE, home.journal / journal.FILE):
            path.unlink(missing_ok=True)


def load_key(home: Path) -> Ed25519PrivateKey:
    """Read this machine's key; without it nothing here proves anything."""
    found = _read_key(home / KEY)
    if found is None:
        raise HomeUnusable(f"{home / KEY} is not there", hint="move the home away and pair again")
    return found


def _read_key(path: Path) -> Ed25519PrivateKey | None:
    with minding(f"{path} cannot be read"):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        return Ed25519PrivateKey.from_private_bytes(decode(content.decode("ascii").strip()))
    except ValueError as error:
        raise HomeUnusable(f"{path} holds no key: {error}", hint="move the home away and pair again") from error


def _keep_key(path: Path) -> Ed25519PrivateKey:
    """The key of an earlier try, or a new one, which is on disk before it is used."""
    found = _read_key(path)
    if found is not None:
        return found
    made = Ed25519PrivateKey.generate()
    replace_durably(path, encode(made.private_bytes_raw()) + "\n")
    return made


def choose_name(name: str | None, *, mac: str | None) -> str:
    """Name the machine: as asked, else after its network interface."""
    if name is not None:
        return check_name(name)
    if mac is None:
        raise NodeNameNeeded(
            "this machine has no network interface of its own to be named after (node_name_needed)",
            hint="give it a name with --name",
        )
    return name_from_mac(mac)


def pair(client: Client, join: JoinString, home: AgentHome, *, name: str, mac: str | None) -> Identity:
    """Become a node of the controller that the join string names, and of no other."""
    if (home.path / NODE).exists():
        known = load(home.path)
        raise HomeUnusable(
            f"{home.path} is already the home of node {known.name!r} at {known.url}",
            hint="run it with `fleetward agent`, or give the new node a home of its own with --home",
        )
    node_key = _keep_key(home.path / KEY)
    public = node_key.public_key().public_bytes_raw()
    transcript = pairing_transcript(code_id=join.code_id, pin=join.pin, node_key=public, name=name, mac=mac or "")
    reply = client.pair(
        m.PairRequest(
            code_id=join.code_id,
            name=name,
            mac=mac or "",
            node_key=encode(public),
            code_signature=encode(code_key(join.secret).sign(transcript)),
            node_signature=encode(node_key.sign(transcript)),
            agent_version=VERSION,
        )
    )
    _check_controller(reply, join, transcript=transcript)
    identity = Identity(
        name=reply.name,
        node_id=reply.node_id,
        url=join.url,
        pin=join.pin,
        key_epoch=reply.key_epoch,
        controller_key=reply.controller_key,
    )
    # A new node has had no session yet; with the numbers of an earlier one it would look like a copy.
    journal.write(home.journal, Journal())
    replace_durably(home.path / NODE, msgspec.json.format(msgspec.json.encode(identity)).decode() + "\n")
    return identity


def _check_controller(reply: m.PairReply, join: JoinString, *, transcript: bytes) -> None:
    """Whoever answered must hold the pinned key: over TLS the handshake has shown it, else the signature does."""
    try:
        der = decode(reply.controller_key)
        public_key = load_der_public_key(der)
        signature = decode(reply.controller_signature)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Unauthenticated(f"the answer of {join.url} holds no key and signature that can be read") from error
    if not join.url.startswith("https:") and pin_of(der) != join.pin:
        raise WrongPin(
            f"the controller at {join.url} has the key {pin_of(der)}, not {join.pin} as the join string says",
            hint="make sure that nothing stands between; else make a new join string: `fleetward node pair`",
        )
    if not isinstance(public_key, Ed25519PublicKey):
        raise Unauthenticated(f"the key of the controller at {join.url} is no Ed25519 key")
    check_signature(public_key=public_key.public_bytes_raw(), signature=signature, message=transcript)


def open_session(
    client: Client,
    identity: Identity,
    node_key: Ed25519PrivateKey,
    *,
    last_session: int,
    nonce: str,
    inventory: Inventory,
) -> m.SessionReply:
    """Prove who we are and get the next session; the same nonce gets the same answer."""
    node_id = NodeId(identity.node_id)
    challenge = client.challenge(m.ChallengeRequest(node_id=node_id)).challenge
    transcript = session_transcript(node_id=node_id, challenge=challenge, last_session=last_session, nonce=nonce)
    return client.open_session(
        m.SessionRequest(
            node_id=node_id,
            challenge=challenge,
            last_session=last_session,
            nonce=nonce,
            signature=encode(node_key.sign(transcript)),
            inventory=inventory,
        )
    )
