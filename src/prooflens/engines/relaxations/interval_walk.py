"""Boxes through a program: the whole of engine `interval`, and where other engines start."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.interval_steps import apply_step, linear_box
from prooflens.models import INPUT, OUTPUT, scores_name
from prooflens.models.program import Program
from prooflens.numerics.rounding import TINY, down, gamma, up
from prooflens.problem import Problem
from prooflens.queries import Box
from prooflens.regions import Region


def score_boxes(problem: Problem, layers: Iterable[int], capped: bool = True) -> dict[int, Box]:
    """Return proved boxes [H, S, S] of the attention scores of some layers.

    Args:
        problem: the model and the region.
        layers: which layers.
        capped: whether the scores are those behind their cap, if the model has one.
    """
    has_cap = problem.model.architecture.score_cap is not None
    end = "_uncapped" if has_cap and not capped else ""
    names = {layer: scores_name(problem.model.check_layer(layer)) + end for layer in layers}
    boxes = value_boxes(problem, names.values())
    return {layer: boxes[name] for layer, name in names.items()}


def value_boxes(problem: Problem, names: Iterable[str] | None = None) -> dict[str, Box]:
    """Return proved boxes of the values with these names.

    Args:
        problem: the model and the region.
        names: the values; None for all of them.
    """
    wanted = None if names is None else tuple(names)
    program = problem.model.program(problem.n_tokens, wanted or OUTPUT, problem.padding)
    with torch.no_grad():
        return propagate(program, region_box(problem.region), wanted)


def region_box(region: Region) -> Box:
    """Return the smallest box around a region, rounded outward; exact where a coordinate does not move."""
    spread = region.half_widths()
    if region.generators is not None:
        spread = up(spread * (1.0 + gamma(2 * region.n_factors + 4)))
    still = spread == 0
    low, high = down(region.center - spread), up(region.center + spread)
    return Box(torch.where(still, region.center, low), torch.where(still, region.center, high))


def propagate(program: Program, box: Box, keep: Iterable[str] | None = None) -> dict[str, Box]:
    """Return boxes of the kept values for inputs in a box [..., S, d]; many boxes at once.

    Args:
        program: the steps.
        box: the input's box.
        keep: the names of the values to keep; None for all.
    """
    last_use = {name: i for i, step in enumerate(program.steps) for name in step.inputs}
    kept = None if keep is None else set(keep)
    boxes = {INPUT: box}
    for i, step in enumerate(program.steps):
        boxes[step.out] = apply_step(step, *(boxes[name] for name in step.inputs))
        if kept is not None:
            for name in set(step.inputs) - kept:
                if last_use[name] == i:
                    del boxes[name]
    return boxes


def form_program(problem: Problem, forms: Forms) -> Program:
    """Return the steps that some forms depend on."""
    wanted = [scores_name(problem.model.check_layer(layer)) for layer in forms.layers]
    wanted += [OUTPUT] if forms.logits is not None else []
    return problem.model.program(problem.n_tokens, wanted, problem.padding)


def bound_on_box(
    problem: Problem, program: Program, forms: Forms, box: Box
) -> tuple[Float[Tensor, "... F"], Float[Tensor, "... F"]]:
    """Bound forms for inputs in a box [..., S, d].

    Args:
        problem: the model and the region.
        program: the steps that the forms depend on.
        forms: what to bound.
        box: the input's box.

    Returns:
        Lower and upper bounds, shape [..., F].
    """
    names = [scores_name(layer) for layer in forms.layers] + ([OUTPUT] if forms.logits is not None else [])
    boxes = propagate(program, box, names)
    device, batch = box.lower.device, box.lower.shape[:-2]
    total = box.lower.new_zeros(2, *batch, forms.size)
    size = torch.zeros_like(total)
    for layer in forms.layers:
        here = forms.layer == layer
        index, weight = forms.index[here].to(device), forms.weight[here].to(device)
        head, position, key = (part[here].to(device) for part in (forms.head, forms.position, forms.key))
        low, high = (end[..., head, position, key] * weight for end in boxes[scores_name(layer)])
        terms = torch.stack((torch.minimum(low, high), torch.maximum(low, high)))
        total = total.index_add(-1, index, terms)
        size = size.index_add(-1, index, terms.abs())
    most = 1 + (int(forms.index.bincount().max()) if len(forms.index) else 0)
    # Two roundings more than a plain sum per term (product, sum over layers).
    slack = up(gamma(2 * most + 2 * len(forms.layers) + 8) * size) + TINY
    lower, upper = down(total[0] - slack[0]), up(total[1] + slack[1])
    if forms.logits is not None:
        read = Box(*(problem.read_output(end) for end in boxes[OUTPUT]))
        output = linear_box(read, forms.logits.to(box.lower))
        lower, upper = down(lower + output.lower), up(upper + output.upper)
    return lower.nan_to_num(-torch.inf, torch.inf, -torch.inf), upper.nan_to_num(
        torch.inf, torch.inf, -torch.inf
    )
