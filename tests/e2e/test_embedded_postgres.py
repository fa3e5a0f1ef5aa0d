"""The embedded PostgreSQL with real processes: made, killed on either side, found again, refused with a reason."""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from embedded_world import World, ask, eventually, make_template, serving

from fleetward.controller.embedded import EmbeddedPostgres, running_url
from fleetward.controller.postmaster import PID_FILE, PidFile, backends_of, is_alive, is_server_of, wait_for_end
from fleetward.domain.errors import ClusterVersion, HomeLocked, HomeUnusable


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


def test_a_first_start_gives_a_database_that_only_this_user_reaches(world: World) -> None:
    server = world.durable_server(world.empty_home())
    url = server.start()

    assert ask(url, "SELECT current_setting('data_checksums')") == "on"
    assert ask(url, "SELECT current_setting('fsync')") == "on"
    assert ask(url, "SELECT current_setting('listen_addresses')") == ""
    assert ask(url, "SELECT string_agg(DISTINCT auth_method, ' ') FROM pg_hba_file_rules") == "peer scram-sha-256"
    assert ask(url, "SELECT count(*) FROM pg_hba_file_rules WHERE error IS NOT NULL") == 0
    assert ask(url, "SELECT count(*) FROM pg_ident_file_mappings WHERE error IS NOT NULL") == 0
    assert ask(url, "SELECT count(*) FROM pg_authid WHERE rolpassword IS NOT NULL") == 0
    place = server.place
    assert (mode(place.data), mode(place.socket_folder)) == (0o700, 0o700)
    assert place.data.stat().st_uid == serving().uid
    assert list(place.folder.glob("pg.new-*")) == []

    pid = server.pid
    server.stop()
    assert not is_alive(pid)
    assert not server.running
    assert not (place.data / PID_FILE).exists()


def test_a_role_without_a_password_is_refused_unless_it_is_one_of_ours(world: World) -> None:
    server = world.server(world.home())
    url = server.start()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE fleetward_app LOGIN")
        connection.execute("CREATE ROLE stranger LOGIN")

    assert ask(server.url(role="fleetward_app"), "SELECT current_user") == "fleetward_app"
    with pytest.raises(psycopg.OperationalError, match="no password supplied"):
        ask(server.url(role="stranger"), "SELECT 1")


def test_what_was_written_is_there_at_the_next_start_at_the_same_url(world: World) -> None:
    home = world.home()
    with EmbeddedPostgres(home) as server:
        first = server.url()
        with psycopg.connect(first) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")

    with EmbeddedPostgres(home) as server:
        assert server.url() == first
        assert server.start() == first
        assert ask(first, "SELECT answer FROM kept") == 42


def test_the_next_controller_adopts_the_server_of_a_killed_one(world: World) -> None:
    home = world.home()
    killed = world.controller(home)
    said = killed.hear()
    killed.kill()
    assert is_alive(int(said["server"]))
    assert running_url(home) == said["url"]

    server = world.server(home)
    assert server.start() == said["url"]
    assert server.pid == int(said["server"])
    assert ask(said["url"], "SELECT 1") == 1
    server.stop()
    assert not is_server_of(int(said["server"]), home / "pg", uid=serving().uid)
    assert running_url(home) is None


def test_a_killed_server_is_seen_and_started_again_over_its_stale_pid_file(world: World) -> None:
    home = world.home()
    server = world.server(home)
    url = server.start()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    killed = server.pid
    os.kill(killed, signal.SIGKILL)
    wait_for_end(killed, seconds=30)
    assert not server.running
    assert (home / "pg" / PID_FILE).exists()

    assert server.start() == url
    assert server.pid != killed
    assert ask(url, "SELECT answer FROM kept") == 42


def test_a_start_waits_for_the_busy_backend_of_a_killed_server(world: World) -> None:
    home = world.home()
    server = world.server(home)
    url = server.start()
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        busy = connection.info.backend_pid
        # Sent and not awaited: it computes, so it does not notice that its server is gone.
        connection.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 100000000000)")
        eventually(
            lambda: (
                ask(url, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%1000000000%' AND state = 'active'")
                == 2
            ),
            why="the query runs",
        )
        os.kill(server.pid, signal.SIGKILL)
        wait_for_end(server.pid, seconds=30)
        assert busy in backends_of(home / "pg", uid=serving().uid)

        assert server.start() == url
        assert not is_alive(busy)
    assert ask(url, "SELECT 1") == 1


def test_a_pid_that_another_process_of_the_user_has_now_does_not_stop_a_start(world: World) -> None:
    home = world.home()
    server = world.server(home)
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    wait_for_end(server.pid, seconds=30)
    pid_file = home / "pg" / PID_FILE

    reading, writing = os.pipe()
    with os.fdopen(writing, "wb"), subprocess.Popen(
        ["cat"], stdin=reading, user=serving().uid if os.geteuid() == 0 else None
    ) as other:  # fmt: skip
        os.close(reading)
        stale = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(other.pid), *stale[1:]]) + "\n")
        try:
            server.start()
            found = PidFile.read(home / "pg")
            assert found is not None
            assert found.pid == server.pid
            assert other.poll() is None
        finally:
            other.kill()


def test_an_empty_pid_file_is_left_alone_and_explained(world: World) -> None:
    home = world.home()
    pid_file = home / "pg" / PID_FILE
    pid_file.touch()
    shutil.chown(pid_file, serving().uid)
    with pytest.raises(HomeUnusable, match=r"postmaster\.pid is empty"):
        world.server(home).start()
    assert pid_file.exists()


def test_a_first_start_that_was_killed_half_way_starts_over(world: World) -> None:
    home = world.empty_home()
    killed = world.controller(home)
    eventually(lambda: any(home.glob("pg.new-*/base/1/*")), why="initdb is at work")
    killed.kill()
    assert not (home / "pg").exists()

    server = world.server(home)
    assert ask(server.start(), "SELECT 1") == 1
    # The orphaned initdb ends by itself once its files are gone; what it may still have made goes with the next start.
    assert not any(home.glob("pg.new-*/PG_VERSION"))


def test_a_second_controller_on_a_home_is_told_which_process_has_it(world: World) -> None:
    home = world.home()
    first = world.controller(home)
    said = first.hear()

    with pytest.raises(HomeLocked, match=rf"{home} is in use by another controller, process {said['controller']}"):
        world.server(home).start()
    assert ask(said["url"], "SELECT 1") == 1
    assert first.end() == 0
    world.server(home).start()


def test_a_data_folder_of_another_version_is_named_and_left_alone(world: World) -> None:
    home = world.home()
    (home / "pg" / "PG_VERSION").write_text("17\n")
    before = (home / "postgres.log").read_bytes()
    with pytest.raises(ClusterVersion, match="was written by PostgreSQL 17, and the programs here are 18") as refused:
        world.server(home).start()
    assert "fleetward db backup" in refused.value.hint
    assert (home / "postgres.log").read_bytes() == before


def test_a_folder_that_is_no_data_folder_is_left_alone(world: World) -> None:
    home = world.empty_home()
    (home / "pg").mkdir(parents=True)
    (home / "pg" / "mine.txt").write_text("x")
    shutil.chown(home / "pg", serving().uid)
    with pytest.raises(HomeUnusable, match="it has no PG_VERSION"):
        world.server(home).start()
    assert (home / "pg" / "mine.txt").read_text() == "x"


def test_a_home_that_is_a_file_is_refused(world: World) -> None:
    file = world.folder() / "file"
    file.touch()
    with pytest.raises(HomeUnusable, match="cannot be used: file exists"):
        world.server(file).start()


def test_an_odd_or_long_name_of_a_home_does_no_harm(world: World) -> None:
    home = world.home()
    for name in ("a b", "it's", 'a"b', "a,b", "ä\\n%41", "n" * 100):
        moved = world.empty_home(name)
        home = home.rename(moved)
        server = world.server(home)
        url = server.start()
        assert ask(url, "SELECT current_setting('data_directory')") == str(home / "pg")
        sockets = server.place.socket_folder
        assert len(os.fsencode(sockets / ".s.PGSQL.5432")) <= 107
        server.stop()
        sockets.rmdir()


def test_a_home_with_a_line_break_in_its_name_is_refused(world: World) -> None:
    home = world.empty_home("a\nb")
    with pytest.raises(HomeUnusable, match="control character"):
        world.server(home).start()
    assert not home.exists()


def test_a_server_idles_on_little_memory_of_its_own(world: World) -> None:
    server = world.server(world.home())
    server.start()
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    own = 0
    for pid in [str(server.pid), *children]:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        own += int(fields["Pss"].split()[0])
    assert own < 25_000, "kB"
