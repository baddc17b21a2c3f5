"""The forms of one chunk of `layer0`, entry by entry: values, slopes and absolute-value chains.

A margin reads three tokens of many. So each form has *slots* for the tokens it reads (padded to a common number), and
all tensors [F, T, d] run over slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.first_layer.layer import LEAST_SIZE, Drift, FirstLayer
from prooflens.engines.forms import Forms
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.regions import Region


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries w · a[head, position, key] of F forms as columns.

    Attributes:
        view: the steps to the first scores.
        tokens: the slots of each form, shape [F, T].
        form: the form of each entry, shape [N].
        head: the head of each entry, shape [N].
        position: the query token of each entry, shape [N].
        key: the key token of each entry, shape [N].
        weight: the weight of each entry, shape [N].
        at_i: the flat index form · T + slot of the query token.
        at_j: the flat index form · T + slot of the key token.
    """

    view: FirstLayer
    tokens: Int[Tensor, "F T"]
    form: Int[Tensor, " N"]
    head: Int[Tensor, " N"]
    position: Int[Tensor, " N"]
    key: Int[Tensor, " N"]
    weight: Float[Tensor, " N"]
    at_i: Int[Tensor, " N"]
    """The flat index form · T + slot of the query token."""
    at_j: Int[Tensor, " N"]
    """The flat index form · T + slot of the key token."""

    @classmethod
    def of(cls, view: FirstLayer, forms: Forms) -> Entries:
        """Make slots for the tokens that each form reads, or for all tokens if generators couple them."""
        device, S = view.center.device, len(view.center)
        form, head, i, j = (c.to(device) for c in (forms.index, forms.head, forms.position, forms.key))
        weight = forms.weight.to(view.center)
        used = forms.tokens_read(S).to(device)
        if view.problem.region.generators is not None:
            used[:] = True
        width = max(1, int(used.sum(-1).max())) if forms.size else 1
        tokens = used.long().argsort(dim=-1, descending=True, stable=True)[:, :width]
        slot = (used.long().cumsum(-1) - 1).clamp(min=0)
        return cls(
            view, tokens, form, head, i, j, weight, form * width + slot[form, i], form * width + slot[form, j]
        )

    @property
    def size(self) -> int:
        """The number of forms, F."""
        return len(self.tokens)

    @property
    def own(self) -> Tensor:
        """Which entries have their query as their key."""
        return self.position == self.key

    @property
    def bent(self) -> Float[Tensor, " N"]:
        """|w| where both tokens move, else 0: with one token at rest a score is affine in the other."""
        moving = (self.view.problem.region.half_widths() > 0).any(-1).to(self.weight)
        return self.weight.abs() * moving[self.position] * moving[self.key]

    def select(self, chosen: Int[Tensor, " M"]) -> Entries:
        """Return some of the forms, renumbered."""
        place = torch.full((self.size,), -1, dtype=torch.long, device=self.form.device)
        place[chosen] = torch.arange(len(chosen), device=place.device)
        kept = place[self.form] >= 0
        form, width = place[self.form[kept]], self.tokens.shape[1]
        columns = (self.head, self.position, self.key, self.weight)
        slots = (form * width + at[kept] % width for at in (self.at_i, self.at_j))
        return Entries(self.view, self.tokens[chosen], form, *(column[kept] for column in columns), *slots)

    def negated(self) -> Entries:
        """Return the forms times −1."""
        return replace(self, weight=-self.weight)

    @cached_property
    def longest(self) -> int:
        """The largest number of entries of one form."""
        return int(self.form.bincount().max()) if len(self.form) else 0

    @cached_property
    def by_head(self) -> list[tuple[int, Tensor]]:
        """The entry numbers of each head that occurs."""
        return [(head, (self.head == head).nonzero()[:, 0]) for head in self.head.unique().tolist()]

    def per_slot(self, at_i: Float[Tensor, " N"], at_j: Float[Tensor, " N"]) -> Float[Tensor, "F T"]:
        """Add up the entries' parts at their query and key slots."""
        total = (
            at_i.new_zeros(self.tokens.numel()).index_add(0, self.at_i, at_i).index_add(0, self.at_j, at_j)
        )
        return total.view(self.tokens.shape)

    def value_size(self) -> Float[Tensor, " F"]:
        """Return Σ|w| times the absolute-value chain of each score."""
        view = self.view
        q = view.q_size[self.position, self.head]
        terms = (q * view.k_size[self.key, self.head]).sum(-1) * view.scores.scale
        if view.scores.bias is not None:
            terms = terms + view.scores.bias[self.head, self.position, self.key].abs()
        if view.drift is not None:
            far = 2.0 * view.size
            for t, g, token in self._drifts(view.drift):
                terms = terms + t.abs() * (g.abs() * far[token]).sum(-1)
        return terms.new_zeros(self.size).index_add(0, self.form, terms * self.weight.abs())

    def _drifts(self, drift: Drift) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return t, g and the token of what is added to each entry's score: at its query, then at its key."""
        h, i, j = self.head, self.position, self.key
        return [(drift.query[h, i, j], drift.by_query[i, h], i), (drift.key[h, i, j], drift.by_key[j, h], j)]

    def _drifted(self, size: bool = False) -> Float[Tensor, "F T d"]:
        """Return the slope of what is added to scores, or its absolute-value chain."""
        view = self.view
        total = view.center.new_zeros(self.tokens.numel(), view.center.shape[-1])
        if view.drift is not None:
            for (t, g, _), place in zip(self._drifts(view.drift), (self.at_i, self.at_j), strict=True):
                terms = (self.weight * t)[:, None] * g
                total.index_add_(0, place, terms.abs() if size else terms)
        return total.view(*self.tokens.shape, -1)

    def slope_size(self) -> Float[Tensor, "F T d"]:
        """Return the absolute-value chain of ∂f/∂x."""
        size = self._plain_slope_size()
        return size if self.view.drift is None else size + self._drifted(size=True)

    def _plain_slope_size(self) -> Float[Tensor, "F T d"]:
        view = self.view
        size = view.center.new_zeros(self.tokens.numel(), view.center.shape[-1])
        for head, chosen in self.by_head:
            weight = (self.weight[chosen].abs() * view.scores.scale)[:, None]
            k, q = view.k_size[self.key[chosen], head], view.q_size[self.position[chosen], head]
            if view.rotary is not None:
                k, q = view.turned_size(k), view.turned_size(q)
            WQ, WK = (view.head_weight(step, head).abs() + LEAST_SIZE for step in (view.q, view.k))
            size.index_add_(0, self.at_i[chosen], weight * k @ WQ)
            size.index_add_(0, self.at_j[chosen], weight * q @ WK)
        size = size.view(*self.tokens.shape, -1)
        if view.norm is None:
            return size
        size = size if view.norm.weight is None else size * (view.norm.weight.abs() + LEAST_SIZE)
        n, terms = view.n_high[self.tokens][..., None], view.size[self.tokens]
        along = (terms * size).mean(-1, keepdim=True)
        if view.norm.centred:
            size = size + size.mean(-1, keepdim=True)
        return n * (size + terms * n.square() * along)

    def evaluate(
        self, x: Float[Tensor, "F T d"]
    ) -> tuple[Float[Tensor, " F"], Float[Tensor, "F T d"], Float[Tensor, "F T d"]]:
        """Evaluate each form at its own point.

        Args:
            x: a point per form, on its slots, shape [F, T, d].

        Returns:
            The values, ∂f/∂x, and v = ∂F/∂y = γ ⊙ ∂f/∂z for the curvature of the norm.
        """
        value, slope, read = self._plain(x)
        if self.view.drift is None:
            return value, slope, read
        added = self._drifted()
        move = x - self.view.center[self.tokens]
        return value + (added * move).sum((-1, -2)), slope + added, read

    def _plain(
        self, x: Float[Tensor, "F T d"]
    ) -> tuple[Float[Tensor, " F"], Float[Tensor, "F T d"], Float[Tensor, "F T d"]]:
        """Evaluate the forms without what is added to scores."""
        view, norm = self.view, self.view.norm
        y, n = _normalised(view, x)
        z = y if norm is None or norm.weight is None else y * norm.weight
        z = (z if norm is None or norm.bias is None else z + norm.bias).flatten(0, 1)
        value = x.new_zeros(self.size)
        slope = torch.zeros_like(z)
        scale = view.scores.scale
        for head, chosen in self.by_head:
            i, j, at_i, at_j = (c[chosen] for c in (self.position, self.key, self.at_i, self.at_j))
            weight = self.weight[chosen]
            WQ, WK = view.head_weight(view.q, head), view.head_weight(view.k, head)
            q = view.turn(torch.nn.functional.linear(z[at_i], WQ, view.head_bias(view.q, head)), i)
            k = view.turn(torch.nn.functional.linear(z[at_j], WK, view.head_bias(view.k, head)), j)
            score = (q * k).sum(-1) * scale
            if view.scores.bias is not None:
                score = score + view.scores.bias[head, i, j]
            value = value.index_add(0, self.form[chosen], weight * score)
            pull = (scale * weight)[:, None]
            slope.index_add_(0, at_i, view.turn(pull * k, i, back=True) @ WQ)
            slope.index_add_(0, at_j, view.turn(pull * q, j, back=True) @ WK)
        slope = slope.view(x.shape)
        if norm is None:
            return value, slope, slope
        read = slope if norm.weight is None else slope * norm.weight
        read = read - read.mean(-1, keepdim=True) if norm.centred else read
        slope = n * (read - y * (y * read).mean(-1, keepdim=True))
        return value, slope, read

    def pulls(self, x: Float[Tensor, "F T d"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Return ‖wMy_j‖ and ‖wMᵀy_i‖ per entry at the forms' own points, with scale and γ, without biases."""
        view = self.view
        y = _normalised(view, x)[0].flatten(0, 1)
        gain = 1.0 if view.norm is None or view.norm.weight is None else view.norm.weight
        pull_i, pull_j = torch.empty_like(self.weight), torch.empty_like(self.weight)
        for head, chosen in self.by_head:
            i, j = self.position[chosen], self.key[chosen]
            WQ, WK = view.head_weight(view.q, head) * gain, view.head_weight(view.k, head) * gain
            weight = (self.weight[chosen].abs() * view.scores.scale)[:, None]
            q, k = view.turn(y[self.at_i[chosen]] @ WQ.T, i), view.turn(y[self.at_j[chosen]] @ WK.T, j)
            pull_i[chosen] = (view.turn(weight * k, i, back=True) @ WQ).norm(dim=-1)
            pull_j[chosen] = (view.turn(weight * q, j, back=True) @ WK).norm(dim=-1)
        return pull_i, pull_j


def _normalised(view: FirstLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and n of the norm before the first layer; x itself if there is none."""
    if view.norm is None:
        return x, x.new_ones(())
    m = x - x.mean(-1, keepdim=True) if view.norm.centred else x
    n = torch.rsqrt(m.square().mean(-1, keepdim=True) + view.norm.eps)
    return m * n, n


@dataclass(frozen=True, eq=False)
class Moves:
    """How a chunk's slots move with the factors: coordinate by coordinate in a ball, together under generators.

    Signs, slopes and curvatures of the factors are [F, n]: n = T·d in a ball, n = p under generators.
    """

    entries: Entries
    region: Region

    def point(self, signs: Float[Tensor, "F n"]) -> Float[Tensor, "F T d"]:
        """Return x₀ + Gs on the slots."""
        if self.region.generators is not None:
            return self.region.point(signs)
        center = self.region.center[self.entries.tokens]
        return center + signs.view(center.shape) * self._radius

    @cached_property
    def _radius(self) -> Float[Tensor, "F T d"]:
        assert self.region.radius is not None
        return self.region.radius[self.entries.tokens]

    def pull(self, covector: Float[Tensor, "F T d"]) -> Float[Tensor, "F n"]:
        """Return Gᵀv."""
        if self.region.generators is not None:
            return self.region.pullback(covector)
        return (covector * self._radius).flatten(1)

    def pull_size(self, size: Float[Tensor, "F T d"]) -> Float[Tensor, "F n"]:
        """Return |G|ᵀ|v|, the size of the terms of `pull`."""
        if self.region.generators is not None:
            return torch.einsum("fsd,psd->fp", size, self.region.generators.abs())
        return self.pull(size)

    def curvature(self, D: Float[Tensor, "F T d"]) -> Float[Tensor, "F n"]:
        """Return a diagonal above GᵀDG: exact in a ball; else row sums of |G_tG_tᵀ|, with D constant on tokens."""
        if self.region.generators is None:
            radius = self._radius.flatten(1)
            # Not by the radius' square, which may vanish where D times it does not.
            return up(up(D.flatten(1) * radius) * radius * (1.0 + gamma(4)))
        G = self.region.generators
        products = torch.einsum("psd,qsd->spq", G, G).abs().sum(-1)
        slack = torch.einsum("psd,qsd->spq", G.abs(), G.abs()).sum(-1)
        rows = products + gamma(G.shape[-1] + 4) * slack + TINY
        return up(D.amax(-1) @ rows * (1.0 + gamma(2 * sum(products.shape) + 16)))

    def factors(self, signs: Float[Tensor, "F n"]) -> Float[Tensor, "F p"]:
        """Return the signs as factors of the region; tokens that a form does not read stay at the centre."""
        if self.region.generators is not None:
            return signs
        full = signs.new_zeros(self.entries.size, *self.region.center.shape)
        rows = torch.arange(self.entries.size, device=signs.device)[:, None]
        # Padding slots repeat no token, so every write has its own place.
        full[rows, self.entries.tokens] = signs.view(*self.entries.tokens.shape, -1)
        full = full.flatten(1)
        return full if full.shape[1] == self.region.n_factors else full[:, self.region.moving]


@dataclass(frozen=True, eq=False)
class Point:
    """A corner for each form: its signs, the form's value there, the point x, ∂f/∂x, and v = ∂F/∂y."""

    signs: Float[Tensor, "F n"]
    value: Float[Tensor, " F"]
    x: Float[Tensor, "F T d"]
    slope: Float[Tensor, "F T d"]
    read: Float[Tensor, "F T d"]

    def select(self, chosen: Tensor) -> Point:
        """Return the corners of some of the forms."""
        return Point(*(getattr(self, name)[chosen] for name in ("signs", "value", "x", "slope", "read")))

    def better_of(self, other: Point) -> Point:
        """Return, for each form, the corner with the larger value."""
        better = other.value > self.value

        def choose(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(better.view(-1, *([1] * (old.ndim - 1))), new, old)

        names = ("signs", "value", "x", "slope", "read")
        return Point(*(choose(getattr(other, name), getattr(self, name)) for name in names))
