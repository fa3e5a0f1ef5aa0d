"""Settings: every one once, with its name, bounds, default and the line that documents it.

Owns where a setting may come from (flag, environment, file, default, in that order) and what it may be.
Refuses to know what any setting is used for.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from fleetward.domain.errors import InvalidSetting, quoted

T = TypeVar("T")

ENV_PREFIX: Final = "FLEETWARD_"
FILE_NAME: Final = "config.toml"
FILE_BYTES_MAX: Final = 64 * 1024
ROOT_HOME: Final = "/var/lib/fleetward"
WORDS: Final = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
HIDDEN: Final = "********"


class Source(StrEnum):
    """Where a value came from."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class Tls(StrEnum):
    """When the controller speaks TLS: beyond loopback only, or always."""

    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Listen:
    """A host and port to listen on; port 0 takes any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        address = self._address()
        return self.host == "localhost" if address is None else address.is_loopback

    @property
    def is_anywhere(self) -> bool:
        """Whether it is every address of this machine, and so none that others could be told."""
        address = self._address()
        return address is not None and address.is_unspecified

    def _address(self) -> IPv4Address | IPv6Address | None:
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    @property
    def text(self) -> str:
        """The form that a URL and the flag take."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One setting. `parse` raises ValueError with the words that finish the sentence "it must be …"."""

    name: str
    default: str
    parse: Callable[[str], T]
    doc: str
    is_secret: bool = False

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_claim(self) -> bool:
        """Whether it is true or false, so that its flag takes no value."""
        return self.default in {"true", "false"}


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("a path")
    return Path(text).expanduser().absolute()


def _maybe_path(text: str) -> Path | None:
    return _path(text) if text else None


def _claim(text: str) -> bool:
    word = WORDS.get(text.lower())
    if word is None:
        raise ValueError("true or false")
    return word


def _tls(text: str) -> Tls:
    if text not in set(Tls):
        raise ValueError("auto or always")
    return Tls(text)


def _level(text: str) -> str:
    if text not in {"debug", "info", "warning", "error"}:
        raise ValueError("debug, info, warning or error")
    return text


def _listen(text: str) -> Listen:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):(\d{1,5})", text)
    if match is None or int(match[2]) > 65_535:
        raise ValueError("HOST:PORT, such as 127.0.0.1:7400")
    return Listen(match[1].strip("[]"), int(match[2]))


def _public_url(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment):
        raise ValueError("an http or https URL")
    return text.rstrip("/")


def _database_url(text: str) -> str:
    if text and urlsplit(text).scheme not in {"postgresql", "postgres"}:
        raise ValueError("a postgresql:// URL")
    return text


def _artifacts_url(text: str) -> Path | None:
    if not text:
        return None
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError("a file:///folder URL")
    return _path(unquote(parts.path))


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,19}", text) or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(text)

    return parse


def _decimal(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or not least <= float(text) <= most:
            raise ValueError(f"a number from {least} to {most}")
        return float(text)

    return parse


HOME: Final = Setting("home", "~/.fleetward", _path, f"the folder that holds everything local; as root {ROOT_HOME}")
LISTEN: Final = Setting("listen", "127.0.0.1:7400", _listen, "where the controller listens; port 0 takes any free one")
PUBLIC_URL: Final = Setting("public_url", "", _public_url, "the URL that nodes are told; from `listen` when empty")
DATABASE_URL: Final = Setting(
    "database_url", "", _database_url, "a PostgreSQL >= 15 of your own; the embedded one when empty", is_secret=True
)
ARTIFACTS_URL: Final = Setting(
    "artifacts_url",
    "",
    _artifacts_url,
    "a folder as file:///… for artifacts, shared by several controllers; one's own in `home` when empty",
)
TLS: Final = Setting("tls", "auto", _tls, "auto: TLS beyond loopback; always: on loopback too")
TLS_CERT: Final = Setting("tls_cert", "", _maybe_path, "a certificate chain (PEM); made by the controller when empty")
TLS_KEY: Final = Setting("tls_key", "", _maybe_path, "the key of `tls_cert` (PEM)")
INSECURE_HTTP: Final = Setting(
    "insecure_http", "false", _claim, "speak plain HTTP beyond loopback; anyone there can read it"
)
LOCAL_NODE: Final = Setting(
    "local_node", "true", _claim, "whether `up` runs a node on this machine beside the controller"
)
TIME_SCALE: Final = Setting(
    "time_scale", "1", _decimal(0.01, 10), "stretches beats, leases and grace; below 1 is for trials only"
)
POOL_MAX: Final = Setting("pool_max", "12", _whole(6, 256), "database connections at most; calls beyond that wait")
STREAM_MAX: Final = Setting("stream_max", "32", _whole(1, 1024), "uploads and downloads served at once")
SYNC_BATCH_MAX: Final = Setting("sync_batch_max", "200", _whole(1, 2000), "syncs of different nodes in one transaction")
VERIFY_BATCH_MAX: Final = Setting(
    "verify_batch_max", "100", _whole(1, 1000), "assignments that a verifier claims at once"
)
BLOB_RESERVE_BYTES: Final = Setting(
    "blob_reserve_bytes",
    "67108864",
    _whole(0, 1 << 50),
    "free disk that uploads must leave; beyond it they are refused",
)
LOG_LEVEL: Final = Setting("log_level", "info", _level, "the least important line that is logged")

SETTINGS: Final = (
    HOME,
    LISTEN,
    PUBLIC_URL,
    DATABASE_URL,
    ARTIFACTS_URL,
    TLS,
    TLS_CERT,
    TLS_KEY,
    INSECURE_HTTP,
    LOCAL_NODE,
    TIME_SCALE,
    POOL_MAX,
    STREAM_MAX,
    SYNC_BATCH_MAX,
    VERIFY_BATCH_MAX,
    BLOB_RESERVE_BYTES,
    LOG_LEVEL,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting's value, and where each came from."""

    home: Path
    listen: Listen
    public_url: str
    database_url: str
    artifacts_url: Path | None
    tls: Tls
    tls_cert: Path | None
    tls_key: Path | None
    insecure_http: bool
    local_node: bool
    time_scale: float
    pool_max: int
    stream_max: int
    sync_batch_max: int
    verify_batch_max: int
    blob_reserve_bytes: int
    log_level: str
    sources: Mapping[str, Source]

    @property
    def speaks_tls(self) -> bool:
        """Whether the controller serves HTTPS."""
        if self.tls is Tls.ALWAYS or self.tls_cert is not None:
            return True
        return not self.listen.is_loopback and not self.insecure_http


@dataclass(frozen=True, slots=True)
class Shown:
    """One line of `config show`; a secret's value is hidden."""

    name: str
    value: str
    source: Source
    env: str
    flag: str
    default: str
    doc: str


@dataclass(frozen=True, slots=True)
class _Layers:
    """The texts that were given, by source; the first that has a setting wins."""

    texts: tuple[tuple[Source, Mapping[str, str]], ...]

    def find(self, name: str, *, default: str) -> tuple[Source, str]:
        for source, texts in self.texts:
            if name in texts:
                return source, texts[name]
        return Source.DEFAULT, default

    def value(self, setting: Setting[T]) -> T:
        source, text = self.find(setting.name, default=setting.default)
        try:
            return setting.parse(text)
        except ValueError as error:
            shown = HIDDEN if setting.is_secret else quoted(text)
            raise InvalidSetting(
                f"setting {setting.name} cannot be {shown}, which came from the {source}: it must be {error}",
                hint=f"give it with {setting.flag}, {setting.env} or in {FILE_NAME}",
                field=setting.name,
            ) from error


def load(flags: Mapping[str, str], *, environment: Mapping[str, str], user_id: int) -> Config:
    """Settle every setting, or refuse the first that has a value it cannot have."""
    known = {setting.name for setting in SETTINGS}
    from_environment = {s.name: environment[s.env] for s in SETTINGS if s.env in environment}
    layers = _Layers(((Source.FLAG, flags), (Source.ENVIRONMENT, from_environment)))
    assert flags.keys() <= known, "a flag that is no setting"
    if user_id == 0:
        layers = _Layers((*layers.texts, (Source.DEFAULT, {"home": ROOT_HOME})))
    in_file = _read_file(layers.value(HOME) / FILE_NAME)
    layers = _Layers((*layers.texts[:2], (Source.FILE, in_file), *layers.texts[2:]))
    return _check(_config(layers))


def _config(layers: _Layers) -> Config:
    return Config(
        home=layers.value(HOME),
        listen=layers.value(LISTEN),
        public_url=layers.value(PUBLIC_URL),
        database_url=layers.value(DATABASE_URL),
        artifacts_url=layers.value(ARTIFACTS_URL),
        tls=layers.value(TLS),
        tls_cert=layers.value(TLS_CERT),
        tls_key=layers.value(TLS_KEY),
        insecure_http=layers.value(INSECURE_HTTP),
        local_node=layers.value(LOCAL_NODE),
        time_scale=layers.value(TIME_SCALE),
        pool_max=layers.value(POOL_MAX),
        stream_max=layers.value(STREAM_MAX),
        sync_batch_max=layers.value(SYNC_BATCH_MAX),
        verify_batch_max=layers.value(VERIFY_BATCH_MAX),
        blob_reserve_bytes=layers.value(BLOB_RESERVE_BYTES),
        log_level=layers.value(LOG_LEVEL),
        sources={setting.name: layers.find(setting.name, default=setting.default)[0] for setting in SETTINGS},
    )


def _check(config: Config) -> Config:
    """Refuse settings that are each possible, but not together."""
    if (config.tls_cert is None) != (config.tls_key is None):
        missing = "tls_key" if config.tls_key is None else "tls_cert"
        raise InvalidSetting(f"setting {missing} is missing: a certificate and its key come together", field=missing)
    if config.insecure_http and (config.tls is Tls.ALWAYS or config.tls_cert is not None):
        raise InvalidSetting(
            "setting insecure_http cannot be true while TLS is asked for; leave one of the two out",
            field="insecure_http",
        )
    return config


def _read_file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidSetting(f"the settings in {path} cannot be read: {error.strerror}", field="home") from error
    if len(content) > FILE_BYTES_MAX:
        raise InvalidSetting(f"the settings in {path} are more than {FILE_BYTES_MAX} bytes", field="home")
    try:
        table = tomllib.loads(content.decode())
    except ValueError as error:
        raise InvalidSetting(f"the settings in {path} are no TOML: {error}", field="home") from error
    return {name: _file_text(path, name, value) for name, value in table.items()}


def _file_text(path: Path, name: str, value: object) -> str:
    if name == HOME.name or name not in {setting.name for setting in SETTINGS}:
        raise InvalidSetting(
            f"{path} sets {quoted(name)}, which is no setting there",
            hint="`fleetward config show` lists the settings",
            field=name[:64],
        )
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidSetting(f"{path} sets {name} to a table or list; it takes a text, number or true/false", field=name)


def show(config: Config) -> tuple[Shown, ...]:
    """List each setting, its value and where it came from."""
    return tuple(
        Shown(
            name=setting.name,
            value=HIDDEN
            if setting.is_secret and getattr(config, setting.name)
            else _shown(getattr(config, setting.name)),
            source=config.sources[setting.name],
            env=setting.env,
            flag=setting.flag,
            default=setting.default,
            doc=setting.doc,
        )
        for setting in SETTINGS
    )


def _shown(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case Listen():
            return value.text
        case _:
            return str(value)
