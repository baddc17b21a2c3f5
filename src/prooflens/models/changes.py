"""How the weights of an edited model differ from those of the model: what a run keeps, so that one gives the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer

Columns = list[tuple[int, int]]
"""Ranges of columns, first and beyond the last."""


@dataclass(frozen=True, eq=False)
class Changes:
    """What was changed, weight by weight.

    Attributes:
        zeroed: columns that are 0 in the edited model, by the name of the weight.
        replaced: weights that have other numbers, or that the model did not have.
        removed: names of weights that the edited model does not have.
    """

    zeroed: Mapping[str, Columns] = field(default_factory=dict)
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    @classmethod
    def between(cls, model: Transformer, edited: Transformer) -> Changes:
        """Compare the weights of two models, bit by bit.

        Args:
            model: the model.
            edited: the edited one.

        Example:
            >>> import prooflens as pl
            >>> model = pl.load("toy")
            >>> dict(Changes.between(model, pl.edit(model, "a1.h0")).zeroed)
            {'blocks.1.o.weight': [(0, 4)]}
        """
        zeroed: dict[str, Columns] = {}
        replaced: dict[str, Tensor] = {}
        for name, after in edited.weights.items():
            before = model.weights.get(name)
            if before is after:
                continue
            if before is None or before.shape != after.shape or after.ndim != 2:
                if before is None or not _same_bits(before, after).all():
                    replaced[name] = after
                continue
            moved = ~_same_bits(before, after).all(0)
            if bool(after[:, moved].view(torch.int64).any()):
                replaced[name] = after
            elif bool(moved.any()):
                zeroed[name] = _ranges(moved)
        removed = tuple(name for name in model.weights if name not in edited.weights)
        return cls(zeroed, replaced, removed)


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where two float64 tensors of one shape are the same number, the sign of zero included."""
    if a.shape != b.shape:
        return torch.zeros(1, dtype=torch.bool)
    return a.contiguous().view(torch.int64) == b.contiguous().view(torch.int64)


def _ranges(chosen: Tensor) -> Columns:
    """The ranges of consecutive numbers that are chosen."""
    found: Columns = []
    for i in chosen.nonzero()[:, 0].tolist():
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found
