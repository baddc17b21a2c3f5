"""Sort the scores of a query token, cut the list where rounding leaves no doubt, and count from below.

Items are scores of one query token: `group` is the slot that an item belongs to, `owners` are the keys that it may
stand for (one, except where a slot stands at several positions whose scores are too close to tell apart).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prooflens.engines.counting.integers import sums_of_products

RADIX_FROM = 4096
"""From so many items on, two passes of a radix sort are faster than a comparison sort on a cpu."""


MENDED, MOST_MENDED = 6, 256
"""How far around a place in disorder, and how many such places, are sorted by themselves before all is sorted again."""


def ascending(values: Float[Tensor, "B M"]) -> tuple[Float[Tensor, "B M"], Int[Tensor, "B M"]]:
    """Return each row sorted, and the order that sorts it."""
    if values.device.type != "cpu":
        by_torch = values.sort(-1)
        return by_torch.values, by_torch.indices
    rows = [_order(row) for row in values.numpy()]
    found, order = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
    return found, order


def _order(row: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Sort by a 32-bit key, a non-decreasing function of the value, in two passes of 16 bits; then mend the rest.

    Two passes leave only neighbours with equal keys in disorder: they are sorted by themselves.
    """
    low, high = float(row.min()), float(row.max())
    scale = (2.0**32 - 2.0) / (high - low) if high > low else 0.0
    if len(row) < RADIX_FROM or not 0.0 < scale < 2.0**500:
        order = np.argsort(row, kind="stable")
        return row[order], order
    keys = np.subtract(row, low)
    keys *= scale
    halves = keys.astype("<u4").view("<u2")
    first = np.argsort(halves[::2], kind="stable")
    order = first[np.argsort(halves[1::2][first], kind="stable")]
    found = row[order]
    for place in (found[1:] < found[:-1]).nonzero()[0][:MOST_MENDED]:
        near = slice(max(0, place - MENDED), place + MENDED)
        again = np.argsort(found[near], kind="stable")
        order[near], found[near] = order[near][again], found[near][again]
    if bool((found[1:] < found[:-1]).any()):
        again = np.argsort(found, kind="stable")
        order, found = order[again], found[again]
    return found, order


def brackets(
    values: Float[Tensor, " M"],
    group: Int[Tensor, " M"],
    owners: Int[Tensor, " M"],
    apart: float,
    members: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Return the least and the largest number of combinations, one item per group, in which each key is on top alone.

    Args:
        values: sorted scores.
        group: the group of each item.
        owners: the keys that an item may stand for, as bits.
        apart: scores that are further apart than this have the order of the real ones.
        members: the keys that stand in each group; keys are numbered from 0.
        sizes: how many items each group has.

    Returns:
        Lower and upper counts by key.
    """
    cut = (values[1:] - values[:-1] > apart).nonzero()[:, 0] + 1
    none, all_ = cut.new_zeros(1), cut.new_full((1,), len(values))
    starts, ends = torch.cat((none, cut)), torch.cat((cut, all_))
    before = [_running(group == g) for g in range(len(sizes))]
    sure = torch.ones_like(owners, dtype=torch.bool) if not _shared(members) else (owners & (owners - 1)) == 0
    lower, upper = (dict.fromkeys((key for keys in members for key in keys), 0) for _ in range(2))
    for g, keys in enumerate(members):
        others = [k for k in range(len(sizes)) if k != g]
        for key in keys:
            may = (owners >> key & 1).bool() & (group == g)
            for found, who, at in ((lower, may & sure, starts), (upper, may, ends)):
                total = _running(who)
                weight = total[ends] - total[starts]
                some = weight.nonzero()[:, 0]
                factors = [weight[some], *(before[k][at[some]] for k in others)]
                (found[key],) = sums_of_products(factors, [sizes[g], *(sizes[k] for k in others)])
    return [lower[key] for key in sorted(lower)], [upper[key] for key in sorted(upper)]


def _shared(members: Sequence[Sequence[int]]) -> bool:
    return any(len(keys) > 1 for keys in members)


def _running(mask: Bool[Tensor, " M"]) -> Int[Tensor, " M+1"]:
    """Return how many are True before each place, and in all."""
    return torch.cat((mask.new_zeros(1, dtype=torch.long), mask.cumsum(-1)))
