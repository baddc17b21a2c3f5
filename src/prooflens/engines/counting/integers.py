"""Sums of products of counts, exactly: limbs of 30 bits in int64, whatever the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

LIMB_BITS = 30
"""A limb times a chunk (below 2³²) and a carry (below 2³³) stays below 2⁶³."""

CHUNK = 2**32
"""Factors are multiplied with each other while their product stays below this."""

MASK = (1 << LIMB_BITS) - 1


def sums_of_products(factors: Sequence[Int[Tensor, "*B L"]], bounds: Sequence[int]) -> list[int]:
    """Return Σ_l Π_f factors[f][b, l] as whole numbers, one per row b.

    Args:
        factors: whole numbers of int64, not negative, shape [L] or [B, L]; L below 2³¹.
        bounds: an upper bound of each factor, below 2³².

    Example:
        >>> big = torch.full((3,), 2**31)
        >>> sums_of_products([big, big, big], [2**31] * 3) == [3 * 2**93]
        True
    """
    chunks: list[Tensor] = []
    room = 0
    for bound, factor in sorted(zip(bounds, factors, strict=True), key=lambda pair: pair[0]):
        if bound >= CHUNK:
            raise ValueError(f"a factor may reach {bound}, which is not below 2³²")
        if chunks and room * max(bound, 1) < CHUNK:
            chunks[-1], room = chunks[-1] * factor, room * max(bound, 1)
        else:
            chunks.append(factor)
            room = max(bound, 1)
    limbs = [chunks[0] & MASK, chunks[0] >> LIMB_BITS]
    for chunk in chunks[1:]:
        limbs = _times(limbs, chunk)
    sums = torch.stack([limb.sum(-1) for limb in limbs], -1).reshape(-1, len(limbs)).tolist()
    return [sum(part << (LIMB_BITS * i) for i, part in enumerate(row)) for row in sums]


def _times(limbs: list[Tensor], chunk: Tensor) -> list[Tensor]:
    """Multiply numbers in limbs by numbers below 2³²."""
    made, carry = [], torch.zeros_like(chunk)
    for limb in limbs:
        product = limb * chunk + carry
        made.append(product & MASK)
        carry = product >> LIMB_BITS
    return [*made, carry & MASK, carry >> LIMB_BITS]
