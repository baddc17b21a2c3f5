"""What softmax leaves beyond the polynomials of `taylor.mixing`, in budgets that all heads and keys share.

For the centred scores b = b_lin + b_e of a query token let b̄ = |b_lin| + |b_e| ≤ β. Then Σ s b̄² ≤ W and Σ s b_e² ≤
W_e over all heads (one eigenvalue each). With R_n(b) = e^b − Σ_{k<n} b^k/k! and r_n = R_n(β)/β²,

    t = s b̄²/W sums to at most 1,      s b̄ = √(sW) √t,      s|R_n(b)| ≤ r_n √(W min(W, sβ²)) √t,

the same for b_e, and a sum of x g with |x| ≤ Z√t lies in E(Σ Z² g gᵀ) by Cauchy and Schwarz. Sizes Z that belong to
the same t may be added; those of another t are another sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.derivatives import exp_tail
from prooflens.engines.relaxations.ellipsoids import raised
from prooflens.engines.relaxations.norms import frobenius, grow, largest
from prooflens.engines.taylor.attention import MixSite, budget
from prooflens.numerics import gamma


@dataclass(frozen=True, eq=False)
class SoftmaxBudget:
    """Bounds Σ s b̄² ≤ W over all heads and W_head in each, Σ s b_e² ≤ W_e and W_e_head, for some query tokens."""

    s: Float[Tensor, "T H S"]
    E: Float[Tensor, "T H S"]
    beta: Float[Tensor, "T H S"]
    W: Float[Tensor, "T 1 1"]
    W_head: Float[Tensor, "T H 1"]
    W_e: Float[Tensor, "T 1 1"]
    W_e_head: Float[Tensor, "T H 1"]

    @classmethod
    def of(
        cls, mix: MixSite, tokens: list[int], keys: slice, K_e: Float[Tensor, "T n n"] | None = None
    ) -> SoftmaxBudget:
        """Make budgets from the eigenvalues of the linear parts and from b_e's shape or, without one, from E.

        Args:
            mix: the mixing.
            tokens: the query tokens.
            keys: the keys that they read.
            K_e: the shape of b_e; None to use |b_e| ≤ E.
        """
        s, E, beta = (x[:, tokens, keys].movedim(0, 1) for x in (mix.s, mix.E, mix.beta))
        T, H, S = s.shape
        rows = mix.rows[:, tokens, keys].movedim(0, 1) * mix.weights[tokens][:, None, None]
        linear, heads = budget(s.flatten(1), rows.flatten(1, 2)), budget(s, rows)
        each = (s * E.square()).sum(-1)
        W_e, W_e_head = each.sum(-1), each
        if K_e is not None:
            root = s.flatten(1).sqrt()
            even = root[:, :, None] * K_e * root[:, None]
            even = raised(even, gamma(8) * frobenius(even))
            blocks = even.reshape(T, H, S, H, S).diagonal(dim1=1, dim2=3).movedim(-1, 1)
            W_e = torch.minimum(largest(even), W_e)
            W_e_head = torch.minimum(largest(blocks.contiguous()), W_e_head)
        W, W_head = (grow((x.sqrt() + y.sqrt()).square()) for x, y in ((linear, W_e), (heads, W_e_head)))
        wide = (x[:, None, None] for x in (W, grow(W_e)))
        narrow = (x[:, :, None] for x in (W_head, grow(W_e_head)))
        (W, W_e), (W_head, W_e_head) = wide, narrow
        return cls(s, E, beta, W, W_head, W_e, W_e_head)

    @property
    def straight(self) -> Float[Tensor, "T H S"]:
        """Z of s b̄."""
        return (self.s * self.W).sqrt()

    @property
    def curved(self) -> Float[Tensor, "T H S"]:
        """Z of s b̄²."""
        return (self.W * torch.minimum(self.W, self.s * self.beta.square())).sqrt()

    @property
    def straight_e(self) -> Float[Tensor, "T H S"]:
        """Z of s b_e, in b_e's budget."""
        return (self.s * self.W_e).sqrt()

    @property
    def curved_e(self) -> Float[Tensor, "T H S"]:
        """Z of s b_e², in b_e's budget."""
        return (self.W_e * torch.minimum(self.W_e, self.s * self.E.square())).sqrt()

    @property
    def both(self) -> Float[Tensor, "T H 1"]:
        """sup Σ_j s b̄ |b_e|, head by head."""
        return (self.W_head * self.W_e_head).sqrt()

    def mean(self, r: Float[Tensor, "T H S"]) -> Float[Tensor, "T H 1"]:
        """Bound Σ_j s b̄² r, head by head."""
        each = (self.s * self.beta.square() * r).sum(-1, keepdim=True)
        return grow(torch.minimum(each, r.amax(-1, keepdim=True) * self.W_head))


class Sizes(NamedTuple):
    """How large sums of x g and of x W_O δ are, by the budget that they share.

    |x| ≤ Z√t for the budget of b or of b_e, or x = s y for a head's y. A head's |y| ≤ Y√τ for τ = Σ_j s b̄²/W of that
    head, or the same of b_e; then s y has Z = √s Y with t = sτ.
    """

    v: Tensor
    v_e: Tensor
    head: Tensor
    head_e: Tensor | None = None
    g: Tensor | None = None
    g_e: Tensor | None = None

    def plus(self, other: Sizes) -> Sizes:
        """Return the sizes of both sums: what shares a budget is added before it is squared."""
        return Sizes(
            self.v + other.v,
            self.v_e + other.v_e,
            self.head + other.head,
            _sum(self.head_e, other.head_e),
            _sum(self.g, other.g),
            _sum(self.g_e, other.g_e),
        )


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def with_e(at: SoftmaxBudget) -> Sizes:
    """Return the sizes of what b_e changes beyond the polynomials' own terms, alone and against δV.

    Alone: ½ b b_e², ½ b m(b_e²), b_e m(b b_e), ½ b_e m(b_e²), and b⁴/24 − b² m₂/4 − b m₃/6 at b less at b_lin.
    Against δV: ½(b_e² − m(b_e²)), and b³/6 − b m₂/2 − m₃/6 at b less at b_lin. Here m is the mean Σ s of a head.
    """
    beta, m2, peak = at.beta, at.W_head, at.beta.amax(-1, keepdim=True)
    g = at.straight * (0.5 * at.W_e_head + 0.5 * peak * at.both) + 0.5 * at.curved * at.both
    fourth = beta**3 / 6.0 + 0.5 * beta * m2 + peak * m2 / 6.0
    g_e = 0.5 * beta * at.curved_e + at.straight_e * (at.both + 0.5 * at.W_e_head + fourth)
    v, v_e = at.straight * at.both, 0.5 * at.curved_e + at.straight_e * 0.5 * (beta.square() + m2)
    head, head_e = 0.5 * peak * (at.W * at.W_e_head).sqrt(), 0.5 * (at.W_e * at.W_e_head).sqrt()
    return Sizes(v, v_e, head, head_e, g, g_e)


def against_e(at: SoftmaxBudget) -> Sizes:
    """Return the sizes against e_V: b_e and b b_e − m(b b_e), and the polynomials of b from second order on."""
    m2, peak = at.W_head, at.beta.amax(-1, keepdim=True)
    v = at.straight * 0.5 * m2 + at.curved * (0.5 + at.beta / 6.0)
    head = (at.W * m2).sqrt() * (0.5 + peak / 6.0) + (at.W * at.W_e_head).sqrt()
    return Sizes(v, at.straight_e * (1.0 + at.beta), head)


def beyond(at: SoftmaxBudget) -> Sizes:
    """Return the sizes of fifth order of N/(1 + q), and of fourth order of the weights against the values.

    N = N₁ + N₂ + N₃ + …, q = q₂ + q₃ + …, by orders of b, and from n on: N_n⁺ = Σ c R_n(b), q_n⁺ = Σ s R_n(b).

        N/(1 + q)   = … + N₅⁺ − N₁q₄⁺ − N₂q₃⁺ − N₃⁺q + N q²/(1 + q)
        e^b/(1 + q) = … + R₄(b) − q₄⁺ − b q₃⁺ − R₂(b) q + e^b q²/(1 + q)
    """
    beta = at.beta
    r1 = exp_tail(beta, 1, 1)
    r2, r3, r4, r5 = (exp_tail(beta, n, 2) for n in (2, 3, 4, 5))
    q2, q3, q4 = (at.mean(r) for r in (r2, r3, r4))
    small = q2 * q2.clamp(max=1.0)
    g = at.curved * (r5 + 0.5 * q3 + r3 * q2) + at.straight * (q4 + r1 * small)
    v = at.curved * (r4 + r2 * q2) + at.straight * (q3 + r1 * small)
    most2, most4 = (r.amax(-1, keepdim=True) for r in (r2, r4))
    head = (at.W * at.W_head).sqrt() * (most4 + most2 * q2.clamp(max=1.0))
    return Sizes(v, torch.zeros_like(v), head, g=g)


def at_once(at: SoftmaxBudget) -> Sizes:
    """Return the sizes of everything beyond first order in b, without polynomials.

    N/(1 + q) = N₁ + N₂⁺ − N q/(1 + q) alone, and s(e^b/(1 + q) − 1) = s(e^b − 1)/(1 + q) − s q/(1 + q) against δV.
    """
    r1, r2 = exp_tail(at.beta, 1, 1), exp_tail(at.beta, 2, 2)
    g = at.curved * r2 + at.straight * r1 * at.mean(r2).clamp(max=1.0)
    v = at.straight * r1
    head = (at.W * at.W_head).sqrt() * r2.amax(-1, keepdim=True)
    return Sizes(v, torch.zeros_like(v), head, g=g)
