"""One head and one query position: counts over all prompts, query token by query token, in tiles that fit memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Int
from torch import Tensor

from prooflens.engines.counting.differences import SortedRows, count_rows
from prooflens.engines.counting.ordering import ascending, brackets
from prooflens.engines.counting.pieces import share_brackets
from prooflens.engines.counting.scores import FirstScores, Vectors
from prooflens.engines.counting.slots import Slots
from prooflens.errors import QueryError
from prooflens.numerics import up

TILE_BYTES = {"cpu": 2**26, "cuda": 2**31}
"""The scores of one tile may take so much; on a GPU sorting and counting take several times as much."""

SORTED_TOGETHER = 4
"""Query tokens that a thread of a cpu sorts and counts together: their scores stay near the processor."""

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
        threads: ThreadPoolExecutor,
    ) -> None:
        self.scores, self.slots, self.keys, self.threads = scores, slots, tuple(keys), threads
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
        size = len(values) if values.device.type != "cpu" else SORTED_TOGETHER
        parts = [slice(start, start + size) for start in range(0, len(values), size)]

        def sort(part: slice) -> tuple[list[list[int]], list[list[int]]]:
            return self._sort(values[part], owners[part] if self.shared else None, apart[part])

        found = [sort(part) for part in parts] if len(parts) == 1 else list(self.threads.map(sort, parts))
        for part, (low, high) in zip(parts, found, strict=True):
            for place, least, most in zip(left[part], low, high, strict=True):
                lower[place], upper[place] = least, most
        return lower, upper

    def _sort(
        self, values: Tensor, owners: Tensor | None, apart: Tensor
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return lower and upper counts of some rows, by sorting them."""
        values, order = ascending(values)
        owners = None if owners is None else owners.gather(-1, order)
        rows = SortedRows(values, self.group[order], owners, apart, self.members, self.sizes)
        low, high, hard = count_rows(rows)
        for row in hard:
            low[row], high[row] = brackets(
                values[row], rows.group[row], rows.bits(row), float(apart[row]), self.members, self.sizes
            )
        return low, high

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
        # Shares as whole numbers of 2⁻⁶⁰, rounded outward: a count is whole, so both products may be cut.
        least, most = (low * 2.0**60).floor().long().tolist(), (high * 2.0**60).ceil().long().tolist()
        for row in safe.nonzero()[:, 0].tolist():
            lower[row] = [share * each >> 60 for share in least[row]]
            upper[row] = [share * each >> 60 for share in most[row]]
        rows: list[int] = (~safe).nonzero()[:, 0].tolist()
        return rows


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
    workers = torch.get_num_threads()
    device = scores.model.device
    lower: list[tuple[int, ...]] = []
    upper: list[tuple[int, ...]] = []
    try:
        with (
            ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as threads,
            torch.no_grad(),
        ):
            counter = _Counter(scores, slots, head, position, chosen, shifts or {}, threads)
            tile = max(1, TILE_BYTES.get(device.type, 2**26) // (8 * counter.items))
            for start in range(0, len(counted), tile):
                low, high = counter.count(torch.tensor(counted[start : start + tile], device=device), pieces)
                lower += [tuple(number * counter.free for number in row) for row in low]
                upper += [tuple(number * counter.free for number in row) for row in high]
                if progress is not None:
                    progress(len(lower) / len(counted))
    finally:  # a worker's setting is the process's
        torch.set_num_threads(workers)
    each = slots.prompts // slot.size(slots.vocabulary)
    return Counts(tuple(chosen), counted, each, tuple(lower), tuple(upper))
