"""Real agents under a real controller: jobs end as they should, whoever is killed on the way."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Generator, Iterator
from hashlib import sha256

import pytest
from real_fleet import Agent, Fleet, a_fleet

from fleetward.agent import sandbox
from fleetward.domain.jobs import JobInput, Timeouts
from fleetward.verify.archive import Member, pack
from fleetward.wire.messages import CancelRequest
from tests.needs import needs

# The command writes what the test tells it, when the test tells it.
WAITS = "mkfifo go; echo started; cat go > out.txt"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with a_fleet() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def ada(fleet: Fleet) -> Agent:
    """A node that nobody kills."""
    return fleet.node("ada")


def here(agent: Agent) -> dict[str, str]:
    return {"who": agent.name}


def test_a_job_completes_with_its_verified_file(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit("sh", "-c", "echo said; echo hi > out.txt", artifacts=("out.txt",), labels=here(ada))
    job = fleet.end(job_id)
    assert (job.status, job.error) == ("completed", None)
    assert fleet.file(job_id, "out.txt") == b"hi\n"
    assert fleet.log(job_id) == b"said\n"
    assert sorted(file.path for file in fleet.client.list_artifacts(job_id).items) == [
        ".fleetward/receipt.json",
        "out.txt",
    ]


def test_a_killed_agent_takes_up_what_runs(fleet: Fleet) -> None:
    agent = fleet.node("bob")
    job_id = fleet.submit("sh", "-c", WAITS, artifacts=("out.txt",), labels=here(agent))
    attempt = fleet.hear_log(job_id, b"started\n")
    agent.kill()
    agent.start()
    agent.hear("connected")
    (agent.attempt(attempt.id) / "work" / "go").write_text("adopted\n")
    assert fleet.end(job_id).status == "completed"
    assert [(each.id, each.attempt, each.state) for each in fleet.attempts(job_id)] == [(attempt.id, 1, "succeeded")]
    assert fleet.file(job_id, "out.txt") == b"adopted\n"
    assert agent.leave() == 0


def test_what_ended_while_no_agent_ran_is_handed_in_by_the_next(fleet: Fleet) -> None:
    agent = fleet.node("cyd")
    job_id = fleet.submit("sh", "-c", WAITS, artifacts=("out.txt",), labels=here(agent))
    attempt = fleet.hear_log(job_id, b"started\n")
    agent.kill()
    (agent.attempt(attempt.id) / "work" / "go").write_text("alone\n")
    agent.start()
    assert fleet.end(job_id).status == "completed"
    assert [(each.id, each.attempt) for each in fleet.attempts(job_id)] == [(attempt.id, 1)]
    assert fleet.file(job_id, "out.txt") == b"alone\n"
    fleet.released(job_id, attempt.id)
    assert agent.leave() == 0
    assert not agent.attempt(attempt.id).exists()


def test_the_work_of_a_node_that_dies_whole_is_done_by_another(fleet: Fleet) -> None:
    both = {"who": "either"}
    first = fleet.node("dan", labels=both)
    job_id = fleet.submit("sh", "-c", WAITS, artifacts=("out.txt",), labels=both)
    lost = fleet.hear_log(job_id, b"started\n")
    assert len(first.kill_all()) >= 3, "an agent, a supervisor and a command"
    second = fleet.node("eve", labels=both)
    event = fleet.wait_for(job_id, lambda event: event.kind == "assignment.assigned" and event.node == "eve")
    assert event.assignment_id is not None
    fleet.hear_log(job_id, b"started\n", assignment_id=event.assignment_id)
    (second.attempt(event.assignment_id) / "work" / "go").write_text("eve\n")
    assert fleet.end(job_id).status == "completed"
    assert [(each.id, each.node, each.state, each.outcome) for each in fleet.attempts(job_id)] == [
        (lost.id, "dan", "failed", "lost"),
        (event.assignment_id, "eve", "succeeded", "completed"),
    ]
    assert fleet.file(job_id, "out.txt") == b"eve\n"


def test_a_cancelled_job_is_stopped_and_let_go(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit("sh", "-c", "echo started; exec sleep 600", labels=here(ada))
    attempt = fleet.hear_log(job_id, b"started\n")
    fleet.client.cancel_job(job_id, CancelRequest(reason="enough"))
    assert fleet.end(job_id).status == "cancelled"
    fleet.released(job_id, attempt.id)
    [ended] = fleet.attempts(job_id)
    assert (ended.state, ended.outcome) == ("cancelled", "cancelled")


def test_an_exit_code_is_a_failure_that_keeps_its_log(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit("sh", "-c", "echo before; exit 3", labels=here(ada))
    assert fleet.end(job_id).status == "failed"
    [ended] = fleet.attempts(job_id)
    assert (ended.state, ended.outcome, ended.result) == ("failed", "failed", {"exit_code": 3})
    assert "exit code 3" in (ended.error or "")
    assert fleet.log(job_id) == b"before\n"


def test_a_command_that_does_not_exist_is_named(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit("no-such-program", labels=here(ada))
    job = fleet.end(job_id)
    assert job.status == "failed"
    assert "no-such-program" in (fleet.attempts(job_id)[0].error or "")


def test_a_promised_file_that_is_missing_is_named(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit("true", artifacts=("promised.bin",), labels=here(ada))
    job = fleet.end(job_id)
    assert job.status == "failed"
    assert "promised.bin" in (fleet.attempts(job_id)[0].error or "")


def test_a_large_file_arrives_whole(fleet: Fleet, ada: Agent) -> None:
    script = "head -c 20000000 /dev/urandom > big; sha256sum big | cut -c1-64"
    job_id = fleet.submit("sh", "-c", script, artifacts=("big",), labels=here(ada))
    assert fleet.end(job_id).status == "completed"
    content = fleet.file(job_id, "big")
    assert len(content) == 20_000_000
    assert fleet.log(job_id).decode().strip() == sha256(content).hexdigest()


def test_many_small_files_arrive_too(fleet: Fleet, ada: Agent) -> None:
    """More than one report may carry, so some travel on their own."""
    script = "for i in $(seq 40); do head -c 60000 /dev/zero > f$i; echo $i >> f$i; done; : > f0"
    job_id = fleet.submit("sh", "-c", script, artifacts=("f*",), labels=here(ada))
    assert fleet.end(job_id).status == "completed"
    files = {file.path: file.size_bytes for file in fleet.client.list_artifacts(job_id).items}
    del files[".fleetward/receipt.json"]
    assert files == {"f0": 0} | {f"f{number}": 60_001 + len(str(number)) for number in range(1, 41)}
    assert fleet.file(job_id, "f17") == bytes(60_000) + b"17\n"


def test_an_input_is_unpacked_before_the_command_starts(fleet: Fleet, ada: Agent) -> None:
    target = io.BytesIO()
    script = b"#!/bin/sh\nwc -c < data/numbers > count\n"
    pack(
        [
            Member("data/numbers", 9_000_000, False, lambda: io.BytesIO(b"7" * 9_000_000)),
            Member("count.sh", len(script), True, lambda: io.BytesIO(script)),
        ],
        target,
    )
    job_id = fleet.submit("./count.sh", artifacts=("count",), labels=here(ada), inputs=[stored(fleet, target)])
    assert fleet.end(job_id).status == "completed"
    assert fleet.file(job_id, "count").strip() == b"9000000"


def test_an_input_that_leaves_its_folder_fails_the_attempt_and_writes_nothing(fleet: Fleet, ada: Agent) -> None:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    job_id = fleet.submit("true", labels=here(ada), inputs=[stored(fleet, target)])
    assert fleet.end(job_id).status == "failed"
    assert "../escaped" in (fleet.attempts(job_id)[0].error or "")
    assert list(ada.home.rglob("escaped")) == []


def stored(fleet: Fleet, archive: io.BytesIO) -> JobInput:
    content = archive.getvalue()
    digest = sha256(content).hexdigest()
    fleet.client.store_blob(digest, size_bytes=len(content), content=content)
    return JobInput(sha256=digest)


def test_long_output_that_is_no_text_arrives_byte_by_byte(fleet: Fleet, ada: Agent) -> None:
    script = r'printf "\377\376\000\n"; head -c 3000000 /dev/zero | tr "\0" x; printf "\r\n\377end"'
    job_id = fleet.submit("sh", "-c", script, labels=here(ada))
    assert fleet.end(job_id).status == "completed"
    assert fleet.log(job_id) == b"\xff\xfe\x00\n" + b"x" * 3_000_000 + b"\r\n\xffend"


def test_a_job_finds_who_it_is_and_nothing_of_the_agent_in_its_environment(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit("env", labels=here(ada), env={"MINE": "yes"})
    assert fleet.end(job_id).status == "completed"
    found = dict(line.split("=", 1) for line in fleet.log(job_id).decode().splitlines())
    [attempt] = fleet.attempts(job_id)
    assert found.keys() - {"_", "SHLVL", "OLDPWD"} == {
        "FLEETWARD_ASSIGNMENT_ID",
        "FLEETWARD_ATTEMPT",
        "FLEETWARD_JOB_ID",
        "HOME",
        "LANG",
        "MINE",
        "PATH",
        "PWD",
        "TMPDIR",
    }
    assert (found["FLEETWARD_JOB_ID"], found["FLEETWARD_ASSIGNMENT_ID"]) == (str(job_id), str(attempt.id))


def test_an_agent_that_is_asked_to_leave_finishes_first(fleet: Fleet) -> None:
    agent = fleet.node("fay")
    job_id = fleet.submit("sh", "-c", WAITS, artifacts=("out.txt",), labels=here(agent))
    attempt = fleet.hear_log(job_id, b"started\n")
    agent.process.send_signal(signal.SIGTERM)
    agent.hear("finishing 1 attempt")
    (agent.attempt(attempt.id) / "work" / "go").write_text("last\n")
    assert fleet.end(job_id).status == "completed"
    assert agent.process.wait(timeout=30) == 0
    assert not agent.attempt(attempt.id).exists()


def test_an_agent_that_is_interrupted_leaves_at_once_and_its_work_goes_on(fleet: Fleet) -> None:
    agent = fleet.node("gil")
    job_id = fleet.submit("sh", "-c", WAITS, artifacts=("out.txt",), labels=here(agent))
    attempt = fleet.hear_log(job_id, b"started\n")
    assert agent.leave(signal.SIGINT) == 0
    agent.start()
    agent.hear("connected")
    (agent.attempt(attempt.id) / "work" / "go").write_text("on\n")
    assert fleet.end(job_id).status == "completed"
    assert [(each.id, each.attempt) for each in fleet.attempts(job_id)] == [(attempt.id, 1)]


def test_a_command_that_runs_too_long_is_ended(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit(
        "sh", "-c", "echo begun; exec sleep 600", labels=here(ada), timeouts=Timeouts(run_seconds=1, upload_seconds=60)
    )
    assert fleet.end(job_id).status == "failed"
    [ended] = fleet.attempts(job_id)
    assert (ended.state, ended.outcome) == ("failed", "failed")
    assert "1 s" in (ended.error or "")
    assert fleet.log(job_id) == b"begun\n"


def test_no_job_reads_what_is_its_agents_or_its_controllers(fleet: Fleet, ada: Agent) -> None:
    document = sandbox.probe().document()
    if document["sandbox"] == "none" and not document["user_per_attempt"]:
        needs("sandbox", "neither bubblewrap nor users of their own for attempts work here")
    secrets = [fleet.house.home / "token", ada.home / "node_key", ada.home / "journal" / "journal.json"]
    assert all(path.exists() for path in secrets)
    job_id = fleet.submit("cat", *map(str, secrets), labels=here(ada))
    assert fleet.end(job_id).status == "failed"
    assert len(fleet.log(job_id).splitlines()) == len(secrets), "one refusal each, and nothing else"


def test_a_copied_home_is_found_out_and_neither_goes_on(fleet: Fleet) -> None:
    agent = fleet.node("hal")
    agent.hear("connected")
    assert agent.leave() == 0
    copy = Agent(agent.home.with_name("copy"), "copy", agent.environment)
    shutil.copytree(agent.home, copy.home, ignore=shutil.ignore_patterns("attempts"))
    agent.start()
    agent.hear("connected")
    copy.start()
    copy.hear("fleetward: ")
    assert copy.process.wait(timeout=30) == 3
    copy.kill()
    assert agent.process.wait(timeout=30) == 3
    assert fleet.client.show_node("hal").eligible_reason == "cloned"


def test_a_node_whose_disk_is_full_does_not_blame_the_job(fleet: Fleet) -> None:
    agent = fleet.join("ira")
    with little_room(agent):
        agent.start()
        content = os.urandom(30_000_000)
        target = io.BytesIO()
        pack([Member("data", len(content), False, lambda: io.BytesIO(content))], target)
        impatient = Timeouts(start_seconds=1)
        job_id = fleet.submit(
            "true", labels=here(agent), inputs=[stored(fleet, target)], max_losses=1, timeouts=impatient
        )
        assert fleet.end(job_id).status == "failed"
        for attempt in fleet.attempts(job_id):
            assert attempt.outcome == "lost"
            assert "No space left on device" in (attempt.error or "")
            fleet.released(job_id, attempt.id)
        job_id = fleet.submit("echo", "still here", labels=here(agent))
        assert fleet.end(job_id).status == "completed"
        assert agent.leave() == 0


def test_a_log_that_fills_the_disk_of_its_node_does_not_hold_up_its_attempt(fleet: Fleet) -> None:
    agent = fleet.join("leo")
    with little_room(agent):
        agent.start()
        for exit_code, status in ((0, "completed"), (3, "failed")):
            fills = f"yes | head -c 30000000; exit {exit_code}"
            job_id = fleet.submit("sh", "-c", fills, labels=here(agent), max_attempts=1)
            assert fleet.end(job_id).status == status
            [attempt] = fleet.attempts(job_id)
            fleet.released(job_id, attempt.id)
        assert agent.leave() == 0


def test_a_job_that_is_cancelled_while_its_input_is_fetched_never_starts(fleet: Fleet) -> None:
    agent = fleet.join("jan")
    with little_room(agent):
        agent.start()
        target = io.BytesIO()
        pack([Member("data", 30_000_000, False, lambda: io.BytesIO(bytes(30_000_000)))], target)
        job_id = fleet.submit("echo", "started", labels=here(agent), inputs=[stored(fleet, target)])
        agent.hear("starting")
        fleet.client.cancel_job(job_id, CancelRequest())
        assert fleet.end(job_id).status == "cancelled"
        [attempt] = fleet.attempts(job_id)
        assert (attempt.state, attempt.error) == ("cancelled", "stopped before it started")
        fleet.released(job_id, attempt.id)
        assert agent.leave() == 0
        assert not agent.attempt(attempt.id).exists()


def test_a_node_that_is_cut_off_ends_its_work_before_another_begins(fleet: Fleet) -> None:
    either = {"who": "kay or lou"}
    first = fleet.node("kay", labels=either)
    job_id = fleet.submit("sh", "-c", WAITS, artifacts=("out.txt",), labels=either)
    lost = fleet.hear_log(job_id, b"started\n")
    second = fleet.node("lou", labels=either)
    second.hear("connected")
    first.process.send_signal(signal.SIGSTOP)
    event = fleet.wait_for(job_id, lambda event: event.kind == "assignment.assigned" and event.node == "lou")
    assert event.assignment_id is not None
    assert first.tree() == [first.process.pid], "its supervisor has ended it when the lease ended"
    first.process.send_signal(signal.SIGCONT)
    fleet.released(job_id, lost.id)
    fleet.hear_log(job_id, b"started\n", assignment_id=event.assignment_id)
    (second.attempt(event.assignment_id) / "work" / "go").write_text("lou\n")
    assert fleet.end(job_id).status == "completed"
    assert [(each.node, each.outcome) for each in fleet.attempts(job_id)] == [("kay", "lost"), ("lou", "completed")]


def test_an_attempt_whose_supervisor_is_killed_is_ended_and_told(fleet: Fleet, ada: Agent) -> None:
    job_id = fleet.submit("sh", "-c", "echo started; exec sleep 600", labels=here(ada), max_losses=0)
    attempt = fleet.hear_log(job_id, b"started\n")
    folder = ada.attempt(attempt.id)
    status = json.loads((folder / "status.json").read_text())
    os.kill(status["supervisor_pid"], signal.SIGKILL)
    assert fleet.end(job_id).status == "failed"
    fleet.released(job_id, attempt.id)
    [ended] = fleet.attempts(job_id)
    assert (ended.state, ended.outcome) == ("failed", "lost")
    assert fleet.log(job_id).startswith(b"started\n")
    assert ada.tree(below=folder) == []


@contextlib.contextmanager
def little_room(agent: Agent) -> Generator[None]:
    """Put the attempts of an agent on a disk of their own, and a small one."""
    attempts = agent.home / "attempts"
    mount = shutil.which("mount") or "mount"
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=16m,mode=711", "none", str(attempts)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        needs("mount", "a small disk of its own cannot be mounted by this user")
    try:
        yield
    finally:
        if agent.process.poll() is None:
            agent.kill_all()
        subprocess.run(["umount", str(attempts)], check=True)


def test_two_agents_never_share_a_home(fleet: Fleet, ada: Agent) -> None:
    second = Agent(ada.home, "second", ada.environment)
    second.start()
    second.hear(f"another agent already runs on {ada.home} (process {ada.process.pid})")
    assert second.process.wait(timeout=30) == 3
    second.kill()


def test_an_agent_whose_home_belongs_to_nobody_says_so(fleet: Fleet) -> None:
    nobody = Agent(fleet.house.work / "nobody", "nobody", fleet.house.environment)
    nobody.start()
    nobody.hear("belongs to no node yet")
    assert nobody.process.wait(timeout=30) == 3
    assert not nobody.home.exists()
    nobody.kill()
    assert os.listdir(fleet.house.work) == []
