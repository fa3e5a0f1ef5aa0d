"""What the agent must still know after it fell: the journal on disk.

Owns the file's form and the order in which it is written: a crash at any point leaves the journal of before
or the one of after, and what was damaged by other hands is refused instead of half believed. Refuses to know
what the entries mean. Everything else that a restarted agent knows, it learns from the supervisors.
"""

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from fleetward.agent.commands import Journal
from fleetward.agent.home import minding, replace_durably
from fleetward.domain.errors import HomeUnusable

FILE: Final = "journal.json"


def read(folder: Path) -> Journal:
    """Read the journal; before the first write it is empty."""
    path = folder / FILE
    with minding(f"{path} cannot be read"):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return Journal()
    checksum, _, content = text.partition(b"\n")
    if checksum != _checksum(content):
        raise _damaged(path, "its checksum does not fit")
    try:
        return msgspec.json.decode(content, type=Journal)
    except msgspec.DecodeError as error:
        raise _damaged(path, str(error)) from error


def write(folder: Path, journal: Journal) -> None:
    """Put the journal on disk; on return it is there."""
    content = msgspec.json.encode(journal)
    replace_durably(folder / FILE, (_checksum(content) + b"\n" + content).decode())


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _damaged(path: Path, why: str) -> HomeUnusable:
    return HomeUnusable(
        f"the journal {path} is damaged: {why}",
        hint="without it this machine cannot prove that it is no copy: move the home away and pair again",
    )
