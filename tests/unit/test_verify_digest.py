"""Digests: only what was checked becomes one, and streams hash as their bytes do."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetward.domain.errors import MalformedDigest
from fleetward.verify.digest import HEAD_BYTES, Digest, Hasher, Measured, measure

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_digest_is_read_from_hex_and_gives_its_bytes() -> None:
    digest = Digest.parse(EMPTY)
    assert (digest.hex, digest.raw, digest) == (EMPTY, bytes.fromhex(EMPTY), Digest.of(b""))


@pytest.mark.parametrize(
    "text", ["", "zz", EMPTY[:-1], EMPTY + "0", EMPTY.upper(), EMPTY + "\n", " " + EMPTY, "٣" + EMPTY[1:]]
)
def test_text_of_any_other_form_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(MalformedDigest, match="is no SHA-256"):
        Digest.parse(text)


def test_a_digest_that_nobody_checked_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        Digest("zz")


@given(st.lists(st.binary(max_size=700), max_size=6))
def test_a_stream_is_measured_as_its_bytes_are_however_it_is_cut(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    expected = Measured(Digest(hashlib.sha256(whole).hexdigest()), len(whole), whole[:HEAD_BYTES])
    hasher = Hasher()
    for chunk in chunks:
        hasher.update(memoryview(chunk))
    assert measure(chunks) == hasher.measured() == expected


def test_only_the_first_bytes_are_kept() -> None:
    assert measure([b"a" * HEAD_BYTES, b"b"]).head == b"a" * HEAD_BYTES
