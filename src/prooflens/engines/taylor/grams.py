"""Inner products of keys and of values, as a mixing in `taylor` weighs the factors (`taylor.mixing`).

Weights are equal within a group of factors, so left diag(w²) rightᵀ is a sum over groups of w_g² times the inner
products of one group. These are the same for all query tokens: they are made once where there is room for them. A
token that a group does not move has no rows there: in a causal model that leaves a third of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor.attention import MixSite


class GroupProducts(NamedTuple):
    """The inner products of two lists of rows over one group of factors, and the places of the rows that it moves."""

    products: Float[Tensor, "n m"]
    left: slice
    right: slice


@dataclass(eq=False)
class Grams:
    """The linear parts of keys and values, and their inner products, group by group of factors.

    Attributes:
        mix: the mixing.
        room: how many bytes products may take that are kept for further query tokens.
    """

    mix: MixSite
    room: int = 0
    _kept: dict[str, list[GroupProducts]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = [self.mix.factors.group == g for g in range(self.mix.factors.count)]
        self.first = torch.stack([own.to(torch.int8).argmax() for own in self.groups])

    def keys(self, seen: slice, squares: Float[Tensor, "T G"]) -> Float[Tensor, "T n n"]:
        """Return the inner products of keys.

        Args:
            seen: the tokens whose keys count.
            squares: w² of every group, for each query token.
        """
        return self._weighed("kk", seen, squares)

    def values(self, seen: slice, squares: Float[Tensor, "T G"]) -> Float[Tensor, "T n n"]:
        """Return the inner products of values, as `keys` does of keys.

        Args:
            seen: the tokens whose values count.
            squares: w² of every group, for each query token.
        """
        return self._weighed("vv", seen, squares)

    def across(self, seen: slice, squares: Float[Tensor, "T G"]) -> Float[Tensor, "T n m"]:
        """Return the inner products of values with keys.

        Args:
            seen: the tokens whose values and keys count.
            squares: w² of every group, for each query token.
        """
        return self._weighed("vk", seen, squares)

    def _rows(self, kind: str) -> Float[Tensor, "S g c p"]:
        return self.mix.scores.k.A if kind == "k" else self.mix.v.A

    def _weighed(self, kinds: str, seen: slice, squares: Float[Tensor, "T G"]) -> Float[Tensor, "T n m"]:
        """Return left diag(w²) rightᵀ of the rows of some tokens, for weights that are equal within a group."""
        places = []
        for kind in kinds:
            _, heads, width, _ = self._rows(kind).shape
            places.append(slice(seen.start * heads * width, seen.stop * heads * width))
        sizes = [place.stop - place.start for place in places]
        found = squares.new_zeros(len(squares), *sizes)
        for group, (products, *moved) in enumerate(self._products(kinds)):
            # The rows that are both asked for and moved by the group, among either.
            both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(places, moved, strict=True)]
            if any(first >= last for first, last in both):
                continue
            asked, own = (
                tuple(
                    slice(first - of.start, last - of.start)
                    for (first, last), of in zip(both, these, strict=True)
                )
                for these in (places, moved)
            )
            found[:, *asked].addcmul_(squares[:, group, None, None], products[own])
        return found

    def _products(self, kinds: str) -> Iterator[GroupProducts]:
        """Yield the inner products of all rows group by group; they are kept if there is room."""
        if kinds in self._kept:
            yield from self._kept[kinds]
            return
        left, right = (self._rows(kind).flatten(0, 2) for kind in kinds)
        moved = [tuple(_moved(rows[:, own]) for rows in (left, right)) for own in self.groups]
        need = 8 * sum((a.stop - a.start) * (b.stop - b.start) for a, b in moved)
        kept: list[GroupProducts] | None = [] if need <= self.room else None
        for own, (a, b) in zip(self.groups, moved, strict=True):
            one = GroupProducts(left[a][:, own] @ right[b][:, own].T, a, b)
            if kept is not None:
                kept.append(one)
            yield one
        if kept is not None:
            self._kept[kinds], self.room = kept, self.room - need


def _moved(rows: Float[Tensor, "n p"]) -> slice:
    """Return the range of the rows that are not 0."""
    where = (rows != 0).any(1).nonzero()[:, 0]
    return slice(int(where[0]), int(where[-1]) + 1) if len(where) else slice(0, 0)
