"""The least value of a linear form of a token's stream, where some tokens of the prompt are free.

Behind one layer without norms the stream of token t at position p is X_p(t) + Σ_j e_j(t_j) W_j(t_j) / Σ_j e_j(t_j),
with weights e_j = e^{a_j} that depend on t and t_j alone. For a form f and any λ

    Σ_j e_j f(W_j) / Σ_j e_j − λ = Σ_j e_j (f(W_j) − λ) / Σ_j e_j,

whose numerator is a sum of one term per position: its least value g over free tokens takes the least of every term.
So the mixture is at least λ + min(g, 0) / (the least Σ_j e_j), for every λ; Dinkelbach's steps find the λ with g = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.attention_only.tables import Chain, embedded
from prooflens.errors import QueryError
from prooflens.models import Transformer
from prooflens.numerics import gamma
from prooflens.numerics.rounding import UNIT_ROUNDOFF

STEPS = 2
"""Dinkelbach's steps; every λ gives a proof, and they square the distance to the best."""

SPREAD = 600.0
"""The largest difference of scores whose weights are far from underflow."""


class Sizes(NamedTuple):
    """How large forms are.

    Attributes:
        largest: the largest |f(X)| or |f(W)|.
        off: how far these may be from the real ones.
    """

    largest: float
    off: float


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """What the first layer knows of single tokens: n positions, V tokens.

    Attributes:
        e: e[p, t, j, u]: the weight of token u at position j for token t at position p, over the largest of (p, t); 0
            behind p.
        X: X[p, t]: the stream of a token without the mixture, biases included.
        W: W[j, t]: what a token writes into the stream of whoever attends to it.
        X_size: |X| with every product and sum taken of absolute values.
        W_size: the same of W.
        doubt: ε, the relative error of the weights of one (p, t) but for a common factor.
        rounded: γ of the longest chain of products that ends in a form of X or W.
    """

    e: Float[Tensor, "n V n V"]
    X: Float[Tensor, "n V d"]
    W: Float[Tensor, "n V d"]
    X_size: Float[Tensor, "n V d"]
    W_size: Float[Tensor, "n V d"]
    doubt: float
    rounded: float

    @classmethod
    def of(cls, model: Transformer, length: int) -> FirstLayer:
        """Make the tables of a model that `check_model` accepts.

        Args:
            model: the model.
            length: n.
        """
        n, x = length, embedded(model, length)
        rounded = gamma(8 * x.shape[-1] + 128)

        def chain(absolute: bool) -> tuple[Tensor, Tensor, Tensor]:
            made = Chain(model.weights, absolute)
            inner = made.part(x)
            q, k, v = (made.project(f"blocks.0.{name}", inner) for name in "qkv")
            scores = torch.einsum("ptc,juc->ptju", q, k) * model.architecture.scale(0)
            written = v @ made.weight("blocks.0.o.weight").T
            return scores, made.add_bias(inner, "blocks.0.o"), written

        (a, X, W), (a_size, X_size, W_size) = chain(False), chain(True)
        seen = torch.ones(n, n, dtype=torch.bool).tril()[:, None, :, None]
        a = a.masked_fill(~seen, -torch.inf)
        a = a - a.amax((-1, -2), keepdim=True)
        if float(a.masked_fill(~seen, 0.0).min()) < -SPREAD:
            raise QueryError(f"{model.name}: its scores spread too far for a proof by cells: enumerate it")
        off = (rounded + 4.0 * UNIT_ROUNDOFF) * float(a_size.max())
        doubt = 1.25 * expm1(2.0 * off) + 32.0 * UNIT_ROUNDOFF
        if doubt > 2.0**-21:
            raise QueryError(f"{model.name}: rounding blurs its scores: enumerate it")
        return cls(a.exp(), X, W, X_size, W_size, doubt, rounded)

    def sizes(self, forms: Float[Tensor, "F d"], chains: Float[Tensor, "F d"]) -> Sizes:
        """Return how large forms of X and W are, and how far they may be off.

        Args:
            forms: the forms.
            chains: the forms with every product and sum taken of absolute values.
        """
        parts = ((self.X, self.X_size), (self.W, self.W_size))
        off = 2.0 * self.rounded * max(float((chains @ size.flatten(0, 1).T).max()) for _, size in parts)
        largest = max(float((forms @ part.flatten(0, 1).T).abs().max()) for part, _ in parts)
        return Sizes(largest * (1.0 + 2.0**-20) + off, off)

    def by_neighbours(
        self,
        forms: Float[Tensor, "F d"],
        sizes: Sizes,
        p: int,
        at: Int[Tensor, " T"],
        before: Int[Tensor, " U"],
    ) -> Float[Tensor, "F T U"]:
        """Bound forms of the stream at one position from below, by the tokens there and before it.

        Args:
            forms: the forms f.
            sizes: what `sizes` says of them.
            p: the position. Tokens of a prompt differ, but the last may be one of those before.
            at: the tokens there that are asked about.
            before: the tokens before it that are asked about.

        Returns:
            out[f, t, u]: f is at least that where at[t] stands at p and before[u] before it, whatever stands further
            left; ∞ where they cannot be so. At the first position it is the same for all u.
        """
        n, V = self.e.shape[:2]
        shape = (len(at), len(before))
        through = torch.einsum("fd,jtd->fjt", forms, self.W[: p + 1])
        e, free = self.e[p, at], slice(0, max(0, p - 1))
        own = e[torch.arange(len(at)), p, at]
        known_e, known_f = own[:, None].expand(shape), (own * through[:, p, at])[:, :, None]
        if p:
            known_e = known_e + e[:, p - 1, before]
            known_f = known_f + e[:, p - 1, before] * through[:, None, p - 1, before]
        open_e = e[:, None, free].expand(*shape, -1, V)
        token = torch.arange(V)
        banned = (token == before[:, None])[None, :, None].expand(*shape, 1, V)
        if p < n - 1:
            banned = banned | (token == at[:, None])[:, None, None]
        products = (open_e * through[:, None, None, free]).masked_fill(banned, torch.inf)
        found = self.least_mixture(known_e, known_f.expand(-1, *shape), open_e, products, sizes)
        found = found + (forms @ self.X[p, at].T)[..., None] - (sizes.off + gamma(8) * sizes.largest)
        # A stream is its X and a mean of W: no form of it is further from 0 than both together.
        found = found.clamp(min=-2.0 * sizes.largest)
        return found.masked_fill(at[:, None] == before, torch.inf) if 0 < p < n - 1 else found

    def least_mixture(
        self,
        known_e: Float[Tensor, ...],
        known_f: Float[Tensor, ...],
        open_e: Float[Tensor, "... s V"],
        products: Float[Tensor, "... s V"],
        sizes: Sizes,
    ) -> Float[Tensor, ...]:
        """Bound mixtures from below over the tokens of their free positions.

        For each choice of tokens, weights that are off by ε, but for a common factor, change the mixture by at most
        4ε times the largest form, whatever they add up to; forms that are off change it by as much as they are. What
        rounds here is the numerator: n products, differences and sums.

        Args:
            known_e: the sum of the weights of positions whose token is known.
            known_f: the sum of their weights times forms.
            open_e: weights of the tokens that may stand at s free positions.
            products: weights times forms; ∞ where a token cannot stand.
            sizes: of the forms.
        """
        n, free = len(self.e), open_e.shape[-2] > 0
        may = products < torch.inf
        e = open_e.where(may, 0.0)
        value = (known_f + products.where(may, 0.0).sum((-1, -2))) / (known_e + e.sum((-1, -2)))
        for _ in range(STEPS if free else 0):
            terms, chosen = (products - value[..., None, None] * e).min(-1)
            weight = known_e + e.gather(-1, chosen[..., None])[..., 0].sum(-1)
            value = value + (terms.sum(-1) + known_f - value * known_e) / weight
        rest, least_e = known_f - value * known_e, known_e
        if free:
            rest = rest + (products - value[..., None, None] * e).amin(-1).sum(-1)
            least_e = known_e + open_e.where(may, torch.inf).amin(-1).sum(-1)
        rounding = 64.0 * n * n * UNIT_ROUNDOFF * sizes.largest
        blur = sizes.off + 5.0 * self.doubt * sizes.largest
        return value + (rest.clamp(max=0.0) - rounding) * (1.0 + 2.0**-19) / least_e - blur
