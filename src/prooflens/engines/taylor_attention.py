"""Attention in `taylor`: one row of scores, softmax and mixing as a site.

With centred score deviations b_j (Σ s_j b_j = 0), weights s, values centred at z, ω the covector at a head's output,
ỹ_j = ω·(V_j − z), p_j = ω·δV_j and c_j = s_j ỹ_j, the row's output moves by exactly

    Σ_j s_j [(s_j(x)/s_j − 1) ỹ_j + s_j(x)/s_j p_j]
      = Σ c_j b_j + Σ s_j p_j                                  (linear)
      + ½ Σ c_j b_j² + Σ s_j b_j p_j                           (second order; Σ c_j = 0 removes the mean)
      + third order of s_j(x)/s_j, at most (s⁺_j/s_j)(B_j³ + 3 B_j V₂ + V₃)/6,   B_j = β_j + Σ s⁺β, V_k = Σ s⁺Bᵏ,

and the scores themselves are bilinear: scale·u_q·u_k under the weight c_j. Here β_j bounds |b_j|, and s⁺ the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor_norms import frobenius, grow, length, product_error, top_eigenvalue
from prooflens.engines.taylor_segments import Attention
from prooflens.engines.taylor_shapes import supports
from prooflens.engines.taylor_values import Value
from prooflens.models.sites import Scores
from prooflens.numerics import gamma


@dataclass(eq=False)
class Heads:
    """Queries, keys or values with shared heads repeated."""

    u: Float[Tensor, "S H c"]
    A: Float[Tensor, "S H c p"]
    P: Float[Tensor, "S H c c"]
    B: Float[Tensor, "S H c c"]
    tau: Float[Tensor, "S H"]
    e: Float[Tensor, "S H"]

    @classmethod
    def of(cls, value: Value, n_heads: int) -> Heads:
        """Give each group's head to all its readers; A = JN rounds, which `slip` in e covers."""
        S, n = value.u.shape
        c, share = n // value.heads, n_heads // value.heads
        A = (value.J @ value.root.N).reshape(S, value.heads, c, -1)
        u = value.u.reshape(S, value.heads, c)
        parts = (u, A, value.blocks("shape_a"), value.blocks("shape_e"), value.tau, value.e)
        return cls(*(x.repeat_interleave(share, 1) for x in parts))

    @property
    def n(self) -> Float[Tensor, "S H"]:
        """‖u‖."""
        return length(self.u)

    @property
    def reach(self) -> Float[Tensor, "S H"]:
        """sup ‖u(x) − u‖."""
        return grow(self.tau + self.e)


def _outer(x: Float[Tensor, "S H"], y: Float[Tensor, "S H"]) -> Float[Tensor, "H S S"]:
    return x.T[:, :, None] * y.T[:, None, :]


@dataclass(eq=False)
class ScoreSite:
    """The bilinear site a_ij = scale·q_i·k_j."""

    step: Scores
    names: tuple[str, str]
    q: Heads
    k: Heads

    @cached_property
    def products(self) -> tuple[Float[Tensor, "H S S"], Float[Tensor, "H S S"]]:
        """Per score: sup of its second-order part, and of what e adds to it, with rounding."""
        q, k, scale = self.q, self.k, self.step.scale
        cross = torch.minimum(
            self._traces(q.P, k.B) + self._traces(q.B, k.P), _outer(q.tau, k.e) + _outer(q.e, k.tau)
        )
        cross = cross + torch.minimum(self._traces(q.B, k.B), _outer(q.e, k.e))
        rounding = gamma(4 * q.u.shape[-1] + 64) * scale * _outer(q.n + q.reach, k.n + k.reach)
        if self.step.bias is not None:
            rounding = rounding + gamma(8) * self.step.bias.abs()
        second = torch.minimum(self._traces(q.P, k.P), _outer(q.tau, k.tau))
        mask = self.step.mask
        return grow(scale * second * mask), grow((scale * cross + rounding) * mask)

    @staticmethod
    def _traces(M: Float[Tensor, "S H c c"], K: Float[Tensor, "S H c c"]) -> Float[Tensor, "H S S"]:
        """√tr(MK) ≥ sup |x·y| over the two ellipsoids, for all pairs of tokens."""
        square = torch.einsum("ihce,jhce->hij", M, K).clamp(min=0.0)
        slack = product_error(M.shape[-1] ** 2, _outer(frobenius(M), frobenius(K)))
        return grow((square + slack).sqrt())

    def rest(self, s: Float[Tensor, "H S S"], keys: Float[Tensor, "H S S c"]) -> Float[Tensor, "H S S"]:
        """sup |e| of centred scores: their own products, and what q and k miss."""
        second, cross = self.products
        mask, scale = self.step.mask, self.step.scale
        q, k = self.q, self.k
        H, S, _ = s.shape
        shape = (H, S, S)
        far = supports(k.B.movedim(1, 0)[:, None].expand(*shape, -1, -1), _per_key(q.u.movedim(1, 0), S))
        own = supports(q.B.movedim(1, 0)[:, :, None].expand(*shape, -1, -1), keys)
        each = second + cross + scale * far * mask
        each = each + (s * each).sum(-1, keepdim=True)
        return grow((each + scale * own) * mask)


def _per_key(u: Float[Tensor, "H S c"], n_keys: int) -> Float[Tensor, "H S S c"]:
    return u[:, :, None].expand(-1, -1, n_keys, -1)


@dataclass(eq=False)
class MixSite:
    """Softmax mixing of all heads and rows."""

    scores: ScoreSite
    attention: Attention
    v: Heads
    values: Float[Tensor, "S g c p"]
    """A_v without repeating shared heads."""
    far: Float[Tensor, " S"]
    """sup of the stream's size, for rounding."""
    half: Float[Tensor, " p"]
    """Half-widths of the scaled factors."""

    def __post_init__(self) -> None:
        step, q, k, v = self.scores.step, self.scores.q, self.scores.k, self.v
        self.mask, self.scale = step.mask, step.scale
        a = torch.einsum("ihc,jhc->hij", q.u, k.u) * step.scale
        a = a if step.bias is None else a + step.bias
        self.s = torch.softmax(a.masked_fill(~step.mask, -torch.inf), -1)
        self.z = torch.einsum("hij,jhc->ihc", self.s, v.u)
        average = torch.einsum("hij,jhc->ihc", self.s, k.u)
        self.keys = k.u.movedim(1, 0)[:, None] - average.movedim(1, 0)[:, :, None]
        self.spread = v.u.movedim(1, 0)[:, None] - self.z.movedim(1, 0)[:, :, None]
        self.keys, self.spread = (x * self.mask[..., None] for x in (self.keys, self.spread))
        S, H, c = self.z.shape
        weight = self.attention.output.weight
        self.out = weight.reshape(len(weight), H, c)
        self.out_size = frobenius(self.out.movedim(1, 0))
        self.rows = self._rows()
        self.root_p = float(length(self.half))
        p = self.rows.shape[-1]
        size = self.scale * (
            q.n.T[:, :, None] * frobenius(k.A).T[:, None, :]
            + q.n.T[:, :, None] * frobenius(k.A).amax(0)[:, None, None]
            + frobenius(q.A).T[:, :, None] * 2.0 * k.n.amax(0)[:, None, None]
        )
        # What the rows' own rounding leaves out counts as e.
        rounding = gamma(8 * c + 8 * S + p + 64) * 4.0 * size * length(self.half) * self.mask
        self.E = grow(self.scores.rest(self.s, self.keys) + rounding)
        self.rho = grow((self.rows.abs() @ self.half + rounding) * self.mask)
        self.beta = grow(self.rho + self.E + 2.0**-45)
        self.high = grow(torch.minimum(self.s * torch.exp(self.beta), torch.ones_like(self.s)) * self.mask)
        ceiling = (self.s * torch.exp(self.beta)).sum(-1, keepdim=True)
        low = self.s * torch.exp(-self.beta) / ceiling * (1.0 - 2.0**-40)
        self.ds = grow(torch.maximum(self.high - self.s, self.s - low))
        # The mean of b along the way: its slope is the variance of b.
        self.mean = grow(torch.minimum((self.high * self.beta).sum(-1), self._variance()))[..., None]
        B = self.beta + self.mean
        V2, V3 = (self.high * B.square()).sum(-1, keepdim=True), (self.high * B**3).sum(-1, keepdim=True)
        self.third_weight = grow(self.high * (B**3 + 3.0 * B * V2 + V3) / 6.0)
        self.second_weight = grow(self.high * (B.square() + V2) / 2.0)

    def _variance(self) -> Float[Tensor, "H S"]:
        """sup Σ s⁺b²."""
        return grow(self.swing.T + (self.high * self.E.square()).sum(-1).sqrt()).square()

    def _rows(self) -> Float[Tensor, "H S S p"]:
        """The centred scores' linear parts."""
        q, k = self.scores.q, self.scores.k
        rows = self.scale * torch.einsum("jhcp,ihc->hijp", k.A, q.u)
        rows = rows - torch.einsum("hij,hijp->hip", self.s, rows)[:, :, None]
        rows = rows + self.scale * torch.einsum("ihcp,hijc->hijp", q.A, self.keys)
        return rows * self.mask[..., None]

    @cached_property
    def grams(self) -> Float[Tensor, "S n n"]:
        """Gram matrices of √s-weighted rows of each query token, all heads; p times them bounds Σ s b²."""
        rows = (self.s.sqrt()[..., None] * self.rows).movedim(1, 0).flatten(1, 2)
        gram = rows @ rows.mT
        return 0.5 * (gram + gram.mT)

    @cached_property
    def gram_error(self) -> Float[Tensor, " S"]:
        """Rounding of `grams` in the 2-norm."""
        return product_error(self.rows.shape[-1] + 64, self.grams.diagonal(dim1=1, dim2=2).abs().sum(-1))

    @cached_property
    def swing(self) -> Float[Tensor, "S H"]:
        """sup (Σ_j s⁺_j b_j²)^½ of the linear parts, per query token and head."""
        rows = self.high.sqrt()[..., None] * self.rows
        gram = rows @ rows.mT
        error = product_error(self.rows.shape[-1] + 64, gram.diagonal(dim1=-2, dim2=-1).abs().sum(-1))
        return grow((top_eigenvalue(0.5 * (gram + gram.mT)) + error).sqrt() * self.root_p).T

    @cached_property
    def value_gram(self) -> Float[Tensor, "S g c q"]:
        """A_v A_vᵀ over all tokens and key-value heads, q = (token, head, coordinate)."""
        A = self.values.flatten(0, 2)
        gram = A @ A.T
        return (0.5 * (gram + gram.T)).reshape(*self.values.shape[:3], -1)

    @cached_property
    def value_rows(self) -> Float[Tensor, "S n g S c"]:
        """√s row · A_vᵀ for each query token: [t, (h, j), g, j′, c]."""
        rows = (self.s.sqrt()[..., None] * self.rows).movedim(1, 0).flatten(1, 2)
        return torch.einsum("tnp,jgcp->tngjc", rows, self.values)

    @cached_property
    def key_grams(self) -> Float[Tensor, "H S c S c"]:
        """A_k A_kᵀ of each head."""
        k = self.scores.k.A.movedim(1, 0)
        return torch.einsum("hjcp,hiep->hjcie", k, k)

    @cached_property
    def query_factor(self) -> tuple[Float[Tensor, "S H c c"], Float[Tensor, "S H"], Float[Tensor, " S"]]:
        """R with A_qA_qᵀ ⪯ g·RRᵀ (g beside it), and the squared length of a query's factors."""
        A = self.scores.q.A
        gram = A @ A.mT
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=2.0**-900)
        gram = 0.5 * (gram + gram.mT)
        lifted = gram.clone()
        lifted.diagonal(dim1=-2, dim2=-1).add_(1e-7 * trace[..., None])
        R = torch.linalg.cholesky_ex(lifted).L
        residual = frobenius(R @ R.mT - lifted) + product_error(
            A.shape[-1] + 64, frobenius(A).square() + trace
        )
        fits = residual < 1e-8 * trace
        support = (A != 0).flatten(1, 2).any(1).to(A) @ self.half.square()
        return R, torch.where(fits, 1.0, torch.inf).to(A), support

    def tangent(
        self, q: Float[Tensor, "S n m"], k: Float[Tensor, "S n m"], v: Float[Tensor, "S n m"], stream: Tensor
    ) -> tuple[Float[Tensor, "S S d m"], Float[Tensor, "S S"]]:
        """∂(next root)_t/∂(something of token t′) from the Jacobians of q, k, v and the stream by it; its rounding."""
        S, H, c = self.z.shape
        Jq, Jk, Jv = (_split(J, H, c) for J in (q, k, v))
        made = stream.new_zeros(S, S, stream.shape[1], stream.shape[2])
        pulled = self.s[..., None] * self.spread
        for t in range(S):
            beta = self.scale * torch.einsum("jhcd,hc->hjd", Jk, self.scores.q.u[t])
            alpha = self.scale * torch.einsum("hcd,hjc->hjd", Jq[t], self.keys[:, t])
            inner = torch.einsum("hj,jhcd->jhcd", self.s[:, t], Jv)
            inner = inner + torch.einsum("hjc,hjd->jhcd", pulled[:, t], beta)
            inner[t] += torch.einsum("hjc,hjd->hcd", pulled[:, t], alpha)
            made[t] = self.out.flatten(1) @ inner.flatten(1, 2)
            made[t, t] += stream[t]
        values, keys, queries = self.v.n.amax(), self.scores.k.n.amax(), self.scores.q.n.amax()
        head = frobenius(v) + 2.0 * values * self.scale * (queries * frobenius(k) * H**0.5)
        size = (self.out_size.square().sum().sqrt() * head).expand(S, -1).clone()
        own = frobenius(stream) + self.out_size.square().sum().sqrt() * (
            4.0 * values * self.scale * keys * frobenius(q) * H**0.5 * S
        )
        size.diagonal().add_(own)
        return made, grow(gamma(8 * (S + c * H + stream.shape[1]) + 256) * 8.0 * size)

    def pull(self, u: Float[Tensor, "F d"], t: int) -> tuple[dict[str, Tensor], Float[Tensor, "F 2"]]:
        """From a covector at row t of the next root: covectors at q (row t), k and v (all rows), and what is missed.

        The bound is for +f and for −f; both hold what is beyond second order and the rounding as well.
        """
        q, scale = self.scores.q, self.scale
        omega = torch.einsum("fd,dhc->fhc", u, self.out)
        y = torch.einsum("fhc,hjc->fhj", omega, self.spread[:, t])
        coef = self.s[:, t] * y
        size = coef.abs()
        found = {
            "q": scale * torch.einsum("fhj,hjc->fhc", coef, self.keys[:, t]),
            "k": scale * torch.einsum("fhj,hc->fjhc", coef, q.u[t]),
            "v": torch.einsum("hj,fhc->fjhc", self.s[:, t], omega),
        }
        # Second order.
        n_p, p_range = self._values(omega)
        first = torch.stack([self._squares(sign * y, t) for sign in (1.0, -1.0)], -1)
        second = self._bilinear(coef, t)
        mixed = self._mixed(omega, n_p, t)
        # Beyond.
        E, rho = self.E[:, t], self.rho[:, t]
        high = self.high[:, t]
        swing = grow(self.swing[t] + (high * E.square()).sum(-1).sqrt())
        peak = (y.abs() * (self.beta + self.mean)[:, t]).amax(-1)
        spread = (high * y.square()).sum(-1).sqrt()
        tilt = (y.abs() * self.ds[:, t]).sum(-1) * (self.beta + self.mean)[:, t].amax(-1)
        cubic = swing.square() * (peak + 3.0 * swing * spread + tilt)
        plain = (y.abs() * self.third_weight[:, t]).sum(-1)
        third = torch.minimum(cubic / 6.0, plain).sum(-1)
        third = third + (size * (rho * E + 0.5 * E.square())).sum((-1, -2))
        p_e = self._beyond(omega)
        p = p_range + p_e
        joint = 0.5 * swing.square() * (p.amax(-1) + (high * p).sum(-1))
        third = third + torch.minimum(joint, (self.second_weight[:, t] * p).sum(-1)).sum(-1)
        third = third + (self.s[:, t] * (E * p_range + (rho + E) * p_e)).sum((-1, -2))
        third = third + (size * self.scores.products[1][:, t]).sum((-1, -2))
        noise = length(u) * self.noise(t)
        return found, grow(first + (second + mixed + third + noise)[:, None])

    def _values(self, omega: Float[Tensor, "F H c"]) -> tuple[Tensor, Tensor]:
        """‖A_vᵀω‖₂ per head and key, and the range of ω·A_vα."""
        grams = self.value_blocks
        square = torch.einsum("fhc,jhce,fhe->fhj", omega, grams, omega).clamp(min=0.0)
        slack = length(omega)[:, :, None] * (gamma(self.rows.shape[-1] + 64) ** 0.5 * self.value_size.T)
        norm = grow(square.sqrt() + slack)
        return norm, grow(norm * self.value_support.sqrt())

    def _beyond(self, omega: Float[Tensor, "F H c"]) -> Float[Tensor, "F H S"]:
        """sup |ω·e_v| per head and key."""
        square = torch.einsum("fhc,jhce,fhe->fhj", omega, self.v.B, omega).clamp(min=0.0)
        slack = product_error(
            2 * omega.shape[-1] + 64, length(omega).square()[:, :, None] * frobenius(self.v.B).T
        )
        return grow((square + slack).sqrt())

    @cached_property
    def value_blocks(self) -> Float[Tensor, "S H c c"]:
        """A_v A_vᵀ per token and head."""
        return self.v.A @ self.v.A.mT

    @cached_property
    def value_size(self) -> Float[Tensor, "S H"]:
        """Frobenius norms of A_v."""
        return frobenius(self.v.A)

    @cached_property
    def value_support(self) -> Float[Tensor, " S"]:
        """Squared length of the box of those factors that a value depends on."""
        return grow((self.v.A != 0).flatten(1, 2).any(1).to(self.v.A) @ self.half.square())

    def _mixed(
        self, omega: Float[Tensor, "F H c"], n_p: Float[Tensor, "F H S"], t: int
    ) -> Float[Tensor, " F"]:
        """sup Σ s_j b_j p_j of linear parts: αᵀXᵀYα with X = √s rows and Y = √s ω·A_v.

        For ab ≥ 1, XᵀY + YᵀX ⪯ ½λ_max(aXXᵀ + bYYᵀ + XYᵀ + YXᵀ), as in `sets.bilinear`.
        """
        F, H, c = omega.shape
        S = len(self.z)
        share = H // self.values.shape[1]
        root = self.s[:, t].sqrt()
        groups = omega.reshape(F, -1, share, c)
        cross = torch.einsum("ngjc,fgrc->fngrj", self.value_rows[t], groups).flatten(2, 3)
        cross = (cross * root).flatten(2)
        inner = omega.new_zeros(F, H, S, H, S)
        gram = self.value_gram.reshape(*self.values.shape[:3], S, -1, c)
        for h in range(H):
            left = torch.einsum("fc,jcigd->fjigd", omega[:, h], gram[:, h // share])
            inner[:, h] = torch.einsum("fjigd,fgrd->fjgri", left, groups).flatten(2, 3)
        inner = inner * root[:, :, None, None] * root
        YY = inner.reshape(F, H * S, H * S)
        XX = self.grams[t]
        size_x = XX.diagonal().abs().sum().clamp(min=2.0**-900)
        size_y = (n_p.square() * self.s[:, t]).sum((-1, -2))
        a = (size_y / size_x).sqrt().clamp(min=2.0**-400)
        N = a[:, None, None] * XX + YY / a[:, None, None] + cross + cross.mT
        # Rounding goes by the size of the terms, ‖ω‖‖A_v‖_F, not of the sums.
        terms = (length(omega)[:, :, None] * self.value_size.T).square() * self.s[:, t]
        size_y = size_y + terms.sum((-1, -2))
        size = a * size_x + size_y / a + 2.0 * (size_x * size_y).sqrt()
        error = product_error(8 * self.rows.shape[-1] + 8 * c * H, 4.0 * size)
        top = top_eigenvalue(0.5 * (N + N.mT)) + error
        return grow(0.25 * top * self.root_p**2)

    def _bilinear(self, coef: Float[Tensor, "F H S"], t: int) -> Float[Tensor, " F"]:
        """sup scale Σ_hj c_hj (A_qα)·(A_kα), head by head: ‖A_qᵀ Σ_j c_jA_k,j‖ from d_h × d_h matrices."""
        k = self.scores.k
        R, good, support = (x[t] for x in self.query_factor)
        stacked = torch.einsum("fhj,hjcie,fhi->fhce", coef, self.key_grams, coef)
        form = R.mT @ stacked @ R
        c = R.shape[-1]
        size = (coef.square() * frobenius(k.A).square().T).sum(-1) * frobenius(R).square()
        error = product_error(self.rows.shape[-1] + 8 * c + 64, size * len(self.z))
        sigma = grow((top_eigenvalue(0.5 * (form + form.mT)) + error).sqrt() * good)
        best = sigma * (support.sqrt() * self.root_p)
        plain = (coef.abs() * k.tau.T).sum(-1) * self.scores.q.tau[t]
        return grow(self.scale * torch.minimum(best, plain).sum(-1))

    def _squares(self, y: Float[Tensor, "F H S"], t: int) -> Float[Tensor, " F"]:
        """sup ½ Σ s_j ỹ_j b_j² of the linear parts, from the assembled form."""
        root = y.clamp(min=0.0).flatten(1).sqrt()
        gram = root[:, :, None] * self.grams[t] * root[:, None, :]
        error = self.gram_error[t] * y.clamp(min=0.0).flatten(1).amax(-1)
        return grow(0.5 * (top_eigenvalue(0.5 * (gram + gram.mT)) + error) * self.root_p**2)

    def noise(self, t: int) -> Tensor:
        """Rounding of weights, mixing and output at the centre, and of unit covectors over the region."""
        q, k, v = self.scores.q, self.scores.k, self.v
        S, H, c = self.z.shape
        n = gamma(8 * (S + c * H + len(self.out)) + 256)
        values = (v.n + v.reach).amax()
        moves = self.scale * ((q.n + q.reach)[t] * (k.n + k.reach).amax(0)).max()
        inner = self.out_size.square().sum().sqrt() * values * (2.0 + 2.0 * moves) * 8.0
        bias = 0.0 if self.attention.output.bias is None else length(self.attention.output.bias)
        return grow(n * (inner * S + bias + self.far[t]) + 2.0**-44 * self.out_size.sum() * values)


def _split(J: Float[Tensor, "S n m"], n_heads: int, c: int) -> Float[Tensor, "S H c m"]:
    S, n, m = J.shape
    return J.reshape(S, n // c, c, m).repeat_interleave(n_heads * c // n, 1)
