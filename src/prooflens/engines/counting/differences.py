"""Fast exact counts of sorted rows: a running product of running counts, and its differences.

W(x) = Π_k C_k(x) is the number of combinations whose items all stand at x or below. At an item x of group j it grows by
Π_{k≠j} C_k(x), the combinations in which x is on top. int64 wraps around, so differences below 2⁶³ are exact whatever
W is. Groups of one item may add more; their products are taken one by one. So are *runs*: items whose order, or whose
key, is in doubt. With C_k before a run and behind it they have a lower and an upper count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

EXACT_PRODUCT = 2**63
"""Products of counts below this are exact differences of int64 numbers."""

EXACT_SUM = 2**21
"""So many numbers below 2³² have an exact sum in float64."""

MOST_DOUBTS = 64
"""A row with more doubts is left to `brackets`."""

WINDOW = 8
"""Runs that reach further than this from a doubt are left to `brackets`."""

Rows = list[list[int]]


@dataclass(frozen=True, eq=False)
class SortedRows:
    """Sorted scores of some query tokens.

    Attributes:
        values: the scores, ascending in each row.
        group: the group of each item.
        owners: the keys that an item may stand for, as bits; None if every group has one key.
        apart: scores of a row that are further apart than this have the order of the real ones.
        members: the keys of each group; keys are numbered from 0.
        sizes: how many items each group has.
    """

    values: Float[Tensor, "B M"]
    group: Int[Tensor, "B M"]
    owners: Int[Tensor, "B M"] | None
    apart: Float[Tensor, " B"]
    members: Sequence[Sequence[int]]
    sizes: Sequence[int]

    @property
    def n_keys(self) -> int:
        """How many keys there are."""
        return sum(len(keys) for keys in self.members)

    def bits(self, row: int) -> Int[Tensor, " M"]:
        """Return the keys of the items of a row, as bits."""
        if self.owners is not None:
            return self.owners[row]
        alone = torch.tensor([1 << keys[0] for keys in self.members], device=self.group.device)
        return alone[self.group[row].long()]


@dataclass(frozen=True)
class _Run:
    """Neighbours in doubt: where they start, their groups, and the keys that each may stand for, as bits."""

    row: int
    start: int
    groups: tuple[int, ...]
    bits: tuple[int, ...]

    def __contains__(self, item: int) -> bool:
        return self.start <= item < self.start + len(self.groups)


def count_rows(rows: SortedRows) -> tuple[Rows, Rows, list[int]]:
    """Return lower and upper counts per row and key, and the rows that are left to `brackets`.

    Args:
        rows: the sorted scores.
    """
    nothing = [[0] * rows.n_keys for _ in rows.values]
    several = [size for size in rows.sizes if size > 1]
    largest = prod(several) // min(several) if several else 1
    if largest >= EXACT_PRODUCT or rows.values.shape[-1] >= EXACT_SUM:
        return nothing, nothing, list(range(len(nothing)))
    group = rows.group
    runs, hard = _runs(rows)
    singles = {
        g: (group == g).byte().argmax(-1, keepdim=True) for g, size in enumerate(rows.sizes) if size == 1
    }
    below: dict[int, list[Tensor]] = {g: [] for g in singles}
    at = torch.tensor([[run.row, run.start] for run in runs], dtype=torch.long, device=group.device)
    at = at.reshape(-1, 2)
    before = []
    product = torch.ones_like(rows.values, dtype=torch.long)
    for g in range(len(rows.sizes)):
        mask = group == g
        running = mask.cumsum(-1)
        product *= running
        before.append(running[at[:, 0], at[:, 1]] - mask[at[:, 0], at[:, 1]].long())
        for single, index in singles.items():
            below[single].append(running.gather(-1, index))
    product = torch.cat((product[:, :1], product[:, 1:] - product[:, :-1]), -1)
    for index in singles.values():
        product.scatter_(-1, index, 0)
    for run in runs:
        product[run.row, run.start : run.start + len(run.groups)] = 0
    lower = _sums(product, rows)
    by_row: dict[int, list[_Run]] = {}
    for run in runs:
        by_row.setdefault(run.row, []).append(run)
    for g, index in singles.items():
        _add_single(rows, g, index, torch.cat(below[g], -1).tolist(), by_row, lower)
    upper = [list(row) for row in lower]
    for run, counts in zip(runs, torch.stack(before, -1).tolist(), strict=True):
        _add_run(rows, run, counts, lower[run.row], upper[run.row])
    return lower, upper, hard


def _runs(rows: SortedRows) -> tuple[list[_Run], list[int]]:
    """Return the runs of all rows, and the rows that have too many or too long ones."""
    near = rows.values[:, 1:] - rows.values[:, :-1] <= rows.apart[:, None]
    seeds = torch.nn.functional.pad(near & (rows.group[:, 1:] != rows.group[:, :-1]), (0, 1))
    if rows.owners is not None:
        seeds |= (rows.owners & (rows.owners - 1)) != 0
    many = (seeds.sum(-1) > MOST_DOUBTS).nonzero()[:, 0]
    seeds[many] = False
    places = seeds.nonzero()
    hard = set(many.tolist())
    if not len(places):
        return [], sorted(hard)
    row, item = places[:, :1], places[:, 1:]
    window = item + torch.arange(-WINDOW, WINDOW + 1, device=item.device)
    inside = (window >= 0) & (window < rows.values.shape[-1])
    window = window.clamp(0, rows.values.shape[-1] - 1)
    linked = torch.nn.functional.pad(near, (0, 1))[row, window] & inside
    groups = rows.group[row, window].tolist()
    bits = None if rows.owners is None else rows.owners[row, window].tolist()
    found: list[_Run] = []
    for number, ((at, seed), link) in enumerate(zip(places.tolist(), linked.tolist(), strict=True)):
        if found and found[-1].row == at and seed in found[-1]:
            continue
        start = stop = WINDOW
        while start > 0 and link[start - 1]:
            start -= 1
        while stop < 2 * WINDOW and link[stop]:
            stop += 1
        if start == 0 or stop == 2 * WINDOW:
            hard.add(at)
            continue
        there = groups[number][start : stop + 1]
        keys = bits[number][start : stop + 1] if bits else [1 << rows.members[g][0] for g in there]
        found.append(_Run(at, seed - WINDOW + start, tuple(there), tuple(keys)))
    return found, sorted(hard)


def _add_single(
    rows: SortedRows,
    g: int,
    index: Int[Tensor, "B 1"],
    counts: Rows,
    runs: dict[int, list[_Run]],
    sums: Rows,
) -> None:
    """Add the combinations in which the only item of a group is on top, unless it is in doubt."""
    if rows.owners is None:
        keys = [rows.members[g][0]] * len(sums)
    else:
        keys = [bits.bit_length() - 1 for bits in rows.owners.gather(-1, index)[:, 0].tolist()]
    for row, (item, key) in enumerate(zip(index[:, 0].tolist(), keys, strict=True)):
        if not any(item in run for run in runs.get(row, [])):
            sums[row][key] += prod(count for k, count in enumerate(counts[row]) if k != g)


def _add_run(rows: SortedRows, run: _Run, before: list[int], lower: list[int], upper: list[int]) -> None:
    """Add the combinations whose largest item is in a run: nothing of the run counts as below, or all of it."""
    kinds = range(len(rows.sizes))
    after = [before[g] + run.groups.count(g) for g in kinds]
    for g, bit in zip(run.groups, run.bits, strict=True):
        for key in rows.members[g]:
            if bit >> key & 1:
                lower[key] += prod(before[k] for k in kinds if k != g) * (bit == 1 << key)
                upper[key] += prod(after[k] for k in kinds if k != g)


def _sums(product: Int[Tensor, "B M"], rows: SortedRows) -> Rows:
    """Add up products by key, exactly: their halves of 32 bits have exact sums in float64."""
    halves = (product & 0xFFFFFFFF).double(), (product >> 32).double()
    n, group = rows.n_keys, rows.group
    place = {keys[0]: g for g, keys in enumerate(rows.members)}
    if product.device.type == "cpu" and rows.owners is None:
        chosen = [place[key] for key in range(n)]
        sums = [
            torch.from_numpy(
                np.stack(
                    [
                        np.bincount(g, w, len(rows.sizes))
                        for g, w in zip(group.numpy(), half.numpy(), strict=True)
                    ]
                )
            )[:, chosen]
            for half in halves
        ]
    else:
        masks = [group == place[key] if rows.owners is None else rows.owners == 1 << key for key in range(n)]
        sums = [torch.stack([(half * mask).sum(-1) for mask in masks], -1) for half in halves]
    return [
        [(int(b) << 32) + int(a) for a, b in zip(*row, strict=True)]
        for row in zip(sums[0].tolist(), sums[1].tolist(), strict=True)
    ]
