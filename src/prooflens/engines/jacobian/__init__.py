r"""Engines `jacobian` (estimated) and `jacobian-proved`: the recursive Jacobian-zonotope connector (Eq. `eq:jac_zono`).

For a layer ℓ > 0 the value f that its queries and keys read is linearised once, at x₀, as a function of the factors:

    f = f(x₀) + Σ_{j ∈ 𝒦} α_j J_·j + remainder,     𝒦 the K_J columns of J = ∂f/∂α with the largest ℓ1 norm,

and scores are the exact products of what that zonotope gives. Factors are shared by all tokens, so they cancel.

**`jacobian`, as the paper has it.** The remainder is one factor per token times the vector r_t, i.e. a segment, with
r = 1.5·V̂ + Σ_{j ∉ 𝒦}|J_·j|, V̂_i = max_n ‖∇f_i(z_n) − ∇f_i(x₀)‖₁ over 30 sampled points, half of them corners
(the factor stands for the ε²Ĥ that the paper does not define); bounds by Lemma `lem:quadratic_bound`. The true
remainder is in a box, not on a segment, and a maximum over samples is a lower bound of a supremum (soundness.md, rows 1
and 2): the guarantee is *estimated*, and bounds of this engine do get broken.

**`jacobian-proved`.** The remainder is a box (one factor per coordinate), for every α

    |f_i(α) − f_i(0) − J_i·α| ≤ Σ_j sup |∂_jf_i − J_ij|  ≤  Σ_j (|mid_ij − J_ij| + rad_ij)      (`prop:remainder`),

mid ± rad the interval Jacobian over the region of `jacobian.interval`; or, if that is smaller, the local form of the
spectral fallback (`prop:remainder_analytical`), (sup‖∇f_i‖₂ + ‖J_i‖₂)√p with the supremum over the same region. Both
are intersected with the hull of (the set that `cpz` propagates) − Jα: interval Jacobians lose a factor per layer, the
set does not. J may be any matrix, so its own rounding does not matter; f(x₀) is enclosed by a walk over a point.
"""

from prooflens.engines.jacobian.engine import Jacobian, ProvedConnector, SampledConnector, jacobian

__all__ = ["Jacobian", "ProvedConnector", "SampledConnector", "jacobian"]
