"""Processes are recognised by more than their number, hear of each other's end, and are ended in the end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import pytest

from fleetward.cli.processes import (
    STATE_FILE,
    Child,
    Exited,
    Mark,
    News,
    Running,
    end,
    forget_running,
    lives,
    mark_of,
    read_running,
    write_running,
)

SHORT = timedelta(seconds=5)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python -m` finds the programs that a test writes."""
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_a_process_lives_until_it_has_ended_also_before_its_parent_has_noticed(
    sleeper: subprocess.Popen[bytes],
) -> None:
    mark = mark_of(sleeper.pid)
    assert lives(mark)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not lives(mark), "a zombie has ended"
    sleeper.wait()
    assert not lives(mark)


def test_another_process_with_the_same_number_is_not_taken_for_it_and_not_ended(
    sleeper: subprocess.Popen[bytes],
) -> None:
    earlier = Mark(pid=sleeper.pid, started="1")
    assert not lives(earlier)
    assert end(earlier, limit=SHORT)
    assert sleeper.poll() is None


def test_that_very_process_is_asked_to_end(sleeper: subprocess.Popen[bytes]) -> None:
    assert end(mark_of(sleeper.pid), limit=SHORT)
    assert sleeper.wait() == -signal.SIGTERM


def test_no_process_is_ended_already() -> None:
    assert end(None)
    assert not lives(None)


def test_a_childs_end_is_told_with_its_own_last_words(tmp_path: Path, programs: dict[str, str]) -> None:
    (tmp_path / "dying.py").write_text("import sys; print('fleetward: no room', file=sys.stderr); sys.exit(4)")
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")
    news: SimpleQueue[News] = SimpleQueue()
    child = Child("controller", ["dying"], log=log, environment=programs)
    child.tell_end(news)
    assert news.get(timeout=30) == Exited("controller", 4)
    assert child.last_words() == "fleetward: no room"


def test_a_child_that_will_not_end_is_killed(tmp_path: Path, programs: dict[str, str]) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.mkdir('ready'); signal.pause()"
    )
    code = f"import os; os.chdir({str(tmp_path)!r}); import runpy; runpy.run_module('stubborn')"
    (tmp_path / "start.py").write_text(code)
    child = Child("agent", ["start"], log=tmp_path / "log", environment=programs)
    wait_for(tmp_path / "ready", child)
    child.stop(limit=timedelta(milliseconds=100))
    assert child.process.returncode == -signal.SIGKILL


def test_what_runs_is_kept_in_the_home(tmp_path: Path) -> None:
    assert read_running(tmp_path) is None
    running = Running(up=Mark(pid=1, started="10"), controller=Mark(pid=2, started="20"))
    write_running(tmp_path, running)
    assert read_running(tmp_path) == running
    forget_running(tmp_path)
    forget_running(tmp_path)
    assert read_running(tmp_path) is None


def test_a_damaged_note_is_no_note(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"up": ')
    assert read_running(tmp_path) is None


def wait_for(path: Path, child: Child) -> None:
    """Wait until a child has made a folder, or has ended without."""
    while not path.exists():
        with pytest.raises(subprocess.TimeoutExpired):
            child.process.wait(0.02)
