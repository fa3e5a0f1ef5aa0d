"""SHA256SUMS: ours is read by `sha256sum`, and nobody's leads out of the folder."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetward.domain.errors import ArtifactConflict, MalformedDigest, UnsafePath
from fleetward.verify.bundle import CHECKSUMS_NAME, read_checksums, write_checksums
from fleetward.verify.digest import Digest
from fleetward.verify.manifest import parse_path

SHA = Digest.of(b"").hex
NAMES = st.text(alphabet="abé ü.-*", min_size=1, max_size=6).filter(lambda name: name not in {".", ".."})
FILES = st.dictionaries(NAMES.map(parse_path), st.binary(max_size=9).map(Digest.of), max_size=5)


@given(FILES)
def test_what_is_written_is_read(digests: dict) -> None:
    text = write_checksums(digests)
    assert read_checksums(text) == digests
    assert text.splitlines() == sorted(text.splitlines(), key=lambda line: line[66:].encode())


def test_sha256sum_agrees(tmp_path: Path) -> None:
    program = shutil.which("sha256sum") or shutil.which("shasum")
    assert program is not None
    files = {parse_path("a b"): b"1", parse_path("d/é"): b"2"}
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    text = write_checksums({path: Digest.of(content) for path, content in files.items()})
    (tmp_path / CHECKSUMS_NAME).write_text(text, encoding="utf-8")
    checked = subprocess.run([program, "-c", CHECKSUMS_NAME], cwd=tmp_path, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout.count(b": OK")) == (0, 2)


def test_the_binary_mark_and_a_missing_last_line_end_are_read() -> None:
    assert read_checksums(f"{SHA} *a\n{SHA}  b") == {"a": Digest(SHA), "b": Digest(SHA)}


@pytest.mark.parametrize(
    ("text", "refusal", "why"),
    [
        ("\n", MalformedDigest, "line 1"),
        (f"{SHA}  a\n\n", MalformedDigest, "line 2"),
        (f"{SHA} a", MalformedDigest, "line 1"),
        ("short  a", MalformedDigest, "line 1"),
        (f"{SHA.upper()}  a", MalformedDigest, "is no SHA-256"),
        (f"\\{SHA}  a", MalformedDigest, "line 1"),
        (f"{SHA}  ", UnsafePath, "is empty"),
        (f"{SHA}  ../a", UnsafePath, "part"),
        (f"{SHA}  /a", UnsafePath, "is absolute"),
        (f"{SHA}  a\r\n", UnsafePath, "control"),
        (f"{SHA}  a\n{SHA}  a\n", ArtifactConflict, "line 2 of SHA256SUMS names 'a' a second time"),
    ],
)
def test_a_list_that_cannot_be_trusted_is_refused(text: str, refusal: type, why: str) -> None:
    with pytest.raises(refusal, match=why):
        read_checksums(text)
