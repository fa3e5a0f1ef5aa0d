"""Loops: woken by hints, never ended by an error, stopped in time."""

import threading
from collections.abc import Callable

from fleetward.controller.hints import Hub, Signal
from fleetward.controller.loops import Loop, Loops
from fleetward.domain.errors import DatabaseUnavailable


class Line:
    """The way to other controllers, with nobody at the other end."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.told = threading.Event()
        self.is_closed = threading.Event()

    def send(self, topics: list[str]) -> None:
        self.sent.append(topics)
        self.told.set()

    def listen(self, *, heard: Callable[[list[str]], None], joined: Callable[[], None]) -> None:
        joined()
        heard(["assign"])
        self.is_closed.wait(10)


def running(loop: Loop, hub: Hub, line: Line) -> Loops:
    loops = Loops([loop], hub=hub, channel=line)
    loops.start()
    return loops


def stop(loops: Loops, line: Line) -> None:
    line.is_closed.set()
    loops.stop(timeout=10)


def test_a_loop_runs_again_at_a_hint_and_at_once_while_there_is_more() -> None:
    rounds: list[int] = []
    reached = {count: threading.Event() for count in (3, 4)}
    signal = Signal()

    def run() -> bool:
        rounds.append(len(rounds))
        if len(rounds) in reached:
            reached[len(rounds)].set()
        return len(rounds) < 3

    line = Line()
    loops = running(Loop("test", run, signal, poll_seconds=600), Hub(), line)
    assert reached[3].wait(10), "a round that found more is followed by another"
    signal.set()
    assert reached[4].wait(10), "a hint is followed by a round"
    stop(loops, line)


def test_an_error_of_one_round_does_not_end_the_loop() -> None:
    errors: list[Exception] = [DatabaseUnavailable("gone"), ValueError("a bug")]
    went_on = threading.Event()

    def run() -> bool:
        if errors:
            raise errors.pop()
        went_on.set()
        return False

    line = Line()
    loops = running(Loop("test", run, Signal(), poll_seconds=600), Hub(), line)
    assert went_on.wait(10)
    stop(loops, line)


def test_hints_go_to_the_other_controllers_and_theirs_arrive_here() -> None:
    hub, line = Hub(), Line()
    loops = running(Loop("test", lambda: False, Signal(), poll_seconds=600), hub, line)
    assert hub.signal("assign").wait(10), "what others say wakes the loop here"
    hub.wake({"job:1"})
    assert line.told.wait(10)
    assert line.sent == [["job:1"]]
    stop(loops, line)
