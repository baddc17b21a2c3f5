"""Two networks side by side: which weights they do not share, and what stands in front of these."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prooflens.checker.depth.networks import NetworkSite
from prooflens.checker.depth.norms import NormSite
from prooflens.checker.depth.shapes import Array
from prooflens.checker.depth.solu import SoluSite
from prooflens.checker.depth.values import Value
from prooflens.checker.edited import edges_of

Site = NormSite | NetworkSite | SoluSite
Affines = tuple[tuple[Array, Array] | None, ...]

AT_THE_END = ("final_norm.", "head.", "pooler.", "read.", "embed.", "free.")
"""Weights that no block reads."""
BEHIND_MIXING = (
    *("up", "gate", "down", "norm1_out", "norm2", "norm2_out", "network_norm"),
    *("o", "attn_out", "resid_mid", "resid_post", "mlp_out"),
)
"""Parts of a block that stand behind its mixing, where it is not parallel. What is mixed *into* is compared apart."""


class Kept(NamedTuple):
    """A site and its output, with what they were made from."""

    source: Value
    weights: Affines
    name: str
    site: Site
    made: Value


def apart(first: dict[str, Array], second: dict[str, Array]) -> list[str]:
    """The names of weights that two networks do not share.

    Args:
        first: the weights of one.
        second: the weights of the other.
    """
    names = first.keys() | second.keys()
    return [
        name
        for name in names
        if name not in first or name not in second or not equal(first[name], second[name])
    ]


def mixes_alike(number: int, first: dict[str, Array], second: dict[str, Array]) -> bool:
    """Whether two networks that share the stream in front of a block mix it by the same weights.

    Weights of other blocks and of the end do not matter here; all others do, those of no block too. Of the block's own,
    those behind the mixing do not, nor do edges into its network.

    Args:
        number: the block.
        first: the weights of one.
        second: the weights of the other.
    """
    block = f"blocks.{number}"
    unread = (*AT_THE_END, f"{block}.edges.", *(f"{block}.{part}." for part in BEHIND_MIXING))
    others = [name for name in apart(first, second) if not name.startswith(unread)]
    if any(name.startswith(f"{block}.") or not name.startswith("blocks.") for name in others):
        return False
    one, other = ([e for e in edges_of(weights, block) if e.channel < 3] for weights in (first, second))
    return len(one) == len(other) and all(
        a[:4] == b[:4] and np.array_equal(a.value, b.value) for a, b in zip(one, other, strict=True)
    )


def alike(first: Affines, second: Affines) -> bool:
    """Whether maps are the same ones.

    Args:
        first: some maps.
        second: as many others.
    """
    pairs = zip(first, second, strict=True)
    return all(a is b or (a is not None and b is not None and all(map(equal, a, b))) for a, b in pairs)


def equal(a: Array, b: Array) -> bool:
    """Whether arrays hold the same numbers.

    Args:
        a: an array.
        b: another one.
    """
    return a is b or np.array_equal(a, b)
