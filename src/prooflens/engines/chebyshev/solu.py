"""SoLU on a piece: y_k = x_k s_k with s = softmax(x) over a token's neurons.

With w a move of the neurons and w̄ = Σ s w, the derivative is dy_k = s_k (w_k + x_k (w_k − w̄)): a diagonal less one
column times one row, as of a norm. So at the centre errors are moved by a `RankOne`, and the derivative itself changes,
for |x − c₀| ≤ r, |s − s₀| ≤ Δ and s ≤ s⁺, by at most

    Δ_k |e_k + c_k (e_k − ē)| + s⁺_k (r_k |e_k − ē'| + |c_k| Σ Δ|e|).

Along neurons that move by w the second derivative is 2w_k s_k (w_k − w̄) + x_k s_k ((w_k − w̄)² − var w): on complex
discs too, where the exponentials do not cancel. Weights do not see what all neurons move by, so there they are taken
relative to their mean.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.attention import (
    FAR,
    LEAST,
    second_order,
    weight_lift,
    weight_range,
    weights_on_discs,
)
from prooflens.engines.chebyshev.values import Atom, Factor, RankOne, Value, compose, factor_size
from prooflens.engines.relaxations.norms import grow, product_error
from prooflens.models.sites import Solu
from prooflens.numerics import gamma


def solu(step: Solu, value: Value) -> Value:
    """SoLU of every token.

    Args:
        step: the step.
        value: the neurons.
    """
    grid, n = value.piece.grid, value.box.shape[-1]
    c0, R, e = value.center, value.moves, value.reach
    runs = step(value.runs)
    middle = torch.softmax(c0, -1)
    level = (middle[:, None] * value.runs).sum(-1, keepdim=True)
    coefficients, off = grid.coefficients(value.runs - level)
    # differences of neurons round by a few units of the largest
    size = value.runs.abs().amax(1).amax(-1, keepdim=True)
    off = off + gamma(n + 8) * size
    s0 = torch.softmax(coefficients[:, 0], -1)
    lift = weight_lift(coefficients[:, 0])
    mean_e = (s0 * e).sum(-1, keepdim=True)
    turns = grid.moves(coefficients, off)
    # weights do not see the mean of the errors either, but each neuron's own error counts whole
    most, change = weight_range(s0, grow(turns + e), lift)
    large = grow(c0.abs() + R)
    swayed = (change * e).sum(-1, keepdim=True)
    changed = change * (e + c0.abs() * (e + mean_e))
    changed = changed + most * ((R + e) * (e + (most * e).sum(-1, keepdim=True)) + c0.abs() * swayed)
    around = grow(changed + _defect(step, value, (coefficients, off), s0, most))
    rounding = grid.lebesgue * (gamma(n + 128) * (1.0 + size) * runs.abs().amax(1) + LEAST * (1.0 + large))
    # the coefficients of the map round once or twice
    slack = gamma(32) * s0 * (e + c0.abs() * (e + mean_e)) + LEAST * (1.0 + large) * (1.0 + e)
    by = RankOne(s0 * (1.0 + c0), s0 * c0, s0)
    terms: dict[str, Factor] = {}
    noise = torch.zeros_like(value.box[..., 0])
    given = dict(value.terms)
    if value.has_own:
        value.piece.atoms[f"{value.name}.own"] = Atom(value.own)
        given[f"{value.name}.own"] = None
    for name, factor in given.items():
        terms[name] = compose(by, factor)
        most_of_it = by.size() * factor_size(factor, n) * value.piece.atoms[name].size
        noise = noise + product_error(4 * n + 32, 4.0 * most_of_it)
    box = grow(around + rounding + slack + noise[..., None])
    known = (turns + e < FAR).all(-1, keepdim=True) & (c0.abs() + R + e).isfinite().all(-1, keepdim=True)
    return Value(step.out, value.piece, runs, terms, torch.where(known, box, torch.inf), value.heads)


def _defect(
    step: Solu,
    value: Value,
    relative: tuple[Float[Tensor, "b N S n"], Float[Tensor, "b S n"]],
    s0: Float[Tensor, "b S n"],
    most: Float[Tensor, "b S n"],
) -> Float[Tensor, "b S n"]:
    """Bound how far the interpolant is from SoLU of the interpolated neurons."""
    grid, fine = value.piece.grid, value.piece.grid.finer
    if not grid.degrees:
        return torch.zeros_like(most)
    c0, R, turns = value.center, value.moves, grid.moves(*relative)
    places, loose = fine.at(value.runs)
    seen = step(places)
    apart = fine.apart(step(value.runs), seen)
    large = grow(c0.abs() + R)
    widest, size = loose.amax(-1, keepdim=True), 1.0 + places.abs().amax(1).amax(-1, keepdim=True)
    slack = most * (loose + 2.0 * (large + loose) * widest) * (1.0 + 4.0 * widest)
    slack = slack + gamma(s0.shape[-1] + 128) * size * seen.abs().amax(1) + LEAST * (1.0 + large)
    far = fine.grid.on_ellipses(fine.padded(value.coefficients[0]).abs(), value.coefficients[1])
    turned = fine.grid.on_ellipses(fine.padded(relative[0]).abs(), relative[1])
    top, known = weights_on_discs(s0, turned, weight_lift(relative[0][:, 0]))
    bound = torch.where(known, _curve(top, far, turned.clamp(max=FAR), c0), torch.inf)
    return grow(fine.grid.defect(bound, _curve(most, R, turns, c0)) + apart + fine.grid.lebesgue * slack)


def _curve(p: Tensor, R: Tensor, turns: Tensor, c0: Tensor) -> Tensor:
    """½ sup |d²y_k/dt²| along neurons that move by at most R, and by at most `turns` relative to their mean."""
    mean = (p * turns).sum(-1, keepdim=True)
    return grow(R * p * (turns + mean) + (c0.abs() + R) * second_order(p, turns))
