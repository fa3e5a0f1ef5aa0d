"""What arrives late: found by simulated worlds, kept as stories."""

import pytest

from fleetward.controller.services import sessions
from fleetward.domain.errors import NodeCloned, SessionStale
from fleetward.wire.handshake import encode, session_transcript
from fleetward.wire.messages import SessionRequest
from tests.services.fleet import INVENTORY, TOKEN_KEY, Fleet, Machine


def asks(fleet: Fleet, machine: Machine, *, last_session: int, nonce: str) -> SessionRequest:
    assert machine.node_id is not None
    challenge = sessions.challenge(fleet.database, node_id=machine.node_id, token_key=TOKEN_KEY).challenge
    message = session_transcript(node_id=machine.node_id, challenge=challenge, last_session=last_session, nonce=nonce)
    return SessionRequest(
        node_id=machine.node_id,
        challenge=challenge,
        last_session=last_session,
        nonce=nonce,
        signature=encode(machine.key.sign(message)),
        inventory=INVENTORY,
    )


def test_a_session_request_that_was_overtaken_by_the_next_session_condemns_nobody(fleet: Fleet):
    machine = fleet.node("late")
    overtaken = asks(fleet, machine, last_session=0, nonce="nonce")
    fleet.open_session(machine, nonce="of the next run")
    with pytest.raises(SessionStale):
        sessions.open_session(fleet.database, overtaken, token_key=TOKEN_KEY)
    fleet.sync(machine)


def test_a_copy_that_asks_afresh_is_found_out(fleet: Fleet):
    machine = fleet.node("twin")
    fleet.open_session(machine, nonce="of the next run")
    with pytest.raises(NodeCloned):
        sessions.open_session(
            fleet.database, asks(fleet, machine, last_session=0, nonce="of the copy"), token_key=TOKEN_KEY
        )
