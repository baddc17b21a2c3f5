r"""Proved bounds of linear forms of scores whose queries and keys are tensor sets (`lem:quadratic_bound`, improved).

A form Σ w a_hij over one query is q_hi·(Σ_j w_j k_hj): the difference is taken before the product, so what the
challengers share cancels. Over several queries the products are stacked. As a polynomial of the factors,

    f(α) = c + aᵀα + ½αᵀHα  ± rest,     H = UᵀV + VᵀU + the quadratic generators.

For every corner s and every d ≥ 0 with diag(d) ⪰ H (the argument of `layer0`, for a quadratic),

    f(α) ≤ f(s) + Σ_k max(0, 2(d_k − s_k(a + Hs)_k)) + rest,

and for s = 0 the diagonal shift of `prooflens.sets.quadratic`. d is λ·t for scales t that follow the slope at the
corner (where the slope is small, d must be) or the row sizes of H; λ is a verified eigenvalue. Few factors: H is
written out. Many: only the 2M × 2M Gram matrices of U and V are (`prooflens.sets.bilinear`), and quadratic
generators are boxed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.tensor_sets.steps import shared
from prooflens.engines.tensor_sets.tensor_set import TensorSet, square_split
from prooflens.models.sites import Scores
from prooflens.numerics import certified_shift, gamma, gershgorin_shift, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.bilinear import GramBlocks, extreme_eigenvalues
from prooflens.sets.quadratic import lemma_upper, shift_upper

DENSE_FACTORS = 400
"""Up to this many factors, the Hessian of a form is written out."""

CHUNK_ELEMENTS = 2**24
"""How many numbers are worked on at a time."""

SIGN_STEPS = 3
"""How often a corner is replaced by the signs of the gradient there; any corner gives a bound."""

FLOOR = 2.0**-6
"""The smallest scale, as a share of the mean. Any positive scale is valid; a tiny one spoils the proof."""

LEAST_MEAN = 2.0**-900
"""If the mean scale itself is smaller than this, all scales are 1."""


@dataclass(frozen=True, eq=False)
class Quadratics:
    """F forms f = c + aᵀα + ½αᵀ(UᵀV + VᵀU + K)α ± rest of the factors `ids`.

    K is dense (p × p, symmetric) or None; `size` bounds the sum of all coefficients' magnitudes.
    """

    c: Float[Tensor, " F"]
    a: Float[Tensor, "F p"]
    U: Float[Tensor, "F M p"]
    V: Float[Tensor, "F M p"]
    K: Float[Tensor, "F p p"] | None
    rest: Float[Tensor, " F"]
    size: Float[Tensor, " F"]

    def negated(self) -> Quadratics:
        """Return −f."""
        return replace(self, c=-self.c, a=-self.a, U=-self.U, K=None if self.K is None else -self.K)

    @property
    def roundings(self) -> float:
        """The error of a value or slope of f, relative to `size`."""
        return gamma(4 * (self.U.shape[-2] + self.a.shape[-1]) + 128)

    def curve(self, alpha: Float[Tensor, "F p"]) -> Float[Tensor, "F p"]:
        """Return Hα."""
        made = _rows(self.U.mT, _rows(self.V, alpha)) + _rows(self.V.mT, _rows(self.U, alpha))
        return made if self.K is None else made + _rows(self.K, alpha)

    def upper(self, lemma: bool = False) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"]]:
        """Return a proved upper bound of every form, and its corner."""
        s = _signs(self.a)
        for _ in range(SIGN_STEPS):
            s = _signs(self.a + self.curve(s))
        bent = self.curve(s)
        G = s * (self.a + bent)
        value = self.c + (self.a * s).sum(-1) + 0.5 * (bent * s).sum(-1)
        slack = up(self.roundings * self.size + TINY)
        best = lemma_upper(self.c, self.a, self._hessian()) if lemma else torch.full_like(value, torch.inf)
        for d in () if lemma else self._shifts(G):
            # The two ends of [0, 2] hold the maximum of −Gβ + ½dβ² only for d ≥ 0; a larger d majorises H too.
            excess = 2.0 * up(d.clamp(min=0.0) - G).clamp(min=0.0)
            total = up(excess.sum(-1) * (1.0 + gamma(2 * G.shape[-1] + 16)))
            best = torch.minimum(best, up(value + total))
            best = torch.minimum(best, shift_upper(self.c, self.a, d))
        # Real coefficients differ from ours by at most the slack in sum; α enters as 1 − s_kα_k ∈ [0, 2], so H's error
        # counts 4 times, that of G and of the value at the corner 8 times at most.
        bound = up(best + up(16.0 * slack + self.rest))
        return torch.where(bound.isnan(), torch.inf, bound), s

    def _shifts(self, G: Float[Tensor, "F p"]) -> Iterator[Float[Tensor, "F p"]]:
        """Yield vectors d with diag(d) ⪰ H proved."""
        rows = self._row_sizes()
        scales = [_positive(scale) for scale in (G, rows, G + rows)]
        if self.K is None:
            yield from map(self._thin_shift, scales)
            return
        H = self._hessian()
        yield gershgorin_shift(H)
        yield from (certified_shift(H, scale) for scale in scales)

    def _hessian(self) -> Float[Tensor, "F p p"]:
        """Return H, exactly symmetric; the rounding of its entries is part of `size`."""
        assert self.K is not None
        product = self.U.mT @ self.V
        H = product + product.mT + self.K
        return 0.5 * H + 0.5 * H.mT

    def _thin_shift(self, scale: Tensor) -> Tensor:
        r = scale.rsqrt()
        X, Y = self.U * r[:, None, :], self.V * r[:, None, :]
        gram = GramBlocks.of(X @ X.mT, Y @ X.mT, Y @ Y.mT, self.a.shape[-1])
        _, plus = extreme_eigenvalues(gram)
        inverse = up(1.0 / r)
        return up(plus[:, None] * up(inverse * inverse))

    def _row_sizes(self) -> Float[Tensor, "F p"]:
        u, v = self.U.square().sum(-2).sqrt(), self.V.square().sum(-2).sqrt()
        rows = u * v.square().sum(-1, keepdim=True).sqrt() + v * u.square().sum(-1, keepdim=True).sqrt()
        return rows if self.K is None else rows + self.K.norm(dim=-1)


def _signs(x: Tensor) -> Tensor:
    return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))


def _rows(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x[..., None])[..., 0]


def _positive(scale: Tensor) -> Tensor:
    mean = scale.abs().mean(-1, keepdim=True)
    return torch.where(mean > LEAST_MEAN, torch.maximum(scale, mean * FLOOR), torch.ones_like(scale))


def bound_scores(
    step: Scores, q: TensorSet, k: TensorSet, forms: Forms, n_region: int, *, lemma: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bound forms of one layer's scores from both sides.

    Args:
        step: the step that makes the scores.
        q: the set of queries.
        k: the set of keys.
        forms: what to bound.
        n_region: how many factors the region has.
        lemma: use the paper's `lem:quadratic_bound` alone.

    Returns:
        Lower and upper bounds, and the region's factors at both corners.
    """
    keys = shared(k, q.c.shape[-2])
    ids = torch.cat((q.ids, keys.ids)).unique()
    dense = lemma or len(ids) <= DENSE_FACTORS
    per_form = len(ids) * (len(ids) if dense else 4 * q.c.shape[-1])
    chunk = max(1, CHUNK_ELEMENTS // max(per_form, 1))
    parts = []
    for start in range(0, forms.size, chunk):
        some = forms.select(torch.arange(start, min(start + chunk, forms.size)))
        f = _quadratics(step, q, keys, some, ids, dense)
        high, top = f.upper(lemma)
        low, bottom = f.negated().upper(lemma)
        parts.append((-low, high, *(_of_region(s, ids, n_region) for s in (bottom, top))))
    lower, upper, bottom, top = (torch.cat(part) for part in zip(*parts, strict=True))
    return lower, upper, bottom, top


def _of_region(corner: Tensor, ids: Tensor, n_region: int) -> Tensor:
    made = corner.new_ones(len(corner), n_region)
    inside = ids < n_region
    made[:, ids[inside]] = corner[:, inside]
    return made


def _quadratics(
    step: Scores, q: TensorSet, keys: TensorSet, forms: Forms, ids: Int[Tensor, " p"], dense: bool
) -> Quadratics:
    """Return the polynomials of some forms: queries and weighted key sums, one slot per query that a form reads."""
    device = q.c.device
    H, S, p = q.c.shape[-2], q.c.shape[0], len(ids)
    index, head, position, key = (t.to(device) for t in (forms.index, forms.head, forms.position, forms.key))
    weight = forms.weight.to(q.c)
    place = (index * H + head) * S + position
    slots, slot = torch.unique(place, return_inverse=True)
    form, h, i = slots // (H * S), (slots // S) % H, slots % S
    n, longest = len(slots), int(torch.bincount(slot).max()) if len(slot) else 1

    def read(t: Tensor, w: Tensor) -> Tensor:
        """Σ_j w_j k_hj for every slot, with any leading generators."""
        rows = t[..., key, head, :] * w[:, None]
        made = rows.new_zeros(*rows.shape[:-2], n, rows.shape[-1])
        return made.index_add_(-2, slot, rows)

    sizes = (keys.magnitude, keys.r, keys.linear_size, keys.rest_size)
    k_size, k_r, k_lin, k_rest = (read(t, weight.abs()) for t in sizes)
    y_c, y_L, y_Q = (read(t, weight) for t in (keys.c, keys.L, keys.Q))
    x_c, x_L, x_Q = q.c[i, h], q.L[:, i, h], q.Q[:, i, h]
    x_size, x_r = q.magnitude[i, h], q.r[i, h]
    x_lin, x_rest = q.linear_size[i, h], q.rest_size[i, h]
    rest = x_c.abs() * k_r + x_r * y_c.abs() + (x_lin + x_rest) * k_rest + x_rest * k_lin
    full_x, full_y = _on(ids, q.ids, x_L), _on(ids, keys.ids, y_L)
    linear = torch.einsum("pnc,nc->np", full_x, y_c) + torch.einsum("pnc,nc->np", full_y, x_c)
    pairs = torch.cat((q.pairs, keys.pairs))
    quadratic = torch.cat((torch.einsum("mnc,nc->mn", x_Q, y_c), torch.einsum("mnc,nc->mn", y_Q, x_c)))
    F, M = forms.size, q.c.shape[-1]

    def gather(values: Tensor) -> Tensor:
        """Sum slots into forms along the first dimension."""
        return values.new_zeros(F, *values.shape[1:]).index_add_(0, form, values)

    c = gather((x_c * y_c).sum(-1))
    rest, size = gather(rest.sum(-1)), gather((x_size * k_size).sum(-1))
    # Slots of one form lie side by side in U and V, so their products add up.
    order = torch.arange(n, device=device) - torch.searchsorted(form, form)
    width = int(order.max()) + 1 if n else 1
    U, V = (q.c.new_zeros(F, width, M, p) for _ in range(2))
    U[form, order], V[form, order] = full_x.permute(1, 2, 0), full_y.permute(1, 2, 0)
    K = None
    if dense:
        K = q.c.new_zeros(F, p * p)
        inside = torch.isin(pairs, ids).all(-1)
        first, second = torch.searchsorted(ids, pairs[inside]).unbind(-1)
        per_form = gather(quadratic[inside].T)
        K.index_add_(1, first * p + second, per_form)
        K.index_add_(1, second * p + first, per_form)
        K = K.reshape(F, p, p)
        pairs, quadratic = pairs[~inside], quadratic[~inside]
    shift, lost = square_split(gather(quadratic.T).T, pairs)
    scale, grow = step.scale, 1.0 + gamma(4 * M + 2 * longest + len(pairs) + 64)
    bias = torch.zeros_like(c)
    if step.bias is not None:
        bias = bias.index_add(0, index, step.bias[head, position, key] * weight)
        size = (
            size
            + torch.zeros_like(c).index_add(0, index, (step.bias[head, position, key] * weight).abs()) / scale
        )
    roundings = gamma(4 * M + 4 * longest + len(index) + 256)
    return Quadratics(
        (c + shift) * scale + bias,
        gather(linear) * scale,
        U.reshape(F, width * M, p) * scale,
        V.reshape(F, width * M, p),
        None if K is None else K * scale,
        up((rest + lost + roundings * size) * grow * scale * grow + TINY),
        up(size * scale * grow),
    )


def _on(ids: Tensor, own: Tensor, L: Tensor) -> Tensor:
    """Return generators on a larger set of ids."""
    full = L.new_zeros(len(ids), *L.shape[1:])
    full[torch.searchsorted(ids, own)] = L
    return full
