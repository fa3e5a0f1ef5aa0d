"""Unpacking a job's input on real folders: nothing appears but below the target."""

import io
import os
import stat
from pathlib import Path

import pytest

from fleetward.agent.unpack import unpack
from fleetward.domain.errors import UnsafeArchive
from fleetward.verify.archive import Member, pack


def archive(**files: bytes) -> io.BytesIO:
    target = io.BytesIO()
    members = [
        Member(name.replace("__", "/"), len(content), name == "run", lambda content=content: io.BytesIO(content))
        for name, content in files.items()
    ]
    pack(members, target)
    target.seek(0)
    return target


def test_files_and_folders_appear_with_their_bytes_and_masked_modes(tmp_path: Path) -> None:
    assert 3 == unpack(archive(run=b"#!", a__b__c=b"deep", plain=b""), tmp_path)
    assert b"deep" == (tmp_path / "a/b/c").read_bytes()
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run", "plain")}
    assert {"run": 0o755, "plain": 0o644} == modes


def test_two_archives_share_folders_but_never_a_file(tmp_path: Path) -> None:
    unpack(archive(a__b=b"1"), tmp_path)
    unpack(archive(a__c=b"2"), tmp_path)
    with pytest.raises(UnsafeArchive, match="'a/c' is already there"):
        unpack(archive(a__c=b"3"), tmp_path)
    assert b"2" == (tmp_path / "a/c").read_bytes()


@pytest.mark.parametrize("link", ["folder", "file"])
def test_a_link_that_lies_in_the_target_is_not_followed(tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    work = tmp_path / "work"
    outside.mkdir()
    work.mkdir()
    if link == "folder":
        (work / "a").symlink_to(outside)
    else:
        (work / "a").mkdir()
        (work / "a/b").symlink_to(outside / "b")
    with pytest.raises(UnsafeArchive, match="'a/b'"):
        unpack(archive(a__b=b"x"), work)
    assert [] == list(outside.iterdir())


def test_a_pipe_in_the_way_neither_blocks_nor_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(UnsafeArchive, match="'a' is already there"):
        unpack(archive(a=b"x"), tmp_path)
    with pytest.raises(UnsafeArchive, match="no folder"):
        unpack(archive(a__b=b"x"), tmp_path)
