"""Counts without sorting: the range of scores is cut into equal pieces, and the order inside a piece is left open."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF


def share_brackets(
    values: Float[Tensor, "B M"],
    column: Int[Tensor, " M"] | Int[Tensor, "B M"],
    apart: Float[Tensor, " B"],
    pieces: int,
    members: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K"], Bool[Tensor, " B"]]:
    """Bound the share of combinations, one item per group, in which each key is on top alone.

    An item at v is in piece ⌊(v − low)·s + ½⌋. A row is safe if no item is nearer to a cut than m, which covers half of
    `apart` and the rounding of that expression: then items in different pieces have the order of the real scores.

    Args:
        values: scores, in any order.
        column: the key of every item.
        apart: scores that are further apart than this have the order of the real ones.
        pieces: how many pieces.
        members: the keys that stand in each group.
        sizes: how many items each group has.

    Returns:
        Proved lower and upper shares by key, and the rows that are safe; the others mean nothing.
    """
    n = sum(len(keys) for keys in members)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    scale = (pieces - 1) / (high - low).clamp(min=TINY * 2.0**60)
    place = (values - low).mul_(scale).add_(0.5)
    margin = up((0.5 * apart[:, None] * scale + 8.0 * UNIT_ROUNDOFF * pieces) * (1.0 + gamma(16)), 4)
    piece = place.floor()
    place -= piece
    safe = ((place > margin) & (place < 1.0 - margin)).all(-1) & (margin[:, 0] < 0.25)
    index = piece.clamp_(0, pieces - 1).long().add_(column * pieces)
    index += torch.arange(len(values), device=values.device)[:, None] * (n * pieces)
    there = torch.zeros(len(values) * n * pieces, dtype=torch.int32, device=values.device)
    there.scatter_add_(0, index.flatten(), there.new_ones(1).expand(index.numel()))
    found = there.view(len(values), n, pieces).double()
    inside = [found[:, list(keys)].sum(1) for keys in members]
    after = [some.cumsum(-1) for some in inside]
    lower, upper = (values.new_zeros(len(values), n) for _ in range(2))
    # Counts are exact in float64; shares, products and sums of numbers that are not negative round relative to them.
    error = gamma(4 * len(sizes) + pieces + 16)
    for is_upper, made in ((False, lower), (True, upper)):
        ends = [
            (end if is_upper else end - some) / size
            for end, some, size in zip(after, inside, sizes, strict=True)
        ]
        for keys, size, others in zip(members, sizes, _products_of_others(ends), strict=True):
            for key in keys:
                made[:, key] = (found[:, key] / size * others).sum(-1)
    lower *= 1.0 - error
    upper = upper * (1.0 + error) + TINY * pieces
    return lower.clamp_(min=0.0), upper.clamp_(max=1.0), safe


def _products_of_others(factors: Sequence[Float[Tensor, "B P"]]) -> list[Tensor]:
    """Return, for each g, the product of all factors but the g-th."""
    ones = torch.ones_like(factors[0])
    before, after = [ones], [ones]
    for factor in factors[:-1]:
        before.append(before[-1] * factor)
    for factor in reversed(factors[1:]):
        after.append(after[-1] * factor)
    return [left * right for left, right in zip(before, reversed(after), strict=True)]
