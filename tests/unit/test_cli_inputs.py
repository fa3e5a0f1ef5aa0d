"""Which files a path on the command line sends along, and under which names."""

import os
from pathlib import Path

import pytest

from fleetward.cli.inputs import members_below
from fleetward.domain.errors import MalformedRequest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "b.txt").write_text("bb")
    (folder / "data" / "deep" / "a.txt").write_text("a")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("ccc")
    monkeypatch.chdir(folder)
    return folder


def found(*inputs: Path) -> tuple[list[tuple[str, int, bool]], list[str]]:
    skipped: list[str] = []
    members = list(members_below(inputs, skipped=skipped.append))
    return [(member.path, member.size_bytes, member.is_executable) for member in members], skipped


def test_paths_here_keep_their_names_in_a_fixed_order(here: Path) -> None:
    expected = [("data/b.txt", 2, False), ("data/deep/a.txt", 1, False), ("run.sh", 10, True)]
    assert found(Path("data"), Path("run.sh")) == (expected, [])
    assert found(Path("./data/"), here / "run.sh") == (expected, [])


@pytest.mark.usefixtures("here")
def test_the_current_folder_is_everything_in_it() -> None:
    assert [path for path, _, _ in found(Path())[0]] == ["data/b.txt", "data/deep/a.txt", "run.sh"]


@pytest.mark.usefixtures("here")
def test_a_path_from_elsewhere_is_called_by_its_last_part() -> None:
    assert found(Path("../elsewhere"), Path("../elsewhere/c.txt"))[0] == [
        ("elsewhere/c.txt", 3, False),
        ("c.txt", 3, False),
    ]


def test_a_link_to_a_file_brings_its_bytes_and_other_links_are_named_and_left_out(here: Path) -> None:
    (here / "data" / "to-file").symlink_to(here / "run.sh")
    (here / "data" / "to-folder").symlink_to(here)
    (here / "data" / "to-nothing").symlink_to("nowhere")
    os.mkfifo(here / "data" / "pipe")
    members, skipped = found(Path("data"))
    assert ("data/to-file", 10, True) in members
    assert skipped == [
        "data/pipe is no plain file",
        "data/to-folder is a link to a folder",
        "data/to-nothing is a link to nothing",
    ]


@pytest.mark.usefixtures("here")
def test_the_bytes_are_those_of_the_file() -> None:
    (member,) = members_below([Path("data/b.txt")], skipped=print)
    with member.open() as content:
        assert content.read() == b"bb"


@pytest.mark.usefixtures("here")
def test_an_input_that_is_not_there_is_refused() -> None:
    with pytest.raises(MalformedRequest, match="the input 'nothing' is not there"):
        found(Path("nothing"))
