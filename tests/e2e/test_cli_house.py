"""A house that is up, from the command line: jobs that complete, fail and are cancelled."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import House, a_house

from fleetward.cli.processes import lives, mark_of

UP_SECONDS = 30.0
RUN_SECONDS = 5.0  # issue 2: `run` of an echo, from typing to the file on this disk


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with a_house() as house:
        done = house.type("up", "--listen", "127.0.0.1:0", "--detach")
        assert done.status == 0, done.err
        yield house


@pytest.fixture
def folder(house: House, tmp_path: Path) -> str:
    return str(house.work / tmp_path.name)


def test_a_second_up_on_the_same_home_is_refused(house: House) -> None:
    done = house.type("up", "--detach")
    assert done.status == 3
    assert f"already runs on {house.home}" in done.err
    assert "fleetward down" in done.err


def test_this_machine_is_a_node_and_all_is_well(house: House) -> None:
    # Another test may have paired a second machine, which no agent runs on.
    paired = house.type("node", "ls", "--json").document
    (node,) = [each for each in paired if each["name"] != "ada"]
    assert node["status"] in {"online", "provisioning"}
    assert house.type("node", "show", node["name"], "--json").document["id"] == node["id"]
    status = house.type("status", "--json").document
    assert sum(status["nodes"].values()) == len(paired)
    findings = house.type("doctor", "--json").document
    assert {finding["name"] for finding in findings} >= {"home", "disk", "controller", "database", "nodes", "sandbox"}
    assert [finding for finding in findings if finding["result"] == "bad"] == []


def test_a_run_ends_with_its_verified_file_on_this_disk(house: House, folder: str) -> None:
    started = time.monotonic()
    done = house.type("run", "--artifact", "out.txt", "--output", folder, "--", "sh", "-c", "echo hi > out.txt")
    assert done.status == 0, done.err
    assert (Path(folder) / "out.txt").read_bytes() == b"hi\n"
    assert time.monotonic() - started < RUN_SECONDS


def test_the_log_goes_to_standard_output_and_the_states_beside_it(house: House) -> None:
    done = house.type("run", "--", "sh", "-c", "echo one; echo two >&2")
    assert (done.status, sorted(done.out.splitlines())) == (0, ["one", "two"])
    assert "completed" in done.err


def test_a_failing_command_ends_in_status_1_with_its_log_and_the_reason(house: House) -> None:
    done = house.type("run", "--max-attempts", "1", "--", "sh", "-c", "echo before the end; exit 3")
    assert done.status == 1
    assert done.out == "before the end\n"
    assert "failed" in done.err
    assert "fleetward job show" in done.err


def test_a_command_that_does_not_exist_fails_and_says_so(house: House) -> None:
    done = house.type("run", "--max-attempts", "1", "--", "no-such-program")
    assert done.status == 1
    assert "no-such-program" in done.err


def test_a_promised_file_that_is_missing_fails_the_job_and_is_named(house: House) -> None:
    done = house.type("run", "--max-attempts", "1", "--artifact", "promised.bin", "--", "true")
    assert done.status == 1
    assert "promised.bin" in done.err


def test_a_run_in_json_is_one_document(house: House, folder: str) -> None:
    command = ("run", "--json", "--name", "told", "--artifact", "*.txt", "--output", folder)
    done = house.type(*command, "--", "sh", "-c", "echo log; : > empty.txt")
    assert done.status == 0, done.err
    ending = done.document
    assert (ending["status"], ending["name"], ending["artifacts"]) == ("completed", "told", ["empty.txt"])
    shown = house.type("job", "show", ending["job_id"], "--json").document
    assert (shown["status"], [attempt["state"] for attempt in shown["assignments"]]) == ("completed", ["succeeded"])


def test_inputs_travel_with_the_job(house: House, folder: str) -> None:
    (house.work / "data").mkdir()
    (house.work / "data" / "numbers.txt").write_text("1\n2\n3\n")
    command = ("run", "--input", "data", "--artifact", "sum.txt", "--output", folder)
    done = house.type(*command, "--", "sh", "-c", "awk '{s += $1} END {print s}' data/numbers.txt > sum.txt")
    assert done.status == 0, done.err
    assert (Path(folder) / "sum.txt").read_text() == "6\n"


def test_what_lies_in_the_output_folder_is_never_overwritten(house: House) -> None:
    taken = house.work / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    done = house.type("run", "--name", "taken", "--artifact", "mine", "--", "sh", "-c", "echo theirs > mine")
    assert done.status == 3
    assert "nothing is ever overwritten" in done.err
    assert (taken / "mine").read_text() == "mine"


def test_a_job_file_is_submitted_followed_and_fetched_later(house: House, folder: str) -> None:
    job_file = house.work / "job.toml"
    job_file.write_text(
        'name = "file"\ncommand = ["sh", "-c", "echo out; echo x > a.txt"]\n[[artifacts]]\npath = "a.txt"\n'
    )
    made = house.type("job", "submit", str(job_file), "--json").document
    assert house.type("job", "logs", "-f", made["id"]).out == "out\n"
    kinds = [line for line in house.type("job", "events", "-f", made["id"]).out.splitlines() if "job.completed" in line]
    assert len(kinds) == 1
    assert house.type("job", "fetch", made["id"], "--output", folder).status == 0
    assert (Path(folder) / "a.txt").read_text() == "x\n"
    paths = {file["path"] for file in house.type("job", "artifacts", made["id"], "--json").document}
    assert paths == {"a.txt", ".fleetward/receipt.json"}


def test_stopping_to_watch_leaves_the_job_running_and_cancelling_ends_it(house: House) -> None:
    process = house.start("run", "--", "sh", "-c", "echo started; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the job runs on" in err
    (job,) = house.type("job", "ls", "--status", "running", "--json").document
    assert house.type("job", "cancel", job["id"]).status == 0
    events = house.type("job", "events", "-f", job["id"], "--json").out.splitlines()
    assert any('"job.cancelled"' in line for line in events)


def test_what_is_not_there_is_refused(house: House) -> None:
    done = house.type("job", "show", "0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a")
    assert done.status == 3
    assert done.err.startswith("fleetward: ")


def test_a_wrong_key_is_refused(house: House) -> None:
    assert house.type("node", "ls", "--token", "fwt_wrong").status == 3


def test_the_settings_are_shown_with_where_they_came_from(house: House) -> None:
    shown = {line["name"]: line for line in house.type("config", "show", "--json").document}
    assert (shown["home"]["value"], shown["home"]["source"]) == (str(house.home), "environment")


def test_down_leaves_nothing_running_and_says_when_nothing_runs() -> None:
    with a_house() as other:
        assert other.type("down").out == f"nothing runs on {other.home}\n"
        ready = other.type("up", "--listen", "127.0.0.1:0", "--no-local-node", "--detach", "--json").document
        assert lives(mark_of(ready["pid"]))
        assert other.type("down").out == f"stopped {other.home}\n"
        assert not lives(mark_of(ready["pid"]))
        assert other.type("status").status == 4


def test_plain_http_beyond_this_machine_is_warned_of() -> None:
    with a_house() as other:
        done = other.type("up", "--listen", "0.0.0.0:0", "--insecure-http", "--no-local-node", "--detach")
        assert done.status == 0, done.err
        assert "Plain HTTP:" in done.err
        assert "it speaks plain HTTP" in (other.home / "controller.log").read_text()


def test_a_house_comes_back_with_its_node_also_at_another_address() -> None:
    with a_house() as other:
        for _ in range(2):
            ready = other.type("up", "--listen", "127.0.0.1:0", "--detach", "--json").document
            assert other.type("run", "--", "echo", "ok").out == "ok\n"
            assert lives(mark_of(ready["pid"]))
            other.type("down")
        assert len(list((other.home / "nodes").iterdir())) == 1


@pytest.mark.parametrize("victim", ["agent", "controller"])
def test_a_killed_program_comes_back_and_the_job_goes_on_as_one_attempt(house: House, victim: str) -> None:
    process = house.start("run", "--json", "--", "sh", "-c", "echo started; sleep 3")
    assert process.stderr is not None
    while "started\n" not in process.stderr.readline():
        assert process.poll() is None
    running = json.loads((house.home / "up.json").read_text())
    os.kill(running[victim]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    shown = house.type("job", "show", json.loads(out)["job_id"], "--json").document
    assert [(attempt["attempt"], attempt["state"]) for attempt in shown["assignments"]] == [(1, "succeeded")]


def test_another_machine_joins_with_a_string_that_works_once(house: House) -> None:
    made = house.type("node", "pair", "--label", "zone=lab", "--json").document
    assert made.keys() >= {"join_string", "code", "expires_at"}
    folder = house.work / "ada"
    done = house.type("join", made["join_string"], "--name", "ada", "--home", str(folder), "--no-agent")
    assert done.status == 0, done.err
    node = house.type("node", "show", "ada", "--json").document
    assert (node["status"], node["labels"]) == ("provisioning", {"zone": "lab"})
    again = house.type("join", made["join_string"], "--name", "bob", "--home", str(house.work / "bob"), "--no-agent")
    assert again.status == 3
    cut = house.type("join", made["join_string"][:-3], "--home", str(house.work / "cut"), "--no-agent")
    assert cut.status == 3
    assert "not whole" in cut.err
