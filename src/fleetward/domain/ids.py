"""Identity: the ids of things and how a new one is made.

Owns the distinct id types and UUIDv7. Refuses to know a clock or a source of chance: both are passed in.
"""

from datetime import datetime
from typing import NewType
from uuid import UUID

NodeId = NewType("NodeId", UUID)
JobId = NewType("JobId", UUID)
AssignmentId = NewType("AssignmentId", UUID)
ArtifactId = NewType("ArtifactId", UUID)
PairingCodeId = NewType("PairingCodeId", UUID)
UserId = NewType("UserId", UUID)
ApiKeyId = NewType("ApiKeyId", UUID)

ENTROPY_BYTES = 10  # 74 random bits of a UUIDv7, rounded up to whole bytes


def uuid7(*, now: datetime, entropy: bytes) -> UUID:
    """Make a UUIDv7 (RFC 9562): milliseconds of `now`, then chance. Ordered by time, so indexes stay dense."""
    assert len(entropy) == ENTROPY_BYTES, "a UUIDv7 takes ten bytes of chance"
    milliseconds = int(now.timestamp() * 1000)
    chance = int.from_bytes(entropy)
    value = (milliseconds & (2**48 - 1)) << 80
    value |= 0x7 << 76
    value |= (chance >> 62 & 0xFFF) << 64
    value |= 0b10 << 62
    value |= chance & (2**62 - 1)
    return UUID(int=value)
