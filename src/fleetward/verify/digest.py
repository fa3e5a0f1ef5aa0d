"""SHA-256, as a type: holding a `Digest` proves that its form was checked.

Owns parsing and hashing of bytes that are handed in. Refuses to know where bytes come from.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self, final

from fleetward.domain.errors import MalformedDigest, quoted

HEAD_BYTES: Final = 512  # enough to recognise a media type by its first bytes

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A SHA-256 that has been checked."""

    hex: str

    def __post_init__(self) -> None:
        assert _SHA256_HEX.fullmatch(self.hex), "text from outside goes through Digest.parse"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a digest from text, or refuse it."""
        if not _SHA256_HEX.fullmatch(text):
            raise MalformedDigest(f"{quoted(text)} is no SHA-256", hint="give 64 lowercase hex digits")
        return cls(text)

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Hash bytes that are at hand."""
        return cls(hashlib.sha256(content).hexdigest())

    @property
    def raw(self) -> bytes:
        """The 32 bytes."""
        return bytes.fromhex(self.hex)


@dataclass(frozen=True, slots=True)
class Measured:
    """What bytes turned out to be when we looked ourselves; `head` is the first of them."""

    digest: Digest
    size_bytes: int
    head: bytes


@final
class Hasher:
    """Hashes and counts bytes as they pass by."""

    __slots__ = ("_hash", "_head", "size_bytes")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._head = b""
        self.size_bytes = 0

    def update(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take the next bytes."""
        self._hash.update(chunk)
        if len(self._head) < HEAD_BYTES:
            self._head += bytes(chunk[: HEAD_BYTES - len(self._head)])
        self.size_bytes += len(chunk)

    def measured(self) -> Measured:
        """Say what has passed so far."""
        return Measured(digest=Digest(self._hash.hexdigest()), size_bytes=self.size_bytes, head=self._head)


def measure(chunks: Iterable[bytes]) -> Measured:
    """Hash and count a stream, one chunk in memory at a time."""
    hasher = Hasher()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.measured()
