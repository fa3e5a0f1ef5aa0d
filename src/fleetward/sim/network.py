"""A network that keeps no promise: what is sent may arrive late, twice, in any order, or not at all.

Owns the calls and replies that are on their way. Refuses to know what they say.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from fleetward.domain.errors import Fault, Refusal, Unreachable
from fleetward.sim.controller import Life, SimController

Outcome = object | Refusal | Fault


@dataclass(slots=True, eq=False)
class Call:
    """One call of somebody to whichever controller it reaches."""

    number: int
    sender: str
    what: str
    work: Callable[[SimController], object]
    answered: Callable[[Outcome], None]
    arrives_at: datetime
    sync: object = None  # a sync's own SyncCall: those that arrive together share a transaction
    is_closed: bool = False  # the sender has given it up, or is gone


@dataclass(slots=True, eq=False)
class Reply:
    """What a call came to, on its way back."""

    call: Call
    outcome: Outcome


@dataclass(slots=True, eq=False)
class Held:
    """A sync that brought no news: taken in, and answered later by the controller that has it."""

    call: Call
    controller: SimController
    life: Life
    since: datetime


@dataclass(slots=True)
class Network:
    """Everything that is on its way."""

    calls: list[Call] = field(default_factory=list[Call])
    replies: list[Reply] = field(default_factory=list[Reply])
    held: list[Held] = field(default_factory=list[Held])
    sent: int = 0

    def send(self, call: Call) -> None:
        """Put a call on its way."""
        self.calls.append(call)

    def number(self) -> int:
        """The next call's number."""
        self.sent += 1
        return self.sent

    def give_back(self, call: Call, outcome: Outcome) -> None:
        """Put a reply on its way."""
        self.replies.append(Reply(call, outcome))

    def arrived(self, now: datetime) -> list[Call]:
        """The calls that can be delivered by now."""
        return [call for call in self.calls if call.arrives_at <= now]

    def forget_closed(self) -> None:
        """Drop replies that nobody waits for any more. Their calls may still arrive."""
        self.replies = [reply for reply in self.replies if not reply.call.is_closed]


def unreachable() -> Unreachable:
    """What a sender learns when nothing came back."""
    return Unreachable("the controller did not answer")
