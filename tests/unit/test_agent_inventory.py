"""The machine's own account of itself, on this machine and on made-up ones."""

from pathlib import Path

import pytest

from fleetward.agent import inventory as machine
from fleetward.agent.inventory import LoadMeter, inventory, mac_address


def interface(
    net: Path, name: str, mac: str, *, device: str | None = None, kind: str = "1", radio: bool = False
) -> None:
    folder = net / name
    folder.mkdir(parents=True)
    (folder / "address").write_text(mac + "\n")
    (folder / "type").write_text(kind + "\n")
    if radio:
        (folder / "wireless").mkdir()
    if device is not None:
        target = net.parent / "devices" / device
        target.mkdir(parents=True, exist_ok=True)
        (folder / "device").symlink_to(target)


def test_the_inventory_tells_what_this_process_may_use(tmp_path: Path) -> None:
    told = inventory(tmp_path, sandbox={"sandbox": "none"})
    assert 0 < told.cpus_milli
    assert 2**24 < told.memory_bytes
    assert 0 < told.disk_bytes
    assert told.boot_id
    assert told.arch
    assert {"sandbox": "none"} == told.sandbox


def test_load_stays_within_its_bounds(tmp_path: Path) -> None:
    load = LoadMeter().read(tmp_path)
    assert 0 <= load.cpu_percent <= 100
    assert 0 < load.memory_free_bytes
    assert 0 < load.disk_free_bytes


@pytest.mark.parametrize(
    ("files", "milli"),
    [
        ({"cpu.max": "150000 100000"}, 1500),
        ({"cpu.max": "max 100000"}, 4000),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 500),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4000),
        ({"cpu.max": "900000 100000"}, 4000),
        ({}, 4000),
    ],
)
def test_a_quota_makes_cores_fewer_and_never_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], milli: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)

    def four(_: int) -> set[int]:
        return {0, 1, 2, 3}

    monkeypatch.setattr("os.sched_getaffinity", four)
    assert milli == machine.cpus_milli()


def test_the_makers_address_on_a_cable_comes_first_in_whatever_order_they_are_found(tmp_path: Path) -> None:
    net = tmp_path / "net"
    interface(net, "lo", "00:00:00:00:00:00", kind="772")
    interface(net, "docker0", "02:42:00:00:00:01")
    interface(net, "br-1234", "00:11:22:33:44:01")
    interface(net, "veth12", "00:11:22:33:44:02")
    interface(net, "wg0", "", kind="65534")
    interface(net, "wlp3s0", "00:11:22:33:44:03", device="pci0/wifi", radio=True)
    interface(net, "enx1", "00:11:22:33:44:04", device="pci0/usb1/cdc")
    interface(net, "ens5", "02:11:22:33:44:05", device="pci0/virtio")
    interface(net, "enp9s0", "00:11:22:33:44:06", device="pci0/eth1")
    interface(net, "enp2s0", "00:11:22:33:44:07", device="pci0/eth0")
    assert "00:11:22:33:44:07" == mac_address(net)


def test_an_address_given_on_the_machine_itself_serves_where_there_is_no_other(tmp_path: Path) -> None:
    net = tmp_path / "net"
    interface(net, "docker0", "02:42:00:00:00:01")
    interface(net, "eth0", "02:FC:00:00:00:01", device="virtio0")
    assert "02:fc:00:00:00:01" == mac_address(net)


def test_a_machine_without_a_real_interface_has_no_address(tmp_path: Path) -> None:
    net = tmp_path / "net"
    assert mac_address(net) is None
    interface(net, "lo", "00:00:00:00:00:00", kind="772")
    interface(net, "eth0", "02:42:ac:11:00:02")
    interface(net, "ib0", "00:11:22:33:44:08", device="pci0/infiniband", kind="32")
    assert mac_address(net) is None
