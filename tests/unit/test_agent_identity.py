"""Pairing and its home: one key, one controller, and nothing kept of what cannot be believed."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from loopback_server import Answer, Loopback, serve

from fleetward.agent import identity, journal
from fleetward.agent.commands import Journal
from fleetward.agent.home import AgentHome
from fleetward.client import Client
from fleetward.domain.errors import (
    Fault,
    HomeLocked,
    HomeUnusable,
    NodeNameNeeded,
    Refusal,
    Unauthenticated,
    Unreachable,
    WrongPin,
)
from fleetward.domain.ids import NodeId, PairingCodeId
from fleetward.domain.nodes import Inventory
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

CONTROLLER = Ed25519PrivateKey.from_private_bytes(b"c" * 32)
DER = CONTROLLER.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
SECRET, CODE = b"s" * 32, PairingCodeId(UUID(int=5))
NODE = UUID(int=6)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[AgentHome]:
    home = AgentHome.hold(tmp_path / "home")
    yield home
    home.release()


def join_string(url: str, *, pin: str = "") -> JoinString:
    return JoinString(url=url, code_id=CODE, secret=SECRET, pin=pin or pin_of(DER))


def node_key(home: AgentHome) -> Ed25519PrivateKey:
    """The key that pairing will use, so that an answer can be signed beforehand."""
    with serve([Answer(status=503)]) as down, Client(down.url) as client, pytest.raises(Fault):
        identity.pair(client, join_string(down.url), home, name="ada", mac=None)
    return identity.load_key(home.path)


def answer(home: AgentHome, *, key: Ed25519PrivateKey = CONTROLLER, shown: bytes = DER, name: str = "ada") -> Answer:
    """A controller's answer to the pairing of this home's key under the name."""
    public = node_key(home).public_key().public_bytes_raw()
    transcript = pairing_transcript(code_id=CODE, pin=pin_of(DER), node_key=public, name=name, mac="")
    reply = m.PairReply(
        node_id=NODE,
        name=name,
        key_epoch=1,
        controller_key=encode(shown),
        controller_signature=encode(key.sign(transcript)),
    )
    return Answer(body=msgspec.json.encode(reply))


def paired(home: AgentHome, loopback: Loopback) -> identity.Identity:
    with Client(loopback.url) as client:
        return identity.pair(client, join_string(loopback.url), home, name="ada", mac=None)


def test_a_pairing_is_signed_by_the_code_and_by_a_key_made_here(home: AgentHome) -> None:
    with serve([answer(home)]) as controller:
        who = paired(home, controller)
    [asked] = controller.asked
    request = msgspec.json.decode(asked.body, type=m.PairRequest)
    transcript = pairing_transcript(
        code_id=CODE, pin=pin_of(DER), node_key=decode(request.node_key), name="ada", mac=""
    )
    for public, signature in (
        (code_key(SECRET).public_key().public_bytes_raw(), request.code_signature),
        (identity.load_key(home.path).public_key().public_bytes_raw(), request.node_signature),
    ):
        check_signature(public_key=public, signature=decode(signature), message=transcript)
    assert encode(SECRET).encode() not in asked.body
    assert identity.load(home.path) == who
    assert (who.name, who.node_id, who.url, who.pin) == ("ada", NODE, controller.url, pin_of(DER))


def test_key_and_node_are_their_owners_alone(home: AgentHome) -> None:
    with serve([answer(home)]) as controller:
        paired(home, controller)
    for name in (identity.KEY, identity.NODE):
        assert stat.S_IMODE((home.path / name).stat().st_mode) == 0o600


def test_after_a_lost_answer_the_same_key_asks_again(home: AgentHome) -> None:
    cut = Answer(body=answer(home).body, cut_after=10)
    with serve([cut, answer(home)]) as controller:
        with pytest.raises(Unreachable):
            paired(home, controller)
        assert not (home.path / identity.NODE).exists()
        paired(home, controller)
    assert controller.asked[0].body == controller.asked[1].body


def test_another_controllers_answer_is_not_believed(home: AgentHome) -> None:
    other = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
    shown = other.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    with serve([answer(home, key=other, shown=shown)]) as controller:
        with pytest.raises(WrongPin, match=pin_of(shown)):
            paired(home, controller)
    assert not (home.path / identity.NODE).exists()


@pytest.mark.parametrize(
    "reply",
    [
        {"controller_signature": encode(b"x" * 64)},
        {"controller_signature": "=="},
        {"controller_key": "no key"},
    ],
)
def test_an_answer_without_the_pinned_keys_signature_is_not_believed(home: AgentHome, reply: dict[str, str]) -> None:
    told = msgspec.json.decode(answer(home).body) | reply
    with serve([Answer(body=msgspec.json.encode(told))]) as controller:
        with pytest.raises(Unauthenticated):
            paired(home, controller)
    assert not (home.path / identity.NODE).exists()


def test_a_home_that_is_a_node_already_is_not_paired_again(home: AgentHome) -> None:
    with serve([answer(home)]) as controller:
        paired(home, controller)
        with pytest.raises(HomeUnusable, match="already the home of node 'ada'"):
            paired(home, controller)
    assert len(controller.asked) == 1


def test_a_new_node_begins_with_an_empty_journal(home: AgentHome) -> None:
    journal.write(home.journal, Journal(last_session=40, nonce="n"))
    with serve([answer(home)]) as controller:
        paired(home, controller)
    assert journal.read(home.journal) == Journal()


def test_a_forgotten_node_leaves_nothing_that_proves_anything(home: AgentHome) -> None:
    with serve([answer(home)]) as controller:
        paired(home, controller)
    identity.forget(home)
    identity.forget(home)
    assert journal.read(home.journal) == Journal()
    with pytest.raises(HomeUnusable, match="belongs to no node yet"):
        identity.load(home.path)
    with pytest.raises(HomeUnusable, match="node_key is not there"):
        identity.load_key(home.path)


@pytest.mark.parametrize("content", ["", "short", "ü", encode(b"x" * 31), encode(b"x" * 33)])
def test_a_damaged_key_is_refused_and_never_replaced(home: AgentHome, content: str) -> None:
    path = home.path / identity.KEY
    path.write_text(content, "utf-8")
    with serve([Answer()]) as controller:
        with pytest.raises(HomeUnusable, match="node_key holds no key"):
            paired(home, controller)
    assert controller.asked == []
    assert path.read_text("utf-8") == content


def test_a_damaged_node_file_is_refused(home: AgentHome) -> None:
    (home.path / identity.NODE).write_text('{"name": "ada"')
    with pytest.raises(HomeUnusable, match=r"node\.json cannot be read"):
        identity.load(home.path)


def test_a_machine_is_named_as_asked_or_after_its_interface() -> None:
    assert identity.choose_name("ada", mac="02:00:00:00:00:01") == "ada"
    assert identity.choose_name(None, mac="02:00:00:00:00:01") == identity.choose_name(None, mac="02:00:00:00:00:01")
    with pytest.raises(NodeNameNeeded, match="node_name_needed") as caught:
        identity.choose_name(None, mac=None)
    assert "--name" in caught.value.hint
    with pytest.raises(Refusal):
        identity.choose_name("no/name", mac=None)


def test_a_session_is_asked_for_with_a_signed_challenge(home: AgentHome) -> None:
    with serve([answer(home)]) as controller:
        who = paired(home, controller)
    replies = [
        Answer(body=b'{"challenge": "what?"}'),
        Answer(body=b'{"session": 4, "token": "t", "expires_at": "2026-01-01T00:00:00Z"}'),
    ]
    inventory = Inventory(cpus_milli=1, memory_bytes=1, disk_bytes=1, os="o", arch="a", agent_version="1", boot_id="b")
    key = identity.load_key(home.path)
    with serve(replies) as controller, Client(controller.url) as client:
        reply = identity.open_session(client, who, key, last_session=3, nonce="ab", inventory=inventory)
    assert (reply.session, reply.token) == (4, "t")
    request = msgspec.json.decode(controller.asked[1].body, type=m.SessionRequest)
    check_signature(
        public_key=key.public_key().public_bytes_raw(),
        signature=decode(request.signature),
        message=session_transcript(node_id=NodeId(NODE), challenge="what?", last_session=3, nonce="ab"),
    )


def test_two_agents_never_hold_one_home(home: AgentHome) -> None:
    with pytest.raises(HomeLocked, match=f"process {os.getpid()}") as caught:
        AgentHome.hold(home.path)
    assert "--home" in caught.value.hint


def test_a_released_home_can_be_held_again(tmp_path: Path) -> None:
    for _ in range(2):
        AgentHome.hold(tmp_path / "home").release()


def test_a_home_is_closed_except_to_the_users_of_attempts(home: AgentHome) -> None:
    passage = 0o711 if os.geteuid() == 0 else 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home.path, home.attempts, home.journal)}
    assert modes == {"home": passage, "attempts": passage, "journal": 0o700}


def test_a_home_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeUnusable, match="Not a directory"):
        AgentHome.hold(tmp_path / "file" / "home")
