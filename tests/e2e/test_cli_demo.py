"""The demo, played whole: the liar is refused twice, an honest node wins, and nothing is left running."""

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator

import pytest
from command_line import Done, House, a_house

MINUTE = 60.0


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with a_house() as house:
        yield house


@pytest.fixture(scope="module")
def played(house: House) -> tuple[Done, float]:
    started = time.monotonic()
    done = house.type("demo", "--json")
    return done, time.monotonic() - started


@pytest.mark.timeout(150)
def test_the_job_completes_although_one_node_lies(house: House, played: tuple[Done, float]) -> None:
    done, seconds = played
    assert done.status == 0, done.err
    assert seconds < MINUTE
    assert done.document["status"] == "completed"
    assert done.document["artifacts"] == ["index.json", "index.svg"]
    assert done.document["output"] == str((house.work / "fleetward-demo").resolve())


@pytest.mark.timeout(150)
def test_both_lies_are_refused_with_the_reason(played: tuple[Done, float]) -> None:
    nothing, other_bytes = played[0].document["refused"]
    assert "index.json" in nothing
    assert "missing" in nothing
    assert "arrived" in other_bytes
    assert "mallory's claim refused" in played[0].err


@pytest.mark.timeout(150)
def test_the_results_are_where_it_says_and_are_what_they_should_be(house: House, played: tuple[Done, float]) -> None:
    folder = house.work / "fleetward-demo"
    index = json.loads((folder / "index.json").read_text())
    assert index["totals"]["lines"] == sum(module["lines"] for module in index["modules"]) > 100_000
    assert (folder / "index.svg").read_text().startswith("<svg ")
    digest = hashlib.sha256((folder / "index.json").read_bytes()).hexdigest()
    assert digest[:16] in played[0].err


@pytest.mark.timeout(150)
def test_the_persons_own_home_is_not_touched_and_nothing_is_left_running(
    house: House, played: tuple[Done, float]
) -> None:
    assert played[0].status == 0
    assert not house.home.exists()
    listed = subprocess.run(["/bin/ps", "-axww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert [line for line in listed.splitlines() if str(house.temporary) in line] == []
    assert list(house.temporary.iterdir()) == []
