"""Names and patterns of artifacts: what may be one, and which files a pattern means."""

import contextlib
import re
import time
import unicodedata
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetward.domain.artifacts import ARTIFACTS_MAX
from fleetward.domain.errors import ArtifactConflict, MalformedDigest, MalformedRequest, UnsafePath
from fleetward.verify.digest import Digest
from fleetward.verify.manifest import (
    PART_BYTES_MAX,
    PARTS_MAX,
    PATH_BYTES_MAX,
    SIZE_BYTES_MAX,
    Entry,
    Glob,
    parse_entries,
    parse_path,
)

SHA = Digest.of(b"").hex


@pytest.mark.parametrize(
    "text",
    [
        "out.txt",
        "a/b/c",
        ".fleetward/receipt.json",
        "with space",
        "...",
        "a..b",
        "-rf",
        "é",
        "日本/語",
        "👩‍💻",
        "a" * PART_BYTES_MAX,
        "/".join(["a"] * PARTS_MAX),
        "/".join(["a" * 255] * 4) + "",
    ],
)
def test_a_plain_relative_name_is_taken_as_it_is(text: str) -> None:
    assert parse_path(text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is absolute"),
        ("//etc", "is absolute"),
        ("..", "part"),
        ("a/../b", "part"),
        ("../../etc/passwd", "part"),
        ("a/..", "part"),
        (".", "part"),
        ("./a", "part"),
        ("a//b", "part"),
        ("a/", "part"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("a\x7fb", "control"),
        ("a\x9bb", "control"),
        ("a\u2028b", "control"),
        ("a\u202egpj.exe", "control"),
        ("a\u2066b", "control"),
        ("a\ud800b", "control"),
        ("a\\..\\b", "backslash"),
        (unicodedata.normalize("NFD", "é"), "NFC"),
        ("a" * (PART_BYTES_MAX + 1), "part longer"),
        ("é" * 128, "part longer"),
        ("/".join(["a" * 204] * 5) + "a", "longer than 1024"),
        ("/".join(["a"] * (PARTS_MAX + 1)), "folders deep"),
    ],
)
def test_a_name_that_could_leave_its_folder_or_be_read_in_two_ways_is_refused(text: str, why: str) -> None:
    with pytest.raises(UnsafePath, match=why):
        parse_path(text)


def test_a_name_of_exactly_the_most_bytes_is_taken() -> None:
    text = "/".join(["a" * 204] * 5)
    assert len(text) == PATH_BYTES_MAX
    assert parse_path(text) == text


@given(st.text(max_size=40))
def test_whatever_is_taken_stays_below_its_folder(text: str) -> None:
    with contextlib.suppress(UnsafePath):
        path = parse_path(text)
        parts = path.split("/")
        assert path == text
        assert not {"", ".", ".."} & set(parts)
        assert path.encode().decode() == unicodedata.normalize("NFC", path)


@given(st.text(max_size=200))
def test_a_refusal_can_be_printed_whatever_was_refused(text: str) -> None:
    with pytest.raises(UnsafePath) as refused:
        parse_path(text + "\0")
    assert refused.value.message.isprintable()


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("out.txt", "out.txt", True),
        ("./out.txt", "out.txt", True),
        ("out//a.txt", "out/a.txt", True),
        ("out/", "out", True),
        ("out.txt", "a/out.txt", False),
        ("out", "out/a", False),
        ("*", "a", True),
        ("*", "a/b", False),
        ("*.txt", ".txt", False),
        ("*", ".hidden", False),
        (".*", ".hidden", True),
        ("?hidden", ".hidden", False),
        ("[.]hidden", ".hidden", False),
        ("**", "a/b/c", True),
        ("**", "a", True),
        ("**", ".cache/a", False),
        ("**", "a/.b/c", False),
        ("**/.b/c", "a/.b/c", True),
        ("**/*", ".fleetward/receipt.json", False),
        ("**/b", "b", True),
        ("**/b", "a/a/b", True),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/x/y/c", False),
        ("a/**", "a", True),
        ("a/**", "a/b/c", True),
        ("a/**", "b/c", False),
        ("**/**/a", "a", True),
        ("a**b", "axxb", True),
        ("a**b", "a/b", False),
        ("[a-c]x", "bx", True),
        ("[a-c]x", "dx", False),
        ("[!a-c]x", "dx", True),
        ("[!a-c]x", "bx", False),
        ("[]]x", "]x", True),
        ("[!]]x", "]x", False),
        ("[a-]x", "-x", True),
        ("[ab", "[ab", True),
        ("*[ab", "x[ab", True),
        ("a[1].txt", "a1.txt", True),
        ("a[1].txt", "a[1].txt", True),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("*.tar.gz", "x.tar.tar.gz", True),
        ("caf" + unicodedata.normalize("NFD", "é"), "café", True),
    ],
)
def test_a_pattern_means_these_files(pattern: str, path: str, *, expected: bool) -> None:
    assert Glob.parse(pattern).matches(path) is expected


@pytest.mark.parametrize("pattern", ["", ".", "./", "/", "/etc/*", "../*", "a/../../b", "a/**/../..", "a\0*", "a\\*"])
def test_a_pattern_that_leaves_the_folder_is_refused(pattern: str) -> None:
    with pytest.raises(UnsafePath):
        Glob.parse(pattern)


PARTS = st.text(alphabet="ab.", min_size=1, max_size=3).filter(lambda part: part not in {".", ".."})
PATTERN_PARTS = st.one_of(st.just("**"), st.text(alphabet="ab.*?", min_size=1, max_size=4)).filter(
    lambda part: part not in {".", ".."}
)


def _means(pattern: list[str], path: list[str]) -> bool:
    """Decide by the definition itself, recursion: slow and plain."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _means(pattern[1:], path) or (bool(path) and path[0][0] != "." and _means(pattern, path[1:]))
    if not path or (path[0][0] == "." and pattern[0][0] != "."):
        return False
    part = re.sub(r"[*]+", ".*", re.escape(pattern[0]).replace(r"\*", "*").replace(r"\?", "."))
    return re.fullmatch(part, path[0]) is not None and _means(pattern[1:], path[1:])


@given(st.lists(PATTERN_PARTS, min_size=1, max_size=5), st.lists(PARTS, min_size=1, max_size=5))
def test_the_matcher_agrees_with_the_definition(pattern: list[str], path: list[str]) -> None:
    text = "/".join(path)
    assert Glob.parse("/".join(pattern)).matches(text) == (pattern == path or _means(pattern, path))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 100 + "b", "a" * 255),
        ("**/a/" * 20 + "b", "/".join(["a"] * PARTS_MAX)),
        ("*" * 255, "a" * 255),
        ("*?" * 120, "a" * 100),
    ],
)
def test_a_hostile_pattern_costs_no_more_than_others(pattern: str, path: str) -> None:
    glob = Glob.parse(pattern)
    began_at = time.thread_time()
    glob.matches(path)
    assert time.thread_time() - began_at < 0.5  # backtracking through every star would take longer than the sun has


@dataclass(frozen=True)
class Told:
    """A file as the wire tells it."""

    path: str = "out.txt"
    size_bytes: int = 0
    sha256: str = SHA
    media_type: str = "text/plain"


def test_a_declaration_becomes_entries_in_order_and_the_same_twice_is_once() -> None:
    told = [Told("b/c"), Told("a", size_bytes=SIZE_BYTES_MAX), Told("b/c")]
    assert parse_entries(told) == (
        Entry(parse_path("b/c"), 0, Digest(SHA), "text/plain"),
        Entry(parse_path("a"), SIZE_BYTES_MAX, Digest(SHA), "text/plain"),
    )


@pytest.mark.parametrize(
    ("told", "refusal", "why"),
    [
        ([Told("../x")], UnsafePath, "part"),
        ([Told(sha256="zz")], MalformedDigest, "is no SHA-256"),
        ([Told(size_bytes=-1)], MalformedRequest, "cannot have -1 bytes"),
        ([Told(size_bytes=SIZE_BYTES_MAX + 1)], MalformedRequest, "cannot have"),
        ([Told(media_type="text")], MalformedRequest, "media type"),
        ([Told(media_type="text/\x1b[2J")], MalformedRequest, "media type"),
        ([Told(media_type="text/" + "a" * 127)], MalformedRequest, "media type"),
        ([Told(), Told(size_bytes=1)], ArtifactConflict, "'out.txt' is declared twice"),
        ([Told("a"), Told("b"), Told("a/b/c")], UnsafePath, "'a' is declared as a file and, by 'a/b/c', as a folder"),
        ([Told(str(n)) for n in range(ARTIFACTS_MAX + 1)], MalformedRequest, "more than 10000"),
    ],
)
def test_a_declaration_that_no_disk_could_hold_is_refused(told: list[Told], refusal: type, why: str) -> None:
    with pytest.raises(refusal, match=why):
        parse_entries(told)
