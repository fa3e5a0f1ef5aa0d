"""After the command: which files the job promised, what their bytes are, and the receipt of the attempt.

Owns the walk through the working folder and the receipt's form. Refuses to judge: whether the promises are
kept is the verifier's to say. Nothing is followed, nothing but plain files is opened, and what is left out
is named.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from fleetward.agent import attempt
from fleetward.agent.supervised import Observation, Supervised
from fleetward.domain.artifacts import ARTIFACTS_MAX, RECEIPT_PATH
from fleetward.domain.errors import StorageFailed, UnsafePath, quoted
from fleetward.verify.digest import Digest, Measured, measure
from fleetward.verify.manifest import ArtifactPath, parse_path
from fleetward.verify.policy import Rule, asked_for, media_type_for

VISITS_MAX: Final = 2_000_000  # entries looked at; a folder of a million files takes a few seconds
WALK_TIME_MAX: Final = timedelta(minutes=5)
SKIPPED_MAX: Final = 1_000  # named in a receipt; the count says how many there were
DEPTH_MAX: Final = 64
CHUNK: Final = 1024 * 1024

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe that took a file's place would wait for a writer.
_PLAIN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_KINDS: Final = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class CollectedFile:
    """A file that the job promised, and what its bytes are."""

    path: ArtifactPath
    size_bytes: int
    digest: Digest
    media_type: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was left out although a promise speaks of it, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What an attempt has to hand in."""

    files: tuple[CollectedFile, ...]
    skipped: tuple[Skipped, ...]


def collect(work: Path, rules: Sequence[Rule]) -> Collected:
    """Find and hash the promised files below a working folder in which nothing runs any more."""
    files: list[CollectedFile] = []
    skipped: list[Skipped] = []
    for found in _walk(work, rules):
        if isinstance(found, Skipped):
            skipped.append(found)
        elif len(files) >= ARTIFACTS_MAX:
            skipped.append(Skipped(found, f"an attempt hands in at most {ARTIFACTS_MAX} files"))
        else:
            try:
                measured = _measure(work, found)
            except OSError as error:
                skipped.append(Skipped(found, f"could not be read: {error.strerror}"))
            else:
                media_type = media_type_for(rules, found)
                files.append(CollectedFile(found, measured.size_bytes, measured.digest, media_type))
    return Collected(tuple(files), tuple(skipped))


def open_collected(work: Path, file: CollectedFile) -> BinaryIO:
    """Open a collected file again for its upload; the verifier would notice other bytes, so we need not hash here."""
    try:
        stream = os.fdopen(_open(work, file.path), "rb")
    except OSError as error:
        raise StorageFailed(f"artifact {quoted(file.path)} can no longer be read: {error.strerror}") from error
    size = os.fstat(stream.fileno()).st_size
    if size != file.size_bytes:
        stream.close()
        raise StorageFailed(f"artifact {quoted(file.path)} has changed from {file.size_bytes} to {size} bytes")
    return stream


def _walk(work: Path, rules: Sequence[Rule]) -> Iterator[ArtifactPath | Skipped]:
    """Give the promised files in order of their names. Time and count are bounded, and a bound that was hit is said."""
    visits = 0
    until = attempt.boottime() + WALK_TIME_MAX.total_seconds()
    # By descriptor and never by path: a folder cannot be changed for a link between look and entry.
    for folder, folders, names, fd in os.fwalk(work, follow_symlinks=False):
        below = Path(folder).relative_to(work).parts
        _open_up(folders, fd)
        folders.sort()
        if len(below) >= DEPTH_MAX and folders:
            yield Skipped("/".join(below), f"lies more than {DEPTH_MAX} folders deep")
            folders.clear()
        visits += len(folders) + len(names)
        if visits > VISITS_MAX or attempt.boottime() > until:
            yield Skipped("/".join(below) or ".", "the working folder holds too much to be looked through")
            return
        for name in sorted(folders + names):
            text = "/".join((*below, name))
            mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            # A link in a folder's place hides files that may be promised; one name below stands for all.
            is_promised = asked_for(rules, text) or (stat.S_ISLNK(mode) and asked_for(rules, f"{text}/x"))
            if is_promised and not stat.S_ISDIR(mode):
                yield _look(text, mode)


def _open_up(folders: list[str], fd: int) -> None:
    """A job may have closed a folder to itself; the agent of the same user opens it again."""
    for name in folders:
        mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode) and mode & 0o500 != 0o500:
            os.chmod(name, 0o700, dir_fd=fd)


def _look(text: str, mode: int) -> ArtifactPath | Skipped:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        return Skipped(text, f"is {kind}; only plain files are handed in")
    try:
        return parse_path(text)
    except UnsafePath as refusal:
        return Skipped(text.encode(errors="backslashreplace").decode(), refusal.message)


def _open(work: Path, path: str) -> int:
    *folders, name = path.split("/")
    fd = os.open(work, _FOLDER)
    for part in folders:
        try:
            below = os.open(part, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    try:
        opened = os.open(name, _PLAIN, dir_fd=fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "is no plain file")
    return opened


def _measure(work: Path, path: str) -> Measured:
    with os.fdopen(_open(work, path), "rb") as stream:
        return measure(iter(lambda: stream.read(CHUNK), b""))


# The receipt


def write_receipt(
    supervised: Supervised, seen: Observation, collected: Collected, *, node: Mapping[str, str]
) -> CollectedFile:
    """Write what this node attests of the attempt, beside the working folder where no command could reach it."""
    assert seen.is_released, "a receipt is about what has ended"
    order = supervised.order
    log = _measure(supervised.folder.path, attempt.LOG)
    document = {
        "kind": "fleetward.receipt/1",
        "node": dict(node),
        "assignment_id": order.assignment_id,
        "fence": order.fence,
        "command": list(order.command),
        "working_dir": order.working_dir,
        "environment": sorted(order.env),
        "ended_by": seen.ended_by,
        "exit_code": seen.exit_code,
        "message": seen.message,
        "started_at": seen.started_at,
        "finished_at": seen.finished_at,
        "log": {"sha256": log.digest.hex, "size_bytes": log.size_bytes, "written_bytes": seen.log_written_bytes},
        "in_force": order.in_force | ({"user": str(seen.user)} if seen.user is not None else {}),
        "limits": {"run_seconds": order.run_seconds, "log_bytes_max": order.log_bytes_max},
        "used": {"cpu_seconds": seen.cpu_seconds, "memory_peak_bytes": seen.memory_peak_bytes},
        "lingering": seen.lingering,
        "artifacts": {file.path: file.digest.hex for file in collected.files},
        "skipped": [{"path": each.path, "why": each.why} for each in collected.skipped[:SKIPPED_MAX]],
        "skipped_count": len(collected.skipped),
        "warnings": list(seen.warnings),
    }
    content = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    try:
        supervised.folder.receipt.write_bytes(content)
    except OSError as error:
        raise StorageFailed(f"the receipt of {order.assignment_id} cannot be written: {error.strerror}") from error
    return CollectedFile(ArtifactPath(RECEIPT_PATH), len(content), Digest.of(content), "application/json")
