"""Inner products of keys and of values, as a mixing in `taylor` weighs the factors (`taylor.mixing`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor.attention import MixSite


@dataclass(eq=False)
class Grams:
    """The linear parts of keys and values, and their inner products, group by group of factors."""

    mix: MixSite

    def __post_init__(self) -> None:
        self.groups = [self.mix.factors.group == g for g in range(self.mix.factors.count)]
        self.first = torch.stack([own.to(torch.int8).argmax() for own in self.groups])
        self.rows_k = self.mix.scores.k.A.flatten(0, 2)
        self.rows_v = self.mix.v.A.flatten(0, 2)

    def weighed(
        self, left: Float[Tensor, "n p"], right: Float[Tensor, "m p"], squares: Float[Tensor, "T G"]
    ) -> Float[Tensor, "T n m"]:
        """Return left diag(w²) rightᵀ for weights that are equal within a group; each group is multiplied once."""
        found = left.new_zeros(len(squares), len(left) * len(right))
        for group, own in enumerate(self.groups):
            # In the first layer most rows do not depend on a group and are 0.
            kept = [X[:, own] for X in (left, right)]
            rows, columns = ((X != 0).any(1).nonzero()[:, 0] for X in kept)
            gram = left.new_zeros(len(left), len(right))
            gram[rows[:, None], columns] = kept[0][rows] @ kept[1][columns].T
            found.addr_(squares[:, group], gram.flatten())
        return found.reshape(len(squares), len(left), len(right))
