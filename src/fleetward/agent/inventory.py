"""What this machine has and how busy it is.

Owns the reading of cores, memory, disk and the hardware address, as far as this process may use them.
Refuses to know what any of it is used for.
"""

import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from fleetward.agent import attempt
from fleetward.domain.nodes import MAC, Inventory, Load
from fleetward.wire.versions import VERSION

_NET: Final = Path("/sys/class/net")
_NO_MAC: Final = "00:00:00:00:00:00"
_CGROUP: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 2**60  # what version 1 of cgroups writes where there is no limit is a little below 2**63
# Made by software on the machine itself; where /sys does not say so, the name has to.
_MADE_UP: Final = re.compile(
    r"(lo|docker|br-|virbr|veth|tun|tap|wg|tailscale|zt|cni|flannel|vxlan|dummy|ifb|bond|team)\w*.*"
)


def inventory(home: Path, *, sandbox: dict[str, object]) -> Inventory:
    """Say what this machine has, as far as the agent may use it."""
    return Inventory(
        cpus_milli=cpus_milli(),
        memory_bytes=memory_bytes(),
        disk_bytes=shutil.disk_usage(home).total,
        os=f"{platform.system()} {platform.release()}",
        arch=platform.machine(),
        agent_version=VERSION,
        boot_id=attempt.boot_id(),
        sandbox=sandbox,
    )


def cpus_milli() -> int:
    """Thousandths of a core that this process may use: those it may run on, or less where a quota says so."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _cpu_quota()
    return usable * 1000 if quota is None else max(1, min(usable * 1000, quota))


def _cpu_quota() -> int | None:
    words = _read(_CGROUP / "cpu.max").split()
    if not words:
        words = [_read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) * 1000 // int(words[1])


def memory_bytes() -> int:
    """Bytes of memory, or less where this container may have less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read(_CGROUP / "memory.max"), _read(_CGROUP / "memory/memory.limit_in_bytes")]
    return min([total, *(int(text) for text in limits if text.isdecimal() and 0 < int(text) < _UNLIMITED)])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class LoadMeter:
    """Measures how busy the machine was between two readings."""

    def __init__(self) -> None:
        self._before = _cpu_ticks()

    def read(self, home: Path) -> Load:
        """Say how busy the machine is; the share of its cores is since the last reading."""
        now, before = _cpu_ticks(), self._before
        self._before = now
        passed = now[1] - before[1]
        busy = 100.0 * (now[0] - before[0]) / passed if passed > 0 else 0.0
        return Load(
            cpu_percent=round(min(100.0, max(0.0, busy)), 1),
            memory_free_bytes=_memory_free_bytes(),
            disk_free_bytes=shutil.disk_usage(home).free,
        )


def _memory_free_bytes() -> int:
    """What can be had without swapping; where the system does not say, nothing is promised."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_ticks() -> tuple[int, int]:
    """Ticks of all cores since boot: the busy ones, and all."""
    fields = [int(word) for word in _read(Path("/proc/stat")).partition("\n")[0].split()[1:9]]
    # Of user, nice, system, idle, iowait, irq, softirq, steal the fourth and fifth are idle.
    return sum(fields) - sum(fields[3:5]), sum(fields)


# The hardware address


def mac_address(net: Path = _NET) -> str | None:
    """Choose the address that names this machine: a real interface's, the same after each start; None without one."""
    interfaces = sorted(net.iterdir()) if net.is_dir() else []
    candidates = [
        (_rank(path), str((path / "device").resolve()), mac) for path in interfaces if (mac := _mac(path)) is not None
    ]
    return min(candidates)[2] if candidates else None


def _mac(path: Path) -> str | None:
    mac = _permanent(path)
    is_ethernet_or_wifi = _read(path / "type") == "1"
    # Without a device behind it an interface is made up: bridges, tunnels, the ends of containers' cables.
    is_real = (path / "device").exists() or (path / "device").is_symlink()
    is_plain = is_real and not _MADE_UP.fullmatch(path.name) and is_ethernet_or_wifi
    return mac if is_plain and MAC.fullmatch(mac) and mac != _NO_MAC and not int(mac[:2], 16) & 1 else None


def _permanent(path: Path) -> str:
    """A bonded interface shows its bond's address; its own is kept beside."""
    own = _read(path / "bonding_slave/perm_hwaddr")
    return (own or _read(path / "address")).lower()


def _rank(path: Path) -> tuple[int, int, int]:
    """Order: addresses given by a maker first, then what is no plug-in device, then cable before radio."""
    is_local = int(_permanent(path)[:2] or "0", 16) >> 1 & 1
    is_usb = int("/usb" in str((path / "device").resolve()))
    is_radio = int((path / "wireless").exists() or (path / "phy80211").exists())
    return is_local, is_usb, is_radio
