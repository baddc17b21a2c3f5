"""Members as tokens: all members of one shape have the same length, and every slot stands at the same positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prooflens.models import Roles

Numbers = NDArray[np.int64]

BLOCK = 2**20
"""Combinations that are looked at together when members are listed."""


@dataclass(frozen=True, eq=False)
class Shape:
    """The members of a family that share their token lengths.

    Attributes:
        ids: the fixed tokens, shape [S]; −1 where a slot stands.
        places: for every slot the spans [start, stop) of its occurrences, in the order of the text.
        fillers: for every slot the numbers of the fillers that fit this shape.
        tokens: for every slot the tokens of those fillers at each occurrence, shape [fillers, length].
        differ: pairs of slots whose fillers must not be the same text.
        words: for every slot all its fillers, as texts, or as tokens where it takes the vocabulary.
    """

    ids: Numbers
    places: Mapping[str, tuple[tuple[int, int], ...]]
    fillers: Mapping[str, Numbers]
    tokens: Mapping[str, tuple[Numbers, ...]]
    differ: tuple[tuple[str, str], ...]
    words: Mapping[str, Sequence[str | int]]

    @property
    def n_tokens(self) -> int:
        """S, the number of tokens."""
        return len(self.ids)

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots, in the order in which they first stand in the text."""
        return tuple(self.places)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many fillers each slot has here."""
        return tuple(len(self.fillers[slot]) for slot in self.slots)

    @property
    def combinations(self) -> int:
        """How many combinations of fillers there are, equal ones included."""
        return math.prod(self.sizes)

    @cached_property
    def members(self) -> int:
        """How many of them keep all slots apart that must differ: exactly, without listing them."""
        kinds = {slot: {self.words[slot][int(i)] for i in self.fillers[slot]} for slot in self.slots}
        return _count(kinds, list(self.differ))

    @cached_property
    def codes(self) -> dict[str, Numbers]:
        """The fillers of the slots that must differ, as numbers that are equal where the texts are."""
        known: dict[str | int, int] = {}
        named = {slot for pair in self.differ for slot in pair}
        return {
            slot: np.array(
                [known.setdefault(self.words[slot][int(i)], len(known)) for i in self.fillers[slot]]
            )
            for slot in named
        }

    @property
    def roles(self) -> Roles:
        """Every slot's positions, occurrence by occurrence, as queries name them."""
        return {
            slot: tuple(tuple(range(start, stop)) for start, stop in spans)
            for slot, spans in self.places.items()
        }

    def keep(self, digits: Numbers) -> NDArray[np.bool_]:
        """Which combinations [B, slots] are members.

        Args:
            digits: which filler every slot has, one row for each combination.
        """
        kept = np.ones(len(digits), dtype=bool)
        order = {slot: i for i, slot in enumerate(self.slots)}
        for a, b in self.differ:
            kept &= self.codes[a][digits[:, order[a]]] != self.codes[b][digits[:, order[b]]]
        return kept

    def digits(self, numbers: Numbers) -> Numbers:
        """Combinations by number: which filler of every slot, shape [B, slots]; the last slot turns fastest.

        Args:
            numbers: the numbers of combinations, from 0.
        """
        found = np.empty((len(numbers), len(self.sizes)), dtype=np.int64)
        rest = numbers
        for column in range(len(self.sizes) - 1, -1, -1):
            rest, found[:, column] = np.divmod(rest, self.sizes[column])
        return found

    def ids_of(self, digits: Numbers) -> Numbers:
        """The tokens [B, S] of combinations.

        Args:
            digits: which filler every slot has, one row for each combination.
        """
        found = np.repeat(self.ids[None], len(digits), axis=0)
        for column, slot in enumerate(self.slots):
            for (start, stop), tokens in zip(self.places[slot], self.tokens[slot], strict=True):
                found[:, start:stop] = tokens[digits[:, column]]
        return found

    def blocks(self, first: int, size: int, end: int | None = None) -> Iterator[tuple[int, Numbers]]:
        """Members in order, `size` at a time, from a combination on: the next combination, and their digits.

        Args:
            first: the combination to begin with.
            size: members of one block.
            end: the combination behind the last; None for all.
        """
        end = self.combinations if end is None else end
        step = min(BLOCK, max(size, 1024))
        numbers, digits = np.empty(0, np.int64), np.empty((0, len(self.sizes)), np.int64)
        for start in range(first, end, step):
            more = np.arange(start, min(start + step, end), dtype=np.int64)
            found = self.digits(more)
            kept = self.keep(found)
            numbers, digits = np.concatenate((numbers, more[kept])), np.concatenate((digits, found[kept]))
            while len(numbers) >= size:
                yield int(numbers[size - 1]) + 1, digits[:size]
                numbers, digits = numbers[size:], digits[size:]
        if len(numbers):
            yield end, digits


def _count(kinds: Mapping[str, set[str | int]], apart: list[tuple[str, str]]) -> int:
    """Ways to choose one of each slot's fillers with some pairs of slots apart: all, less those where a pair is equal.

    P(G) = P(G − e) − P(G / e): leave an inequality out, and take away the choices in which its two slots are one.
    """
    if not apart:
        return math.prod(len(held) for held in kinds.values())
    (a, b), *rest = apart
    whole = _count(kinds, rest)
    merged = {slot: held for slot, held in kinds.items() if slot != b}
    merged[a] = kinds[a] & kinds[b]
    joined = [(a if x == b else x, a if y == b else y) for x, y in rest]
    if any(x == y for x, y in joined):
        return whole
    return whole - _count(merged, joined)
