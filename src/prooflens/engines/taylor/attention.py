"""Attention in `taylor`: one row of scores, softmax and mixing as a site.

With centred score deviations b_j (Σ s_j b_j = 0), weights s, values centred at z, ω the covector at a head's output,
ỹ_j = ω·(V_j − z), p_j = ω·δV_j and c_j = s_j ỹ_j, the row's output moves by exactly

    Σ_j s_j [(s_j(x)/s_j − 1) ỹ_j + s_j(x)/s_j p_j]
      = Σ c_j b_j + Σ s_j p_j                                  (linear)
      + ½ Σ c_j b_j² + Σ s_j b_j p_j                           (second order; Σ c_j = 0 removes the mean)
      + third order and beyond (`taylor.mixing`),

and the scores themselves are bilinear: scale·u_q·u_k under the weight c_j. Here β_j bounds |b_j|. Scores that go
through a cap have a slope each, by which their moves are multiplied, and bend by themselves (`taylor.caps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import supports
from prooflens.engines.relaxations.norms import (
    CHUNK,
    UNDERFLOW,
    bilinear,
    cholesky_factor,
    frobenius,
    grow,
    largest,
    length,
    product_error,
)
from prooflens.engines.taylor.caps import CappedScores, capped_scores
from prooflens.engines.taylor.segments import Attention
from prooflens.engines.taylor.values import FactorBox, Value
from prooflens.models.sites import Scores
from prooflens.numerics import gamma


@dataclass(eq=False)
class Heads:
    """Queries, keys or values, with shared heads repeated.

    Attributes:
        source: the value that they are the heads of.
        u: values at the centre, shape [S, H, c].
        P: shapes of Aα, [S, H, c, c].
        B: shapes of e, [S, H, c, c].
        tau: sup ‖Aα‖, shape [S, H].
        e: sup ‖e‖, shape [S, H].
    """

    source: Value
    u: Float[Tensor, "S H c"]
    P: Float[Tensor, "S H c c"]
    B: Float[Tensor, "S H c c"]
    tau: Float[Tensor, "S H"]
    e: Float[Tensor, "S H"]

    @classmethod
    def of(cls, value: Value, n_heads: int) -> Heads:
        """Give each group's head to all query heads that read it."""
        S, n = value.u.shape
        c, share = n // value.heads, n_heads // value.heads
        u = value.u.reshape(S, value.heads, c)
        parts = (u, value.blocks("shape_a"), value.blocks("shape_e"), value.tau, value.e)
        u, P, B, tau, e = (x.repeat_interleave(share, 1) for x in parts)
        return cls(value, u, P, B, tau, e)

    @cached_property
    def A(self) -> Float[Tensor, "S g c p"]:  # noqa: N802
        """Linear parts, each shared head once; the product JN rounds, which `slip` in e covers."""
        found: Tensor = self.source.root.linear_part(self.source.J).unflatten(1, (self.source.heads, -1))
        return found

    def forget_moves(self) -> None:
        """Let go of the linear parts; they are made again if they are asked for."""
        self.__dict__.pop("A", None)

    @property
    def share(self) -> int:
        """How many heads read each of A."""
        return self.u.shape[1] // self.source.heads

    @cached_property
    def move_size(self) -> Float[Tensor, "S H"]:
        """‖A‖_F per token and head."""
        return frobenius(self.A).repeat_interleave(self.share, 1)

    def seen(self, w: Float[Tensor, "*b H c"]) -> Float[Tensor, "*b S H p"]:
        """Return w·A of every head's covector with every token.

        Args:
            w: covectors, shape [..., H, c].
        """
        w = w.unflatten(-2, (self.source.heads, self.share))
        return torch.einsum("...grc,jgcp->...jgrp", w, self.A).flatten(-3, -2)

    @property
    def n(self) -> Float[Tensor, "S H"]:
        """‖u‖ per token and head."""
        return length(self.u)

    @property
    def reach(self) -> Float[Tensor, "S H"]:
        """sup ‖u(x) − u‖ per token and head."""
        return grow(self.tau + self.e)


def _outer(x: Float[Tensor, "S H"], y: Float[Tensor, "S H"]) -> Float[Tensor, "H S S"]:
    return x.T[:, :, None] * y.T[:, None, :]


@dataclass(eq=False)
class ScoreSite:
    """The bilinear site a_ij = scale·q_i·k_j + bias_ij, and the cap behind it if there is one.

    Attributes:
        step: the step that makes scores.
        names: the names of queries and keys.
        q: queries.
        k: keys.
        half_widths: half-widths of the factors, shape [p].
        quick: bound products by traces, without eigenvalues.
        cap: c of c·tanh(a/c); None if scores are not capped.
    """

    step: Scores
    names: tuple[str, str]
    q: Heads
    k: Heads
    half_widths: Float[Tensor, " p"]
    quick: bool = False
    """Bound products by traces, without eigenvalues."""
    cap: float | None = None

    @cached_property
    def bilinear(self) -> Float[Tensor, "H S S"]:
        """Scores at the centre, before the cap."""
        a = torch.einsum("ihc,jhc->hij", self.q.u, self.k.u) * self.step.scale
        return a if self.step.bias is None else a + self.step.bias

    @cached_property
    def capped(self) -> CappedScores | None:
        """What the cap does to scores; None without a cap."""
        if self.cap is None:
            return None
        q, k, scale, mask = self.q, self.k, self.step.scale, self.step.mask
        second, cross = self._products
        c, p = q.A.shape[-2:]
        own = supports(q.B.movedim(1, 0)[:, :, None].expand(*second.shape, -1, -1), _per_query(k.u))
        widths = self.half_widths
        size = scale * (_outer(q.n, k.move_size) + _outer(q.move_size, k.n)) * length(widths)
        # A row is two sums of c terms, and its product with the half-widths one of p; x = fl(a/c) rounds once.
        rounding = gamma(8 * c + p + 64) * 4.0 * size + gamma(8) * self.bilinear.abs()
        rho = grow((self.rows.abs() @ widths + rounding) * mask)
        E = grow((second + cross + scale * (self._far + own) + rounding) * mask)
        return capped_scores(self.cap, self.bilinear, rho, E)

    @cached_property
    def rows(self) -> Float[Tensor, "H S S p"]:
        """The linear parts of scores before the cap, 0 where the mask hides them."""
        q, k = self.q, self.k
        found = k.seen(q.u).permute(2, 0, 1, 3) + torch.einsum("ihcp,jhc->hijp", q.A, k.u)
        return self.step.scale * found * self.step.mask[..., None]

    @property
    def values(self) -> Float[Tensor, "H S S"]:
        """Scores at the centre, as softmax reads them."""
        return self.bilinear if self.capped is None else self.capped.value

    @cached_property
    def slopes(self) -> Float[Tensor, "H S S"]:
        """By how much a score moves with q·k: 1, or the slope of the cap."""
        if self.capped is not None:
            return self.capped.slope
        return self.q.u.new_ones(1, 1, 1).expand(self.q.u.shape[1], len(self.q.u), len(self.k.u))

    @cached_property
    def _products(self) -> tuple[Float[Tensor, "H S S"], Float[Tensor, "H S S"]]:
        """As `products`, before the cap."""
        q, k, scale = self.q, self.k, self.step.scale
        cross = self._pairs(q.P, k.B) + self._pairs(k.P, q.B).mT + self._pairs(q.B, k.B)
        mask = self.step.mask
        return grow(scale * self._pairs(q.P, k.P) * mask), grow(scale * cross * mask + self.rounding)

    @cached_property
    def rounding(self) -> Float[Tensor, "H S S"]:
        """The rounding of scores and of their covectors over the region: sums of c products, γ_{4c+64} covers both."""
        q, k = self.q, self.k
        found = gamma(4 * q.u.shape[-1] + 64) * self.step.scale * _outer(q.n + q.reach, k.n + k.reach)
        if self.step.bias is not None:
            found = found + gamma(8) * self.step.bias.abs()
        return found * self.step.mask

    @cached_property
    def products(self) -> tuple[Float[Tensor, "H S S"], Float[Tensor, "H S S"]]:
        """Per score, the supremum of its second-order part and of what e adds to it, with rounding.

        Behind a cap, what was there before it is multiplied by the slope, and the cap adds its own quadratic part and
        its rest. tanh and the product with c round by a few units of c.
        """
        second, cross = self._products
        if self.capped is None or self.cap is None:
            return second, cross
        mask, bent = self.step.mask, self.capped
        rest = bent.rest + gamma(64) * self.cap
        return grow((bent.slope * second + bent.straight) * mask), grow((bent.slope * cross + rest) * mask)

    @cached_property
    def products_e(self) -> Float[Tensor, "H S S"]:
        """Per score that has no cap, the supremum of scale·e_q·e_k, with the rounding that `products` counts."""
        return grow(self.step.scale * self._pairs(self.q.B, self.k.B) * self.step.mask + self.rounding)

    @cached_property
    def _far(self) -> Float[Tensor, "H S S"]:
        """sup |q·e_k|."""
        q, k = self.q, self.k
        S, H, _ = q.u.shape
        shapes = k.B.movedim(1, 0)[:, None].expand(H, S, S, -1, -1)
        return supports(shapes, _per_key(q.u.movedim(1, 0), S))

    def _pairs(self, M: Float[Tensor, "S H c c"], K: Float[Tensor, "S H c c"]) -> Float[Tensor, "H S S"]:
        """Bound |x·y| over two ellipsoids, for all pairs of tokens."""
        S, H, c, _ = M.shape
        if self.quick:
            square = torch.einsum("ihce,jhce->hij", M, K).clamp(min=0.0)
            error = product_error(c * c, _outer(frobenius(M), frobenius(K))) + UNDERFLOW
            return grow((square + error).sqrt())
        step = max(1, CHUNK // (S * S * c * c))
        found = []
        for start in range(0, H, step):
            left, right = (x[:, start : start + step].movedim(1, 0) for x in (M, K))
            shape = (len(left), S, S, c, c)
            L = cholesky_factor(left)[:, :, None].expand(shape)
            found.append(bilinear(left[:, :, None].expand(shape), L, right[:, None].expand(shape)))
        return torch.cat(found)

    def rest(
        self, s: Float[Tensor, "H S S"], keys: Float[Tensor, "H S S c"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Bound the part b_e of the centred scores that is not linear in α.

        Args:
            s: softmax weights at the centre.
            keys: keys, times the slopes of their scores, less their weighted mean, per query.

        Returns:
            Bounds of |b_e|, of all products of moves in it, and of the products that involve e.
        """
        second, cross = self.products
        mask, scale = self.step.mask, self.step.scale
        far = self.slopes * self._far
        own = supports(self.q.B.movedim(1, 0)[:, :, None].expand(*s.shape, -1, -1), keys)
        whole, products, cross = (
            each + (s * each).sum(-1, keepdim=True)
            for each in (second + cross + scale * far * mask, second + cross, cross)
        )
        return grow((whole + scale * own) * mask), grow(products * mask), grow(cross * mask)


def budget(weights: Float[Tensor, "*b n"], rows: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b"]:
    """Bound Σ weights (rows·α̂)² over ‖α̂‖₂ ≤ 1 by one eigenvalue.

    The 64 more roundings in `product_error` are for the roots of the weights and their products with the rows.
    """
    X = weights.sqrt()[..., None] * rows
    K = X @ X.mT
    error = product_error(X.shape[-1] + 64, frobenius(X).square())
    return grow(largest(0.5 * (K + K.mT)) + error + UNDERFLOW)


def seen_keys(mask: Bool[Tensor, "*b S"]) -> slice:
    """Return the range of the keys that some query reads; of queries that read none, the first one.

    Args:
        mask: which keys each of some queries reads.
    """
    live = mask.reshape(-1, mask.shape[-1]).any(0).nonzero()[:, 0].tolist()
    return slice(live[0], live[-1] + 1) if live else slice(0, 1)


def _per_key(u: Float[Tensor, "H S c"], n_keys: int) -> Float[Tensor, "H S S c"]:
    return u[:, :, None].expand(-1, -1, n_keys, -1)


def _per_query(u: Float[Tensor, "S H c"]) -> Float[Tensor, "H S S c"]:
    return u.movedim(1, 0)[:, None].expand(-1, len(u), -1, -1)


@dataclass(eq=False)
class MixSite:
    """The softmax mixing of all heads and rows.

    Attributes:
        scores: the site that makes scores.
        attention: the names of the values that meet.
        v: values.
        stream: a bound of the stream's size, for rounding.
        factors: the box of the factors.
    """

    scores: ScoreSite
    attention: Attention
    v: Heads
    stream: Float[Tensor, " S"]
    """A bound of the stream's size, for rounding."""
    factors: FactorBox

    def __post_init__(self) -> None:
        step, q, k, v = self.scores.step, self.scores.q, self.scores.k, self.v
        self.mask, self.scale = step.mask, step.scale
        self.slopes = self.scores.slopes
        self.s = torch.softmax(self.scores.values.masked_fill(~step.mask, -torch.inf), -1)
        self.z = torch.einsum("hij,jhc->ihc", self.s, v.u)
        average = torch.einsum("hij,jhc->ihc", self.s * self.slopes, k.u)
        self.keys = self.slopes[..., None] * _per_query(k.u) - average.movedim(1, 0)[:, :, None]
        self.deviations = v.u.movedim(1, 0)[:, None] - self.z.movedim(1, 0)[:, :, None]
        self.keys, self.deviations = (x * self.mask[..., None] for x in (self.keys, self.deviations))
        S, H, c = self.z.shape
        weight = self.attention.output.weight
        self.out = weight.reshape(len(weight), H, c)
        self.out_size = frobenius(self.out.movedim(1, 0))
        self.rows = self._rows()
        widths = self.factors.half_widths
        p = self.rows.shape[-1]
        size = self.scale * (
            q.n.T[:, :, None] * k.move_size.T[:, None, :]
            + q.n.T[:, :, None] * k.move_size.amax(0)[:, None, None]
            + q.move_size.T[:, :, None] * 2.0 * k.n.amax(0)[:, None, None]
        )
        # What the rows' own rounding leaves out counts as e. A row is two sums of c terms less a mean of S terms, and
        # its keys are deviations from a mean of S terms: γ_{2c+2S+8} of `size`, and γ_p for the sum over factors.
        rounding = gamma(8 * c + 8 * S + p + 64) * 4.0 * size * length(widths) * self.mask
        bounds = self.scores.rest(self.s, self.keys)
        self.E, self.E_products, self.E_cross = (grow(bound + rounding) for bound in bounds)
        self.rho = grow((self.rows.abs() @ widths + rounding) * self.mask)
        # The computed weights s err by 8u relative (exp) and by u|a_j − max a| (its argument): 2⁻⁴⁵ = 256u covers
        # that for scores less than 240 apart. Weights further apart are below e⁻²⁴⁰, and so is what they err by.
        self.beta = grow(self.rho + self.E + 2.0**-45)

    def _rows(self) -> Float[Tensor, "H S S p"]:
        """Return the linear parts of the centred scores."""
        q, k = self.scores.q, self.scores.k
        rows = k.seen(self.scale * q.u).permute(2, 0, 1, 3) * self.slopes[..., None]
        rows -= torch.einsum("hij,hijp->hip", self.s, rows)[:, :, None]
        rows += torch.einsum("ihcp,hijc->hijp", q.A, self.scale * self.keys)
        return rows.mul_(self.mask[..., None])

    @cached_property
    def weights(self) -> Float[Tensor, "S p"]:
        """The weights of the groups of factors for each query token, by what its scores and its values read."""
        scores = self.factors.sizes((self.s.sqrt()[..., None] * self.rows).movedim(1, 0).flatten(1, 2))
        read = torch.stack([self.factors.sizes(A.flatten(0, 1)) for A in self.v.A])
        values = torch.einsum("hij,jg->ig", self.s, read)
        shares = [x / x.sum(-1, keepdim=True).clamp(min=2.0**-300) for x in (scores, values)]
        return self.factors.weights(shares[0] + shares[1] + 2.0**-300)

    def pull(self, u: Float[Tensor, "F d"], t: int) -> dict[str, Tensor]:
        """Take covectors at row t of the next root back to q (row t), k and v (all rows).

        Args:
            u: covectors, shape [F, d].
            t: the token.
        """
        omega = torch.einsum("fd,dhc->fhc", u, self.out)
        coef = self.s[:, t] * torch.einsum("fhc,hjc->fhj", omega, self.deviations[:, t])
        return {
            "q": self.scale * torch.einsum("fhj,hjc->fhc", coef, self.keys[:, t]),
            "k": self.scale * torch.einsum("fhj,hc->fjhc", coef * self.slopes[:, t], self.scores.q.u[t]),
            "v": torch.einsum("hj,fhc->fjhc", self.s[:, t], omega),
        }

    @cached_property
    def noise(self) -> Float[Tensor, " S"]:
        """Rounding of weights, mixing and output at the centre, and of unit covectors over the region."""
        q, k, v = self.scores.q, self.scores.k, self.v
        S, H, c = self.z.shape
        n = gamma(8 * (S + c * H + len(self.out)) + 256)
        values = (v.n + v.reach).amax()
        moves = self.scale * ((q.n + q.reach) * (k.n + k.reach).amax(0)).amax(1)
        if self.scores.step.bias is not None:
            moves = moves + self.scores.step.bias.abs().amax((0, 2))
        moves = moves + (self.scores.cap or 0.0)
        inner = self.out_size.square().sum().sqrt() * values * (2.0 + 2.0 * moves) * 8.0
        bias = 0.0 if self.attention.output.bias is None else length(self.attention.output.bias)
        # Weights that are off by 2⁻⁴⁵ relative, as in `beta`, move a mean of values by at most twice that.
        return grow(n * (inner * S + bias + self.stream) + 2.0**-44 * self.out_size.sum() * values)
