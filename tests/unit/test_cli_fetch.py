"""Fetched artifacts: checked on arrival, all or none, nothing overwritten, gone on with after a cut."""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from loopback_server import Answer, Loopback, serve

from fleetward.cli.fetch import Fetched, check_free, fetch
from fleetward.client import Client
from fleetward.domain.errors import ArtifactNotFound, DigestMismatch, OutputExists, Unreachable, UnsafePath
from fleetward.domain.jobs import JobSpec
from fleetward.wire import messages as m

JOB = UUID(int=1)
WINNER = UUID(int=2)
AT = datetime(2026, 1, 1, tzinfo=UTC)


def job(winner: UUID | None = WINNER, status: str = "completed") -> m.Job:
    return m.Job(
        id=JOB,
        kind="command",
        name="train",
        status=status,
        priority=50,
        spec=JobSpec(command=["true"]),
        replicas=1,
        quorum=1,
        failures=0,
        losses=0,
        created_at=AT,
        started_at=AT,
        finished_at=AT,
        cancel_requested_at=None,
        winning_assignment_id=winner,
        error=None,
    )


def artifact(path: str, content: bytes, *, owner: UUID = WINNER, is_receipt: bool = False) -> m.Artifact:
    return m.Artifact(
        id=UUID(int=3),
        job_id=JOB,
        assignment_id=owner,
        path=path,
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        media_type="text/plain",
        state="verified",
        is_receipt=is_receipt,
        stored_at=AT,
        verified_at=AT,
    )


def listing(*files: m.Artifact) -> Answer:
    return Answer(body=msgspec.json.encode(m.ArtifactList(items=list(files))))


def get(answers: Iterable[Answer], folder: Path, *, is_named: bool = True) -> tuple[Fetched, Loopback]:
    with serve(list(answers)) as server, Client(server.url, repeat_max=0) as client:
        return fetch(client, job(), folder=folder, is_named=is_named), server


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_winners_files_arrive_without_the_receipt_and_others(tmp_path: Path) -> None:
    files = (
        artifact("out/a.txt", b"aaa"),
        artifact("b.txt", b""),
        artifact(".fleetward/receipt.json", b"{}", is_receipt=True),
        artifact("b.txt", b"loser's", owner=UUID(int=9)),
    )
    fetched, _ = get([listing(*files), Answer(body=b"aaa")], tmp_path / "train")
    assert fetched == Fetched(folder=tmp_path / "train", paths=("out/a.txt", "b.txt"))
    assert files_below(tmp_path) == {"train/out/a.txt": b"aaa", "train/b.txt": b""}


def test_other_bytes_than_were_verified_are_thrown_away(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch, match=r"artifact 'a\.txt' arrived with SHA-256"):
        get([listing(artifact("a.txt", b"good")), Answer(body=b"evil")], tmp_path / "train")
    assert not (tmp_path / "train").exists()
    assert files_below(tmp_path) == {}


def test_a_fetch_that_was_cut_off_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = artifact("a.txt", b"0123456789")
    with pytest.raises(Unreachable):
        get([listing(file), Answer(body=b"0123456789", cut_after=4)], tmp_path / "train")
    assert not (tmp_path / "train").exists()
    _, server = get([listing(file), Answer(body=b"456789")], tmp_path / "train")
    assert server.asked[1].target.endswith("path=a.txt&offset=4")
    assert files_below(tmp_path) == {"train/a.txt": b"0123456789"}


def test_a_file_that_is_there_is_never_overwritten_and_nothing_else_is_written_either(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"a\.txt exists, and nothing is ever overwritten"):
        get([listing(artifact("b.txt", b"b"), artifact("a.txt", b"a")), Answer(body=b"b")], tmp_path)
    assert files_below(tmp_path) == {"a.txt": b"mine"}


def test_a_named_folder_takes_files_beside_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    get([listing(artifact("b.txt", b"b")), Answer(body=b"b")], tmp_path)
    assert files_below(tmp_path) == {"a.txt": b"mine", "b.txt": b"b"}


def test_the_default_folder_must_be_free_or_empty(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    check_free(tmp_path / "train", is_named=False)
    (tmp_path / "train" / "old").write_text("")
    with pytest.raises(OutputExists):
        check_free(tmp_path / "train", is_named=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputExists):
        check_free(tmp_path / "file", is_named=True)


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b"])
def test_a_controller_cannot_write_outside_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(UnsafePath):
        get([listing(artifact(path, b"a")), Answer(body=b"a")], tmp_path / "train")
    assert files_below(tmp_path) == {}


def test_a_job_without_artifacts_makes_no_folder(tmp_path: Path) -> None:
    fetched, _ = get([listing(artifact(".fleetward/receipt.json", b"{}", is_receipt=True))], tmp_path / "train")
    assert fetched == Fetched(folder=None, paths=())
    assert list(tmp_path.iterdir()) == []


def test_a_job_without_a_winner_has_nothing_to_fetch(tmp_path: Path) -> None:
    refused = pytest.raises(ArtifactNotFound, match="is failed: it has no verified artifacts")
    with serve([listing()]) as server, Client(server.url) as client, refused:
        fetch(client, job(None, "failed"), folder=tmp_path / "x", is_named=True)
