"""Where the controller is and how the person wants to be answered.

Owns the flags that every command takes, and where URL and token come from (flag, environment, this
machine's home, in that order). Refuses to know what any command does.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
import typer

from fleetward.cli.output import Output
from fleetward.client import ANSWER_LIMIT, Client
from fleetward.domain.errors import HomeUnusable, InvalidSetting

DEFAULT_URL: Final = "http://127.0.0.1:7400"
PANEL: Final = "Everywhere"
STATE_BYTES_MAX: Final = 64 * 1024


class ControllerFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller leaves in its home for the programs on the same machine."""

    url: str
    pin: str = ""
    pid: int = 0
    local_node: bool = True


@dataclass(slots=True)
class Given:
    """The flags that may stand before or after a command's name; filled while the line is read."""

    home: Path | None = None
    url: str | None = None
    token: str | None = None
    is_json: bool = False
    is_quiet: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def _take_url(ctx: typer.Context, value: str | None) -> None:
    if value is not None:
        given_of(ctx).url = value


def _take_token(ctx: typer.Context, value: str | None) -> None:
    if value is not None:
        given_of(ctx).token = value


def _take_json(ctx: typer.Context, *, value: bool) -> None:
    given_of(ctx).is_json |= value


def _take_quiet(ctx: typer.Context, *, value: bool) -> None:
    given_of(ctx).is_quiet |= value


UrlFlag = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The controller; else $FLEETWARD_URL, else the one of this machine.",
        callback=_take_url,
        expose_value=False,
        rich_help_panel=PANEL,
    ),
]
TokenFlag = Annotated[
    str | None,
    typer.Option(
        "--token",
        help="Your API key; else $FLEETWARD_TOKEN, else the one in the home.",
        callback=_take_token,
        expose_value=False,
        rich_help_panel=PANEL,
    ),
]
JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Answer in JSON on standard output, and nothing else there.",
        callback=_take_json,
        expose_value=False,
        rich_help_panel=PANEL,
    ),
]
QuietFlag = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Say only what was asked for.",
        callback=_take_quiet,
        expose_value=False,
        rich_help_panel=PANEL,
    ),
]


def given_of(ctx: typer.Context) -> Given:
    """The flags read so far."""
    given = ctx.find_root().obj
    assert isinstance(given, Given)
    return given


@dataclass(frozen=True, slots=True)
class Settings:
    """The settled form of `Given`."""

    home: Path
    url: str
    token: str
    pin: str
    output: Output

    def client(self, *, answer_limit: timedelta = ANSWER_LIMIT) -> Client:
        """Connect to the controller."""
        return Client(self.url, token=self.token, pin=self.pin, answer_limit=answer_limit)


def settings_of(ctx: typer.Context, *, home: Path | None = None) -> Settings:
    """Settle what was given; `home` is a command's own --home."""
    given = given_of(ctx)
    if home is not None:
        given.home = home
    return settle(given)


def settle(given: Given) -> Settings:
    """Fill in from the environment and from this machine's home what no flag says."""
    home = home_folder(given)
    local = read_controller_file(home)
    local_url = local.url if local is not None else DEFAULT_URL
    url = given.url or given.environment.get("FLEETWARD_URL") or local_url
    token = given.token or given.environment.get("FLEETWARD_TOKEN")
    is_local = _same_server(url, local_url)
    # The key in the home opens everything here; another server that a URL names must not get to see it.
    if token is None and is_local:
        token = read_text(home / "token")
    pin = given.environment.get("FLEETWARD_PIN") or (local.pin if local is not None and is_local else "")
    return Settings(
        home=home, url=url, token=token or "", pin=pin, output=Output(is_json=given.is_json, is_quiet=given.is_quiet)
    )


def home_folder(given: Given) -> Path:
    """The folder that holds everything local."""
    if given.home is not None:
        return given.home.expanduser().absolute()
    named = given.environment.get("FLEETWARD_HOME")
    if named:
        return Path(named).expanduser().absolute()
    return Path("/var/lib/fleetward") if os.geteuid() == 0 else Path("~/.fleetward").expanduser()


def read_controller_file(home: Path) -> ControllerFile | None:
    """What the controller of this home says of itself, or nothing when none was ever started."""
    text = read_text(home / "controller.json")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=ControllerFile)
    except msgspec.DecodeError as error:
        raise HomeUnusable(
            f"{home / 'controller.json'} cannot be read: {error}", hint="start the controller again: `fleetward up`"
        ) from error


def read_text(path: Path) -> str:
    """The text of a small file, or nothing when there is none."""
    try:
        with path.open("rb") as file:
            return file.read(STATE_BYTES_MAX).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise HomeUnusable(
            f"{path} cannot be read: {reason}", hint="run as the user who ran `fleetward up`, or give --token"
        ) from error


def _same_server(one: str, other: str) -> bool:
    return _server(one) == _server(other)


def _server(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise InvalidSetting(f"{url!r} is no controller URL: {error}", field="url") from error
    return parts.scheme, "loopback" if _is_loopback(host) else host, port


def is_in_the_clear(url: str) -> bool:
    """Whether anyone on the way reads what is said to that controller."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not _is_loopback(parts.hostname or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
