r"""A polynomial zonotope for a whole tensor of values at once: what `polyzono` propagates.

    x = c + Σ_k α_k L_k + Σ_{(k,l)} α_k α_l Q_kl + r ⊙ β,      α ∈ [−1,1]^p shared,  β ∈ [−1,1]^shape independent,

c, L_k, Q_kl, r tensors of one shape, r ≥ 0 the diagonal G_I, optionally ∩ box. It is the CPZ of `prooflens.sets` (E
has degree at most two, ids are shared by all coordinates, tokens and values of a walk), kept so that every operation
is one tensor operation: a Python loop over scores would take minutes at d = 128.

**Rounding.** |α^E| ≤ 1, so an operation whose coefficients err by γ_n times its absolute-value chain errs, at every
α, by at most γ_n times the chain applied to `magnitude` = |c| + Σ|L| + Σ|Q| + r. That is added to r: the set that
comes out contains the exact image in real arithmetic. Radii are sums of nonnegative terms, scaled up by 1 + γ_n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.queries.simplex import Box
from prooflens.sets.quadratic import scalar_maximum

NEGLIGIBLE = 2.0**-40
"""A radius below this share of the largest magnitude, as rounding mostly is, does not become a factor of its own."""


@dataclass(eq=False)
class FactorIds:
    """Hands out fresh factor ids; those of the region come first."""

    count: int

    def fresh(self, n: int, like: Tensor) -> Int[Tensor, " n"]:
        """Return n new ids."""
        ids = torch.arange(self.count, self.count + n, device=like.device)
        self.count += n
        return ids


@dataclass(frozen=True, eq=False)
class TensorSet:
    """The set c + Σ α_k L_k + Σ α_kα_l Q_kl + r ⊙ β of tensors, ∩ box.

    Attributes:
        c: the centre, any shape.
        L: linear generators, one per factor.
        ids: the factors of the linear generators, ascending.
        Q: quadratic generators, one per pair of factors.
        pairs: the pairs of factor ids k ≤ l.
        r: independent radii, at least 0.
        box: a box that is intersected with the set; None for none.

    Example:
        >>> none = torch.zeros(0, dtype=torch.long)
        >>> x = TensorSet(torch.zeros(1).double(), torch.ones(1, 1).double(), torch.tensor([0]),
        ...     torch.zeros(0, 1).double(), none.reshape(0, 2), torch.full((1,), 0.5).double())
        >>> round(x.hull().upper.item(), 9)  # |α| + 0.5|β|
        1.5
    """

    c: Float[Tensor, "*shape"]
    L: Float[Tensor, " p *shape"]
    ids: Int[Tensor, " p"]
    Q: Float[Tensor, " m *shape"]
    pairs: Int[Tensor, "m 2"]
    r: Float[Tensor, "*shape"]
    box: Box | None = field(default=None)

    @classmethod
    def point(cls, c: Float[Tensor, "*shape"]) -> TensorSet:
        """Return the set of one point."""
        none = torch.zeros(0, dtype=torch.long, device=c.device)
        empty = c.new_zeros(0, *c.shape)
        return cls(c, empty, none, empty, none.reshape(0, 2), torch.zeros_like(c))

    @property
    def dependent(self) -> int:
        """The number of dependent generators."""
        return len(self.L) + len(self.Q)

    @property
    def independent(self) -> int:
        """The number of coordinates with an independent radius that is not negligible."""
        return int(self._worth().sum())

    def _worth(self) -> Tensor:
        return self.r > NEGLIGIBLE * self.magnitude.amax() + TINY

    @property
    def finite(self) -> bool:
        """Whether no coefficient is infinite or NaN."""
        return all(bool(x.isfinite().all()) for x in (self.c, self.L, self.Q, self.r))

    @cached_property
    def linear_size(self) -> Float[Tensor, "*shape"]:
        """Σ|L_k|, rounded up."""
        return self.L.abs().sum(0) * (1.0 + gamma(len(self.L) + 4))

    @cached_property
    def rest_size(self) -> Float[Tensor, "*shape"]:
        """Σ|Q_kl| + r, rounded up."""
        return (self.Q.abs().sum(0) + self.r) * (1.0 + gamma(len(self.Q) + 6))

    @cached_property
    def magnitude(self) -> Float[Tensor, "*shape"]:
        """|c| + Σ|L| + Σ|Q| + r, rounded up: it bounds every value that the coefficients can stand for."""
        return (self.c.abs() + self.linear_size + self.rest_size) * (1.0 + gamma(8))

    def hull(self) -> Box:
        """Return an interval per coordinate: squares exactly with their linear term, mixed pairs term by term."""
        squares = self.pairs[:, 0] == self.pairs[:, 1]
        g, mixed = 2.0 * self.Q[squares], self.Q[~squares]
        # Which linear generator has the factor of which square, if any.
        same = self.ids[:, None] == self.pairs[squares][:, 0]
        a = torch.zeros_like(g)
        row, column = same.nonzero(as_tuple=True)
        a[column] = self.L[row]
        flat = self.L[~same.any(1)].abs().sum(0) + mixed.abs().sum(0) + self.r
        flat = flat * (1.0 + gamma(self.dependent + 8))
        grow = 1.0 + gamma(len(g) + 8)
        high = _signed_up(scalar_maximum(a, g), grow)
        low = _signed_up(scalar_maximum(a, -g), grow)
        made = Box(down(self.c - up(flat + low) - TINY), up(self.c + up(flat + high) + TINY))
        if self.box is None:
            return made
        return Box(torch.maximum(made.lower, self.box.lower), torch.minimum(made.upper, self.box.upper))

    def linear(
        self,
        f: Callable[[Tensor], Tensor],
        size: Callable[[Tensor], Tensor],
        roundings: int,
        offset: Tensor | None = None,
    ) -> TensorSet:
        """Return the image under a linear map plus an offset, exact but for rounding.

        Args:
            f: the linear map.
            size: f with absolute values.
            roundings: how many roundings f takes in sequence.
            offset: a constant to add.
        """
        c = f(self.c)
        slack = gamma(roundings + 8) * size(self.magnitude)
        if offset is not None:
            c = c + offset
            slack = slack + gamma(roundings + 8) * offset.abs()
        r = (size(self.r) + slack) * (1.0 + gamma(roundings + 8)) + TINY
        return replace(self, c=c, L=f(self.L), Q=f(self.Q), r=r, box=None)

    def scaled(self, factor: Tensor | float) -> TensorSet:
        """Return factor ⊙ x; the box is dropped."""
        size = factor.abs() if isinstance(factor, Tensor) else abs(factor)
        return self.linear(lambda x: x * factor, lambda x: x * size, 1)

    def plus(self, offset: Tensor) -> TensorSet:
        """Return x + offset for a constant tensor of the same shape."""
        return self.linear(lambda x: x, lambda x: x, 1, offset)

    def widened(self, radius: Tensor) -> TensorSet:
        """Return the set with larger independent radii; the box is dropped."""
        return replace(self, r=(self.r + radius) * (1.0 + gamma(4)), box=None)

    def __add__(self, other: TensorSet) -> TensorSet:
        """Return the exact sum ⊞: generators with the same id or pair are added, so what is shared can cancel."""
        ids = torch.cat((self.ids, other.ids)).unique()
        L = self.c.new_zeros(len(ids), *self.c.shape)
        for part in (self, other):
            L.index_add_(0, torch.searchsorted(ids, part.ids), part.L)
        Q, pairs = merge_pairs(torch.cat((self.Q, other.Q)), torch.cat((self.pairs, other.pairs)))
        slack = gamma(4) * (self.magnitude + other.magnitude)
        return TensorSet(self.c + other.c, L, ids, Q, pairs, (self.r + other.r + slack) * (1.0 + gamma(8)))

    def absorbed(self, factors: FactorIds) -> TensorSet:
        """Turn every radius that is not negligible into a linear generator with a fresh factor. Exact."""
        worth = self._worth().flatten().nonzero()[:, 0]
        if not len(worth):
            return self
        new = self.c.new_zeros(len(worth), self.c.numel())
        new[torch.arange(len(worth), device=worth.device), worth] = self.r.flatten()[worth]
        left = self.r.flatten().index_fill(0, worth, 0.0).reshape(self.r.shape)
        ids = torch.cat((self.ids, factors.fresh(len(worth), self.ids)))
        return replace(self, L=torch.cat((self.L, new.reshape(-1, *self.c.shape))), ids=ids, r=left)

    def reduced(self, linear: int, quadratic: int) -> TensorSet:
        """Keep the largest linear and quadratic generators by ℓ1 norm; the others widen r (Girard).

        `prop:trunc_sound`: |α^E| ≤ 1. A dropped square g α² is g/2 ± |g|/2.

        Args:
            linear: how many linear generators to keep.
            quadratic: how many quadratic generators to keep.
        """
        kept = self
        if len(self.L) > linear:
            keep = _largest(self.L, linear)
            lost = self.L[~keep].abs().sum(0) * (1.0 + gamma(len(self.L)))
            r = (kept.r + lost) * (1.0 + gamma(4))
            kept = replace(kept, L=self.L[keep], ids=self.ids[keep], r=r)
        if len(self.Q) > quadratic:
            keep = _largest(self.Q, quadratic)
            shift, lost = square_split(self.Q[~keep], self.pairs[~keep])
            slack = gamma(len(self.Q) + 8) * (self.c.abs() + lost)
            r = (kept.r + lost + slack) * (1.0 + gamma(8))
            kept = replace(kept, c=self.c + shift, Q=self.Q[keep], pairs=self.pairs[keep], r=r)
        return kept

    def within(self, box: Box) -> TensorSet:
        """Return the set ∩ box (row 11 of soundness.md): r is cut to min(r, max(u_∩ − ℓ_dep, u_dep − ℓ_∩)).

        The box is kept. Where the box is narrower than the set itself it replaces it: r is half its width, without
        generators.
        """
        hull = self.hull()
        bare = replace(self, r=torch.zeros_like(self.r), box=None).hull()
        room = up(torch.maximum(box.upper - bare.lower, bare.upper - box.lower)).clamp(min=0.0)
        kept = replace(self, r=torch.minimum(self.r, room))
        narrow = (box.upper - box.lower) < (hull.upper - hull.lower)
        c = torch.where(narrow, 0.5 * box.lower + 0.5 * box.upper, self.c)
        half = up(torch.maximum(box.upper - c, c - box.lower)) + TINY
        return TensorSet(
            c,
            torch.where(narrow, 0.0, kept.L),
            self.ids,
            torch.where(narrow, 0.0, kept.Q),
            self.pairs,
            torch.where(narrow, half, kept.r),
            box,
        )

    def evaluate(self, alpha: Float[Tensor, "n p0"]) -> tuple[Float[Tensor, " n *shape"], Tensor]:
        """Return the part that known factors (ids 0 … p0 − 1) determine, and a bound of what all others can add."""
        known = self.ids < alpha.shape[1]
        both = (self.pairs < alpha.shape[1]).all(-1)
        value = self.c + torch.tensordot(alpha[:, self.ids[known]], self.L[known], 1)
        chosen = self.pairs[both]
        value = value + torch.tensordot(alpha[:, chosen[:, 0]] * alpha[:, chosen[:, 1]], self.Q[both], 1)
        return value, self.L[~known].abs().sum(0) + self.Q[~both].abs().sum(0) + self.r


def _signed_up(terms: Tensor, grow: float) -> Tensor:
    """Return Σ terms, rounded up whatever their signs."""
    return terms.sum(0) + (grow - 1.0) * terms.abs().sum(0)


def _largest(G: Tensor, count: int) -> Tensor:
    """Return the mask of the `count` largest generators by ℓ1 norm."""
    size = G.abs().flatten(1).sum(1)
    keep = torch.zeros(len(G), dtype=torch.bool, device=G.device)
    keep[size.topk(min(count, len(G))).indices] = True
    return keep


def square_split(Q: Float[Tensor, " m *shape"], pairs: Int[Tensor, "m 2"]) -> tuple[Tensor, Tensor]:
    """Return centre shift and radius of Σ Q_kl α_kα_l term by term: squares are ½g ± ½|g|, mixed terms ± |g|."""
    squares = pairs[:, 0] == pairs[:, 1]
    half = 0.5 * Q[squares]
    radius = half.abs().sum(0) + Q[~squares].abs().sum(0)
    return half.sum(0), radius * (1.0 + 2.0 * gamma(len(Q) + 8))


def merge_pairs(
    Q: Float[Tensor, " m *shape"], pairs: Int[Tensor, "m 2"]
) -> tuple[Float[Tensor, " n *shape"], Int[Tensor, "n 2"]]:
    """Add up generators of equal pairs, so that there is one per pair (`compact`)."""
    if not len(Q):
        return Q, pairs
    base = int(pairs.max()) + 1
    unique, place = torch.unique(pairs[:, 0] * base + pairs[:, 1], return_inverse=True)
    if len(unique) == len(pairs):
        return Q, pairs
    merged = Q.new_zeros(len(unique), *Q.shape[1:])
    return merged.index_add_(0, place, Q), torch.stack((unique // base, unique % base), -1)


def unordered_pairs(ids: Int[Tensor, " k"]) -> tuple[Int[Tensor, "2 m"], Int[Tensor, "m 2"]]:
    """Return all index pairs (i ≤ j) of some factors, and the same pairs as ids."""
    index = torch.triu_indices(len(ids), len(ids), device=ids.device)
    return index, ids[index.T]
