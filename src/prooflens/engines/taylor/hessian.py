"""All second orders of a form in one matrix: the last and tightest bound of `taylor`.

Every site of every chain adds v·q(Aα) to a form, q its second order at the centre, and a higher-order remainder.
Ellipsoids bound each of these terms alone, but together they are **one** quadratic form of the factors, the form's
own Hessian:

    f(α) − f(0) = a·α + ½ αᵀHα + Σ_s (v_s·r_s − v_s·q_s(A_sα)),      H = Σ_s A_sᵀ Q_s(v_s) A_s.

Sites, tokens and heads cancel in H before any bound is taken, and `taylor.corners` bounds it over the box.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.relaxations.norms import frobenius, length, product_error
from prooflens.engines.taylor.attention import MixSite
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.corners import ranges
from prooflens.engines.taylor.form_sums import FormSum
from prooflens.engines.taylor.remainder_bounds import Supports

LINEAR_SHARE = 0.97
"""The share of the linear part that is taken to remain after second order: a guess of which forms are provable."""


def hessian_batch(memory: int, factors: int) -> int:
    """Return how many Hessians fit into memory, perhaps none.

    Each is held about eight times while its eigenvalue is found.

    Args:
        memory: bytes that may be used.
        factors: p, the number of rows of a Hessian.
    """
    return int(memory // (64 * factors * factors))


class HigherOrderBound(Supports):
    """Bound what second order at Aα leaves, by ellipsoids, as far as the input.

    Alone it is no bound of a form. It tells which forms are worth a Hessian: `linear_range` is the linear part at its
    least.
    """

    deep = True
    may_stop = False

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Bound what a norm or a network leaves beyond its second order.

        Args:
            chain: the chain that the covectors walk.
            name: the norm or network.
            v: covectors, shape [F, n].
            t: the token.
        """
        return chain.sites[name].rest(v, t)[:, None].expand(-1, 2)

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """Bound what a mixing leaves beyond its second order."""
        assert chain.beyond is not None
        return support(chain.beyond[place], u)[:, None].expand(-1, 2)

    def products(self, chain: Chain, forms: Forms) -> Float[Tensor, "H S S"]:
        """Return what e adds to the products of queries and keys."""
        assert chain.scores is not None
        return chain.scores.products[1]

    def linear_range(self, slope: Float[Tensor, "F p"]) -> Float[Tensor, "F 2"]:
        """Return the linear part at its least."""
        return (LINEAR_SHARE * slope.abs().sum(-1))[:, None].expand(-1, 2)


class Hessian(HigherOrderBound):
    """Bound forms with all second orders collected in one matrix per form.

    Args:
        half_widths: half-widths of the factors, shape [p].
        forms: how many forms there are.
    """

    def __init__(self, half_widths: Float[Tensor, " p"], forms: int) -> None:
        self.half_widths = half_widths
        self.second = FormSum(half_widths, forms)
        """Of ½αᵀHα."""

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Keep the site's second order for the root, and bound what is beyond it.

        Args:
            chain: the chain that the covectors walk.
            name: the norm or network.
            v: covectors, shape [F, n].
            t: the token.
        """
        self.second.keep(t, *chain.sites[name].quadratic(v, t))
        return super().site(chain, name, v, t)

    def arrive(self, chain: Chain) -> None:
        """Add the second orders that were kept at the root to the Hessians."""
        self.second.arrive(chain.root)

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """Add ½ Σ c b² + Σ s b p + scale Σ c λ (A_qα)·(A_kα) + ½ Σ c φ″ℓ², p = ω·A_vα; bound what is beyond it.

        λ, φ″ and ℓ are the slope, the curve and the linear part of a capped score; without a cap λ = 1 and φ″ = 0.
        """
        assert chain.mix is not None
        self._add_mixing(chain.mix, chain.goes_on[place], u)
        return super().mixing(chain, place, u)

    def _add_mixing(self, mix: MixSite, t: int, u: Float[Tensor, "F d"]) -> None:
        s, half_widths = mix.s[:, t], self.half_widths
        omega = torch.einsum("fd,dhc->fhc", u, mix.out)
        c = s * torch.einsum("fhc,hjc->fhj", omega, mix.deviations[:, t])
        rows = mix.rows[:, t] * half_widths
        q, k, v = (A * half_widths for A in (mix.scores.q.A[t], mix.scores.k.A, mix.v.A))
        by_value = omega.unflatten(1, (v.shape[1], -1))
        partners = torch.einsum("fgrc,jgcp->fgrjp", by_value, v).flatten(1, 2)
        partners = s[..., None] * partners + 0.5 * c[..., None] * rows
        by_key = (mix.scale * c * mix.slopes[:, t]).unflatten(1, (k.shape[1], -1))
        keys = torch.einsum("fgrj,jgcp->fgrcp", by_key, k).flatten(1, 2)
        left = torch.cat((rows.flatten(0, 1), q.flatten(0, 1)))
        right = torch.cat((partners.flatten(1, 2), keys.flatten(1, 2)), 1)
        sizes = length(omega) * frobenius(v).amax(0).repeat_interleave(mix.v.share)
        most = torch.linalg.vector_norm(sizes, dim=-1) + length(c.flatten(1)) * frobenius(rows.flatten(0, 1))
        noise = length(u) * frobenius(mix.out.flatten(1)) * (1.0 + mix.v.n.amax() * len(s) ** 0.5)
        size = frobenius(rows.flatten(0, 1)) * (most + noise * (frobenius(v).amax() + frobenius(rows).sum()))
        pair = mix.scale * frobenius(q.flatten(0, 1)) * frobenius(k).amax() * (length(c.flatten(1)) + noise)
        # Sums over the stream, a head's coordinates, keys and the rows of `left`; the factors 8 and S are to spare.
        inner = len(left) + omega.shape[-1] + len(mix.out) + 64
        if (bent := mix.scores.capped) is not None:
            raw = (mix.scores.rows[:, t] * half_widths).flatten(0, 1)
            curve = bent.curve[:, t].flatten()
            left = torch.cat((left, raw))
            right = torch.cat((right, (0.5 * c.flatten(1) * curve)[..., None] * raw), 1)
            pair = pair + frobenius(raw).square() * curve.abs().amax() * (length(c.flatten(1)) + noise)
        self.second.add(left, right, product_error(8 * inner, 8.0 * s.shape[-1] * (size + pair)))

    def products(self, chain: Chain, forms: Forms) -> Float[Tensor, "H S S"]:
        """Add the scores' own products to the Hessians; return what e adds to them."""
        scores = chain.scores
        assert scores is not None
        here = forms.layer == chain.segment.layer
        entries = zip(
            *(x[here].tolist() for x in (forms.index, forms.head, forms.position, forms.key, forms.weight)),
            strict=True,
        )
        for form, h, i, j, weight in entries:
            q, k = (
                scores.q.A[i, h] * self.half_widths,
                scores.k.A[j, h // scores.k.share]
                * (self.half_widths * weight * scores.step.scale * scores.slopes[h, i, j]),
            )
            if scores.capped is not None:
                row = scores.rows[h, i, j] * self.half_widths
                q = torch.cat((q, row[None]))
                k = torch.cat((k, (0.5 * weight * scores.capped.curve[h, i, j] * row)[None]))
            self.second.add_to(form, q, k)
        return super().products(chain, forms)

    def linear_range(self, slope: Float[Tensor, "F p"]) -> Float[Tensor, "F 2"]:
        """Bound ±(a·α + ½αᵀHα) over the box."""
        return ranges(slope, *self.second.taken())
