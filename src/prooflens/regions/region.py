"""Input sets around a post-embedding input x₀, all of one kind:

    { x₀ + Gα  |  α ∈ [-1, 1]^p,  A_eq α = b_eq,  A_ub α ≤ b_ub }.

Constraints can only make the set smaller: an engine that ignores them stays sound.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import RegionError
from prooflens.regions.starts import Start
from prooflens.regions.token_runs import TokenRuns

FEASIBILITY = 1e-9
"""How far outside a constraint a sampled point may be. Samples serve the attack and are never part of a proof."""

MAX_CORNER_FACTORS = 20
"""`corners` lists 2^p points, and refuses more factors than this."""


@dataclass(frozen=True, eq=False)
class Constraints:
    """Linear constraints on the factors of a region: A_eq α = b_eq and A_ub α ≤ b_ub; either may have no rows.

    Attributes:
        A_eq: one row per equation, shape [m, p].
        b_eq: right-hand sides, shape [m].
        A_ub: one row per inequality, shape [r, p].
        b_ub: right-hand sides, shape [r].

    Example:
        >>> import torch
        >>> sum_to_one = Constraints.of(2, A_eq=torch.ones(1, 2), b_eq=torch.ones(1))
        >>> sum_to_one.satisfied(torch.tensor([[0.5, 0.5], [1.0, 1.0]]).double(), tolerance=0.0).tolist()
        [True, False]
    """

    A_eq: Float[Tensor, "m p"]
    b_eq: Float[Tensor, " m"]
    A_ub: Float[Tensor, "r p"]
    b_ub: Float[Tensor, " r"]

    @classmethod
    def of(
        cls,
        n_factors: int,
        A_eq: Tensor | None = None,
        b_eq: Tensor | None = None,
        A_ub: Tensor | None = None,
        b_ub: Tensor | None = None,
    ) -> Constraints:
        """Make constraints on `n_factors` factors; what is left out has no rows.

        Args:
            n_factors: p, the number of factors of the region.
            A_eq: one row per equation, shape [m, p].
            b_eq: right-hand sides, shape [m].
            A_ub: one row per inequality, shape [r, p].
            b_ub: right-hand sides, shape [r].

        Raises:
            RegionError: if shapes do not fit, or an entry is NaN or infinite.
        """
        none, nil = torch.zeros(0, n_factors, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        made = cls(
            none if A_eq is None else numbers(A_eq, "A_eq").double(),
            nil if b_eq is None else numbers(b_eq, "b_eq").double(),
            none if A_ub is None else numbers(A_ub, "A_ub").double(),
            nil if b_ub is None else numbers(b_ub, "b_ub").double(),
        )
        for A, b in ((made.A_eq, made.b_eq), (made.A_ub, made.b_ub)):
            if A.ndim != 2 or A.shape[1] != n_factors or b.shape != A.shape[:1]:
                raise RegionError(
                    f"constraints on {n_factors} factors need A of shape [m, {n_factors}] and b of shape [m], "
                    f"got {list(A.shape)} and {list(b.shape)}"
                )
            if not bool(torch.isfinite(A).all() and torch.isfinite(b).all()):
                raise RegionError("the constraints hold NaN or infinite values")
        return made

    def satisfied(self, alpha: Float[Tensor, "... p"], tolerance: float) -> Tensor:
        """Return which factors satisfy all constraints.

        Args:
            alpha: factors, shape [..., p].
            tolerance: how far a constraint may be missed, absolutely.
        """
        alpha = alpha.to(
            self.A_eq
        )  # factors of a coarser region are compared in the precision of the constraints
        equal = (alpha @ self.A_eq.T - self.b_eq).abs() <= tolerance
        below = alpha @ self.A_ub.T - self.b_ub <= tolerance
        return equal.all(-1) & below.all(-1)


@dataclass(frozen=True, eq=False)
class Region:
    """An input set { x₀ + Gα | α ∈ [-1, 1]^p, A_eq α = b_eq, A_ub α ≤ b_ub }.

    Give exactly one of `radius` and `generators`; centre and generators are kept in the finer precision of the two.
    Coordinates with radius 0 have no factor. Under constraints the centre itself may lie outside.

    Attributes:
        center: x₀, a post-embedding input of shape [S, d].
        radius: how far each coordinate may move, shape [S, d]; a ball is kept like this, not as a matrix.
        generators: the columns of G, shape [p, S, d].
        constraints: constraints on α; None for the whole box.
        label: the name that results and reports show.
        anchor: the factors of the input that claims are made at, shape [p]; None for the centre.
        image: the image that tokens were made of, pixels in [0, 1] of shape [C, H, W]; reports draw on it.
        starts: points that are residual streams of a model, with what they were computed from; the check asks for them.
        free: how many coordinates of each token, the last ones, are no input but factors of a model's own
            (`regions.product`).
        moving: the flat indices of the coordinates that move, of a region with radii.
        runs: the generators token by token, where every one of them moves a single token; None otherwise.

    Example:
        >>> import torch
        >>> region = Region(torch.zeros(1, 2), generators=torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]]))
        >>> region.half_widths().tolist()
        [[2.0, 2.0]]
        >>> region.contains(torch.tensor([[2.0, 0.0]])), region.contains(torch.tensor([[2.0, 1.0]]))
        (True, False)
    """

    center: Float[Tensor, "S d"]
    radius: Float[Tensor, "S d"] | None = None
    generators: Float[Tensor, "p S d"] | None = None
    constraints: Constraints | None = None
    label: str = "region"
    anchor: Float[Tensor, " p"] | None = None
    image: Float[Tensor, "C H W"] | None = None
    starts: tuple[Start, ...] = ()
    free: int = 0
    moving: Tensor = field(init=False, repr=False)
    runs: TokenRuns | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", numbers(self.center, "the centre"))
        if self.center.ndim != 2 or self.center.numel() == 0:
            raise RegionError(f"the centre must have shape [S, d], got {list(self.center.shape)}")
        if (self.radius is None) == (self.generators is None):
            raise RegionError("give a radius per coordinate or generators: one of them, not both")
        kind = "radius" if self.radius is not None else "generators"
        spread = numbers(getattr(self, kind), kind)
        dtype = torch.promote_types(self.center.dtype, spread.dtype)
        object.__setattr__(self, "center", self.center.to(dtype))
        spread = spread.to(self.center)
        object.__setattr__(self, kind, spread)
        lead: tuple[int | str, ...] = () if kind == "radius" else (spread.shape[0] if spread.ndim else "p",)
        wanted = (*lead, *self.center.shape)
        if tuple(spread.shape) != wanted:
            raise RegionError(
                f"{kind} must have shape [{', '.join(map(str, wanted))}], got {list(spread.shape)}; for one ε use "
                "Ball(ε)"
            )
        for what, tensor in (("centre", self.center), (kind, spread)):
            if not bool(torch.isfinite(tensor).all()):
                raise RegionError(f"the {what} holds NaN or infinite values")
        if self.radius is not None and bool((self.radius < 0).any()):
            raise RegionError("radii must not be negative")
        moving = (
            (self.radius if self.radius is not None else torch.zeros_like(self.center)).flatten().nonzero()
        )
        object.__setattr__(self, "moving", moving[:, 0])
        object.__setattr__(self, "runs", None if self.generators is None else TokenRuns.of(self.generators))
        if not isinstance(self.constraints, Constraints | None):
            raise RegionError("constraints are made by Constraints.of(n_factors, A_eq, b_eq, A_ub, b_ub)")
        if self.constraints is not None and self.constraints.A_eq.shape[1] != self.n_factors:
            raise RegionError(f"the constraints must be on {self.n_factors} factors")
        if self.anchor is not None:
            object.__setattr__(self, "anchor", numbers(self.anchor, "the anchor").to(self.center))
            if self.anchor.shape != (self.n_factors,) or not bool((self.anchor.abs() <= 1.0).all()):
                raise RegionError(f"the anchor must have {self.n_factors} factors between −1 and 1")

    @property
    def n_factors(self) -> int:
        """The number of factors, p."""
        return self.generators.shape[0] if self.generators is not None else int(self.moving.numel())

    @property
    def anchor_factors(self) -> Float[Tensor, " p"]:
        """The factors of the input that claims are made at: 0, unless the region has an anchor."""
        return self.center.new_zeros(self.n_factors) if self.anchor is None else self.anchor

    @property
    def reference(self) -> Float[Tensor, "S d"]:
        """The input that claims are made at: "the same key as there"."""
        return self.center if self.anchor is None else self.point(self.anchor)

    @property
    def holds_reference(self) -> bool:
        """Whether the reference satisfies the constraints, so that it is a point of the set."""
        return self.constraints is None or bool(
            self.constraints.satisfied(self.anchor_factors, tolerance=0.0)
        )

    @property
    def is_simplex(self) -> bool:
        """Whether the constraints are those of a hull of p + 1 inputs, Σα ≤ 2 − p, and no others."""
        held, p = self.constraints, self.n_factors
        if held is None or len(held.A_eq) or tuple(held.A_ub.shape) != (1, p):
            return False
        return bool((held.A_ub == 1.0).all()) and float(held.b_ub[0]) == 2.0 - p

    def check(self) -> None:
        """Raise a `RegionError` if no point satisfies the constraints: on an empty set every claim would hold."""
        if self.constraints is None or self.holds_reference:
            return
        from prooflens.regions.membership import contradictory

        if contradictory(self.constraints):
            raise RegionError(
                "no point satisfies the region's constraints: they contradict each other or the box"
            )

    @property
    def scale(self) -> Float[Tensor, " p"]:
        """The radius that belongs to each factor of a ball."""
        if self.radius is None:
            raise RegionError("only regions given by radii have one scale per factor")
        return self.radius.flatten()[self.moving]

    def point(self, alpha: Float[Tensor, "... p"]) -> Float[Tensor, "... S d"]:
        """Return the point x₀ + Gα; differentiable in α.

        Args:
            alpha: factors, shape [..., p].
        """
        if alpha.shape[-1] != self.n_factors:
            raise RegionError(f"the region has {self.n_factors} factors, got {alpha.shape[-1]}")
        if self.runs is not None:
            return self.center + self.runs.moved(alpha)
        if self.generators is not None:
            return self.center + torch.einsum("...p,psd->...sd", alpha, self.generators)
        move = torch.zeros(*alpha.shape[:-1], self.center.numel(), dtype=alpha.dtype, device=alpha.device)
        move = move.index_copy(-1, self.moving, alpha * self.scale)
        return self.center + move.reshape(*alpha.shape[:-1], *self.center.shape)

    def pullback(self, covector: Float[Tensor, "... S d"]) -> Float[Tensor, "... p"]:
        """Return Gᵀv: the linear functional v of x, written as a functional of α.

        Args:
            covector: v, shape [..., S, d].
        """
        if self.runs is not None:
            return self.runs.pullback(covector)
        if self.generators is not None:
            return torch.einsum("...sd,psd->...p", covector, self.generators)
        return covector.flatten(-2)[..., self.moving] * self.scale

    def dense_generators(self) -> Float[Tensor, "p S d"]:
        """Return the generators as a dense tensor [p, S, d], also for a ball."""
        if self.generators is not None:
            return self.generators
        dense = self.center.new_zeros(self.n_factors, self.center.numel())
        dense[torch.arange(self.n_factors, device=dense.device), self.moving] = self.scale
        return dense.reshape(self.n_factors, *self.center.shape)

    def half_widths(self) -> Float[Tensor, "S d"]:
        """Return Σ|G|, half the width of the bounding box in each coordinate; constraints are ignored."""
        return self.radius if self.radius is not None else self.generators.abs().sum(0)  # type: ignore[union-attr]

    def scaled(self, factor: float) -> Region:
        """Return the same set with all generators multiplied by a factor: how a radius search grows a region.

        Args:
            factor: a positive number.
        """
        positive(factor, "the scale")
        return Region(
            self.center,
            None if self.radius is None else self.radius * factor,
            None if self.generators is None else self.generators * factor,
            self.constraints,
            f"{factor:g} × {self.label}",
            self.anchor,
            self.image,
            free=self.free,
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Region:
        """Return a copy on another device or in another precision.

        Args:
            device: as in `torch.Tensor.to`; None to stay.
            dtype: as in `torch.Tensor.to`; None to keep it.
        """

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype)

        held = self.constraints
        if held is not None:
            held = Constraints(*(t.to(device=device, dtype=dtype) for t in vars(held).values()))
        center = self.center.to(device=device, dtype=dtype)
        return Region(
            center,
            move(self.radius),
            move(self.generators),
            held,
            self.label,
            move(self.anchor),
            self.image,
            self.starts,
            self.free,
        )

    def sample(
        self, n: int, seed: int = 0, corners: float = 0.5
    ) -> tuple[Float[Tensor, "n S d"], Float[Tensor, "n p"]]:
        """Draw points of the set.

        Constraints are met by alternating projections. Points that stay outside after a fixed number of rounds are
        dropped, so that fewer than n may come back.

        Args:
            n: how many points to draw.
            seed: seed of the random generator.
            corners: the share of points at vertices of the factor box; the others are uniform.

        Returns:
            The points [n, S, d] and their factors [n, p].
        """
        generator = torch.Generator().manual_seed(seed)
        alpha = torch.rand(n, self.n_factors, generator=generator, dtype=torch.float64) * 2 - 1
        at_corner = torch.rand(n, generator=generator) < corners
        alpha = torch.where(at_corner[:, None], torch.sign(alpha), alpha).to(self.center)
        if self.constraints is not None:
            alpha = self.feasible(alpha)
        return self.point(alpha), alpha

    def feasible(self, alpha: Float[Tensor, "n p"], rounds: int = 200) -> Float[Tensor, "m p"]:
        """Project factors onto the constraints and the box in turn, and keep those that end inside.

        Args:
            alpha: factors, shape [n, p].
            rounds: how many times to project.
        """
        alpha = alpha.clamp(-1.0, 1.0)
        if self.constraints is None:
            return alpha
        rows = torch.cat((self.constraints.A_eq, self.constraints.A_ub))
        limits = torch.cat((self.constraints.b_eq, self.constraints.b_ub))
        n_equal = len(self.constraints.b_eq)
        norms = rows.square().sum(-1)
        for _ in range(rounds):
            for i, row in enumerate(rows):
                excess = alpha @ row - limits[i]
                if i >= n_equal:
                    excess = excess.clamp(min=0.0)
                if float(norms[i]) > 0.0:
                    alpha = alpha - (excess / norms[i])[:, None] * row
            alpha = alpha.clamp(-1.0, 1.0)
        return alpha[self.constraints.satisfied(alpha, tolerance=FEASIBILITY)]

    def contains(self, x: Float[Tensor, "S d"], tolerance: float = 0.0) -> bool:
        """Say whether a point lies in the set; with generators or constraints a linear program decides.

        Args:
            x: a point, shape [S, d].
            tolerance: how far each coordinate may miss the set, absolutely.
        """
        if x.shape != self.center.shape:
            raise RegionError(f"the point has shape {list(x.shape)}, expected {list(self.center.shape)}")
        if self.radius is not None and self.constraints is None:
            return bool(((x - self.center).abs() <= self.radius + tolerance).all())
        from prooflens.regions.membership import nearest_factors

        alpha, slack = nearest_factors(self, x), max(tolerance, FEASIBILITY)
        if alpha is None:
            return False
        held = self.constraints is None or bool(self.constraints.satisfied(alpha, slack))
        return held and bool((self.point(alpha) - x).abs().max() <= slack)

    def corners(self) -> Float[Tensor, "n S d"]:
        """Return the vertices of the factor box that satisfy the constraints (`MAX_CORNER_FACTORS` at most)."""
        if self.n_factors > MAX_CORNER_FACTORS:
            raise RegionError(f"{self.n_factors} factors have too many corners; at most {MAX_CORNER_FACTORS}")
        alpha = torch.tensor(
            list(itertools.product((-1.0, 1.0), repeat=self.n_factors)), dtype=self.center.dtype
        )
        alpha = alpha.reshape(-1, self.n_factors).to(self.center)
        if self.constraints is not None:
            alpha = alpha[self.constraints.satisfied(alpha, tolerance=FEASIBILITY)]
        return self.point(alpha)


def numbers(given: Any, what: str) -> Tensor:
    """Convert what was given to a floating tensor: lists become float64, tensors and arrays keep their precision.

    Args:
        given: a tensor, an array, or lists of numbers.
        what: how an error message names it.
    """
    try:
        tensor = torch.as_tensor(given, dtype=None if hasattr(given, "dtype") else torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RegionError(f"{what} must be a tensor of numbers, got {type(given).__name__}") from error
    return tensor if tensor.is_floating_point() else tensor.double()


def positive(value: Any, what: str, zero: bool = False) -> float:
    """Return a positive finite number, or raise a `RegionError`.

    Args:
        value: what was given.
        what: how the error message names it.
        zero: also accept 0.
    """
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not (number > 0 or (zero and number == 0)) or number == math.inf:
        raise RegionError(f"{what} must be a positive finite number, got {value!r}")
    return number
