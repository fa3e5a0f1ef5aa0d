"""The hash tree of RFC 6962: roots, inclusion and consistency.

Owns the arithmetic of proofs, made and checked. Refuses to know what a leaf means, who signs a root and
where leaves are kept. The checkers take anything and answer yes or no: a proof comes from a stranger.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

HASH_BYTES: Final = 32
EMPTY_ROOT: Final = hashlib.sha256(b"").digest()

# Different first bytes, so that nobody can pass an inner node off as a leaf.
_LEAF = b"\x00"
_NODE = b"\x01"


def leaf_hash(content: bytes) -> bytes:
    """Hash a leaf's content."""
    return hashlib.sha256(_LEAF + content).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash two neighbours into the node above them."""
    return hashlib.sha256(_NODE + left + right).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """Compute the root over leaf hashes."""
    return _root(leaves, start=0, end=len(leaves)) if leaves else EMPTY_ROOT


def _root(leaves: Sequence[bytes], *, start: int, end: int) -> bytes:
    if end - start == 1:
        return leaves[start]
    middle = start + _split(end - start)
    return node_hash(_root(leaves, start=start, end=middle), _root(leaves, start=middle, end=end))


def _split(size: int) -> int:
    """Find the largest power of two below `size`: where the left subtree ends."""
    return 1 << (size - 1).bit_length() - 1


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Make the proof that leaf `index` is under the root over these leaf hashes."""
    assert 0 <= index < len(leaves), "a proof is made for a leaf that exists"
    start, end = 0, len(leaves)
    path: list[bytes] = []
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            path.append(_root(leaves, start=middle, end=end))
            end = middle
        else:
            path.append(_root(leaves, start=start, end=middle))
            start = middle
    return path[::-1]


def verify_inclusion(*, leaf: bytes, index: int, size: int, proof: Sequence[bytes], root_hash: bytes) -> bool:
    """Whether the leaf hash lies at `index` in the tree of `size` leaves with that root."""
    if not 0 <= index < size or not _are_hashes([leaf, root_hash, *proof]):
        return False
    # RFC 9162, 2.1.3.2: walk from the leaf to the root; `last` is the rightmost node of the level.
    here, last, value = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return False
        if here & 1 or here == last:
            value = node_hash(sibling, value)
            while not here & 1 and here:
                here >>= 1
                last >>= 1
        else:
            value = node_hash(value, sibling)
        here >>= 1
        last >>= 1
    return last == 0 and value == root_hash


def consistency_proof(leaves: Sequence[bytes], first: int) -> list[bytes]:
    """Make the proof that the tree over the `first` leaf hashes is the start of the tree over all."""
    assert 0 <= first <= len(leaves), "a proof goes from a tree to one that is no smaller"
    if first in {0, len(leaves)}:
        return []
    start, end = 0, len(leaves)
    is_whole = True  # whether the subtree reached is the whole first tree, whose root the checker has
    path: list[bytes] = []
    while end != first:
        middle = start + _split(end - start)
        if first <= middle:
            path.append(_root(leaves, start=middle, end=end))
            end = middle
        else:
            path.append(_root(leaves, start=start, end=middle))
            start = middle
            is_whole = False
    if not is_whole:
        path.append(_root(leaves, start=start, end=end))
    return path[::-1]


def verify_consistency(
    *, first: int, second: int, first_root: bytes, second_root: bytes, proof: Sequence[bytes]
) -> bool:
    """Whether the tree of `first` leaves is the start of the tree of `second` leaves."""
    if not 0 <= first <= second or not _are_hashes([first_root, second_root, *proof]):
        return False
    if first == second:
        return not proof and first_root == second_root and (first > 0 or first_root == EMPTY_ROOT)
    if first == 0:
        return not proof and first_root == EMPTY_ROOT
    # RFC 9162, 2.1.4.2. A first tree that is a whole subtree of the second has its root left out.
    path = [first_root, *proof] if first & (first - 1) == 0 else list(proof)
    if not path:
        return False
    here, last = first - 1, second - 1
    while here & 1:
        here >>= 1
        last >>= 1
    old = new = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if here & 1 or here == last:
            old = node_hash(sibling, old)
            new = node_hash(sibling, new)
            while not here & 1 and here:
                here >>= 1
                last >>= 1
        else:
            new = node_hash(new, sibling)
        here >>= 1
        last >>= 1
    return last == 0 and old == first_root and new == second_root


def _are_hashes(values: Sequence[object]) -> bool:
    return all(isinstance(value, bytes) and len(value) == HASH_BYTES for value in values)
