"""Hints: nobody who waits misses one, nobody who does not wait keeps one."""

import asyncio
import threading

from fleetward.controller.hints import ASSIGN, OUTBOX_MAX, Hub


def test_a_hint_before_the_wait_is_remembered_and_many_are_one() -> None:
    async def scene() -> list[bool]:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        watch = hub.watch("node:a")
        for _ in range(3):
            hub.wake({"node:a"})
        await asyncio.sleep(0)
        return [await watch.wait(5), await watch.wait(0)]

    assert asyncio.run(scene()) == [True, False]


def test_a_hint_from_another_thread_wakes_who_waits_for_its_topic_and_no_other() -> None:
    async def scene() -> tuple[bool, bool]:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        wanted, other = hub.watch("job:a"), hub.watch("job:b")
        threading.Thread(target=hub.wake, args=({"job:a"},)).start()
        return await wanted.wait(5), await other.wait(0)

    assert asyncio.run(scene()) == (True, False)


def test_everybody_can_be_woken_and_a_closed_watch_leaves_nothing_behind() -> None:
    async def scene() -> tuple[bool, bool, int]:
        hub = Hub()
        hub.attach(asyncio.get_running_loop())
        first, second = hub.watch("job:a", "job:b"), hub.watch("job:b")
        hub.wake_all()
        woke = await first.wait(5), await second.wait(5)
        first.close()
        second.close()
        return *woke, hub.count("job:a") + hub.count("job:b")

    assert asyncio.run(scene()) == (True, True, 0)


def test_a_loops_signal_is_set_by_its_topic_and_cleared_by_its_wait() -> None:
    hub = Hub()
    hub.wake({ASSIGN, "node:a"})
    assert [hub.signal(ASSIGN).wait(5), hub.signal(ASSIGN).wait(0)] == [True, False]


def test_other_controllers_hear_of_each_topic_once_and_what_they_say_is_not_sent_back() -> None:
    hub = Hub()
    hub.wake({"b", "a"})
    hub.wake({"a"})
    hub.arrive({"c"})
    assert hub.take_outbox() == ["a", "b"]
    assert hub.take_outbox() == []


def test_hints_that_nobody_sends_do_not_pile_up() -> None:
    hub = Hub()
    for number in range(2 * OUTBOX_MAX):
        hub.wake({f"job:{number}"})
    assert len(hub.take_outbox()) == OUTBOX_MAX
