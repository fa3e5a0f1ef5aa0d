"""Batches and holds of syncs, on a loop whose transactions the test itself answers."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Event
from uuid import UUID

import pytest

from fleetward.controller.api.syncs import Batcher, Syncs
from fleetward.controller.hints import Hub, node_topic
from fleetward.controller.services.sessions import NodeCredential
from fleetward.controller.services.sync import SyncCall
from fleetward.domain.errors import DatabaseUnavailable, Refusal, SessionStale
from fleetward.domain.ids import NodeId
from fleetward.wire.messages import AssignmentOrder, SyncReply, SyncRequest

THEN = datetime(2026, 1, 1, tzinfo=UTC)


def call(node: int, *, sequence: int = 1, wait_seconds: float = 0.0) -> SyncCall:
    credential = NodeCredential(node_id=NodeId(UUID(int=node)), key_epoch=1, session=1, expires_at=THEN)
    return SyncCall(credential=credential, request=SyncRequest(sequence=sequence, wait_seconds=wait_seconds))


def reply(sequence: int, orders: list[AssignmentOrder] | None = None) -> SyncReply:
    return SyncReply(assignments=orders or [], sequence=sequence, lease_seconds=90, beat_seconds=10, server_time=THEN)


class Transactions:
    """What a service would do, and which calls it was given together."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        self.go = Event()
        self.go.set()
        self.orders: list[AssignmentOrder] = []
        self.raises: dict[int, Exception] = {}

    def __call__(self, calls: Sequence[SyncCall]) -> list[SyncReply | Refusal]:
        self.batches.append([(c.credential.node_id.int, c.request.sequence) for c in calls])
        assert self.go.wait(10)
        for one in calls:
            if one.credential.node_id.int in self.raises:
                raise self.raises[one.credential.node_id.int]
        return [
            SessionStale("old") if c.request.sequence == 0 else reply(c.request.sequence, self.orders) for c in calls
        ]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_calls_that_come_while_a_transaction_runs_share_the_next_one(executor: ThreadPoolExecutor) -> None:
    transact = Transactions()

    async def scene() -> None:
        batcher = Batcher(transact, executor=executor, batch_max=3)
        transact.go.clear()
        tasks = [asyncio.create_task(batcher.ask(call(node))) for node in range(1, 6)]
        await turns()
        transact.go.set()
        assert [one.sequence for one in await asyncio.gather(*tasks)] == [1] * 5

    asyncio.run(scene())
    assert transact.batches == [[(1, 1), (2, 1), (3, 1)], [(4, 1), (5, 1)]]


def test_two_calls_of_one_node_keep_their_order_and_never_share_a_transaction(executor: ThreadPoolExecutor) -> None:
    transact = Transactions()

    async def scene() -> None:
        batcher = Batcher(transact, executor=executor, batch_max=10)
        asked = [call(1, sequence=1), call(1, sequence=2), call(2), call(1, sequence=3)]
        await asyncio.gather(*(batcher.ask(one) for one in asked))

    asyncio.run(scene())
    assert transact.batches == [[(1, 1), (2, 1)], [(1, 2)], [(1, 3)]]


def test_a_refusal_is_for_its_own_call_only(executor: ThreadPoolExecutor) -> None:
    async def scene() -> list[object]:
        batcher = Batcher(Transactions(), executor=executor, batch_max=10)
        asked = [call(1, sequence=0), call(2)]
        return await asyncio.gather(*(batcher.ask(one) for one in asked), return_exceptions=True)

    refused, answered = asyncio.run(scene())
    assert isinstance(refused, SessionStale)
    assert isinstance(answered, SyncReply)


def test_a_fault_of_the_database_is_told_to_all_and_the_next_batch_goes_on(executor: ThreadPoolExecutor) -> None:
    transact = Transactions()
    transact.raises = {1: DatabaseUnavailable("gone")}

    async def scene() -> list[object]:
        batcher = Batcher(transact, executor=executor, batch_max=10)
        failed = await asyncio.gather(*(batcher.ask(call(n)) for n in (1, 2)), return_exceptions=True)
        return [*failed, await batcher.ask(call(3))]

    first, second, third = asyncio.run(scene())
    assert isinstance(first, DatabaseUnavailable)
    assert isinstance(second, DatabaseUnavailable)
    assert isinstance(third, SyncReply)


def test_a_call_that_breaks_its_transaction_breaks_no_others(executor: ThreadPoolExecutor) -> None:
    transact = Transactions()
    transact.raises = {2: ValueError("a bug")}

    async def scene() -> list[object]:
        batcher = Batcher(transact, executor=executor, batch_max=10)
        return await asyncio.gather(*(batcher.ask(call(n)) for n in (1, 2, 3)), return_exceptions=True)

    first, second, third = asyncio.run(scene())
    assert isinstance(first, SyncReply)
    assert isinstance(second, ValueError)
    assert isinstance(third, SyncReply)


def syncs_of(
    transact: Transactions, *, executor: ThreadPoolExecutor, hub: Hub, looks: Transactions | None = None
) -> Syncs:
    return Syncs(
        Batcher(transact, executor=executor, batch_max=100),
        looks=Batcher(looks or Transactions(), executor=executor, batch_max=100),
        hub=hub,
    )


ORDER = AssignmentOrder(id=UUID(int=9), fence=1, job_id=UUID(int=8), attempt=1, desired="run")


def test_news_is_answered_at_once(executor: ThreadPoolExecutor) -> None:
    transact = Transactions()
    transact.orders = [ORDER]

    async def scene() -> SyncReply:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        return await syncs_of(transact, executor=executor, hub=hub).sync(call(1, wait_seconds=30))

    assert asyncio.run(scene()).assignments == [ORDER]


def test_a_quiet_call_is_held_until_a_hint_brings_news_and_is_taken_in_once(executor: ThreadPoolExecutor) -> None:
    transact, looks = Transactions(), Transactions()

    async def scene() -> SyncReply:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        syncs = syncs_of(transact, executor=executor, hub=hub, looks=looks)
        held = asyncio.create_task(syncs.sync(call(1, wait_seconds=30)))
        while not transact.batches:
            await turns()
        hub.wake({node_topic(UUID(int=1))})
        while not looks.batches:
            await turns()
        await turns()
        assert not held.done(), "a hint without news holds the call on"
        looks.orders = [ORDER]
        hub.wake({node_topic(UUID(int=1))})
        return await held

    assert asyncio.run(scene()).assignments == [ORDER]
    assert transact.batches == [[(1, 1)]]
    assert looks.batches == [[(1, 1)], [(1, 1)]]


def test_a_newer_call_ends_the_older_hold(executor: ThreadPoolExecutor) -> None:
    transact = Transactions()

    async def scene() -> SyncReply:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        syncs = syncs_of(transact, executor=executor, hub=hub)
        older = asyncio.create_task(syncs.sync(call(1, sequence=1, wait_seconds=30)))
        while not transact.batches:
            await turns()
        await syncs.sync(call(1, sequence=2))
        return await older

    assert asyncio.run(scene()).sequence == 1
    assert transact.batches == [[(1, 1)], [(1, 2)]]


def test_a_call_that_was_overtaken_on_its_way_is_answered_and_not_held(executor: ThreadPoolExecutor) -> None:
    async def scene() -> tuple[int, bool]:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        syncs = syncs_of(Transactions(), executor=executor, hub=hub)
        newer = asyncio.create_task(syncs.sync(call(1, sequence=2, wait_seconds=30)))
        await turns()
        late = await syncs.sync(call(1, sequence=1, wait_seconds=30))
        is_held = not newer.done()
        newer.cancel()
        return late.sequence, is_held

    assert asyncio.run(scene()) == (1, True)


def test_every_held_call_is_answered_when_the_controller_stops(executor: ThreadPoolExecutor) -> None:
    async def scene() -> list[SyncReply]:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        syncs = syncs_of(Transactions(), executor=executor, hub=hub)
        held = [asyncio.create_task(syncs.sync(call(n, wait_seconds=60))) for n in range(1, 51)]
        while len(syncs._places) < 50:
            await turns()
        syncs.close()
        hub.wake_all()
        return await asyncio.gather(*held)

    assert len(asyncio.run(scene())) == 50
