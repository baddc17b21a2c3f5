"""Third orders of a form collected before a norm is taken: covectors that move with the factors.

Beyond first order a form is Σ_s v_s·r_s(u_s), with u_s = A_sα + e_s the move of a site's input and Q_s the Hessian of
v_s·r_s at the centre. `taylor.hessian` puts all ½ (A_sα)ᵀQ_s(A_sα) into one matrix. Of what is left, the largest part
is (Q_sA_sα)·e_s, second order meeting second order. There, e_s is a sum over earlier sites of J r: so this part is a
sum over *earlier* sites as well, with covectors that are linear in α,

    Σ_s (Q_sA_sα)·e_s = Σ_s (W_sα)·r_s,       W at a site's input = Jᵀ (W at its output) + Q_s A_s,

exactly, walked back as the covectors v are (`taylor.moving`): W_sα is how far the covector at s moves with the factors.
All later sites, tokens and heads add up in W before a bound is taken. With r_s in its ellipsoid E(M),

    sup (W_sα)·r_s ≤ sup_α ‖LᵀW_sα‖₂,  M ⪯ LLᵀ:      one eigenvalue of a matrix of the site's width.

What remains of each site is ½ e_sᵀQ_se_s, an eigenvalue on the ellipsoid of e_s, and v_s·r_s − ½u_sᵀQ_su_s, the
site's own third order at its whole move. A mixing's own third order is a sum of moving forms as well
(`taylor.moved_mixing`).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.ellipsoids import trace
from prooflens.engines.relaxations.norms import (
    cholesky_factor,
    frobenius,
    grow,
    identity,
    product_error,
    spectral,
)
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.head_norms import HeadNormSite
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.mixing_rest import MixingMajorants
from prooflens.engines.taylor.moved_mixing import moved_shapes
from prooflens.engines.taylor.moving import MovingCovectors, SiteForm
from prooflens.engines.taylor.walk import TaylorWalk


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
    stream, queries, keys and values have coordinates, for every factor.

    Args:
        walk: the walk forward.
    """
    root = walk.chains[0].root
    p, (S, d) = len(root.half_widths), root.u.shape
    return int(walk.memory // (80 * p * p + 8 * p * S * 12 * d))


class ThirdOrder(Hessian):
    """Bound forms with second orders in one matrix per form, and with covectors that move.

    Args:
        half_widths: half-widths of the factors, shape [p].
        forms: how many forms there are.
    """

    def __init__(self, half_widths: Float[Tensor, " p"], forms: int) -> None:
        super().__init__(half_widths, forms)
        self.sites: dict[tuple[Chain, str, int], SiteForm] = {}
        self.mixings: dict[tuple[Chain, int], Tensor] = {}
        self.majorants = MixingMajorants(half_widths)

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Keep the site's second order for the matrix and for the moving covectors; bound its own third order.

        Args:
            chain: the chain that the covectors walk.
            name: the norm or network.
            v: covectors, shape [F, n].
            t: the token.
        """
        self.keep(chain, name, v, t)
        site = chain.sites[name]
        assert not isinstance(site, HeadNormSite)
        Q, error = site.quadratic(v, t, identity(site.source.u, site.source.u.shape[1]))
        found = site.own_rest(v, t) + remainder_form(site.source.shape_e[t], Q, error)
        if (key := (chain, name, t)) in self.sites:
            before, old = self.sites[key]
            Q, error = before + Q, old + error + product_error(1, frobenius(before) + frobenius(Q))
        self.sites[key] = SiteForm(Q, error)
        return grow(found)[:, None].expand(-1, 2)

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
        assert chain.scores is not None
        return chain.scores.products_e

    def moving(self, walk: TaylorWalk, forms: Forms) -> Float[Tensor, "F 2"]:
        """Bound Σ (W_sα)·r_s over all sites, and what mixings leave beside, for + and −.

        Args:
            walk: the walk forward.
            forms: what is bounded.
        """
        found = MovingCovectors(walk, forms, self.sites, self.mixings).bound() + self.majorants.bound()
        return found[:, None].expand(-1, 2)


def remainder_form(
    M: Float[Tensor, "n n"], Q: Float[Tensor, "F n n"], error: Float[Tensor, " F"]
) -> Float[Tensor, " F"]:
    """Bound ½|eᵀQe| for e in E(M), by the 2-norm of LᵀQL.

    Args:
        M: the shape of e.
        Q: symmetric matrices, shape [F, n, n].
        error: bounds of their error in the 2-norm, shape [F].
    """
    L = cholesky_factor(M)
    turned = L.T @ Q @ L
    # Two products of inner length n err by γ_2n‖L‖²‖Q‖; 4 and 4 are to spare.
    slip = product_error(4 * len(M), 4.0 * frobenius(L).square() * frobenius(Q))
    return grow(0.5 * (spectral(0.5 * (turned + turned.mT)) + slip + error * trace(M)))
