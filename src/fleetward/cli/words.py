"""Words on the command line and in files, turned into values.

Owns sizes, durations, pairs and job files. Refuses to know what they are for.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final, cast

import typer

from fleetward.domain.errors import InvalidJob, quoted
from fleetward.domain.jobs import JobSpec, parse_spec

FILE_BYTES_MAX: Final = 1024 * 1024  # the controller takes no larger document

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,9})\s*(s|m|h|d)?")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_size(text: str) -> int:
    """Read `4G`, `512M` or a plain number of bytes; a letter counts in powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{quoted(text)} is no size; write one like 512M, 4G or a number of bytes")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def parse_duration(text: str) -> timedelta:
    """Read `90s`, `10m`, `2h`, `1d` or a plain number of seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{quoted(text)} is no duration; write one like 90s, 10m, 2h or 1d")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2] or "s"])


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Read `key=value` texts; the last of a key counts."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise typer.BadParameter(f"{quoted(text)} is no pair; write it as KEY=VALUE")
        pairs[key] = value
    return pairs


def read_job_file(name: str) -> JobSpec:
    """Read a job document, TOML or JSON; `-` is standard input. What is wrong is said with its line or field."""
    content = _read(name)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{name} is no text: byte {error.start} is not UTF-8") from error
    is_json = name.endswith(".json") or (not name.endswith(".toml") and text.lstrip().startswith("{"))
    document = _decode_json(name, text) if is_json else _decode_toml(name, text)
    try:
        return parse_spec(document)
    except InvalidJob as error:
        raise InvalidJob(f"{name}: {error.message}", hint=error.hint, field=error.field) from error


def _read(name: str) -> bytes:
    if name == "-":
        content = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
    else:
        with Path(name).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise InvalidJob(f"{name} is larger than {FILE_BYTES_MAX} bytes", hint="put data in files and use inputs")
    return content


def _decode_json(name: str, text: str) -> object:
    try:
        return cast("object", json.loads(text))
    except json.JSONDecodeError as error:
        raise InvalidJob(f"{name}, line {error.lineno}, column {error.colno}: no JSON: {error.msg.lower()}") from error
    except RecursionError as error:
        raise InvalidJob(f"{name} is nested too deeply") from error


def _decode_toml(name: str, text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidJob(f"{name}: no TOML: {_lowered(str(error))}", hint="TOML or JSON; see `--help`") from error
    except RecursionError as error:
        raise InvalidJob(f"{name} is nested too deeply") from error


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
