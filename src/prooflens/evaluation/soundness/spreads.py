"""Edits of the soundness run at any value of a set, and the region of both models beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from prooflens.errors import ModelError
from prooflens.models import Transformer
from prooflens.models.edits import edit
from prooflens.models.parts import Edit
from prooflens.models.spread import RADII, beside, moved_tokens
from prooflens.problem import Problem
from prooflens.regions.product import times_box

SPREADS = 0.4
"""The share of edits of parts and directions that are at any value of a set."""


def spread_edits(model: Transformer, edits: Sequence[Edit], choose: random.Random) -> list[Edit]:
    """Return edits of which some are held at any value of a set: a box, or one or two generators.

    Args:
        model: the model.
        edits: edits that are drawn, each at one value.
        choose: what draws the sets.
    """
    found = list[Edit]()
    for number, one in enumerate(edits):
        size = 10.0 ** choose.uniform(-4.0, -0.5)
        sets: list[float | torch.Tensor] = [size]
        if isinstance(one.value, torch.Tensor):
            count = choose.randint(1, 2)
            draws = [choose.gauss(0.0, size) for _ in range(count * one.value.numel())]
            sets.append(torch.tensor(draws, dtype=torch.float64).reshape(count, *one.value.shape))
        made = replace(one, spread=choose.choice(sets)) if choose.random() < SPREADS else one
        try:
            edit(model, [*found, made, *edits[number + 1 :]])
        except ModelError:  # a key, an edge, a pattern or a feature
            made = one
        found.append(made)
    return found


def side_by_side(problem: Problem, edited: Transformer, n_tokens: int) -> tuple[Problem, Problem]:
    """Return a model and an edit of it on one region, that of the model times the values that parts may have.

    Args:
        problem: the model and its region.
        edited: the edited model.
        n_tokens: how many tokens there are, without padding.
    """
    region = problem.region
    if edited.architecture.free:
        region = times_box(region, moved_tokens(edited, n_tokens), edited.weights[RADII])
    first = replace(problem, model=beside(problem.model, edited), region=region)
    return first, replace(first, model=edited)
