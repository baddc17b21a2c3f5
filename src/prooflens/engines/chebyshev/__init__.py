"""Engine `chebyshev`: regions of few factors (segments, hulls, spans) at any depth, proved.

Along the way from one prompt to another the values of a model are simple curves, and a curve is known by a few of its
points. On a piece of the region, run the model at the Chebyshev points of the factors; through the runs of every value
s goes a polynomial P_s. It solves the network up to a *defect*: with F_s the step that makes s,

    δ_s(α) = F_s(P(α)) − P_s(α),

which vanishes at the points, falls like r^{−D} with the degree D, and is bounded in closed form (`grid`). So

    x_s(α) = P_s(α) + e_s(α),      e_s = F_s'(c₀) e + (F_s'(ξ) − F_s'(c₀)) e + δ_s,

where e are the errors before the step and c₀ is the middle of the piece. The first part moves errors by the exact
Jacobians at c₀, as ellipsoids (`values`): norms multiply by ten a layer, Jacobians hardly at all. The second is small
because the piece is short, and where it matters most it is kept to first order in α. Nothing here is second order *of
the movement*: that is all in P. A score, an output or any linear form of them is a polynomial plus |e|, and its range
is read off Bernstein coefficients (`ranges`).

A piece whose errors or ranges are too large is cut in two (`pieces`, `engine`). Tokens that no factor reaches are
constants: they are walked once, with one point, for their rounding alone.
"""

from prooflens.engines.chebyshev.engine import MOST_FACTORS, Chebyshev, Search
from prooflens.engines.chebyshev.pieces import Box, Chart

__all__ = ["MOST_FACTORS", "Box", "Chart", "Chebyshev", "Search"]
