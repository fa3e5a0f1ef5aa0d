"""Attempts with real processes: what a supervisor promises, tried on the machine at hand."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypedDict, Unpack
from uuid import UUID

import pytest

from fleetward.agent import process_tree, sandbox, supervised
from fleetward.agent.collect import collect, write_receipt
from fleetward.agent.supervised import Changes, Observation, Order, Supervised, boottime
from fleetward.domain.artifacts import RECEIPT_PATH
from fleetward.domain.errors import SandboxUnavailable
from fleetward.domain.jobs import ArtifactRule
from fleetward.verify.digest import Digest
from fleetward.verify.policy import parse_rules
from tests.needs import needs

PATIENCE = 30.0


@pytest.fixture(scope="module")
def features() -> sandbox.Features:
    return sandbox.probe()


class Wanted(TypedDict, total=False):
    """What a test may ask for beyond the usual."""

    env: dict[str, str]
    working_dir: str
    deadline: float | None
    margin_seconds: float
    run_seconds: float | None
    log_bytes_max: int


@dataclass
class Node:
    """One attempts folder with its changes, as an agent has."""

    attempts: Path
    features: sandbox.Features
    changes: Changes
    started: list[Supervised] = field(default_factory=list[Supervised])

    def start(
        self,
        *command: str,
        asked: sandbox.Asked = "none",
        network: sandbox.Network = "on",
        hidden: tuple[Path, ...] = (),
        **asked_for: Unpack[Wanted],
    ) -> Supervised:
        # Supervisors find an attempt's processes by its id, on the whole machine: no two tests may share one.
        assignment_id = UUID(bytes=os.urandom(16))
        folder = supervised.prepare(self.attempts, assignment_id)
        plan = sandbox.plan(asked, network=network, features=self.features, folder=folder, hidden=hidden)
        order = Order(
            assignment_id=assignment_id,
            fence=7,
            command=command,
            env={},
            plan=plan,
            deadline=None,
            run_seconds=None,
            grace_seconds=1.0,
        )
        self.started.append(supervised.launch(folder, replace(order, **asked_for)))
        return self.started[-1]

    def until(self, attempt: Supervised, is_reached: Callable[[Observation], bool]) -> Observation:
        end = boottime() + PATIENCE
        while not is_reached(observation := attempt.observe()):
            left = end - boottime()
            assert left > 0, f"nothing came of it: {observation}"
            self.changes.wait(timedelta(seconds=left))
        return observation

    def until_gone(self, attempt: Supervised) -> Observation:
        return self.until(attempt, lambda observation: observation.is_released)

    def until_log_has(self, attempt: Supervised, text: bytes) -> None:
        self.until(attempt, lambda _: text in log_of(attempt))


@pytest.fixture
def node(features: sandbox.Features) -> Iterator[Node]:
    # Not pytest's own folder: that is closed to the users of attempts.
    with tempfile.TemporaryDirectory(prefix="fleetward-test-") as home:
        Path(home).chmod(0o711)
        attempts = Path(home, "attempts")
        attempts.mkdir(mode=0o711)
        attempts.chmod(0o711)
        with Changes(attempts) as changes:
            made = Node(attempts, features, changes)
            yield made
            for attempt in made.started:
                if attempt.folder.path.exists():
                    attempt.stop(0.0)
                    made.until_gone(attempt)


def log_of(attempt: Supervised) -> bytes:
    return attempt.read_log(offset=0, limit_bytes=1 << 30)


def marks_of(attempt: Supervised) -> list[int]:
    mark = f"FLEETWARD_ASSIGNMENT_ID={attempt.assignment_id}"
    return [pid for pid, _ in process_tree.marked(mark)]


def until_left(pid: int) -> None:
    """Wait until the kernel says that a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], PATIENCE)[0], f"process {pid} did not end"
    os.close(fd)


@pytest.fixture(params=["none", "auto"])
def asked(request: pytest.FixtureRequest) -> sandbox.Asked:
    return request.param


def test_a_command_runs_to_its_end_and_leaves_its_exit_code_log_and_files(node: Node, asked: sandbox.Asked) -> None:
    attempt = node.start("sh", "-c", "echo out; echo err >&2; echo hi > out.txt; exit 3", asked=asked)
    seen = node.until_gone(attempt)
    assert ("exited", 3, "exit code 3") == (seen.ended_by, seen.exit_code, seen.message)
    assert b"out\nerr\n" == log_of(attempt)
    assert "hi\n" == (attempt.folder.work / "out.txt").read_text()
    assert seen.started_at is not None
    assert seen.finished_at is not None
    assert seen.started_at <= seen.finished_at


def test_a_command_ended_by_a_signal_says_so(node: Node, asked: sandbox.Asked) -> None:
    seen = node.until_gone(node.start("sh", "-c", "kill -USR1 $$", asked=asked))
    assert ("exited", 128 + signal.SIGUSR1) == (seen.ended_by, seen.exit_code)


def test_a_command_that_does_not_exist_fails_to_start_with_its_name_and_the_reason(
    node: Node, asked: sandbox.Asked
) -> None:
    seen = node.until_gone(node.start("no-such-command", "x", asked=asked))
    assert ("start_failed", None) == (seen.ended_by, seen.exit_code)
    assert "the command 'no-such-command' could not be started: No such file or directory" == seen.message


def test_a_working_folder_that_is_missing_fails_to_start(node: Node, asked: sandbox.Asked) -> None:
    seen = node.until_gone(node.start("true", asked=asked, working_dir="not/there"))
    assert "start_failed" == seen.ended_by
    assert "No such file or directory" in seen.message


def test_an_exit_code_that_looks_like_a_missing_command_is_still_the_commands_own(
    node: Node, asked: sandbox.Asked
) -> None:
    seen = node.until_gone(node.start("sh", "-c", "exit 127", asked=asked))
    assert ("exited", 127) == (seen.ended_by, seen.exit_code)


def test_the_environment_is_the_orders_and_nothing_of_the_agents(
    node: Node, asked: sandbox.Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_SECRET", "s3cret")
    attempt = node.start("env", asked=asked, env={"MINE": "a b", "HOME": "/elsewhere"})
    node.until_gone(attempt)
    lines = dict(line.split("=", 1) for line in log_of(attempt).decode().splitlines())
    assert "a b" == lines["MINE"]
    assert str(attempt.folder.work) == lines["HOME"]
    assert "AGENT_SECRET" not in lines
    assert {"HOME", "PATH", "LANG", "PWD", "MINE", "FLEETWARD_ASSIGNMENT_ID"} >= lines.keys()


def test_output_that_is_no_text_arrives_byte_for_byte(node: Node) -> None:
    attempt = node.start("printf", r"\377\376\000\r\n\303")
    node.until_gone(attempt)
    assert b"\xff\xfe\x00\r\n\xc3" == log_of(attempt)


def test_a_stop_gives_grace_and_ends_what_ignores_it_double_forked_children_too(
    node: Node, asked: sandbox.Asked
) -> None:
    stubborn = "trap '' TERM; setsid sh -c 'trap \"\" TERM; (trap \"\" TERM; sleep 1000) & echo ready; wait' & wait"
    attempt = node.start("sh", "-c", stubborn, asked=asked)
    node.until_log_has(attempt, b"ready")
    assert marks_of(attempt)
    begun = boottime()
    assert attempt.stop(0.5)
    seen = node.until_gone(attempt)
    assert "stopped" == seen.ended_by
    assert 0.5 <= boottime() - begun < 5
    assert [] == marks_of(attempt)


def test_a_command_may_use_its_grace_to_end_well(node: Node, asked: sandbox.Asked) -> None:
    attempt = node.start("sh", "-c", "trap 'echo last words; exit 5' TERM; echo ready; sleep 1000 & wait", asked=asked)
    node.until_log_has(attempt, b"ready")
    attempt.stop(20)
    seen = node.until_gone(attempt)
    assert ("stopped", 5) == (seen.ended_by, seen.exit_code)
    assert log_of(attempt).endswith(b"last words\n")


def test_a_second_stop_shortens_the_grace_and_cannot_lengthen_it(node: Node) -> None:
    attempt = node.start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1000; done")
    node.until_log_has(attempt, b"ready")
    begun = boottime()
    attempt.stop(1000)
    attempt.stop(0.2)
    attempt.stop(1000)
    assert "stopped" == node.until_gone(attempt).ended_by
    assert boottime() - begun < 10


def test_what_outlives_the_main_command_is_ended_and_counted_but_the_exit_code_stands(node: Node) -> None:
    attempt = node.start("sh", "-c", "(setsid sh -c 'trap \"\" TERM; sleep 1000' &); exit 4")
    seen = node.until_gone(attempt)
    assert ("exited", 4) == (seen.ended_by, seen.exit_code)
    assert seen.lingering >= 1
    assert [] == marks_of(attempt)


def test_the_tree_is_gone_before_a_lease_that_is_not_renewed(node: Node, asked: sandbox.Asked) -> None:
    deadline = boottime() + 2.0
    attempt = node.start(
        "sh", "-c", "trap '' TERM; while :; do sleep 1000; done", asked=asked, deadline=deadline, margin_seconds=1.5
    )
    seen = node.until_gone(attempt)
    assert "deadline" == seen.ended_by
    assert "stopped because the lease could not be renewed in time" == seen.message
    assert boottime() <= deadline
    assert [] == marks_of(attempt)


def test_a_renewed_lease_lets_the_command_go_on(node: Node) -> None:
    first = boottime() + 1.0
    attempt = node.start("sh", "-c", "sleep 1.2; echo went on; exit 0", deadline=first, margin_seconds=0.5)
    assert attempt.renew(first + 100)
    # An older renewal that comes late must not take the newer one back.
    assert attempt.renew(first)
    seen = node.until_gone(attempt)
    assert ("exited", 0) == (seen.ended_by, seen.exit_code)


def test_a_command_that_takes_longer_than_its_time_is_ended(node: Node) -> None:
    seen = node.until_gone(node.start("sleep", "1000", run_seconds=0.3))
    assert ("timeout", "ran out of its time of 0.3 s") == (seen.ended_by, seen.message)


def test_a_log_beyond_its_limit_is_cut_with_a_marker_and_its_last_lines_arrive(node: Node) -> None:
    limit = 4 * 1024 * 1024
    script = (
        "import sys\n"
        "for n in range(2_000_000): sys.stdout.write(f'line {n:07} of a long log {n:065}\\n')\n"
        "print('the end')"
    )
    attempt = node.start("/usr/bin/python3", "-c", script, log_bytes_max=limit)
    seen = node.until_gone(attempt)
    log = log_of(attempt)
    assert 0 == seen.exit_code
    assert limit // 2 < seen.log_bytes == len(log) <= limit
    assert log.startswith(b"line 0000000 of a long log")
    assert log.endswith(b"line 1999999 of a long log " + b"1999999".zfill(65) + b"\nthe end\n")
    before, marker, after = log.partition(b"bytes were cut here]\n")
    assert marker
    cut, total = (int(word) for word in before.rpartition(b"[fleetward: ")[2].split() if word.isdigit())
    assert total == 2_000_000 * 93 + len("the end\n")
    assert after.startswith(b"line ")
    notices = len(before.partition(b"\n[fleetward:")[1] + before.partition(b"\n[fleetward:")[2])
    assert total == cut + len(before) - notices + len(after)


def test_a_supervisor_outlives_a_killed_launcher_and_its_group_and_is_found_again(
    node: Node, asked: sandbox.Asked
) -> None:
    folder = supervised.prepare(node.attempts, UUID(int=77))
    launcher = f"""
import os, signal
from pathlib import Path
from uuid import UUID
from fleetward.agent import sandbox, supervised
folder = supervised.AttemptFolder(Path({str(folder.path)!r}))
plan = sandbox.plan({asked!r}, network="on", features=sandbox.probe(), folder=folder, hidden=[])
supervised.launch(folder, supervised.Order(assignment_id=UUID(int=77), fence=9, plan=plan, deadline=None, env={{}},
    command=("sh", "-c", "mkfifo -m 666 go; echo ready; read word < go; echo went on"), run_seconds=None))
os.killpg(0, signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", launcher], start_new_session=True, env=environment, check=False)
    assert -signal.SIGKILL == done.returncode
    (found,) = supervised.find(node.attempts)
    node.started.append(found)
    assert (UUID(int=77), 9) == (found.assignment_id, found.fence)
    node.until_log_has(found, b"ready")
    assert "running" == found.observe().phase
    (found.folder.work / "go").write_text("go\n")
    seen = node.until_gone(found)
    assert ("exited", 0) == (seen.ended_by, seen.exit_code)
    assert log_of(found).endswith(b"went on\n")


def test_an_attempt_is_started_once_however_often_it_is_launched(node: Node) -> None:
    attempt = node.start("sh", "-c", "echo started >> times; sleep 1000")
    again = supervised.launch(
        attempt.folder,
        Order(
            assignment_id=attempt.assignment_id,
            fence=8,
            command=("sh", "-c", "echo other >> times"),
            env={},
            plan=sandbox.plan("none", network="on", features=node.features, folder=attempt.folder, hidden=[]),
            deadline=None,
            run_seconds=None,
        ),
    )
    assert 7 == again.fence
    again.stop(0)
    node.until_gone(again)
    assert "started\n" == (attempt.folder.work / "times").read_text()


def test_what_a_killed_supervisor_leaves_behind_is_swept_and_reported_lost(node: Node, asked: sandbox.Asked) -> None:
    attempt = node.start("sh", "-c", "(setsid sleep 1000 &); echo ready; sleep 1000", asked=asked)
    node.until_log_has(attempt, b"ready")
    supervisor_pid = attempt._read_status().supervisor_pid
    os.kill(supervisor_pid, signal.SIGKILL)
    until_left(supervisor_pid)
    assert "orphaned" == attempt.observe().phase
    assert not attempt.stop(1)
    attempt.sweep()
    seen = node.until_gone(attempt)
    assert "lost" == seen.ended_by
    assert [] == marks_of(attempt)


def test_after_a_reboot_an_attempt_that_ran_is_lost_and_released(node: Node) -> None:
    attempt = node.start("true")
    node.until_gone(attempt)
    until_left(attempt._read_status().supervisor_pid)
    status = attempt.folder.path / "status.json"
    text = status.read_text().replace('"gone"', '"running"').replace('"exited"', "null")
    status.write_text(text.replace(attempt._read_status().boot_id, "another boot"))
    seen = attempt.observe()
    assert ("gone", "lost", True) == (seen.phase, seen.ended_by, seen.is_released)


def test_a_folder_without_an_order_is_removed_because_nothing_of_it_ran(node: Node) -> None:
    folder = supervised.prepare(node.attempts, UUID(int=5))
    (folder.work / "input").write_text("x")
    assert [] == supervised.find(node.attempts)
    assert not folder.path.exists()


def test_forgetting_removes_also_what_the_command_closed_and_follows_no_link(node: Node) -> None:
    outside = node.attempts.parent / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").touch()
    script = f"mkdir -p a/b; touch a/b/c; ln -s {outside} a/link; chmod 000 a/b; chmod 000 a"
    attempt = node.start("sh", "-c", script)
    assert 0 == node.until_gone(attempt).exit_code
    attempt.forget()
    assert not attempt.folder.path.exists()
    assert (outside / "kept").exists()


def test_a_home_with_a_very_long_path_works_like_any_other(node: Node) -> None:
    deep = node.attempts / ("x" * 120) / ("y" * 120)
    deep.mkdir(parents=True, mode=0o711)
    folder = supervised.prepare(deep, UUID(int=6))
    plan = sandbox.plan("none", network="on", features=node.features, folder=folder, hidden=[])
    with Changes(deep) as changes:
        order = Order(
            assignment_id=UUID(int=6),
            fence=1,
            command=("sh", "-c", "echo ready; sleep 1000"),
            env={},
            plan=plan,
            deadline=None,
            run_seconds=None,
        )
        attempt = supervised.launch(folder, order)
        there = Node(deep, node.features, changes)
        assert attempt.stop(1)
        assert "stopped" == there.until_gone(attempt).ended_by


def test_the_receipt_says_what_ran_how_it_ended_and_what_was_in_force(node: Node, asked: sandbox.Asked) -> None:
    script = "echo hi; echo result > out.txt; ln -s /etc/passwd link.txt; exit 0"
    attempt = node.start("sh", "-c", script, asked=asked, env={"TOKEN": "s3cret"})
    seen = node.until_gone(attempt)
    collected = collect(attempt.folder.work, parse_rules([ArtifactRule(path="*.txt")]))
    made = write_receipt(attempt, seen, collected, node={"name": "node-a"})
    content = attempt.folder.receipt.read_bytes()
    assert (RECEIPT_PATH, len(content), Digest.of(content)) == (made.path, made.size_bytes, made.digest)
    receipt = json.loads(content)
    assert ["sh", "-c", script] == receipt["command"]
    assert (7, 0, "exited") == (receipt["fence"], receipt["exit_code"], receipt["ended_by"])
    assert {"sha256": Digest.of(b"hi\n").hex, "size_bytes": 3, "written_bytes": 3} == receipt["log"]
    assert {"out.txt": Digest.of(b"result\n").hex} == receipt["artifacts"]
    assert [{"path": "link.txt", "why": "is a link; only plain files are handed in"}] == receipt["skipped"]
    assert "TOKEN" in receipt["environment"]
    assert b"s3cret" not in content
    assert receipt["in_force"]["sandbox"] == attempt.order.in_force["sandbox"]
    assert str(seen.user if seen.user is not None else "the agent's") == receipt["in_force"]["user"]
    assert receipt["started_at"] <= receipt["finished_at"]


# The sandbox


@pytest.fixture
def boxed(node: Node) -> Node:
    if node.features.bwrap is None:
        needs("bwrap", node.features.why_not)
    return node


def test_the_sandbox_hides_the_agents_home_other_attempts_and_the_socket(boxed: Node) -> None:
    home = boxed.attempts.parent
    (home / "node_key").write_text("secret")
    socket_folder = Path(tempfile.mkdtemp(prefix="fleetward-socket-", dir="/var/lib" if os.geteuid() == 0 else None))
    (socket_folder / "s.PGSQL.5432").touch()
    other = boxed.start("sh", "-c", "echo mine > private; echo ready; sleep 1000", asked="require")
    boxed.until_log_has(other, b"ready")
    looks = (f"cat {home}/node_key", f"ls -A {socket_folder} {other.folder.work}", f"ls {boxed.attempts}", "echo end")
    script = "; ".join(looks)
    attempt = boxed.start("sh", "-c", script, asked="require", hidden=(home, socket_folder))
    boxed.until_gone(attempt)
    (socket_folder / "s.PGSQL.5432").unlink()
    socket_folder.rmdir()
    log = log_of(attempt).decode()
    assert "secret" not in log
    assert "PGSQL" not in log
    assert "private" not in log
    assert str(other.assignment_id) not in log.replace(str(other.folder.work), "")
    assert log.endswith("end\n")


def test_in_the_sandbox_nothing_but_the_working_folder_and_tmp_can_be_written(boxed: Node) -> None:
    script = "for d in / /etc /usr /var; do touch $d/x 2>&- && echo in $d; done; touch /tmp/x $HOME/x && echo fine"
    attempt = boxed.start("sh", "-c", script, asked="require", hidden=(boxed.attempts.parent,))
    boxed.until_gone(attempt)
    assert "fine\n" == log_of(attempt).decode()
    assert not Path("/tmp/x").exists()


def test_in_the_sandbox_a_command_has_no_capabilities_and_cannot_gain_any(boxed: Node) -> None:
    attempt = boxed.start("grep", "-E", "^(Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs)", "/proc/self/status", asked="require")
    boxed.until_gone(attempt)
    words = dict(line.split(":\t") for line in log_of(attempt).decode().splitlines())
    assert "1" == words.pop("NoNewPrivs")
    if os.geteuid() != 0:
        words.pop("CapBnd")
    assert {0} == {int(value, 16) for value in words.values()}


def test_a_command_without_network_sees_the_loopback_only(boxed: Node) -> None:
    attempt = boxed.start("cat", "/proc/net/dev", asked="require", network="none")
    boxed.until_gone(attempt)
    names = [line.split(":")[0].strip() for line in log_of(attempt).decode().splitlines()[2:]]
    assert ["lo"] == names


def test_a_required_sandbox_that_is_not_to_be_had_is_refused_with_the_reason(node: Node) -> None:
    lacking = sandbox.Features(None, None, is_root=False, can_cut_network=False, why_not="bwrap is not installed")
    folder = supervised.AttemptFolder(node.attempts / "x")
    with pytest.raises(SandboxUnavailable, match="requires a sandbox and this node has none: bwrap is not installed"):
        sandbox.plan("require", network="on", features=lacking, folder=folder, hidden=[])
    with pytest.raises(SandboxUnavailable, match=r"network: none.*bwrap is not installed"):
        sandbox.plan("auto", network="none", features=lacking, folder=folder, hidden=[])
    plan = sandbox.plan("auto", network="on", features=lacking, folder=folder, hidden=[])
    assert ("none: bwrap is not installed", ()) == (plan.in_force["sandbox"], plan.prefix)


def test_two_attempts_under_root_never_share_a_user(node: Node) -> None:
    if os.geteuid() != 0:
        needs("root", "only root can run an attempt as a user of its own")
    attempts = [node.start("sh", "-c", "id -u; sleep 1000") for _ in range(3)]
    for attempt in attempts:
        node.until_log_has(attempt, b"\n")
    users = {int(log_of(attempt)) for attempt in attempts}
    assert users == {attempt.observe().user for attempt in attempts}
    assert 3 == len(users)
    assert users <= set(range(64_000, 65_000))


def test_a_supervisor_whose_folder_was_removed_leaves_when_its_command_has_ended(node: Node) -> None:
    attempt = node.start("sleep", "1")
    node.until(attempt, lambda observation: observation.phase != "starting")
    supervisor_pid = attempt._read_status().supervisor_pid
    shutil.rmtree(attempt.folder.path)
    until_left(supervisor_pid)
