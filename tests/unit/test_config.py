"""Settings: where each comes from, what it may be, and what is refused."""

from pathlib import Path

import pytest

from fleetward.controller import config
from fleetward.controller.config import SETTINGS, Listen, Source
from fleetward.domain.errors import InvalidSetting


def load(home: Path, flags: dict[str, str] | None = None, **environment: str) -> config.Config:
    return config.load({"home": str(home), **(flags or {})}, environment=environment, user_id=1000)


def test_every_setting_has_a_default_that_it_accepts_and_a_line_that_documents_it(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    shown = {line.name: line for line in config.show(loaded)}
    assert list(shown) == [setting.name for setting in SETTINGS]
    assert all(line.doc and line.doc == line.doc.strip() for line in shown.values())
    assert {line.source for name, line in shown.items() if name != "home"} == {Source.DEFAULT}


def test_a_flag_wins_over_the_environment_and_that_over_the_file_and_that_over_the_default(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("pool_max = 40\nstream_max = 41\nsync_batch_max = 42\n")
    loaded = load(
        tmp_path, {"pool_max": "20"}, FLEETWARD_POOL_MAX="30", FLEETWARD_STREAM_MAX="31", FLEETWARD_URL="not ours"
    )
    found = (loaded.pool_max, loaded.stream_max, loaded.sync_batch_max, loaded.verify_batch_max)
    assert found == (20, 31, 42, 100)
    names = ("pool_max", "stream_max", "sync_batch_max", "verify_batch_max")
    assert [loaded.sources[name] for name in names] == [
        Source.FLAG,
        Source.ENVIRONMENT,
        Source.FILE,
        Source.DEFAULT,
    ]


@pytest.mark.parametrize(
    ("user_id", "expected"), [(0, Path("/var/lib/fleetward")), (1000, Path("~/.fleetward").expanduser())]
)
def test_the_home_of_root_is_elsewhere(user_id: int, expected: Path) -> None:
    assert config.load({}, environment={}, user_id=user_id).home == expected


REFUSED = [
    ("listen", "7400"),
    ("listen", "127.0.0.1:65536"),
    ("listen", "127.0.0.1:-1"),
    ("listen", "http://127.0.0.1:7400"),
    ("public_url", "ftp://example.org"),
    ("public_url", "https://"),
    ("database_url", "mysql://x"),
    ("tls", "never"),
    ("insecure_http", "perhaps"),
    ("time_scale", "0"),
    ("time_scale", "11"),
    ("time_scale", "nan"),
    ("pool_max", "5"),
    ("pool_max", "257"),
    ("pool_max", "1e3"),
    ("pool_max", ""),
    ("blob_reserve_bytes", "-1"),
    ("log_level", "loud"),
    ("home", ""),
]


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_a_value_that_cannot_be_is_refused_by_the_settings_name(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path, {name: text})
    assert caught.value.field == name
    assert name in caught.value.message
    assert "it must be" in caught.value.message


@pytest.mark.parametrize(
    ("listen", "expected", "is_loopback"),
    [
        ("127.0.0.1:7400", Listen("127.0.0.1", 7400), True),
        ("localhost:0", Listen("localhost", 0), True),
        ("[::1]:1", Listen("::1", 1), True),
        ("0.0.0.0:65535", Listen("0.0.0.0", 65535), False),
        ("[2001:db8::1]:7400", Listen("2001:db8::1", 7400), False),
        ("controller.lan:7400", Listen("controller.lan", 7400), False),
    ],
)
def test_only_this_machines_own_addresses_are_loopback(
    tmp_path: Path, listen: str, expected: Listen, *, is_loopback: bool
) -> None:
    found = load(tmp_path, {"listen": listen}).listen
    assert (found, found.is_loopback, found.text) == (expected, is_loopback, listen)


@pytest.mark.parametrize(
    ("flags", "speaks_tls"),
    [
        ({}, False),
        ({"tls": "always"}, True),
        ({"listen": "0.0.0.0:7400"}, True),
        ({"listen": "0.0.0.0:7400", "insecure_http": "true"}, False),
        ({"tls_cert": "/c.pem", "tls_key": "/k.pem"}, True),
    ],
)
def test_beyond_loopback_the_controller_speaks_tls_unless_told_not_to(
    tmp_path: Path, flags: dict[str, str], *, speaks_tls: bool
) -> None:
    assert load(tmp_path, flags).speaks_tls is speaks_tls


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"tls_cert": "/c.pem"}, "tls_key"),
        ({"tls_key": "/k.pem"}, "tls_cert"),
        ({"tls": "always", "insecure_http": "true"}, "insecure_http"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, flags: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path, flags)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text", ["pool = 3\n", "home = '/x'\n", "pool_max = [1]\n", "[pool_max]\na = 1\n", "pool_max = \n", "\xff"]
)
def test_a_settings_file_with_what_it_cannot_have_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path)
    assert "config.toml" in caught.value.message


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"database_url": "postgresql://user:hunter2@db/fleet"})
    assert "hunter2" not in str(config.show(loaded))
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path, {"database_url": "mysql://user:hunter2@db/fleet"})
    assert "hunter2" not in caught.value.message
