"""What is installed: by range in one place, by hash in the locks, from no index in particular."""

import re
import tomllib
from typing import Final

import pytest

from fleetward.wire.versions import VERSION
from tests.tidy.tree import ROOT

LOCKS: Final = ("requirements.txt", "requirements-dev.txt")
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_index(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")
    assert re.findall(r"^-.*|https?://\S+|--(?!hash=)[\w-]+", text, re.MULTILINE) == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_every_package_by_version_and_hash(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8").replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [entry for entry in entries if not re.match(r"[a-z0-9.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry)] == []


@pytest.mark.parametrize(("lock", "group"), [("requirements.txt", "build"), ("requirements-dev.txt", "dev")])
def test_a_lock_holds_what_is_asked_for(lock: str, group: str) -> None:
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["build"]]
    asked += [one for one in PROJECT["dependency-groups"][group] if isinstance(one, str)]
    names = {re.split(r"[^A-Za-z0-9._-]", one)[0].lower() for one in asked}
    locked = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE))
    assert names - locked == set()


def test_what_runs_is_locked_the_same_for_tests() -> None:
    run, dev = (set(re.findall(r"^[a-z0-9._-]+==[^ ;\\]+", (ROOT / lock).read_text(), re.MULTILINE)) for lock in LOCKS)
    assert run - dev == set()


def test_the_version_is_written_once_more_and_equal() -> None:
    assert PROJECT["project"]["version"] == VERSION
