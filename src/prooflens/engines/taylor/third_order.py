"""Third orders of a form collected before a norm is taken: covectors that move with the factors.

Beyond first order a form is Σ_s v_s·r_s(u_s), with u_s = A_sα + e_s the move of a site's input and Q_s the Hessian of
v_s·r_s at the centre. `taylor.hessian` puts all ½ (A_sα)ᵀQ_s(A_sα) into one matrix. Of what is left, the largest part
is (Q_sA_sα)·e_s, second order meeting second order. There, e_s is a sum over earlier sites of J r: so this part is a
sum over *earlier* sites as well, with covectors that are linear in α,

    Σ_s (Q_sA_sα)·e_s = Σ_s (W_sα)·r_s,       W at a site's input = Jᵀ (W at its output) + Q_s A_s,

exactly, walked back as the covectors v are (`taylor.moving`): W_sα is how far the covector at s moves with the factors.
All later sites, tokens and heads add up in W before a bound is taken. With r_s in its ellipsoid E(M),

    (W_sα)·r_s ≤ ‖LᵀW_sα‖₂ ≤ ½(‖LᵀW_sα‖²/t + t),      M ⪯ LLᵀ, any t > 0.

What remains of each site is ½ e_sᵀQ_se_s, what e makes of itself, and v_s·r_s − ½u_sᵀQ_su_s, the site's own third
order at its whole move, which a square of that move majorises (`taylor.squares`); of a network, Q_s has the middles of
the secants of its neurons in place of second derivatives. `taylor.fourth_order` takes both back to squares of the
factors. A mixing's own third order is a sum of moving forms as well (`taylor.moved_mixing`), and the rest of it has a
square for majorant (`taylor.mixing_rest`).

So all that a form has beside first order is one quadratic form of the factors and a constant,

    |f(α) − f(0) − a·α − ½αᵀHα| ≤ ½αᵀJα + rest,      J = Σ WᵀMW/t + 2ZᵀZ + Σ (1 + δ) AᵀRA + Σ BᵀZ′B,

and `taylor.corners` bounds a·α + ½αᵀ(±H + J)α over the box: where the form is steep, remainders count as much as they
are at the corner of the linear part, and not as much as each of them may be somewhere.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.norms import frobenius, grow, identity, product_error
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.corners import Majorised, ranges
from prooflens.engines.taylor.fourth_order import FourthOrder
from prooflens.engines.taylor.head_norms import HeadNormSite
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.mixing_rest import MixingMajorants
from prooflens.engines.taylor.moved_mixing import moved_shapes
from prooflens.engines.taylor.moving import Moved, MovingCovectors, SiteForm
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.numerics import gamma


def moves_known(walk: TaylorWalk) -> bool:
    """Return whether every step of a walk is one through which moving covectors are taken back.

    Norms of single heads and caps of scores are not; walks that dropped chains or bounded mixings in few steps have
    not kept what is needed.

    Args:
        walk: the walk forward.
    """
    if walk.quick or walk.kept is not None:
        return False
    return not any(
        chain.segment.cap is not None or any(isinstance(site, HeadNormSite) for site in chain.sites.values())
        for chain in walk.chains
    )


def third_order_batch(walk: TaylorWalk) -> int:
    """Return how many forms fit into memory with their Hessians and moving covectors, perhaps none.

    A form holds about ten matrices of p × p for its eigenvalues, and for every token about three times what the
    stream, queries, keys and values have coordinates, for every factor, and a dozen matrices of the stream's width.

    Args:
        walk: the walk forward.
    """
    root = walk.chains[0].root
    p, (S, d) = len(root.half_widths), root.u.shape
    return int(walk.memory // (80 * p * p + 8 * S * 12 * d * (p + d)))


class ThirdOrder(Hessian):
    """Bound forms with second orders in one matrix per form, with covectors that move, and squares above the rest.

    Args:
        half_widths: half-widths of the factors, shape [p].
        forms: how many forms there are.
    """

    def __init__(self, half_widths: Float[Tensor, " p"], forms: int) -> None:
        super().__init__(half_widths, forms)
        self.sites: dict[tuple[Chain, str, int], SiteForm] = {}
        self.mixings: dict[tuple[Chain, int], Tensor] = {}
        self.fourth = FourthOrder(half_widths, forms)
        self.majorants = MixingMajorants(half_widths)
        self.moves: Moved | None = None

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Keep the site's second order for the matrix and for the moving covectors, and the square above the rest.

        Args:
            chain: the chain that the covectors walk.
            name: the norm or network.
            v: covectors, shape [F, n].
            t: the token.
        """
        site = chain.sites[name]
        assert not isinstance(site, HeadNormSite)
        source = site.source
        self.second.keep(t, *site.secant(v, t))
        squares = site.squares(v, t)
        Q, error = site.secant(v, t, identity(source.u, source.u.shape[1]))
        self.fourth.add_squares(chain, source, t, squares)
        self.fourth.add_form(chain, source, t, Q, error)
        if (key := (chain, name, t)) in self.sites:
            before, old = self.sites[key]
            Q, error = before + Q, old + error + product_error(1, frobenius(before) + frobenius(Q))
        self.sites[key] = SiteForm(Q, error)
        return v.new_zeros(len(v), 2)

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """Add the mixing's second order to the matrix, and keep its covectors and what majorises the rest.

        Args:
            chain: the chain that ends in the mixing.
            place: the place of a token among those of the next root.
            u: covectors there, shape [F, d].
        """
        assert chain.mix is not None
        self._add_mixing(chain.mix, chain.goes_on[place], u)
        self.mixings[chain, place] = self.mixings.get((chain, place), 0.0) + u
        if chain.moved is None:
            chain.moved = moved_shapes(chain)
        self.majorants.add(chain, place, u)
        return u.new_zeros(len(u), 2)

    def products(self, chain: Chain, forms: Forms) -> Float[Tensor, "H S S"]:
        """Add the scores' own products to the Hessians; return what e_q·e_k adds to them."""
        super().products(chain, forms)
        scores = chain.scores
        assert scores is not None
        self.fourth.add_products(chain, forms)
        return scores.rounding

    def moving(self, walk: TaylorWalk, forms: Forms, slope: Float[Tensor, "F p"]) -> None:
        """Make a square of Σ (W_sα)·r_s over all sites.

        Args:
            walk: the walk forward.
            forms: what is bounded.
            slope: their linear parts, shape [F, p].
        """
        self.moves = MovingCovectors(walk, forms, self.sites, self.mixings, slope).moved()
        self.sites, self.mixings = {}, {}
        self.fourth.walk_back(walk, slope)

    def linear_range(self, slope: Float[Tensor, "F p"]) -> Float[Tensor, "F 2"]:
        """Bound ±(a·α + ½αᵀHα) and all that squares are above, over the box."""
        assert self.moves is not None
        H, error = self.second.taken()
        moves, majorants = self.moves, self.majorants
        J, missed = self.fourth.above.taken()
        alone = self.fourth.rest

        def remainders(some: slice) -> list[Majorised]:
            """Return the squares above the remainders of some forms."""
            K, slip = J[some], missed[some]
            if majorants.rows:
                made, rounding = majorants.squares(some)
                K, slip = K + made, slip + rounding
            if moves.J is not None:
                p, K = moves.J.shape[1], K.clone()
                K[:, :p, :p] += moves.J[some]
                slip = slip + moves.error[some]
            K = 0.5 * (K + K.mT)
            rest = torch.as_tensor(majorants.rest).expand_as(error)[some] + moves.halves[some]
            rest = rest + moves.rest[some] + alone[some]
            return [Majorised(K, grow(slip + gamma(16) * frobenius(K)), grow(rest))]

        return ranges(slope, H, error, remainders)
