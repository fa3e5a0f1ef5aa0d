"""How machines become nodes, and who else tries."""

import pytest

from fleetward.controller.services import sessions
from fleetward.domain.errors import (
    MalformedJoinString,
    NodeCloned,
    NodeExists,
    PairingRefused,
    SessionStale,
    Unauthenticated,
)
from fleetward.wire.handshake import JoinString
from tests.services.fleet import TOKEN_KEY, Fleet, Machine


def test_a_lost_reply_is_asked_for_again_and_is_the_same(fleet: Fleet):
    machine, join = Machine("ada"), fleet.code()
    first = fleet.pair(machine, join)
    assert fleet.pair(machine, join) == first


def test_a_used_code_makes_no_second_node(fleet: Fleet):
    join = fleet.code()
    fleet.pair(Machine("ada"), join)
    with pytest.raises(PairingRefused):
        fleet.pair(Machine("eve"), join)
    with pytest.raises(PairingRefused):
        fleet.pair(Machine("ada"), join)


def test_a_code_without_its_secret_is_worth_nothing(fleet: Fleet):
    join = fleet.code()
    with pytest.raises(PairingRefused):
        fleet.pair(Machine("eve"), join, secret=b"x" * 32)
    fleet.pair(Machine("ada"), join)


def test_a_living_node_is_not_taken_over(fleet: Fleet):
    fleet.node("ada")
    with pytest.raises(NodeExists):
        fleet.pair(Machine("ada"), fleet.code())


@pytest.mark.parametrize("cut", [1, 8, 40])
def test_a_cut_join_string_is_told_apart_from_a_wrong_one(fleet: Fleet, cut: int):
    with pytest.raises(MalformedJoinString):
        JoinString.parse(fleet.code().text()[:-cut])


def test_the_same_nonce_gets_the_same_session_and_the_next_one_the_next(fleet: Fleet):
    ada = fleet.node("ada")
    assert fleet.open_session(ada, nonce="b") == 2
    assert fleet.open_session(ada, nonce="b", last_session=1) == 2
    assert fleet.open_session(ada, nonce="c") == 3


def test_a_copied_state_is_found_out_and_both_are_shut_out(fleet: Fleet):
    ada = fleet.node("ada")
    fleet.open_session(ada, nonce="mine")
    with pytest.raises(NodeCloned):
        fleet.open_session(ada, nonce="the copy's", last_session=1)
    with pytest.raises(NodeCloned):
        fleet.open_session(ada, nonce="mine again", last_session=2)


def test_a_token_of_another_key_proves_nobody(fleet: Fleet):
    ada = fleet.node("ada")
    assert ada.node_id is not None
    challenge = sessions.challenge(fleet.database, node_id=ada.node_id, token_key=TOKEN_KEY).challenge
    for text in ("", "x", "x.y", challenge):
        with pytest.raises((Unauthenticated, SessionStale)):
            sessions.read_token(text, token_key=TOKEN_KEY)
    with pytest.raises(Unauthenticated):
        sessions.read_token(challenge, token_key=b"u" * 32)
