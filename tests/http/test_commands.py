"""The controller's other commands: what they print, and how they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from asking import Api

import fleetward
from fleetward.controller import embedded
from fleetward.controller.config import SETTINGS

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fleetward.__file__).parents[1])}


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleetward.controller", *arguments, "--home", str(home)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("role", "login"), [("app", "fleetward_app"), ("owner", "fleetward_admin"), ("ro", "fleetward_ro")]
)
def test_a_roles_url_is_one_that_it_can_log_in_with(api: Api, home: Path, role: str, login: str) -> None:
    assert api.url
    printed = run("db-url", "--role", role, home=home)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("postgresql://")
    with psycopg.connect(printed.stdout.strip()) as connection:
        assert connection.execute("SELECT current_user").fetchone() == (login,)


def test_an_unknown_role_is_refused_with_those_that_there_are(home: Path) -> None:
    refused = run("db-url", "--role", "king", home=home)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "'king' is no role of the database: app, migrate, seal, ro, owner" in refused.stderr


def test_without_a_running_database_there_is_no_url(tmp_path: Path) -> None:
    refused = run("db-url", home=tmp_path)
    assert refused.returncode == 4
    assert "hint: start the controller" in refused.stderr


def test_making_roles_and_database_again_changes_nothing(api: Api, home: Path, tmp_path: Path) -> None:
    assert api.url
    admin = embedded.running_url(home)
    assert admin is not None
    first, again = (run("db-init", "--admin-url", admin, home=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("postgresql://fleetward_app:")
    assert again.stdout == first.stdout
    assert run("db-migrate", "--admin-url", admin, home=tmp_path).stdout == ""
    assert api.ask("GET", "/readyz").status == 200


def test_a_database_of_ones_own_is_migrated_by_a_role_that_may(tmp_path: Path) -> None:
    refused = run("db-migrate", "--database-url", "postgresql://x@127.0.0.1:1/x", home=tmp_path)
    assert refused.returncode == 3
    assert "--admin-url" in refused.stderr


def test_the_settings_are_shown_as_json_and_as_lines(tmp_path: Path) -> None:
    shown = json.loads(run("config-show", "--json", "--pool-max", "20", home=tmp_path).stdout)
    assert [line["name"] for line in shown] == [setting.name for setting in SETTINGS]
    by_name = {line["name"]: line for line in shown}
    assert (by_name["pool_max"]["value"], by_name["pool_max"]["source"]) == ("20", "flag")
    assert "pool_max" in run("config-show", home=tmp_path).stdout


def test_a_command_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    assert run("rule", home=tmp_path).returncode == 2
