"""Engine `taylor`: linear forms of scores and outputs at any depth, proved, at pretrained scale.

Between sites (norms, activations, softmax mixing, products) a transformer is affine. Replace every site by its
tangent at the centre; a form f is then affine in the factors, and with v_s the covector of f at the output of site s,

    f(α) = f(0) + a·α + Σ_s v_s·r_s(u_s(α))        exactly,

where r_s is the remainder of the site beyond its tangent and u_s is how far its input moves. So |f − f(0)| ≤ ‖a‖₁ +
Σ_s sup v_s·r_s, and the task is to bound each v_s·r_s for a *given* v_s: signs inside a site cancel first, norms are
taken last. Three things make that tight (`taylor.network`, `taylor.attention`):

- the input of a site lies in an ellipsoid L{‖ξ‖ ≤ 1}: its neurons cannot all peak at once, and one eigenvalue of
  Lᵀ(Σ_n ω_n w_nw_nᵀ)L per covector holds second order, third order and cross terms of a whole feed-forward network;
- softmax rows of all heads are one quadratic form in their linear parts; sums Σ s_j b_j² are bounded jointly;
- the remainder of a site is kept as an ellipsoid and carried forward by the Jacobians (`relaxations.ellipsoids`,
  `taylor.values`), so how far inputs move beyond first order is known in all directions at once.

Every eigenvalue is a guess that a factorisation proves (`numerics.psd`), or comes from powers of the matrix
(`relaxations.norms`). Rounding is counted where it happens: a value or covector that was rounded is a slightly
different stand-in, and what it misses is added.
"""

from prooflens.engines.taylor.cost import least_memory, needed_memory, taylor_work
from prooflens.engines.taylor.engine import Taylor, drop_sign_changes
from prooflens.engines.taylor.parts import bound_part
from prooflens.engines.taylor.pieces import factors, pieces

__all__ = [
    "Taylor",
    "bound_part",
    "drop_sign_changes",
    "factors",
    "least_memory",
    "needed_memory",
    "pieces",
    "taylor_work",
]
