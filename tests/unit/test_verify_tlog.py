"""Hash-tree proofs: made ones pass, all others are refused without an exception."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetward.verify import tlog

LEAVES = [tlog.leaf_hash(bytes([number])) for number in range(70)]
ROOTS = [tlog.root(LEAVES[:size]) for size in range(len(LEAVES) + 1)]
SIZES = range(20)

# The tree that the test vectors of Certificate Transparency use.
VECTOR_LEAVES = [
    b"",
    b"\x00",
    b"\x10",
    b"\x20\x21",
    b"\x30\x31",
    b"\x40\x41\x42\x43",
    bytes.fromhex("5051525354555657"),
    bytes.fromhex("606162636465666768696a6b6c6d6e6f"),
]
VECTOR_ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_roots_are_those_of_the_published_vectors() -> None:
    leaves = [tlog.leaf_hash(content) for content in VECTOR_LEAVES]
    assert [tlog.root(leaves[: size + 1]).hex() for size in range(8)] == VECTOR_ROOTS
    assert tlog.root([]) == hashlib.sha256(b"").digest()


def included(index: int, size: int, /, **changes: Any) -> bool:
    proof: dict[str, Any] = {"leaf": LEAVES[index], "index": index, "size": size, "root_hash": ROOTS[size]}
    proof["proof"] = tlog.inclusion_proof(LEAVES[:size], index)
    return tlog.verify_inclusion(**(proof | changes))


def consistent(first: int, second: int, /, **changes: Any) -> bool:
    proof: dict[str, Any] = {"first": first, "second": second}
    proof |= {"first_root": ROOTS[first], "second_root": ROOTS[second]}
    proof["proof"] = tlog.consistency_proof(LEAVES[:second], first)
    return tlog.verify_consistency(**(proof | changes))


def test_every_leaf_of_every_small_tree_is_proved_and_only_where_it_is() -> None:
    for size in SIZES:
        for index in range(size):
            proof = tlog.inclusion_proof(LEAVES[:size], index)
            for other in range(size):
                assert included(other, size, leaf=LEAVES[index], proof=proof) == (other == index)


def test_every_small_tree_is_proved_to_begin_every_larger_one() -> None:
    for second in SIZES:
        for first in range(second + 1):
            assert consistent(first, second)


def test_a_tree_with_another_past_is_never_proved() -> None:
    forged = tlog.leaf_hash(b"forged")
    for second in range(1, 20):
        for first in range(1, second + 1):
            for at in range(first):
                leaves = [*LEAVES[:at], forged, *LEAVES[at + 1 : second]]
                proof = tlog.consistency_proof(leaves, first)
                assert not consistent(first, second, second_root=tlog.root(leaves), proof=proof)


def test_a_consistency_proof_for_a_wrong_second_size_is_refused() -> None:
    for second in range(2, 20):
        for first in range(1, second):
            proof = tlog.consistency_proof(LEAVES[:second], first)
            for wrong in range(first, 40):
                if wrong != second:
                    assert not consistent(first, wrong, second_root=ROOTS[second], proof=proof) or (
                        # The checker learns no more of the size than the walk shows: RFC 9162 leaves the
                        # second size to the signed checkpoint. Equal walks are the only ones that pass.
                        _walk(first, wrong) == _walk(first, second)
                    )


def _walk(first: int, second: int) -> list[str]:
    here, last = first - 1, second - 1
    while here & 1:
        here, last = here >> 1, last >> 1
    steps: list[str] = []
    while last:
        steps.append("left" if here & 1 or here == last else "right")
        if steps[-1] == "left":
            while not here & 1 and here:
                here, last = here >> 1, last >> 1
        here, last = here >> 1, last >> 1
    return steps


JUNK = [b"", b"x", b"\0" * 31, b"\0" * 33, "text", None, 7, b"\0" * 32]


@pytest.mark.parametrize("extra", JUNK)
def test_an_over_long_or_malformed_proof_is_refused(extra: object) -> None:
    for second in range(1, 20):
        for first in range(second + 1):
            proof = tlog.consistency_proof(LEAVES[:second], first)
            assert not consistent(first, second, proof=[*proof, extra])
            assert not consistent(first, second, proof=[extra, *proof])
        for index in range(second):
            proof = tlog.inclusion_proof(LEAVES[:second], index)
            assert not included(index, second, proof=[*proof, extra])


def test_a_short_proof_is_refused() -> None:
    for second in range(2, 20):
        for first in range(1, second):
            assert not consistent(first, second, proof=tlog.consistency_proof(LEAVES[:second], first)[:-1])
        for index in range(second):
            assert not included(index, second, proof=tlog.inclusion_proof(LEAVES[:second], index)[:-1])


@pytest.mark.parametrize(
    ("first", "second"), [(5, 3), (-1, 3), (-3, -1), (3, -1), (-(2**70), 2**70), (2**70, 2**70 - 1), (4, 2**70)]
)
def test_impossible_sizes_are_refused(first: int, second: int) -> None:
    assert not consistent(3, 7, first=first, second=second)


@pytest.mark.parametrize(("index", "size"), [(-1, 7), (7, 7), (0, 0), (0, -1), (-1, -1), (2**70, 2**71)])
def test_impossible_places_are_refused(index: int, size: int) -> None:
    assert not included(3, 7, index=index, size=size)


def test_the_empty_tree_begins_every_tree_and_needs_no_proof() -> None:
    assert consistent(0, 0)
    assert consistent(0, 5)
    assert not consistent(0, 5, first_root=ROOTS[1])
    assert not consistent(0, 0, first_root=ROOTS[1], second_root=ROOTS[1])


def test_one_tree_begins_itself_and_no_other_of_its_size() -> None:
    assert consistent(4, 4)
    assert not consistent(4, 4, second_root=ROOTS[3])


@given(
    st.integers(-2, 80),
    st.integers(-2, 80),
    st.lists(st.sampled_from(LEAVES + ROOTS) | st.binary(max_size=33), max_size=8),
    st.sampled_from(ROOTS),
    st.sampled_from(ROOTS),
)
def test_random_proofs_are_answered_not_thrown_at(
    first: int, second: int, proof: list[bytes], one: bytes, other: bytes
) -> None:
    passes = tlog.verify_consistency(first=first, second=second, first_root=one, second_root=other, proof=proof)
    assert not passes or one == other or first == 0 or one == ROOTS[first]
    found = tlog.verify_inclusion(leaf=one, index=first, size=second, proof=proof, root_hash=other)
    assert not found or second == 1


@given(st.data())
def test_flipping_one_bit_of_a_proof_breaks_it(data: st.DataObject) -> None:
    second = data.draw(st.integers(2, 70))
    first = data.draw(st.integers(1, second - 1))
    proof = tlog.consistency_proof(LEAVES[:second], first)
    at = data.draw(st.integers(0, len(proof) - 1))
    bit = data.draw(st.integers(0, 255))
    proof[at] = (int.from_bytes(proof[at]) ^ 1 << bit).to_bytes(32)
    assert not consistent(first, second, proof=proof)


def test_proofs_are_made_only_for_what_exists() -> None:
    with pytest.raises(AssertionError):
        tlog.inclusion_proof(LEAVES, len(LEAVES))
    with pytest.raises(AssertionError):
        tlog.consistency_proof(LEAVES[:3], 4)
