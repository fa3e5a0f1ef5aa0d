"""Words on the command line and in job files, and what is said of wrong ones."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import typer

from fleetward.cli.words import FILE_BYTES_MAX, parse_duration, parse_pairs, parse_size, read_job_file
from fleetward.domain.errors import InvalidJob
from fleetward.domain.jobs import ArtifactRule, JobSpec


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("512M", 512 * 1024**2),
        ("4G", 4 * 1024**3),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("2kb", 2048),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "4X", "1e9", "G", "4 4", "inf", "9" * 16])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("30", timedelta(seconds=30)),
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("1d", timedelta(days=1)),
    ],
)
def test_durations(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "-5", "1w", "1.5h", "h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no duration"):
        parse_duration(text)


def test_pairs_keep_all_after_the_first_equals_sign() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}


@pytest.mark.parametrize("text", ["a", "=b", ""])
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no pair"):
        parse_pairs([text])


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml, other = tmp_path / "job.toml", tmp_path / "job.json"
    toml.write_text('command = ["true"]\nname = "n"\n[[artifacts]]\npath = "out.txt"\n')
    other.write_text(json.dumps({"command": ["true"], "name": "n", "artifacts": [{"path": "out.txt"}]}))
    expected = JobSpec(command=["true"], name="n", artifacts=[ArtifactRule(path="out.txt")])
    assert read_job_file(str(toml)) == expected
    assert read_job_file(str(other)) == expected


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.toml", 'command = ["true"]\nname = \n', r"job\.toml: no TOML: invalid value \(at line 2, column 8\)"),
        ("job.json", '{"command": ["true"],\n}', r"job\.json, line 2, column 1: no JSON"),
        ("job.json", '{"comand": ["true"]}', r"job\.json: .*unknown field `comand`"),
        ("job.json", '{"command": ["true"], "replicas": "two"}', r"job\.json: .*\$\.replicas"),
        ("job.json", '{"command": ["true"], "replicas": -1}', r"job\.json: replicas: -1 is out of range"),
        ("job.json", '{"command": ["true"], "artifacts": [{"path": "../x"}]}', r"artifacts\[0\]\.path: '\.\./x'"),
        ("job.json", '{"command": []}', r"command: a job needs a command"),
        ("job.json", "[1]", r"job\.json: .*Expected `object`"),
        ("job.json", "[" * 100_000, r"job\.json is nested too deeply"),
    ],
)
def test_a_wrong_job_file_is_told_by_line_or_field(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidJob, match=said):
        read_job_file(str(file))


def test_a_job_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"a\xff")
    with pytest.raises(InvalidJob, match="byte 1 is not UTF-8"):
        read_job_file(str(file))


def test_a_job_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_bytes(b" " * (FILE_BYTES_MAX + 1))
    with pytest.raises(InvalidJob, match="is larger than"):
        read_job_file(str(file))
