"""A controller as a process: how it starts, refuses to start, shares a database, and stops."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import Api, Node, clock
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import fleetward
from fleetward.controller import config, database
from fleetward.controller.home import Announcement
from fleetward.controller.keyring import Keyring
from fleetward.wire.handshake import pin_of

SERVE = [sys.executable, "-m", "fleetward.controller", "serve", "--listen", "127.0.0.1:0"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fleetward.__file__).parents[1])}
STOP_SECONDS = 3.0
"""What a stop may take, with any number of calls held."""


def other_home(home: Path, name: str) -> Path:
    """A home beside the first, with the same keyring."""
    made = home.with_name(f"{home.name}-{name}")
    made.mkdir(mode=0o711)
    shutil.copytree(home / "keyring", made / "keyring")
    return made


@contextmanager
def process(home: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Announcement]]:
    """A controller as a process of its own, from ready to ended."""
    (home / "controller.json").unlink(missing_ok=True)
    with subprocess.Popen(
        [*SERVE, "--home", str(home), *flags], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as child:
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if "answers at" in line:
                    break
            yield child, json_announcement(home)
        finally:
            child.kill()


def json_announcement(home: Path) -> Announcement:
    return Announcement(**json.loads((home / "controller.json").read_text()))


def stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0


def refused(home: Path, *flags: str, timeout: float = 60) -> tuple[int, str]:
    ended = subprocess.run(
        [*SERVE, "--home", str(home), *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        timeout=timeout,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.fixture
def second(api: Api, home: Path, settled: config.Config) -> Iterator[tuple[Path, str]]:
    """A second home with the same keyring, and the service's URL of the database."""
    assert api.url
    made = other_home(home, "second")
    try:
        yield made, database.url(settled, role="app")
    finally:
        shutil.rmtree(made)


def test_a_home_is_held_by_one_controller(api: Api, home: Path) -> None:
    status, said = refused(home)
    assert status == 3
    assert f"another controller already runs on {home} (process {os.getpid()})" in said
    assert "hint: stop it with `fleetward down`" in said
    assert api.ask("GET", "/readyz").status == 200


def test_a_port_that_is_taken_is_said_in_one_line(api: Api, second: tuple[Path, str]) -> None:
    status, said = refused(second[0], "--database-url", second[1], "--listen", api.url.removeprefix("http://"))
    assert status == 3
    assert "setting listen cannot be" in said
    assert "another program listens there" in said
    assert "Traceback" not in said


def test_another_keyring_is_refused(second: tuple[Path, str]) -> None:
    home, url = second
    shutil.rmtree(home / "keyring")
    status, said = refused(home, "--database-url", url)
    assert status == 3
    assert "the keyring of this home is" in said
    assert Keyring.open(home / "keyring").fingerprint() in said


def test_a_second_controller_with_artifacts_in_a_folder_of_its_own_is_refused(second: tuple[Path, str]) -> None:
    status, said = refused(second[0], "--database-url", second[1])
    assert status == 3
    assert "artifacts lie in a local folder that only one may use" in said


def test_a_role_that_could_undo_the_rules_is_refused(settled: config.Config, second: tuple[Path, str]) -> None:
    status, said = refused(second[0], "--database-url", database.url(settled, role="owner"))
    assert status == 3
    assert "may switch triggers off" in said


def test_a_database_that_does_not_answer_is_a_fault(second: tuple[Path, str]) -> None:
    status, said = refused(second[0], "--database-url", "postgresql://fleetward_app@127.0.0.1:1/fleetward")
    assert status == 4
    assert "Traceback" not in said


def test_a_setting_that_cannot_be_is_told_before_anything_is_touched(home: Path) -> None:
    missing = home.with_name(f"{home.name}-missing")
    status, said = refused(missing, "--pool-max", "0")
    assert status == 3
    assert said.startswith("fleetward: setting pool_max cannot be '0'")
    assert not missing.exists()


def test_a_stop_takes_no_longer_than_promised_with_fifty_calls_held(fresh: Path) -> None:
    with process(fresh) as (child, announced), ThreadPoolExecutor(60) as pool:
        api = Api(announced.url, (fresh / "token").read_text().strip(), "", str)
        nodes = list(pool.map(lambda number: Node(api, f"n{number}"), range(20)))
        submitted = api.ask(
            "POST", "/api/v1/jobs", credential=api.owner, body=b'{"command": ["x"], "labels": {"a": "b"}}',
            content_type="application/json",
        )  # fmt: skip
        path = f"/api/v1/jobs/{json.loads(submitted.content)['id']}/events"
        after = json.loads(api.ask("GET", path + "?wait_seconds=5", credential=api.owner).content)["next"]
        for node in nodes:
            node.sync()
        held = [pool.submit(node.sync, wait_seconds=60) for node in nodes]
        held += [
            pool.submit(api.ask, "GET", f"{path}?wait_seconds=60&after={after}", credential=api.owner)
            for _ in range(30)
        ]
        assert api.ask("GET", "/readyz").status == 200
        began = clock()
        stop(child)
        assert clock() - began < STOP_SECONDS
        for answer in held:
            assert answer.exception() is None, "a held call is answered before the stop"
        assert not (fresh / "controller.json").exists()


def test_a_killed_controller_starts_again_on_what_it_left(fresh: Path) -> None:
    with process(fresh) as (child, _):
        key = (fresh / "token").read_text()
        child.kill()
        child.wait()
    with process(fresh) as (child, announced):
        assert (fresh / "token").read_text() == key
        assert (
            Api(announced.url, key.strip(), "", str).ask("GET", "/api/v1/whoami", credential=key.strip()).status == 200
        )
        stop(child)


def test_a_database_that_is_killed_comes_back_by_itself(fresh: Path) -> None:
    with process(fresh) as (child, announced):
        pids = [int(path.read_text().split()[0]) for path in fresh.glob("pg/postmaster.pid")]
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)
        api = Api(announced.url, (fresh / "token").read_text().strip(), "", str)
        assert child.stderr is not None
        for line in child.stderr:
            if "is started again" in line:
                break
        answers = (api.ask("GET", "/readyz").status for _ in range(10_000))
        assert 200 in answers
        stop(child)


def test_a_key_that_proves_nobody_is_replaced_at_the_start(fresh: Path) -> None:
    (fresh / "token").write_text("fwt_nobody\n")
    with process(fresh) as (child, announced):
        key = (fresh / "token").read_text().strip()
        assert Api(announced.url, key, "", str).ask("GET", "/api/v1/whoami", credential=key).status == 200
        stop(child)


def test_over_tls_the_served_key_is_the_announced_pin(fresh: Path) -> None:
    with process(fresh, "--tls", "always") as (child, announced):
        assert announced.url.startswith("https://127.0.0.1:")
        port = int(announced.url.rpartition(":")[2])
        pem = ssl.get_server_certificate(("127.0.0.1", port))
        public_key = x509.load_pem_x509_certificate(pem.encode()).public_key()
        assert pin_of(public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)) == announced.pin
        trusting = ssl.create_default_context(cadata=pem)
        with urllib.request.urlopen(f"{announced.url}/readyz", context=trusting, timeout=30) as answer:
            assert answer.status == 200
        stop(child)


def test_two_controllers_share_one_database_and_wake_each_other(fresh: Path) -> None:
    shared = ["--artifacts-url", f"file://{fresh}/shared"]
    with process(fresh, *shared) as (first, one):
        settled = config.load({"home": str(fresh)}, environment={}, user_id=os.geteuid())
        made = other_home(fresh, "beside")
        try:
            with process(made, *shared, "--database-url", database.url(settled, role="app")) as (second, two):
                key = (fresh / "token").read_text().strip()
                here, there = Api(one.url, key, "", str), Api(two.url, key, "", str)
                status = json.loads(there.ask("GET", "/api/v1/status", credential=key).content)
                assert status["controllers"] == 2
                node = Node(there, "there")
                node.sync()
                with ThreadPoolExecutor(1) as pool:
                    held = pool.submit(node.sync, wait_seconds=50)
                    began = clock()
                    body = b'{"command": ["true"]}'
                    answer = here.ask(
                        "POST", "/api/v1/jobs", credential=key, body=body, content_type="application/json"
                    )
                    assert answer.status == 200
                    held.result()
                    assert clock() - began < 10, "the hint went over to the other controller"
                assert len(node.sync().assignments) == 1
                node.close()
                stop(second)
        finally:
            shutil.rmtree(made)
        stop(first)
