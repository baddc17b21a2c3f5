"""Capped scores in `taylor`: y = c·tanh(a/c) of a = scale·q·k + bias, score by score.

With φ(a) = c·tanh(a/c), ℓ the linear part of a score's move δ = ℓ + e, |ℓ| ≤ ρ and |e| ≤ E,

    φ(a + δ) − φ(a) = φ′δ + ½φ″ℓ² + x,      |x| ≤ ½|φ″|(2ρE + E²) + gap(ρ + E),

φ′ and φ″ at the centre. φ′δ is what an uncapped score would move by, times a slope in (0, 1]. ½φ″ℓ² is a quadratic
form of the factors: it joins the products of queries and keys in the form's Hessian, and in the ellipsoids of a mixing
as a shape of its own. x is a box, one number per score. As 0 < φ′ ≤ 1 everywhere, |φ(a + δ) − φ(a) − φ′δ| ≤ ρ + E as
well, which says more where scores move far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.derivatives import DERIVATIVE_ERROR, derivatives, expansions
from prooflens.engines.relaxations.norms import grow


class CappedScores(NamedTuple):
    """What a cap does to scores near the centre.

    Attributes:
        value: y at the centre.
        slope: φ′.
        curve: φ″.
        straight: ½|φ″|ρ², a bound of the quadratic part.
        rest: a bound of |x|.
    """

    value: Float[Tensor, "H S S"]
    slope: Float[Tensor, "H S S"]
    curve: Float[Tensor, "H S S"]
    straight: Float[Tensor, "H S S"]
    rest: Float[Tensor, "H S S"]


def capped_scores(
    cap: float, a: Float[Tensor, "H S S"], rho: Float[Tensor, "H S S"], E: Float[Tensor, "H S S"]
) -> CappedScores:
    """Expand a cap around scores that move by ℓ + e with |ℓ| ≤ ρ and |e| ≤ E.

    Rounding: the cap is expanded around c·x, x = fl(a/c), so `E` must hold what a and the quotient round by. φ′ and
    cφ″ err by `DERIVATIVE_ERROR` each, at most, seen over a move of (ρ + E)/c in units of c. The value itself errs
    by a few units of c, which callers count.

    Args:
        cap: c.
        a: scores before the cap at the centre.
        rho: bounds of their linear parts.
        E: bounds of what is beyond, rounding included.
    """
    x, reach = a / cap, grow(rho + E)
    b = grow(reach / cap)
    known = derivatives("tanh", x)
    first, second = expansions("tanh", x, b, known)[:2]
    slack = DERIVATIVE_ERROR * (b + b.square())
    curve = known.second / cap
    straight = grow(0.5 * curve.abs() * rho.square())
    whole = torch.minimum(grow(cap * (first.gap + slack)), grow(reach * (1.0 + DERIVATIVE_ERROR)))
    rest = cap * (second.gap + slack) + curve.abs() * (rho * E + 0.5 * E.square())
    rest = torch.minimum(grow(rest), grow(whole + straight))
    return CappedScores(torch.tanh(x) * cap, known.first, curve, straight, rest)
