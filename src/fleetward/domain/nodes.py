"""Machines: what a node says it is, what it may be called, and how long its silence is believed.

Owns the node's vocabulary and the arithmetic of beats, leases and silence. Refuses to know jobs, the
database and the clock.
"""

import re
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from fleetward.domain.errors import MalformedRequest, quoted

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")

BEAT_MIN = timedelta(seconds=10)
BEAT_RATE_TARGET = 500  # syncs a second that one controller core carries with room to spare
SILENCE_MIN = timedelta(seconds=40)  # a little over three of the shortest beats and one reply lost
LEASE_MIN = timedelta(seconds=90)
GRACE = timedelta(seconds=15)  # what the controller adds for a reply in flight before it ends a lease


class NodeStatus(StrEnum):
    """Where a node stands; the moves between them are in `lifecycle.NODE`."""

    PROVISIONING = "provisioning"
    ONLINE = "online"
    DRAINING = "draining"
    OFFLINE = "offline"
    RETIRED = "retired"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The beat of a fleet and the deadlines that follow from it."""

    beat: timedelta
    silence: timedelta
    lease: timedelta
    grace: timedelta


def rhythm(*, node_count: int, scale: float = 1.0) -> Rhythm:
    """The beat grows with the fleet so that one controller's load does not; `scale` shortens all for trials."""
    beat = max(BEAT_MIN, timedelta(seconds=node_count / BEAT_RATE_TARGET)) * scale
    silence = max(SILENCE_MIN * scale, 3 * beat)
    lease = max(LEASE_MIN * scale, 2 * silence + beat)
    return Rhythm(beat=beat, silence=silence, lease=lease, grace=GRACE * scale)


class Inventory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine has, told at the start of each session."""

    cpus_milli: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    memory_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    disk_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    os: str
    arch: str
    agent_version: str
    boot_id: str
    sandbox: dict[str, object] = field(default_factory=dict[str, object])


class Load(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How busy a machine is, told in each beat; a measurement."""

    cpu_percent: float = 0.0
    memory_free_bytes: int = 0
    disk_free_bytes: int = 0


def name_from_mac(mac: str) -> str:
    """The name of the machine with that interface: `node-` and the twelve hex digits of its address."""
    if not MAC.fullmatch(mac):
        raise MalformedRequest(f"{quoted(mac)} is no hardware address: six lowercase hex pairs with colons")
    return "node-" + mac.replace(":", "")


def check_name(name: str) -> str:
    """Refuse a node name that could not be typed, logged or used as a folder."""
    if not NAME.fullmatch(name):
        raise MalformedRequest(
            f"{quoted(name)} is no node name: lowercase letters, digits and inner hyphens, at most 63",
            field="name",
        )
    return name
