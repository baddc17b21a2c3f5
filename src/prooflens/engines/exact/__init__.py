r"""Engine `exact`: the true range of a form where the instance is small enough, as a proved bound with witnesses.

**Vertex enumeration** (`prop:vertex_enum`). Layer 0 without a norm before it, a ball, one query token i and keys j ≠ i:

    f(x) = Σ_j c_j(x_i)·x_j + r(x_i),     c_j and r affine in x_i.

For a fixed x_i the largest value over the keys is r + Σ_j (c_j·x⁰_j + Σ_k ε_jk|c_jk|), a maximum of functions that are
affine in x_i, hence convex: it is attained at one of the 2ᵈ vertices of the query token's box, all of which are visited
(d ≤ 16). In the same way the smallest value is concave in x_i. Each vertex costs O(Sd). With the keys solved for, this
is exact for all tokens moving at once.

**Branch and bound** (`exact.branch`) for every other form, up to 64 factors. When it runs out of cells its bounds are
still proved, only not as tight as the tolerance asks.

Rounding is part of the bounds: `layer0`'s absolute-value chains and γ_N are added to what was computed.
"""

from prooflens.engines.exact.engine import Exact, enumerable

__all__ = ["Exact", "enumerable"]
