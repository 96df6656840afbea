"""One hash for many, any of which can be shown later (pure): a Merkle tree of SHA-256.

    root ── who publishes it is bound to every leaf and to their number
     ├─ node ─┬─ leaf 0
     │        └─ leaf 1        a path is the hashes beside the way from a leaf up to the root:
     └─ leaf 2                 log₂ n of them show that a leaf stands at its place

Leaves, nodes and the root are hashed with different prefixes, so that none can be passed off as another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

HASH_BYTES = 32
MAX_PATH = 32  # enough for 2³² leaves
NOTHING = bytes(HASH_BYTES)  # a leaf that stands for nothing


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The hash that stands for all leaves."""
    return _root(_levels(leaves)[-1], len(leaves))


def merkle_path(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """What shows that a leaf stands at its place under the root."""
    path = []
    for level in _levels(leaves)[:-1]:
        if index ^ 1 < len(level):
            path.append(level[index ^ 1])
        index >>= 1
    return tuple(path)


def is_under(root: bytes, num_leaves: int, index: int, leaf: bytes, path: Sequence[bytes]) -> bool:
    """Whether the path shows that this leaf stands at this place among so many under the root."""
    if not 0 <= index < num_leaves or len(path) > MAX_PATH:
        return False
    rest, node, width = list(path), _leaf(leaf), num_leaves
    while width > 1:
        if index ^ 1 < width:
            if not rest:
                return False
            beside = rest.pop(0)
            node = _node(beside, node) if index & 1 else _node(node, beside)
        index, width = index >> 1, (width + 1) >> 1
    return not rest and _root([node], num_leaves) == root


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """The tree from the leaves up to the single hash on top; one that is alone at its end of a level moves up."""
    levels = [[_leaf(leaf) for leaf in leaves]]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append(
            [_node(*below[at : at + 2]) if at + 1 < len(below) else below[at] for at in range(0, len(below), 2)]
        )
    return levels


def _leaf(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\0" + leaf).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _root(top: Sequence[bytes], num_leaves: int) -> bytes:
    return hashlib.sha256(b"\2" + num_leaves.to_bytes(8, "big") + b"".join(top)).digest()
