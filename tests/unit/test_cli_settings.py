"""Where the controller and the key to it are found, and who never gets to see that key."""

import json
from pathlib import Path

import pytest

from fleetward.cli.settings import DEFAULT_URL, Given, settle
from fleetward.domain.errors import HomeUnusable


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "controller.json").write_text(
        json.dumps({"url": "http://127.0.0.1:7411", "pin": "PIN", "pid": 1, "version": "0", "local_node": True})
    )
    (tmp_path / "token").write_text("fwt_home\n")
    return tmp_path


def test_this_machines_controller_is_the_default(home: Path) -> None:
    settings = settle(Given(home=home, environment={}))
    assert (settings.url, settings.token, settings.pin) == ("http://127.0.0.1:7411", "fwt_home", "PIN")


def test_without_a_controller_here_the_usual_address_is_tried(tmp_path: Path) -> None:
    settings = settle(Given(home=tmp_path, environment={}))
    assert (settings.url, settings.token, settings.pin) == (DEFAULT_URL, "", "")


def test_a_flag_comes_before_the_environment_and_that_before_the_home(home: Path) -> None:
    environment = {"FLEETWARD_URL": "http://b:1", "FLEETWARD_TOKEN": "from-environment", "FLEETWARD_HOME": str(home)}
    assert settle(Given(environment=environment)).url == "http://b:1"
    assert settle(Given(environment=environment)).token == "from-environment"
    given = Given(url="http://a:1", token="from-flag", environment=environment)
    assert (settle(given).url, settle(given).token) == ("http://a:1", "from-flag")


@pytest.mark.parametrize("url", ["http://localhost:7411", "http://127.0.0.1:7411/", "http://[::1]:7411"])
def test_the_homes_key_is_used_for_the_same_controller_however_it_is_written(home: Path, url: str) -> None:
    assert settle(Given(home=home, url=url, environment={})).token == "fwt_home"


@pytest.mark.parametrize("url", ["http://fleet.example.org:7411", "http://127.0.0.1:7412", "https://127.0.0.1:7411"])
def test_the_homes_key_never_goes_to_another_controller(home: Path, url: str) -> None:
    settings = settle(Given(home=home, url=url, environment={}))
    assert (settings.token, settings.pin) == ("", "")


def test_a_damaged_controller_file_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "controller.json").write_text("{")
    with pytest.raises(HomeUnusable, match=r"controller\.json cannot be read") as caught:
        settle(Given(home=tmp_path, environment={}))
    assert "fleetward up" in caught.value.hint
