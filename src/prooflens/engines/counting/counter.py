"""One head and one query position: counts over all prompts, query token by query token, in tiles that fit memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, prod

import torch
from jaxtyping import Int
from torch import Tensor

from prooflens.engines.counting.ordering import ascending, brackets
from prooflens.engines.counting.pieces import share_brackets
from prooflens.engines.counting.scores import FirstScores, Vectors
from prooflens.engines.counting.slots import Slots
from prooflens.errors import QueryError
from prooflens.numerics import up

TILE_BYTES = {"cpu": 2**23, "cuda": 2**31}
"""The scores of one tile may take so much; sorting and counting take several times as much."""

EXACT_PRODUCT = 2**63
"""Products of counts below this are exact differences of int64 numbers, which wrap around."""

EXACT_SUM = 2**21
"""So many numbers below 2³² have an exact sum in float64."""

MOST_DOUBTS = 64
"""A row with more items in doubt is bracketed as a whole."""

MOST_KEYS = 62
"""Keys are bits of an int64 where positions share a slot."""


@dataclass(frozen=True)
class Counts:
    """On how many prompts each key is attended most, by query token.

    Attributes:
        keys: the keys that were compared.
        tokens: the query tokens that were counted.
        each: how many prompts there are per query token.
        lower: proved: at least so many prompts, per query token and key.
        upper: proved: at most so many.
    """

    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    each: int
    lower: tuple[tuple[int, ...], ...]
    upper: tuple[tuple[int, ...], ...]

    @property
    def prompts(self) -> int:
        """How many prompts were counted: those whose query token is one of `tokens`."""
        return self.each * len(self.tokens)

    def total(self, key: int) -> tuple[int, int]:
        """Return the lower and the upper count of a key over all query tokens."""
        column = self.keys.index(key)
        return sum(row[column] for row in self.lower), sum(row[column] for row in self.upper)


@dataclass(frozen=True, eq=False)
class _Group:
    """A slot as the counter sees it: its visible positions, and the tokens that it may hold.

    Attributes:
        columns: numbers of its keys.
        keys: key vectors of its tokens, per position.
        added: bias and shift, per position.
        size: how many tokens; the query's own slot holds one, the query token.
        own: whether it is the query's slot.
    """

    columns: tuple[int, ...]
    keys: tuple[Vectors, ...]
    added: tuple[float, ...]
    size: int
    own: bool


class _Counter:
    """The counts of one head at one query position."""

    def __init__(
        self,
        scores: FirstScores,
        slots: Slots,
        head: int,
        position: int,
        keys: Sequence[int],
        shifts: Mapping[int, float],
    ) -> None:
        self.scores, self.slots, self.keys = scores, slots, tuple(keys)
        self.queries = scores.queries(head, position)
        device = scores.model.device
        own = slots.slot_of(position)
        self.groups: list[_Group] = []
        self.free = 1
        for slot in slots.slots:
            there = [key for key in slot.positions if key in self.keys]
            if not there:
                self.free *= 1 if slot is own else slot.size(slots.vocabulary)
                continue
            vectors = [scores.keys(head, key) for key in there]
            if slot is not own and slot.tokens is not None:
                chosen = torch.tensor(slot.tokens, device=device)
                vectors = [some.of(chosen) for some in vectors]
            added = tuple(scores.bias(head, position, key) + shifts.get(key, 0.0) for key in there)
            size = 1 if slot is own else slot.size(slots.vocabulary)
            columns = tuple(self.keys.index(key) for key in there)
            self.groups.append(_Group(columns, tuple(vectors), added, size, slot is own))
        self.sizes = [group.size for group in self.groups]
        self.members = [group.columns for group in self.groups]
        self.group = torch.cat(
            [torch.full((size,), g, device=device, dtype=torch.int8) for g, size in enumerate(self.sizes)]
        )
        self.shared = any(len(group.columns) > 1 for group in self.groups)
        if self.shared and len(self.keys) > MOST_KEYS:
            raise QueryError(f"prompts with repeated tokens are counted for at most {MOST_KEYS} keys")

    @property
    def items(self) -> int:
        """How many scores a query token has."""
        return len(self.group)

    def scores_of(self, tokens: Int[Tensor, " B"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return values [B, M], owners as bits [B, M] (empty where every slot has one key), and 2E per token."""
        queries = self.queries.of(tokens)
        scaled = queries.middle * self.scores.step.scale
        read = [[some.of(tokens) if group.own else some for some in group.keys] for group in self.groups]
        every = [some for group in read for some in group]
        added = [abs(number) for group in self.groups for number in group.added]
        apart = up(2.0 * self.scores.errors(queries, every, added))
        values = scaled.new_empty(len(tokens), self.items)
        owners = (
            torch.empty((*values.shape,), dtype=torch.long, device=values.device) if self.shared else None
        )
        start = 0
        for group, vectors in zip(self.groups, read, strict=True):
            here = slice(start, start + group.size)
            start += group.size
            found = [
                (scaled * some.middle).sum(-1, keepdim=True) if group.own else scaled @ some.middle.T
                for some in vectors
            ]
            found = [one + number if number else one for one, number in zip(found, group.added, strict=True)]
            if owners is None:
                values[:, here] = found[0]
                continue
            best = torch.stack(found).amax(0)
            values[:, here] = best
            owners[:, here] = 0
            for one, column in zip(found, group.columns, strict=True):
                owners[:, here] |= (best - one <= apart[:, None]).long() << column
        return values, values.new_empty(0) if owners is None else owners, apart

    def count(self, tokens: Int[Tensor, " B"], pieces: int | None) -> tuple[list[list[int]], list[list[int]]]:
        """Return lower and upper counts of some query tokens, per key."""
        values, owners, apart = self.scores_of(tokens)
        lower, upper = [[[0] * len(self.keys) for _ in tokens] for _ in range(2)]
        if pieces is not None:
            left = self._by_pieces(values, owners, apart, pieces, lower, upper)
            if not left:
                return lower, upper
            values, apart = values[left], apart[left]
            owners = owners[left] if self.shared else owners
        else:
            left = list(range(len(tokens)))
        order = ascending(values)
        values, group = values.gather(-1, order), self.group[order]
        owners = owners.gather(-1, order) if self.shared else owners
        hard = self._by_differences(values, group, owners, apart, left, lower, upper)
        for row in hard:
            bits = self._bits_of(owners, group, row)
            found = brackets(values[row], group[row], bits, float(apart[row]), self.members, self.sizes)
            lower[left[row]], upper[left[row]] = found
        return lower, upper

    @property
    def _bits(self) -> Tensor:
        """The key of each group as a bit, where every group has one."""
        return torch.tensor([1 << keys[0] for keys in self.members], device=self.group.device)

    def _by_pieces(
        self,
        values: Tensor,
        owners: Tensor,
        apart: Tensor,
        pieces: int,
        lower: list[list[int]],
        upper: list[list[int]],
    ) -> list[int]:
        """Count with so many cuts; return the rows in which a score is too close to a cut."""
        n = len(self.keys)
        if self.shared:
            column = torch.zeros_like(owners)
            for key in range(n):
                column = torch.where(owners == 1 << key, key, column)
            clear = ((owners & (owners - 1)) == 0).all(-1)
        else:
            column = torch.tensor([keys[0] for keys in self.members], device=values.device)[self.group.long()]
            clear = torch.ones(len(values), dtype=torch.bool, device=values.device)
        low, high, safe = share_brackets(values, column, apart, pieces, self.members, self.sizes)
        each = prod(self.sizes)
        safe &= clear
        for row, (is_safe, least, most) in enumerate(
            zip(safe.tolist(), low.tolist(), high.tolist(), strict=True)
        ):
            if is_safe:
                lower[row] = [max(0, -floor(-Fraction(share) * each)) for share in least]
                upper[row] = [min(each, floor(Fraction(share) * each)) for share in most]
        rows: list[int] = (~safe).nonzero()[:, 0].tolist()
        return rows

    def _by_differences(
        self,
        values: Tensor,
        group: Tensor,
        owners: Tensor,
        apart: Tensor,
        left: Sequence[int],
        lower: list[list[int]],
        upper: list[list[int]],
    ) -> list[int]:
        """Count rows with little doubt: W(x) = Π_k C_k(x) grows by Π_{k≠j} C_k(x) at an item x of group j.

        int64 wraps around, so differences below 2⁶³ are exact whatever W is. Groups of one item may add more; their
        products are taken one by one, and so are items whose order is in doubt. Return the rows that are left.
        """
        several = [size for size in self.sizes if size > 1]
        largest = prod(several) // min(several) if several else 1
        if largest >= EXACT_PRODUCT or self.items >= EXACT_SUM:
            return list(range(len(values)))
        singles = [g for g, size in enumerate(self.sizes) if size == 1]
        at = {g: (group == g).byte().argmax(-1, keepdim=True) for g in singles}
        below: dict[int, list[Tensor]] = {g: [] for g in singles}
        product = torch.ones_like(values, dtype=torch.long)
        for g in range(len(self.sizes)):
            running = (group == g).cumsum(-1)
            product *= running
            for single, index in at.items():
                if single != g:
                    below[single].append(running.gather(-1, index))
        product = product.diff(dim=-1, prepend=product.new_zeros(len(product), 1))
        near = values[:, 1:] - values[:, :-1] <= apart[:, None]
        runs = self._doubts(near, group, owners)
        hard = sorted(row for row, found in runs.items() if sum(map(len, found)) > MOST_DOUBTS)
        for row, found in runs.items():
            for run in found:
                product[row, run.start : run.stop] = 0
        for index in at.values():
            product.scatter_(-1, index, 0)
        sums = self._sums(product, group, owners)
        for g, index in at.items():
            self._add_singles(g, index, below[g], owners, sums, runs)
        for row, total in enumerate(sums):
            if row not in hard:
                lower[left[row]], upper[left[row]] = total, list(total)
                for run in runs.get(row, []):
                    self._add_run(
                        run, group[row], self._bits_of(owners, group, row), lower[left[row]], upper[left[row]]
                    )
        return hard

    def _add_singles(
        self,
        g: int,
        index: Tensor,
        below: list[Tensor],
        owners: Tensor,
        sums: list[list[int]],
        runs: Mapping[int, list[range]],
    ) -> None:
        """Add the combinations in which the only item of a group is on top, unless it is in doubt."""
        factors = torch.cat(below, -1).tolist() if below else [[]] * len(sums)
        if self.shared:
            keys = [bits.bit_length() - 1 for bits in owners.gather(-1, index)[:, 0].tolist()]
        else:
            keys = [self.members[g][0]] * len(sums)
        for row, (item, key) in enumerate(zip(index[:, 0].tolist(), keys, strict=True)):
            if not any(item in run for run in runs.get(row, [])):
                sums[row][key] += prod(factors[row])

    def _doubts(self, near: Tensor, group: Tensor, owners: Tensor) -> dict[int, list[range]]:
        """Return the runs of items, by row, whose order or whose keys are in doubt."""
        seeds = near & (group[:, 1:] != group[:, :-1])
        places = seeds.nonzero().tolist()
        if self.shared:
            places += ((owners & (owners - 1)) != 0).nonzero().tolist()
        found: dict[int, list[range]] = {}
        for row, item in sorted(places):
            runs = found.setdefault(row, [])
            if (runs and item in runs[-1]) or sum(map(len, runs)) > MOST_DOUBTS:
                continue
            start = stop = item
            while start > 0 and bool(near[row, start - 1]):
                start -= 1
            while stop < near.shape[1] and bool(near[row, stop]):
                stop += 1
            runs.append(range(start, stop + 1))
        return found

    def _add_run(self, run: range, group: Tensor, bits: Tensor, lower: list[int], upper: list[int]) -> None:
        """Add the combinations whose largest item is in a run: nothing of it counts as below, or all of it."""
        kinds = range(len(self.sizes))
        inside = group[run.start : run.stop].tolist()
        before = group[: run.start].long().bincount(minlength=len(self.sizes)).tolist()
        after = [before[g] + inside.count(g) for g in kinds]
        for g, bit in zip(inside, bits[run.start : run.stop].tolist(), strict=True):
            for key in self.members[g]:
                if bit >> key & 1:
                    lower[key] += prod(before[k] for k in kinds if k != g) * (bit == 1 << key)
                    upper[key] += prod(after[k] for k in kinds if k != g)

    def _bits_of(self, owners: Tensor, group: Tensor, row: int) -> Tensor:
        """Return the keys of the items of a row, as bits."""
        return owners[row] if self.shared else self._bits[group[row].long()]

    def _sums(self, product: Tensor, group: Tensor, owners: Tensor) -> list[list[int]]:
        """Add up products by key, exactly: their halves of 32 bits have exact sums in float64."""
        halves = (product & 0xFFFFFFFF).double(), (product >> 32).double()
        n = len(self.keys)
        if product.device.type == "cpu" and not self.shared:
            which = torch.tensor([keys[0] for keys in self.members])[group.long()]
            which += n * torch.arange(len(group))[:, None]
            sums = [
                half.new_zeros(n * len(group)).index_add_(0, which.flatten(), half.flatten()).view(-1, n)
                for half in halves
            ]
        else:
            place = {keys[0]: g for g, keys in enumerate(self.members)}
            masks = [owners == 1 << key if self.shared else group == place[key] for key in range(n)]
            sums = [torch.stack([(half * mask).sum(-1) for mask in masks], -1) for half in halves]
        return [
            [(int(b) << 32) + int(a) for a, b in zip(*row, strict=True)]
            for row in zip(sums[0].tolist(), sums[1].tolist(), strict=True)
        ]


def count_most_attended(
    scores: FirstScores,
    slots: Slots,
    head: int,
    position: int,
    keys: Sequence[int] | None = None,
    shifts: Mapping[int, float] | None = None,
    tokens: Sequence[int] | None = None,
    pieces: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Counts:
    """Count the prompts on which each key is attended most, alone, by a head of layer 0 at a query position.

    Args:
        scores: the model's scores for prompts of this length.
        slots: which tokens stand where.
        head: the number of the head.
        position: the query position, from 0.
        keys: the keys that are compared; None for all that the position attends to.
        shifts: numbers that are added to the scores of some keys; None for none.
        tokens: the query tokens that are counted; None for all that its slot may hold.
        pieces: cut the range of scores into so many pieces, and leave the order inside a piece open: faster, and
            the counts have a lower and an upper end; None to sort, which is exact but for rounding.
        progress: called with the share that is done; None for silence.

    Returns:
        Proved lower and upper counts per query token.
    """
    visible = scores.visible(position)
    chosen = sorted(visible if keys is None else set(keys))
    if wrong := [key for key in chosen if key not in visible]:
        raise QueryError(f"position {position} attends to the keys {visible}, not to {wrong[0]}")
    slot = slots.slot_of(position)
    allowed = range(slots.vocabulary) if slot.tokens is None else slot.tokens
    counted = tuple(allowed if tokens is None else tokens)
    if wrong := sorted(set(counted) - set(allowed))[:1]:
        raise QueryError(f"token {wrong[0]} cannot stand at position {position}")
    counter = _Counter(scores, slots, head, position, chosen, shifts or {})
    device = scores.model.device
    tile = max(1, TILE_BYTES.get(device.type, 2**25) // (8 * counter.items))
    lower: list[tuple[int, ...]] = []
    upper: list[tuple[int, ...]] = []
    with torch.no_grad():
        for start in range(0, len(counted), tile):
            low, high = counter.count(torch.tensor(counted[start : start + tile], device=device), pieces)
            lower += [tuple(number * counter.free for number in row) for row in low]
            upper += [tuple(number * counter.free for number in row) for row in high]
            if progress is not None:
                progress(len(lower) / len(counted))
    each = slots.prompts // slot.size(slots.vocabulary)
    return Counts(tuple(chosen), counted, each, tuple(lower), tuple(upper))
