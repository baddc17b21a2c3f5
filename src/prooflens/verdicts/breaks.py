"""Where on the way from one prompt to another a claim breaks first."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack import Witness
from prooflens.engines.forms import forms_of
from prooflens.problem import Problem
from prooflens.queries import Claim
from prooflens.regions import Region

HALVINGS = 40
"""How often the first break is bisected."""

SURE = 1e-9
"""The margin by which a break is bisected: nearer to 0 its sign in float64 may not be that over the reals."""

SCANNED = 129
"""How many points before a known break are looked at."""


def is_way(region: Region) -> bool:
    """Whether a region is the way from one prompt to another: one factor, from −1, where claims are made, to 1.

    Args:
        region: any region.
    """
    return region.n_factors == 1 and region.anchor is not None and float(region.anchor[0]) == -1.0


def has_margin(claim: Claim) -> bool:
    """Whether a claim is the sign of linear functionals, so that it has a margin at every point.

    Args:
        claim: what is claimed.
    """
    return not claim.wants_range and all(f.is_linear for f in claim.functionals)


def margins_at(problem: Problem, claim: Claim, shares: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The weakest functional of a claim at some shares of a way.

    Args:
        problem: a model and a segment.
        claim: what is claimed.
        shares: from 0, the start, to 1.
    """
    return _values(problem, claim, shares).amin(-1)


def _values(problem: Problem, claim: Claim, shares: Float[Tensor, " n"]) -> Float[Tensor, "n F"]:
    forms = forms_of(claim.functionals, problem.model.architecture.d_out or 0)
    alpha = (2.0 * shares - 1.0).to(problem.region.center)[:, None]
    with torch.no_grad():
        scores, output = problem.values(problem.region.point(alpha), forms.layers, forms.logits is not None)
    constants = torch.tensor([f.constant for f in claim.functionals], dtype=torch.float64)
    return forms.evaluate(scores, output).cpu() + constants


def first_break(
    problem: Problem, claim: Claim, shares: Float[Tensor, " n"], margins: Float[Tensor, " n"]
) -> float:
    """The smallest share at which the claim was seen to break: the first of some points, bisected.

    Args:
        problem: a model and a segment.
        claim: what is claimed.
        shares: shares of the way, in order.
        margins: the claim's margin there; some of them must not be positive.
    """
    place = int((margins <= 0.0).nonzero()[0, 0])
    if place == 0:
        return float(shares[0])
    good, bad = float(shares[place - 1]), float(shares[place])
    broken = max(float(margins[place]), -SURE)
    for _ in range(HALVINGS):
        middle = 0.5 * (good + bad)
        if middle in (good, bad):
            break
        value = margins_at(problem, claim, torch.tensor([middle], dtype=torch.float64))
        good, bad = (good, middle) if bool(value[0] <= broken) else (middle, bad)
    return bad


def moved_to_first_break(problem: Problem, claim: Claim, witness: Witness) -> tuple[Witness, float] | None:
    """The first break on the way to a known one, and its share of the way; None if the claim has no margin.

    Args:
        problem: a model and a segment.
        claim: what is claimed.
        witness: a point of the segment that breaks it.
    """
    if not has_margin(claim):
        return None
    far = 0.5 * (float(witness.alpha[0]) + 1.0)
    shares = torch.linspace(0.0, far, SCANNED, dtype=torch.float64)
    margins = margins_at(problem, claim, shares)
    if not bool((margins <= 0.0).any()):
        return None
    share = first_break(problem, claim, shares, margins)
    alpha = torch.tensor([2.0 * share - 1.0], dtype=torch.float64).to(witness.alpha)
    values = _values(problem, claim, torch.tensor([share], dtype=torch.float64))[0]
    return replace(
        witness, x=problem.region.point(alpha), alpha=alpha, values=values.to(witness.values)
    ), share
