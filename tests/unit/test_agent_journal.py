"""The journal: what was written is read again whole, and what was damaged is refused."""

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from fleetward.agent import journal
from fleetward.agent.commands import Journal, JournalEntry, Unstarted
from fleetward.domain.errors import HomeUnusable, StorageFailed
from fleetward.domain.jobs import ArtifactRule, JobSpec, Timeouts

ENTRY = JournalEntry(
    id=UUID(int=1),
    fence=1 << 40 | 7,
    job_id=UUID(int=2),
    attempt=3,
    spec=JobSpec(
        command=["sh", "-c", "echo ü\u2028\n"],
        env={"A": "b"},
        artifacts=[ArtifactRule(path="*.txt", required=False)],
        timeouts=Timeouts(run_seconds=5),
    ),
)
FAILED = JournalEntry(
    id=UUID(int=4),
    fence=9,
    job_id=UUID(int=2),
    attempt=4,
    spec=JobSpec(command=["true"]),
    unstarted=Unstarted(blame="lost", message="no room"),
)
FULL = Journal(last_session=12, nonce="ab" * 16, held=[ENTRY, FAILED])


@contextmanager
def room_for(size_bytes: int) -> Generator[None]:
    """Let no file grow beyond this, as a disk does that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_before_the_first_write_it_is_empty(tmp_path: Path) -> None:
    assert journal.read(tmp_path) == Journal()


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    for written in (FULL, Journal(), FULL):
        journal.write(tmp_path, written)
        assert journal.read(tmp_path) == written


def test_only_its_owner_may_read_it_and_nothing_else_stays_behind(tmp_path: Path) -> None:
    journal.write(tmp_path, FULL)
    journal.write(tmp_path, FULL)
    assert [path.name for path in tmp_path.iterdir()] == [journal.FILE]
    assert (tmp_path / journal.FILE).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_the_journal_of_before(tmp_path: Path) -> None:
    journal.write(tmp_path, Journal(last_session=1))
    with room_for(100), pytest.raises(StorageFailed) as caught:
        journal.write(tmp_path, FULL)
    assert str(tmp_path / journal.FILE) in caught.value.message
    assert journal.read(tmp_path) == Journal(last_session=1)
    journal.write(tmp_path, FULL)
    assert journal.read(tmp_path) == FULL


@pytest.mark.parametrize("size", [0, 1, 64, 65, 200])
def test_a_torn_journal_is_refused_and_not_half_believed(tmp_path: Path, size: int) -> None:
    journal.write(tmp_path, FULL)
    os.truncate(tmp_path / journal.FILE, size)
    with pytest.raises(HomeUnusable, match="is damaged: its checksum does not fit") as caught:
        journal.read(tmp_path)
    assert "pair again" in caught.value.hint


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    journal.write(tmp_path, FULL)
    path = tmp_path / journal.FILE
    path.write_bytes(path.read_bytes().replace(b'"last_session":12', b'"last_session":13'))
    with pytest.raises(HomeUnusable, match="is damaged"):
        journal.read(tmp_path)


def test_a_journal_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / journal.FILE).mkdir()
    with pytest.raises(StorageFailed, match=r"journal\.json cannot be read: Is a directory"):
        journal.read(tmp_path)
