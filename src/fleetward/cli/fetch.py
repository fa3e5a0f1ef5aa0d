"""Verified artifacts, from the controller to this disk.

Owns where they land, that nothing is overwritten, and that every byte is checked on arrival. Refuses
to know who asked. A fetch that was cut off goes on where it ended.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final
from uuid import UUID

from fleetward.cli.output import size
from fleetward.client import Client
from fleetward.domain.artifacts import ArtifactState
from fleetward.domain.errors import ArtifactNotFound, DigestMismatch, OutputExists
from fleetward.verify.digest import measure
from fleetward.verify.manifest import parse_path
from fleetward.wire.messages import Artifact, Job

PIECE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where a job's artifacts are now."""

    folder: Path | None
    paths: tuple[str, ...]


def output_folder(job_name: str, job_id: UUID | None) -> Path:
    """Where artifacts go when nobody says: a folder named like the job, here."""
    return Path(job_name or str(job_id))


def check_free(folder: Path, *, is_named: bool) -> None:
    """Refuse early when artifacts would not find a free place; `is_named` if a person chose the folder."""
    if not os.path.lexists(folder):
        return
    if folder.is_dir() and (is_named or not any(folder.iterdir())):
        return
    raise OutputExists(
        f"{folder} exists, and nothing is ever overwritten", hint="choose another folder with --output, or move it away"
    )


def fetch(client: Client, job: Job, *, folder: Path, is_named: bool) -> Fetched:
    """Bring a completed job's artifacts into the folder; all are there afterwards, or none."""
    files = _winners(client, job)
    if not files:
        return Fetched(folder=None, paths=())
    check_free(folder, is_named=is_named)
    _refuse_collisions(folder, files)
    partial = folder.parent / f".{folder.name or 'output'}.{job.id.hex[:12]}.part"
    partial.mkdir(parents=True, exist_ok=True)
    for file in files:
        _download(client, file, into=partial)
    if os.path.lexists(folder) and any(folder.iterdir()):
        _move_in(partial, folder, files)
    else:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        partial.rename(folder)
    return Fetched(folder=folder, paths=tuple(file.path for file in files))


def _winners(client: Client, job: Job) -> list[Artifact]:
    if job.winning_assignment_id is None:
        raise ArtifactNotFound(
            f"job {job.id} is {job.status}: it has no verified artifacts",
            hint=f"`fleetward job show {job.id}` says why" if job.status != "running" else "wait for it to complete",
        )
    return [
        file
        for file in client.list_artifacts(job.id).items
        if file.assignment_id == job.winning_assignment_id
        and file.state == ArtifactState.VERIFIED
        and not file.is_receipt
    ]


def _refuse_collisions(folder: Path, files: Sequence[Artifact]) -> None:
    for file in files:
        # The controller's word for a path is checked again here: it must not be able to write elsewhere.
        target = folder / parse_path(file.path)
        if os.path.lexists(target):
            raise OutputExists(
                f"{target} exists, and nothing is ever overwritten",
                hint="choose another folder with --output, or move it away",
            )


def _download(client: Client, file: Artifact, *, into: Path) -> None:
    target = into / parse_path(file.path)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{hashlib.sha256(file.path.encode()).hexdigest()[:16]}.part")
    with unfinished.open("ab+") as part:
        have = part.seek(0, os.SEEK_END)
        if have > file.size_bytes:
            part.truncate(0)
            have = 0
        if have < file.size_bytes:
            with client.read_artifact(file.job_id, path=file.path, offset=have) as download:
                for piece in download:
                    part.write(piece)
        found = _digest(part)
        if found != file.sha256:
            unfinished.unlink()
            raise DigestMismatch(
                f"artifact {file.path!r} arrived with SHA-256 {found}, but {file.sha256} was verified",
                hint="fetch again; if it stays so, the controller's store is damaged",
            )
        os.fsync(part.fileno())
    unfinished.rename(target)


def _digest(part: BinaryIO) -> str:
    part.flush()
    part.seek(0)
    return measure(iter(lambda: part.read(PIECE), b"")).digest.hex


def _move_in(partial: Path, folder: Path, files: Sequence[Artifact]) -> None:
    for file in files:
        target = folder / parse_path(file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _place(partial / parse_path(file.path), target)
    shutil.rmtree(partial)


def _place(source: Path, target: Path) -> None:
    try:
        # A hard link, unlike a rename, refuses to replace what somebody put there meanwhile.
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        with target.open("xb") as copy, source.open("rb") as original:
            shutil.copyfileobj(original, copy, PIECE)


def total(files: Sequence[Artifact]) -> str:
    """How many, and how much."""
    return f"{len(files)} artifacts, {size(sum(file.size_bytes for file in files))}"
