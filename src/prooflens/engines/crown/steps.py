r"""Backward rules of `crown`: what is linear in a step's output becomes linear in its inputs.

Invariant of a walk, for every form f and every point of the region, over the values v not yet replaced:

    f ≤ Σ_v ⟨A_v, v⟩ + c + γ_N s.

A rule takes A of a step's output y, and returns A of its inputs, what to add to c, and what to add to s.

**Linear** y = Wx + b:  ⟨A, y⟩ = ⟨WᵀA, x⟩ + ⟨A, b⟩.   **φ**: A⁺ takes the line above, A⁻ the line below.

**Products** (scores, mixing, gates). With x = x₀ + dx, |dx| ≤ r_x and the same for y (McCormick, all planes at once):

    dx dy ≤  r_x r_y + τ(r_x dy − r_y dx),    dx dy ≥ −r_x r_y + τ(r_x dy + r_y dx),    τ ∈ [−1, 1];

τ = ±1 are the two planes of either side, since (r_x ∓ dx)(r_y ± dy) ≥ 0; τ = 0 keeps the gradient at the middle.

**Rounding.** The coefficients are exact by definition: whatever was computed is the A that goes on. The real WᵀA
differs from it by at most γ_n|W|ᵀ|A|, so ⟨A, y⟩ differs by at most γ_n⟨|A|, |W||x| + |b|⟩. Each rule therefore adds
⟨|A|, size⟩ to s, with `size` the absolute-value chain of its formula on the box of its inputs, and N bounds all
numbers of roundings.

**Tokens.** All but attention and pooling work token by token. A function of one token's values goes back with that
token's share of every rule (`at`) until a key or a value reads the others: an S-th of the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.crown.lines import LineRelaxation
from prooflens.engines.relaxations.affine import through_affine, through_rotary
from prooflens.models.sites import (
    Add,
    Affine,
    AnyStep,
    Mix,
    Pool,
    Product,
    Rotary,
    Scores,
    Shift,
    share_heads,
)
from prooflens.numerics import up
from prooflens.queries.simplex import Box

Parameters = Mapping[str, Tensor]
"""τ of one step by name, with a leading dimension of 1 or of the number of forms."""


class Passed(NamedTuple):
    """What a rule returns: A of the inputs, in order, and per form what is added to c and to s."""

    inputs: tuple[Tensor, ...]
    constant: Float[Tensor, " F"]
    size: Float[Tensor, " F"]


class Rule(Protocol):
    """A step that linear functions can be taken back through."""

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the τ that it takes."""
        ...

    @property
    def roundings(self) -> int:
        """At least the number of roundings in sequence of anything that `back` computes."""
        ...

    @property
    def stays(self) -> tuple[bool, ...]:
        """Which inputs belong to the token that the output belongs to."""
        ...

    def at(self, token: int) -> Rule:
        """Return the rule for the part of the output that belongs to one token."""
        ...

    def back(self, A: Float[Tensor, " F *shape"], tau: Parameters) -> Passed:
        """Replace the step's output by its inputs.

        Args:
            A: coefficients of the output, shape [F, *shape].
            tau: τ by name; empty for the middle lines.
        """
        ...


def magnitude(box: Box) -> Tensor:
    """Return the largest |x| of a box."""
    return torch.maximum(box.lower.abs(), box.upper.abs())


def paired(A: Float[Tensor, " F *shape"], size: Float[Tensor, "*shape"]) -> Float[Tensor, " F"]:
    """Return ⟨A_f, size⟩ for every form."""
    return A.flatten(1) @ size.flatten()


def summed(A: Float[Tensor, " F *shape"]) -> Float[Tensor, " F"]:
    """Return the sum of all entries of every form."""
    return A.flatten(1).sum(1)


def cut(x: Tensor, token: int, dim: int = 0) -> Tensor:
    """Return one token's part, with its dimension kept."""
    return x.narrow(dim, token, 1)


class Middle(NamedTuple):
    """A box as middle and radius, with the radius rounded up."""

    x: Tensor
    r: Tensor

    @classmethod
    def of(cls, box: Box) -> Middle:
        """Take the middle as computed; the radius covers both ends from there."""
        x = 0.5 * box.lower + 0.5 * box.upper
        return cls(x, torch.maximum(up(box.upper - x), up(x - box.lower)))

    def at(self, token: int, dim: int = 0) -> Middle:
        """Return one token's part."""
        return Middle(cut(self.x, token, dim), cut(self.r, token, dim))


@dataclass(frozen=True, eq=False)
class Linear:
    """The rule of affine maps, rotations, residual sums and pooling: exact but for rounding."""

    step: Affine | Rotary | Shift | Add | Pool
    shapes: tuple[torch.Size, ...]
    size: Tensor

    @classmethod
    def of(cls, step: Affine | Rotary | Shift | Add | Pool, *boxes: Box) -> Linear:
        """Compute sizes from the inputs' boxes."""
        sizes = [magnitude(box) for box in boxes]
        match step:
            case Affine():
                size = through_affine(step, step.weight.abs())(sizes[0])
                if step.bias is not None:
                    size = size + step.bias.abs().reshape(step.out_shape)
            case Rotary():
                size = through_rotary(step)(sizes[0])
            case Shift():
                size = sizes[0] + step.offset.abs()
            case Add():
                size = sizes[0] + sizes[1]
            case Pool():
                size = torch.einsum("s,sd->d", step.weights.abs(), sizes[0])
        return cls(step, tuple(s.shape for s in sizes), size)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """No τ."""
        return {}

    @property
    def roundings(self) -> int:
        """The roundings of a dot product with the weights, and of the sum of the constant."""
        return self.size.numel() + sum(shape.numel() for shape in self.shapes)

    @property
    def stays(self) -> tuple[bool, ...]:
        """All inputs belong to the output's token; pooling has no token."""
        return (True,) * len(self.shapes)

    def at(self, token: int) -> Linear:
        """Return the same map; a rotation has its angle per token, a shift its offset."""
        step = self.step
        if isinstance(step, Shift):
            step = replace(step, offset=cut(step.offset, token))
        if isinstance(step, Rotary):
            step = replace(step, cos=cut(step.cos, token), sin=cut(step.sin, token))
        shapes = tuple(torch.Size((1, *shape[1:])) for shape in self.shapes)
        return Linear(step, shapes, cut(self.size, token))

    def back(self, A: Tensor, tau: Parameters) -> Passed:
        """Apply the transposed map."""
        size = paired(A.abs(), self.size)
        nothing = torch.zeros_like(size)
        match self.step:
            case Affine(weight=weight, bias=bias):
                flat = A.flatten(-len(self.step.out_shape))
                moved = (flat @ weight).reshape(len(A), *self.shapes[0])
                if bias is None:
                    return Passed((moved,), nothing, size)
                return Passed((moved,), flat.reshape(len(A), -1, len(bias)).sum(1) @ bias, size)
            case Rotary(cos=cos, sin=sin):
                half = A.shape[-1] // 2
                turned = A * sin[:, None, :]
                back = torch.cat((turned[..., half:], -turned[..., :half]), -1)
                return Passed((A * cos[:, None, :] + back,), nothing, size)
            case Shift(offset=offset):
                return Passed((A,), paired(A, offset), size)
            case Add():
                return Passed((A, A), nothing, size)
            case Pool(weights=weights):
                return Passed((torch.einsum("s,fd->fsd", weights, A),), nothing, size)


@dataclass(frozen=True, eq=False)
class Curve:
    """The rule of a coordinate-wise function between its lines; `dim` counts tokens, for scores those of queries."""

    lines: LineRelaxation
    size: Tensor
    dim: int = 0

    @classmethod
    def of(cls, lines: LineRelaxation, box: Box, dim: int = 0) -> Curve:
        """Compute sizes from the lines and the input's box."""
        (low, below), (high, above) = lines.lower.size, lines.upper.size
        size = 4.0 * (torch.maximum(low, high) * magnitude(box) + torch.maximum(below, above))
        return cls(lines, size, dim)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of τ: one per coordinate and side."""
        return {"lower": tuple(self.size.shape), "upper": tuple(self.size.shape)}

    @property
    def roundings(self) -> int:
        """The roundings of a sum over all coordinates."""
        return self.size.numel() + 8

    @property
    def stays(self) -> tuple[bool, ...]:
        """The only input belongs to the output's token."""
        return (True,)

    def at(self, token: int) -> Curve:
        """Return one token's lines."""
        return Curve(self.lines.at(token, self.dim), cut(self.size, token, self.dim), self.dim)

    def back(self, A: Tensor, tau: Parameters) -> Passed:
        """Take the line above where A is positive, and the one below where it is negative.

        Of a ReLU that is split (`crown.branch`) the input has the sign `side`: its output is the input or 0, and
        `beta` ≥ 0 times that sign may be added to the coefficient, since the product with the input is not negative.
        The sum rounds, by less than a unit of β times `size`.
        """
        moved, constant = through_lines(A, self.lines, tau.get("lower"), tau.get("upper"))
        size = paired(A.abs(), self.size)
        if (side := tau.get("side")) is not None:
            beta = tau["beta"]
            moved = torch.where(side == 0, moved, A * (side > 0) + side * beta)
            constant = torch.where(side == 0, constant, 0.0)
            size = size + paired(beta * side.abs(), self.size)
        return Passed((moved,), summed(constant), size)


def through_lines(
    A: Tensor, lines: LineRelaxation, lower: Tensor | None, upper: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return A of the function's input, and the constants, entry by entry.

    Args:
        A: coefficients of the function's output.
        lines: its lines.
        lower: τ of the lines below; None for the middle one.
        upper: τ of the lines above; None for the middle one.
    """
    (below, under), (above, over) = lines.lower.at(lower), lines.upper.at(upper)
    plus = A.clamp(min=0.0)
    minus = A - plus
    return plus * above + minus * below, plus * over + minus * under


@dataclass(frozen=True, eq=False)
class Bilinear:
    """The rule of y = scale · B(x, y) + bias for an einsum B, by McCormick's planes."""

    equation: str
    x: Middle
    y: Middle
    scale: float
    bias: Tensor | None
    groups: int
    center: Tensor
    radius: Tensor
    size: Tensor

    @classmethod
    def of(cls, step: Scores | Mix | Product, first: Box, second: Box) -> Bilinear:
        """Make the planes of a step on its inputs' boxes."""
        equation, scale, bias = EQUATIONS[type(step)], 1.0, None
        groups = second.lower.shape[-2]
        if isinstance(step, Scores):
            scale, bias = step.scale, step.bias
        heads = {Scores: -2, Mix: -3}.get(type(step))
        if heads is not None:
            second = Box(*(share_heads(end, first.lower.shape[heads]) for end in second))
        x, y = Middle.of(first), Middle.of(second)
        center, radius = (torch.einsum(equation, *pair) * scale for pair in ((x.x, y.x), (x.r, y.r)))
        size = 16.0 * scale * torch.einsum(equation, magnitude(first), magnitude(second))
        if bias is not None:
            size = size + bias.abs()
        return cls(equation, x, y, scale, bias, groups, center, radius, size)

    @property
    def letters(self) -> tuple[str, str, str, str]:
        """Indices of x, y, the output, and all of them."""
        inputs, out = self.equation.split("->")
        x, y = inputs.split(",")
        return x, y, out, out + "".join(letter for letter in x if letter not in out)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of τ: one per product and side."""
        x, y, _, every = self.letters
        lengths = dict(zip(x + y, (*self.x.x.shape, *self.y.x.shape), strict=True))
        shape = tuple(lengths[letter] for letter in every)
        return {"lower": shape, "upper": shape}

    @property
    def roundings(self) -> int:
        """The roundings of a sum over all coordinates of an input, or of the output."""
        return 4 * (self.size.numel() + self.x.x.numel() + self.y.x.numel()) + 16

    @property
    def stays(self) -> tuple[bool, ...]:
        """Queries and weights belong to the output's token; keys and values are those of all tokens."""
        return (True, "j" not in self.equation)

    def at(self, token: int) -> Bilinear:
        """Return one token's query, row of weights or gate."""
        x, _, out, _ = self.letters
        first, last = (0, 0) if "i" not in x else (x.index("i"), out.index("i"))
        return replace(
            self,
            x=self.x.at(token, first),
            y=self.y if "j" in self.equation else self.y.at(token),
            bias=None if self.bias is None else cut(self.bias, token, last),
            center=cut(self.center, token, last),
            radius=cut(self.radius, token, last),
            size=cut(self.size, token, last),
        )

    def back(self, A: Tensor, tau: Parameters) -> Passed:
        """Take gradients at the middle, tilted by τ, and ±r_x r_y."""
        x, y, out, every = self.letters
        constant = paired(A.abs(), self.radius) - paired(A, self.center)
        if self.bias is not None:
            constant = constant + paired(A, self.bias)
        size = paired(A.abs(), self.size)
        A = A * self.scale
        by_x = torch.einsum(f"f{out},{y}->f{x}", A, self.y.x)
        by_y = torch.einsum(f"f{out},{x}->f{y}", A, self.x.x)
        if tau:
            plus = A.clamp(min=0.0)
            above = torch.einsum(f"f{out},f{every}->f{every}", plus, tau["upper"])
            below = torch.einsum(f"f{out},f{every}->f{every}", A - plus, tau["lower"])
            tilt_x = torch.einsum(f"f{every},{y}->f{x}", below - above, self.y.r)
            tilt_y = torch.einsum(f"f{every},{x}->f{y}", below + above, self.x.r)
            constant = constant - paired(tilt_x, self.x.x) - paired(tilt_y, self.y.x)
            by_x, by_y = by_x + tilt_x, by_y + tilt_y
        if self.groups != by_y.shape[-2] and "h" in y:
            by_y = by_y.unflatten(-2, (self.groups, -1)).sum(-2)
        return Passed((by_x, by_y), constant, size)


EQUATIONS: dict[type, str] = {Scores: "ihc,jhc->hij", Mix: "hij,jhc->ihc", Product: "sc,sc->sc"}


def linear_rule(step: AnyStep, *boxes: Box) -> Rule | None:
    """Return the rule of a step that needs no bounds but for its rounding; None for other steps."""
    return Linear.of(step, *boxes) if isinstance(step, Affine | Rotary | Shift | Add | Pool) else None
