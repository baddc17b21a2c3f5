"""Chains of `taylor`: a segment of the program with its values and sites, and the steps between values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.norms import frobenius, grow, length
from prooflens.engines.taylor.attention import MixSite, ScoreSite
from prooflens.engines.taylor.head_norms import HeadNormSite
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.segments import Segment
from prooflens.engines.taylor.solu import SoluSite
from prooflens.engines.taylor.values import Root, Value
from prooflens.models.sites import Affine, Pool, Rotary
from prooflens.numerics import gamma

if TYPE_CHECKING:
    from prooflens.engines.taylor.mixing_squares import MixSquares

Seeds = dict[int, dict[str, Tensor]]
"""Covectors [F, n] by token and by the name of the value they read."""


class MovedShapes(NamedTuple):
    """What a mixing leaves once moving covectors hold its third order, by token of the next root.

    Attributes:
        rest: shapes of what neither second order nor moving covectors hold.
        squares: shapes of b², by head and key.
        products: shapes of π, by head and key.
        budget: bounds of Σ s b², head by head.
        budget_e: bounds of Σ s b_e², head by head.
    """

    rest: Float[Tensor, "T d d"]
    squares: Float[Tensor, "T n n"]
    products: Float[Tensor, "T n n"]
    budget: Float[Tensor, "T H"]
    budget_e: Float[Tensor, "T H"]


@dataclass(eq=False)
class Chain:
    """A segment of the program with its values and sites, and how it goes on.

    Attributes:
        segment: the steps.
        root: where the chain starts.
        values: its values by name.
        shapes: the shapes of all remainders by the name of their source.
        sites: norms, networks and SoLUs by the name of their output.
        scores: the site that makes scores, if the chain ends in an attention.
        mix: the softmax mixing, if there is one.
        mixed: the shapes of the mixing's remainder, by token of the next root.
        beyond: the same without the second order of Aα.
        moved: the same without what moving covectors hold (`taylor.moved_mixing`), made when it is asked for.
        squares: squares above what the mixing leaves, by token of the next root, made when they are asked for.
        noise: what rounding adds to the next root, by token.
        goes_on: the tokens that the next root has.
        pool: the pooling, if the chain ends in one.
    """

    segment: Segment
    root: Root
    values: dict[str, Value] = field(default_factory=dict)
    shapes: dict[str, Tensor] = field(default_factory=dict)
    sites: dict[str, NormSite | HeadNormSite | NetworkSite | SoluSite] = field(default_factory=dict)
    scores: ScoreSite | None = None
    mix: MixSite | None = None
    mixed: Tensor | None = None
    """The shapes of the mixing's remainder, by token of the next root."""
    beyond: Tensor | None = None
    """The shapes of the mixing's remainder without the second order of Aα."""
    moved: MovedShapes | None = None
    squares: dict[int, MixSquares] = field(default_factory=dict)
    noise: Tensor | None = None
    goes_on: list[int] = field(default_factory=list)
    """The tokens that the next root has."""
    pool: Pool | None = None

    def forget(self) -> None:
        """Let go of everything but the segment and what tells its root from others."""
        self.values, self.shapes, self.sites, self.squares = {}, {}, {}, {}
        self.root.forget_factors()
        self.scores = self.mix = self.mixed = self.beyond = self.moved = self.noise = None

    def forget_moves(self) -> None:
        """Let go of the linear parts of scores and values, which only the next root and Hessians read."""
        if self.mix is not None:
            for heads in (self.mix.scores.q, self.mix.scores.k, self.mix.v):
                heads.forget_moves()
            self.mix.rows = self.mix.rows[:0]


class Fork(NamedTuple):
    """Where another walk may go on: the chains that both have, and the root behind them with its sources."""

    chains: list[Chain]
    root: Root

    def copied(self) -> Fork:
        """Return the same with a root of its own: going on from a root uses it up."""
        return Fork(list(self.chains), replace(self.root, origins=list(self.root.origins)))


class RemainderBound(Protocol):
    """What a walk asks about the remainders that covectors collect (`taylor.remainder_bounds`)."""

    @property
    def deep(self) -> bool:
        """Whether to go on to the input."""

    @property
    def may_stop(self) -> bool:
        """Whether the ellipsoid of a root may stand for everything before it."""

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Bound v·r and −v·r at a norm or a network, for one token.

        Args:
            chain: the chain that the covectors walk.
            name: the norm or network.
            v: covectors, shape [F, n].
            t: the token.
        """

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """Bound u·r and −u·r at the mixing of the chain, for one token of the next root."""

    def arrive(self, chain: Chain) -> None:
        """Be told that all covectors of a chain have come to its root."""


def slip(source: Value, inner: int, most: Tensor) -> Float[Tensor, " S"]:
    """Bound the rounding of a linear map with Frobenius norm `most` of a value and of its Jacobians.

    Sums of `inner` products err by γ_inner; the value and its Jacobians each count once, hence the factor 2. Earlier
    rounding, `noise`, is mapped along.
    """
    return grow(gamma(inner + 64) * 2.0 * most * (source.size + source.stretch) + most * source.noise)


def moved(source: Value, u: Tensor, move: Callable[[Tensor], Tensor], noise: Tensor, heads: int = 1) -> Value:
    """Return a value that is a linear map of another, up to its constant and what is added afterwards.

    Args:
        source: the value that is mapped.
        u: the new value at the centre.
        move: the linear map, for Jacobians.
        noise: the rounding of the new value in the 2-norm.
        heads: how many heads the new value has.
    """
    sources = {name: move(J) for name, J in source.sources.items()}
    return Value(u, move(source.J), source.root, sources, source.shapes, grow(noise), heads)


def affine_noise(step: Affine, source: Value, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, " F"]:
    """Bound the rounding of an affine map at the centre and of the covector that goes back through it.

    Each errs by γ of its inner length times ‖v‖‖W‖ sup‖u(x)‖; of the factor 4 on that, 2 are to spare.

    Args:
        step: the affine map.
        source: the value that it reads.
        v: covectors at its output, shape [F, o].
        t: the token.
    """
    size = frobenius(step.weight) * (2.0 * source.size[t])
    bias = 0.0 if step.bias is None else length(step.bias)
    return grow(gamma(sum(step.weight.shape) + 16) * length(v) * (2.0 * size + bias))


def turning_norm(step: Rotary) -> Tensor:
    """Return a bound of the 2-norm of a rotation and of its absolute values: 2, more where tables exceed 1."""
    largest = torch.maximum(step.cos.abs().amax(), step.sin.abs().amax())
    return 2.0 * largest.clamp(min=1.0)


def turn(
    step: Rotary, x: Float[Tensor, "... S n"], back: bool = False, position: int | None = None
) -> Tensor:
    """Apply RoPE, or its transpose, to vectors that hold all heads side by side.

    Args:
        step: the rotation.
        x: the vectors, shape [..., S, n].
        back: apply the transpose.
        position: the one position that x has; None for all.
    """
    width = step.cos.shape[-1]
    y = x.reshape(*x.shape[:-1], -1, width)
    half = width // 2
    cos, sin = step.cos[:, None, :], step.sin[:, None, :]
    if position is not None:
        cos, sin = cos[position : position + 1], sin[position : position + 1]
    if back:
        swapped = y * sin
        swapped = torch.cat((swapped[..., half:], -swapped[..., :half]), -1)
        return (y * cos + swapped).reshape(x.shape)
    return (y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin).reshape(x.shape)
