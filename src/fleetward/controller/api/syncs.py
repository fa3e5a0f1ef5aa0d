"""Many syncs, few transactions: concurrent ones travel together, quiet ones are held.

Owns the batches and the held calls of nodes. While one transaction runs, the calls that arrive wait and
go together into the next; no reply leaves before its commit. Each node has at most one call in a batch
and at most one that is held: a newer sequence ends the older hold. Refuses
to know what a sync means.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from fleetward.controller.hints import ASSIGN, JOBS, VERIFY, Hub, Watch, assignment_topic, node_topic
from fleetward.controller.services.sync import SyncCall, has_news
from fleetward.domain.errors import DatabaseUnavailable, OutcomeUnknown, Refusal
from fleetward.domain.ids import AssignmentId, NodeId
from fleetward.wire.messages import SyncReply, SyncRequest

HOLD_SECONDS_MAX: Final = 60.0  # well below the shortest lease; a node that asks for more asks again

Transact = Callable[[Sequence[SyncCall]], Sequence[SyncReply | Refusal]]
Held = frozenset[tuple[AssignmentId, str, bool]]


@dataclass(frozen=True, slots=True)
class _Ticket:
    call: SyncCall
    answer: "asyncio.Future[SyncReply]"

    def settle(self, result: SyncReply | Exception) -> None:
        # The future is already done when its client hung up.
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class Batcher:
    """Concurrent calls into one transaction; one transaction at a time."""

    def __init__(self, transact: Transact, *, executor: Executor, batch_max: int) -> None:
        self._transact = transact
        self._executor = executor
        self._batch_max = batch_max
        self._waiting: deque[_Ticket] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def ask(self, call: SyncCall) -> SyncReply:
        """Answer one call, after the transaction that it shares with others has committed."""
        ticket = _Ticket(call, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await ticket.answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._settle(self._take())
        finally:
            self._runner = None

    def _take(self) -> list[_Ticket]:
        """Take the next batch; a node's second call waits for the next one, so that order is kept."""
        taken: list[_Ticket] = []
        nodes: set[NodeId] = set()
        later: list[_Ticket] = []
        while self._waiting and len(taken) < self._batch_max:
            ticket = self._waiting.popleft()
            if ticket.answer.done():
                continue
            if ticket.call.credential.node_id in nodes:
                later.append(ticket)
                continue
            nodes.add(ticket.call.credential.node_id)
            taken.append(ticket)
        self._waiting.extendleft(reversed(later))
        return taken

    async def _settle(self, tickets: list[_Ticket]) -> None:
        if not tickets:
            return
        loop = asyncio.get_running_loop()
        try:
            calls = [ticket.call for ticket in tickets]
            results = await loop.run_in_executor(self._executor, self._transact, calls)
        except (DatabaseUnavailable, OutcomeUnknown) as fault:
            for ticket in tickets:
                ticket.settle(fault)
        except Exception as error:  # whatever it is, it is an answer to these calls and must not end the batcher
            if len(tickets) == 1:
                tickets[0].settle(error)
                return
            # One call's content broke the transaction of all: find out alone whose.
            for ticket in tickets:
                await self._settle([ticket])
        else:
            for ticket, result in zip(tickets, results, strict=True):
                ticket.settle(result)


@dataclass(slots=True)
class _Place:
    """One call that is being served; `is_over` once a newer one of its node has come."""

    order: tuple[int, int]
    watch: Watch
    is_over: bool = False


class Syncs:
    """The held calls of all nodes: `batcher` takes what they say in, `looks` only reads for them again."""

    def __init__(self, batcher: Batcher, *, looks: Batcher, hub: Hub) -> None:
        self._batcher = batcher
        self._looks = looks
        self._hub = hub
        self._places: dict[NodeId, _Place] = {}
        self._last: dict[NodeId, Held] = {}
        self._is_closing = False

    async def sync(self, call: SyncCall) -> SyncReply:
        """Answer at once when there is news for the node, else when there is, or the wait is over."""
        node_id = call.credential.node_id
        watch = self._hub.watch(node_topic(node_id))
        place = self._enter(call, watch)
        try:
            return await self._serve(call, place)
        finally:
            watch.close()
            if self._places.get(node_id) is place:
                del self._places[node_id]

    async def _serve(self, call: SyncCall, place: _Place) -> SyncReply:
        clock = asyncio.get_running_loop().time
        ends = clock() + min(call.request.wait_seconds, HOLD_SECONDS_MAX)
        reply = await self._batcher.ask(call)
        self._hub.wake(self._news(call))
        while not (has_news(call.request, reply) or place.is_over or self._is_closing):
            woke = await place.watch.wait(ends - clock())
            if not woke or place.is_over or self._is_closing:
                break
            reply = await self._looks.ask(call)
        return reply

    def close(self) -> None:
        """Let every held call end now; the controller is about to stop."""
        self._is_closing = True

    def _enter(self, call: SyncCall, watch: Watch) -> _Place:
        place = _Place((call.credential.session, call.request.sequence), watch)
        older = self._places.get(call.credential.node_id)
        if older is not None and older.order > place.order:
            # It was overtaken on its way: it is answered, never held.
            place.is_over = True
            return place
        if older is not None:
            older.is_over = True
            older.watch.hint()
        self._places[call.credential.node_id] = place
        return place

    def _news(self, call: SyncCall) -> set[str]:
        """Who should look again after this sync; a plain beat is no news."""
        node_id = call.credential.node_id
        held, before = _held(call.request), self._last.get(node_id)
        self._last[node_id] = held
        if before is None:
            return {ASSIGN}
        if held == before:
            return set()
        changed = {assignment_topic(assignment_id) for assignment_id, _, _ in held ^ before}
        return {ASSIGN, VERIFY, JOBS, *changed}


def _held(request: SyncRequest) -> Held:
    return frozenset((AssignmentId(held.id), held.state, held.released) for held in request.held)
