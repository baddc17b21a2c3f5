"""Regions between prompts: segments, hulls, and spans of a few directions.

The hull of x₀, …, x_p is { x₀ + Σ βᵢ(xᵢ − x₀) | β ≥ 0, Σβ ≤ 1 }. With βᵢ = (1 + αᵢ)/2 that is a region of p factors in
[−1, 1] with one constraint, Σα ≤ 2 − p, which says nothing for p = 1: a segment. Claims are made at x₀.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prooflens.errors import RegionError
from prooflens.models.prompt import Prompt, Steering
from prooflens.regions.region import Constraints, Region, numbers, positive
from prooflens.regions.starts import starts_of

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer

Given = Prompt | Tensor | str
"""A prompt, an input [S, d], or a text that a model still has to read."""

SHOWN = 60
"""How much of a text a label shows."""


@dataclass(frozen=True, eq=False)
class Hull:
    """The convex hull of prompts of equal length; claims are made at the first of them.

    Attributes:
        prompts: at least two: prompts, inputs [S, d], or texts.

    Example:
        >>> import torch
        >>> corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]]).double().reshape(3, 1, 2)
        >>> region = Hull(list(corners)).region()
        >>> region.n_factors, region.contains(torch.tensor([[1.0, 1.0]])), region.contains(torch.tensor([[3.0, 3.0]]))
        (2, True, False)
    """

    prompts: Sequence[Given]

    def of(self, model: Transformer) -> Hull:
        """Return the same hull with every text tokenised and embedded by a model.

        Args:
            model: the model that reads the texts.
        """
        return replace(self, prompts=[_read(given, model) for given in self._several()])

    def region(self) -> Region:
        """Return the hull as a region.

        Raises:
            RegionError: if there are fewer than two prompts, if they differ in length or width or are all the same, or
                if one is still a text.
        """
        points = [_point(given) for given in self._several()]
        if len({tuple(point.shape) for point in points}) > 1:
            sizes = " and ".join(str(len(point)) for point in points)
            raise RegionError(
                f"the prompts have {sizes} tokens: between them lies only what has equally many tokens"
            )
        ways = [0.5 * (point - points[0]) for point in points[1:]]
        if not any(bool((way != 0).any()) for way in ways):
            raise RegionError("the prompts are all the same: there is no way between them")
        p = len(ways)
        constraints = None
        if p > 1:
            constraints = Constraints.of(p, A_ub=torch.ones(1, p), b_ub=torch.tensor([2.0 - p]))
        center = points[0] + torch.stack(ways).sum(0)
        anchor = -torch.ones(p, dtype=torch.float64)
        corners = [anchor, *(anchor + 2.0 * one for one in torch.eye(p, dtype=torch.float64))]
        starts = starts_of(self._several(), corners)
        return Region(center, None, torch.stack(ways), constraints, str(self), anchor, starts=starts)

    def _several(self) -> list[Given]:
        if isinstance(self.prompts, str | Prompt) or len(self.prompts) < 2:
            raise RegionError("a hull needs a list of at least two prompts")
        return list(self.prompts)

    def __str__(self) -> str:
        return f"hull of {len(self.prompts)} prompts"


@dataclass(frozen=True, eq=False)
class Segment:
    """The whole way from one prompt to another of equally many tokens; claims are made at the first.

    Attributes:
        a: where the way starts: a prompt, an input [S, d], or a text.
        b: where it ends.

    Example:
        >>> import torch
        >>> way = Segment(torch.zeros(1, 2).double(), torch.ones(1, 2).double()).region()
        >>> way.n_factors, way.reference.tolist(), way.point(torch.ones(1).double()).tolist()
        (1, [[0.0, 0.0]], [[1.0, 1.0]])
    """

    a: Given
    b: Given

    def of(self, model: Transformer) -> Segment:
        """Return the same segment with both texts tokenised and embedded by a model.

        Args:
            model: the model that reads the texts.
        """
        return replace(self, a=_read(self.a, model), b=_read(self.b, model))

    def region(self) -> Region:
        """Return the segment as a region of one factor.

        Raises:
            RegionError: if the ends differ in length or width or are the same, or if one is still a text.
        """
        made = Hull([self.a, self.b]).region()
        return replace(made, label=str(self))

    def __str__(self) -> str:
        text = self.b.text if isinstance(self.b, Prompt) else self.b
        if not isinstance(text, str):
            return "segment to another input"
        return f"segment to {text if len(text) <= SHOWN else text[:SHOWN] + '…'!r}"


@dataclass(frozen=True, eq=False)
class Span:
    """A prompt moved along a few given directions: x + Σ αᵢ rᵢ uᵢ with α ∈ [−1, 1]^k.

    Attributes:
        prompt: the prompt, an input [S, d], or a text.
        directions: vectors [S, d], each of any length: differences of token embeddings, principal components, a
            steering vector (`direction` puts a vector at one token).
        radius: how far along each direction, in multiples of it: one number, or one for each.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, 3).double()
        >>> region = Span(x, [direction(x, 1, torch.tensor([1.0, 0.0, 0.0]))], 0.5).region()
        >>> region.half_widths().tolist()
        [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    """

    prompt: Given
    directions: Sequence[Tensor]
    radius: float | Sequence[float] = 1.0

    def of(self, model: Transformer) -> Span:
        """Return the same span with a text tokenised and embedded by a model.

        Args:
            model: the model that reads the text.
        """
        return replace(self, prompt=_read(self.prompt, model))

    def region(self) -> Region:
        """Return the span as a region with one factor for each direction.

        Raises:
            RegionError: if there is no direction, one has another shape than the input, or a radius is not positive.
        """
        x = _point(self.prompt)
        ways = [numbers(way, "a direction") for way in self.directions]
        if not ways or any(way.shape != x.shape for way in ways):
            raise RegionError(f"a span needs directions of the input's shape {list(x.shape)}")
        given = self.radius if isinstance(self.radius, Sequence) else [self.radius] * len(ways)
        if len(given) != len(ways):
            raise RegionError(f"{len(given)} radii for {len(ways)} directions: give one, or one for each")
        far = [positive(r, "the radius") for r in given]
        moved = torch.stack([r * way.to(x) for r, way in zip(far, ways, strict=True)])
        return Region(x, None, moved, None, str(self), starts=starts_of([self.prompt], [None]))

    def __str__(self) -> str:
        far = f"{self.radius:g}" if isinstance(self.radius, int | float) else list(self.radius)
        return f"span of {len(self.directions)} directions, radius {far}"


@dataclass(frozen=True, eq=False)
class Steer:
    """A residual stream h steered by every strength of a range: h + c·v at some tokens, c₀ ≤ c ≤ c₁.

    Claims are made at c₀.

    Attributes:
        prompt: h: the stream in front of a block (`start_at`), or an input [S, d].
        direction: v, shape [d].
        c: the least and the largest strength.
        at: the tokens that are steered, by index; None for all.

    Example:
        >>> import torch
        >>> h, v = torch.zeros(2, 3).double(), torch.tensor([1.0, 0.0, 2.0]).double()
        >>> region = Steer(h, v, (0.0, 4.0)).region()
        >>> region.label, region.point(torch.ones(1).double()).tolist()
        ('steering by 0.0 to 4.0 at tokens [1]', [[0.0, 0.0, 0.0], [4.0, 0.0, 8.0]])
    """

    prompt: Prompt | Tensor
    direction: Tensor
    c: tuple[float, float] = (0.0, 8.0)
    at: Sequence[int] | None = (-1,)

    def ends(self) -> tuple[Prompt, Prompt]:
        """Return the streams at both ends of the range; each says what it was computed from, if the stream does.

        Raises:
            RegionError: if the direction does not fit the stream, a token does not exist, or the range is none.
        """
        h, v = _point(self.prompt), numbers(self.direction, "the steering vector")
        if v.shape != h.shape[1:] or not bool(v.isfinite().all()):
            raise RegionError(f"a steering vector here is a tensor of {h.shape[1]} finite numbers")
        if not (math.isfinite(self.c[0]) and math.isfinite(self.c[1]) and self.c[0] < self.c[1]):
            raise RegionError(f"strengths go from a smaller to a larger number, got {self.c}")
        tokens = self._tokens(len(h))
        named = self.prompt if isinstance(self.prompt, Prompt) else None
        origin = None if named is None else named.origin
        found = []
        for c in self.c:
            x = h.clone()
            x[list(tokens)] += float(c) * v.to(h)
            steering = Steering(float(c), v.to(h), tokens)
            made = None if origin is None or origin.steering else replace(origin, steering=steering)
            words = tuple(f"x{i}" for i in range(len(h))) if named is None else named.tokens
            found.append(Prompt(x, words, origin=made))
        return found[0], found[1]

    def _tokens(self, size: int) -> tuple[int, ...]:
        asked = range(size) if self.at is None else self.at
        if not asked or any(not -size <= t < size for t in asked):
            raise RegionError(f"steered tokens are between {-size} and {size - 1}, got {list(asked)}")
        return tuple(dict.fromkeys(t % size for t in asked))

    def region(self) -> Region:
        """Return the range of streams as a region of one factor."""
        return replace(Hull(self.ends()).region(), label=str(self))

    def __str__(self) -> str:
        tokens = list(self._tokens(len(_point(self.prompt))))
        return f"steering by {float(self.c[0])!r} to {float(self.c[1])!r} at tokens {tokens}"


def direction(x: Prompt | Tensor, token: int, vector: Tensor) -> Tensor:
    """Return a direction [S, d] that moves one token of an input.

    Args:
        x: a prompt, or an input [S, d].
        token: the token that moves.
        vector: how it moves, shape [d].
    """
    point = _point(x)
    if not -len(point) <= token < len(point) or vector.shape != point.shape[1:]:
        raise RegionError(f"a direction is a token of {len(point)} and a vector of {point.shape[1]} numbers")
    found = torch.zeros_like(point)
    found[token] = vector.to(point)
    return found


def _read(given: Given, model: Transformer) -> Prompt | Tensor:
    return model.prompt(given) if isinstance(given, str) else given


def _point(given: Given) -> Tensor:
    if isinstance(given, str):
        raise RegionError("a text is no point yet: give model.prompt(text), or ask with `.of(model)`")
    return given.x if isinstance(given, Prompt) else numbers(given, "a prompt")
