"""What goes along with a job: paths on this disk, as one archive.

Owns which files belong to a path and what they are called on the node. Refuses to know the archive's
form: `verify.archive` owns that.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Final

from fleetward.domain.errors import MalformedRequest
from fleetward.verify.archive import Member

EXECUTABLE: Final = 0o100


def members_below(inputs: Sequence[Path], *, skipped: Callable[[str], None]) -> Iterator[Member]:
    """Every plain file at or below the paths, in a fixed order. `skipped` hears of what cannot travel.

    A path in the current folder keeps its name from here; another is called by its last part; `.` is
    everything here.
    """
    for path in inputs:
        if not path.exists():
            raise MalformedRequest(f"the input {str(path)!r} is not there", hint="check the path", field="input")
        yield from _walk(path, _name(path), skipped)


def _name(path: Path) -> str:
    whole, here = Path(os.path.normpath(path.absolute())), Path.cwd()
    if whole == here:
        return ""
    return whole.relative_to(here).as_posix() if whole.is_relative_to(here) else whole.name


def _walk(path: Path, name: str, skipped: Callable[[str], None]) -> Iterator[Member]:
    found = path.stat()
    if S_ISREG(found.st_mode):
        yield Member(
            path=name,
            size_bytes=found.st_size,
            is_executable=bool(found.st_mode & EXECUTABLE),
            open=_opener(path),
        )
    elif not S_ISDIR(found.st_mode):
        skipped(f"{path} is no plain file")
    else:
        for entry in sorted(path.iterdir()):
            below = f"{name}/{entry.name}" if name else entry.name
            if not entry.exists():
                skipped(f"{entry} is a link to nothing")
            elif entry.is_symlink() and entry.is_dir():
                # Following it could go round in a circle, or drag half a disk along.
                skipped(f"{entry} is a link to a folder")
            else:
                yield from _walk(entry, below, skipped)


def _opener(path: Path) -> Callable[[], BinaryIO]:
    return lambda: path.open("rb")
