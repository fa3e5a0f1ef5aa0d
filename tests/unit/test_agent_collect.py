"""Collecting what a command left: promised plain files, and nothing through a link."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetward.agent import collect as collecting
from fleetward.agent.collect import Skipped, collect, open_collected
from fleetward.domain.errors import StorageFailed
from fleetward.domain.jobs import ArtifactRule
from fleetward.verify.digest import Digest
from fleetward.verify.policy import Rule, parse_rules


def rules(*paths: str) -> tuple[Rule, ...]:
    return parse_rules([ArtifactRule(path=path) for path in paths])


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "work"
    folder.mkdir()
    yield folder
    for path, folders, _, fd in os.fwalk(folder):
        assert path
        for name in folders:
            os.chmod(name, 0o700, dir_fd=fd)


def test_promised_files_are_found_by_path_and_pattern_and_hashed(work: Path) -> None:
    (work / "out").mkdir()
    (work / "out/b.json").write_text("{}")
    (work / "out/a.txt").write_text("")
    (work / "other").write_text("x")
    found = collect(work, rules("out/*", "missing.txt"))
    assert () == found.skipped
    assert [
        ("out/a.txt", 0, Digest.of(b""), "text/plain"),
        ("out/b.json", 2, Digest.of(b"{}"), "application/json"),
    ] == [(file.path, file.size_bytes, file.digest, file.media_type) for file in found.files]


def test_links_pipes_sockets_and_odd_names_are_named_and_never_opened(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("s3cret")
    (work / "good").write_text("1")
    (work / "link").symlink_to(tmp_path / "secret")
    (work / "loop").symlink_to("loop")
    (work / "folder-link").symlink_to(tmp_path)
    os.mkfifo(work / "pipe")
    monkeypatch.chdir(work)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        (work / "new\nline").write_text("x")
        (work / os.fsdecode(b"\xff")).write_text("x")
        found = collect(work, rules("**"))
    assert ["good"] == [file.path for file in found.files]
    reasons = {each.path: each.why for each in found.skipped}
    plain = "only plain files are handed in"
    assert {"link", "loop", "pipe", "socket", "new\nline", "\\udcff", "folder-link"} <= reasons.keys()
    assert (f"is a link; {plain}", f"is a pipe; {plain}", f"is a socket; {plain}") == tuple(
        reasons[name] for name in ("link", "pipe", "socket")
    )
    assert "control character" in reasons["new\nline"]


def test_a_folder_that_the_command_closed_to_itself_is_opened(work: Path) -> None:
    (work / "closed").mkdir()
    (work / "closed/file").write_text("1")
    (work / "closed").chmod(0)
    assert ["closed/file"] == [file.path for file in collect(work, rules("**")).files]


def test_a_folder_that_is_too_full_or_too_deep_is_left_in_bounded_time(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = work.joinpath(*["d"] * 70)
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (work / "top").write_text("x")
    found = collect(work, rules("**"))
    assert ["top"] == [file.path for file in found.files]
    assert [Skipped("/".join(["d"] * 64), "lies more than 64 folders deep")] == list(found.skipped)
    monkeypatch.setattr(collecting, "VISITS_MAX", 1)
    assert [Skipped(".", "the working folder holds too much to be looked through")] == list(
        collect(work, rules("**")).skipped
    )


def test_a_collected_file_is_opened_again_only_while_it_is_the_same_plain_file(work: Path, tmp_path: Path) -> None:
    (work / "f").write_text("abc")
    (file,) = collect(work, rules("f")).files
    with open_collected(work, file) as stream:
        assert b"abc" == stream.read()
    (work / "f").write_text("abcd")
    with pytest.raises(StorageFailed, match="changed from 3 to 4 bytes"):
        open_collected(work, file)
    (work / "f").unlink()
    (tmp_path / "x").write_text("abc")
    (work / "f").symlink_to(tmp_path / "x")
    with pytest.raises(StorageFailed, match="can no longer be read"):
        open_collected(work, file)
