"""Input sets around a post-embedding input x₀, all of one kind:

    { x₀ + Gα  |  α ∈ [-1, 1]^p,  A_eq α = b_eq,  A_ub α ≤ b_ub }.

An ε-ball has G = εI and is kept as a vector of radii, never as a matrix. A paraphrase hull has one generator per
paraphrase. Constraints can only make the set smaller: an engine that ignores them stays sound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import RegionError
from prooflens.models.prompt import Prompt

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer

MAX_CORNER_FACTORS = 20
"""`corners` lists 2^p points; beyond this many factors that is refused."""


@dataclass(frozen=True, eq=False)
class Constraints:
    """Linear constraints on the factors: A_eq α = b_eq and A_ub α ≤ b_ub, either may have no rows."""

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
        """Constraints on `n_factors` factors; what is left out has no rows."""
        none, nil = torch.zeros(0, n_factors, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        made = cls(
            none if A_eq is None else _numbers(A_eq, "A_eq").double(),
            nil if b_eq is None else _numbers(b_eq, "b_eq").double(),
            none if A_ub is None else _numbers(A_ub, "A_ub").double(),
            nil if b_ub is None else _numbers(b_ub, "b_ub").double(),
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
        """Which points satisfy all constraints up to an absolute tolerance."""
        equal = (alpha @ self.A_eq.T - self.b_eq).abs() <= tolerance
        below = alpha @ self.A_ub.T - self.b_ub <= tolerance
        return equal.all(-1) & below.all(-1)


@dataclass(frozen=True, eq=False)
class Region:
    """An input set: centre, generators (a vector of radii, or p dense ones), optional constraints.

    Exactly one of `radius` and `generators` is given; both take the centre's precision. Coordinates with radius 0 have
    no factor. Under constraints the centre itself may lie outside (`holds_center`).
    """

    center: Float[Tensor, "S d"]
    radius: Float[Tensor, "S d"] | None = None
    generators: Float[Tensor, "p S d"] | None = None
    constraints: Constraints | None = None
    label: str = "region"
    moving: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", _numbers(self.center, "the centre"))
        if self.center.ndim != 2 or self.center.numel() == 0:
            raise RegionError(f"the centre must have shape [S, d], got {list(self.center.shape)}")
        if (self.radius is None) == (self.generators is None):
            raise RegionError("give a radius per coordinate or generators: one of them, not both")
        kind = "radius" if self.radius is not None else "generators"
        spread = _numbers(getattr(self, kind), kind).to(self.center)
        object.__setattr__(self, kind, spread)
        lead: tuple[int | str, ...] = () if kind == "radius" else (spread.shape[0] if spread.ndim else "p",)
        wanted = (*lead, *self.center.shape)
        if tuple(spread.shape) != wanted:
            raise RegionError(
                f"{kind} must have shape [{', '.join(map(str, wanted))}], got {list(spread.shape)}; for one ε use "
                "Ball(ε)"
            )
        for what, tensor in (("centre", self.center), ("spread", spread)):
            if not bool(torch.isfinite(tensor).all()):
                raise RegionError(f"the {what} holds NaN or infinite values")
        if self.radius is not None and bool((self.radius < 0).any()):
            raise RegionError("radii must not be negative")
        moving = (
            (self.radius if self.radius is not None else torch.zeros_like(self.center)).flatten().nonzero()
        )
        object.__setattr__(self, "moving", moving[:, 0])
        if not isinstance(self.constraints, Constraints | None):
            raise RegionError("constraints are made by Constraints.of(n_factors, A_eq, b_eq, A_ub, b_ub)")
        if self.constraints is not None and self.constraints.A_eq.shape[1] != self.n_factors:
            raise RegionError(f"the constraints must be on {self.n_factors} factors")

    @property
    def n_factors(self) -> int:
        """p, the number of factors."""
        return self.generators.shape[0] if self.generators is not None else int(self.moving.numel())

    @property
    def holds_center(self) -> bool:
        """Whether α = 0 satisfies the constraints: only then is the centre known to be a point of the set."""
        if self.constraints is None:
            return True
        return bool(self.constraints.satisfied(self.center.new_zeros(self.n_factors), tolerance=0.0))

    @property
    def scale(self) -> Float[Tensor, " p"]:
        """The radius that belongs to each factor of a ball."""
        if self.radius is None:
            raise RegionError("only regions given by radii have one scale per factor")
        return self.radius.flatten()[self.moving]

    def point(self, alpha: Float[Tensor, "... p"]) -> Float[Tensor, "... S d"]:
        """x₀ + Gα; differentiable in α."""
        if alpha.shape[-1] != self.n_factors:
            raise RegionError(f"the region has {self.n_factors} factors, got {alpha.shape[-1]}")
        if self.generators is not None:
            return self.center + torch.einsum("...p,psd->...sd", alpha, self.generators)
        move = torch.zeros(*alpha.shape[:-1], self.center.numel(), dtype=alpha.dtype, device=alpha.device)
        move = move.index_copy(-1, self.moving, alpha * self.scale)
        return self.center + move.reshape(*alpha.shape[:-1], *self.center.shape)

    def pullback(self, covector: Float[Tensor, "... S d"]) -> Float[Tensor, "... p"]:
        """Gᵀv: what a linear functional v of x is as a functional of α."""
        if self.generators is not None:
            return torch.einsum("...sd,psd->...p", covector, self.generators)
        return covector.flatten(-2)[..., self.moving] * self.scale

    def dense_generators(self) -> Float[Tensor, "p S d"]:
        """The generators as a dense tensor, whatever the region is kept as."""
        if self.generators is not None:
            return self.generators
        dense = self.center.new_zeros(self.n_factors, self.center.numel())
        dense[torch.arange(self.n_factors, device=dense.device), self.moving] = self.scale
        return dense.reshape(self.n_factors, *self.center.shape)

    def spread(self) -> Float[Tensor, "S d"]:
        """Σ|G|: half the width of the box around the set, coordinate by coordinate (constraints ignored)."""
        return self.radius if self.radius is not None else self.generators.abs().sum(0)  # type: ignore[union-attr]

    def scaled(self, factor: float) -> Region:
        """The same set with all generators multiplied: how a radius search grows a region."""
        _positive(factor, "the scale")
        return Region(
            self.center,
            None if self.radius is None else self.radius * factor,
            None if self.generators is None else self.generators * factor,
            self.constraints,
            f"{factor:g} × {self.label}",
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Region:
        """A copy on another device or in another precision."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype)

        held = self.constraints
        if held is not None:
            held = Constraints(*(t.to(device=device, dtype=dtype) for t in vars(held).values()))
        center = self.center.to(device=device, dtype=dtype)
        return Region(center, move(self.radius), move(self.generators), held, self.label)

    def sample(
        self, n: int, seed: int = 0, corners: float = 0.5
    ) -> tuple[Float[Tensor, "n S d"], Float[Tensor, "n p"]]:
        """n points of the set and their factors: a share `corners` at vertices of the box, the rest uniform.

        With constraints, points are made feasible by alternating projections; those that stay outside after a fixed
        number of rounds are dropped, so that fewer than n may come back.
        """
        generator = torch.Generator().manual_seed(seed)
        alpha = torch.rand(n, self.n_factors, generator=generator, dtype=torch.float64) * 2 - 1
        at_corner = torch.rand(n, generator=generator) < corners
        alpha = torch.where(at_corner[:, None], torch.sign(alpha), alpha).to(self.center)
        if self.constraints is not None:
            alpha = self.feasible(alpha)
        return self.point(alpha), alpha

    def feasible(self, alpha: Float[Tensor, "n p"], rounds: int = 200) -> Float[Tensor, "m p"]:
        """Project factors onto the constraints and the box in turn; keep those that end inside."""
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
        return alpha[self.constraints.satisfied(alpha, tolerance=_FEASIBILITY)]

    def contains(self, x: Float[Tensor, "S d"], tolerance: float = 0.0) -> bool:
        """Whether x lies in the set, up to an absolute tolerance per coordinate."""
        if x.shape != self.center.shape:
            raise RegionError(f"the point has shape {list(x.shape)}, expected {list(self.center.shape)}")
        if self.radius is not None and self.constraints is None:
            return bool(((x - self.center).abs() <= self.radius + tolerance).all())
        return self._contains_by_program(x, tolerance)

    def _contains_by_program(self, x: Tensor, tolerance: float) -> bool:
        """The α of the box and the constraints whose point is nearest to x, by a linear program: near enough?"""
        from scipy.optimize import linprog

        G = self.dense_generators().flatten(1).T.cpu().double()
        target = (x - self.center).flatten().cpu().double()
        # The solver's tolerances are absolute: in units of the largest entry they are relative.
        unit = max(float(G.abs().max()) if G.numel() else 0.0, float(target.abs().max())) or 1.0
        near = torch.full((len(G), 1), -1.0, dtype=torch.float64)
        A_ub = [torch.cat((G / unit, near), 1), torch.cat((-G / unit, near), 1)]
        b_ub = [target / unit, -target / unit]
        held = self.constraints and Constraints(
            *(part.cpu().double() for part in vars(self.constraints).values())
        )
        A_eq = b_eq = None
        if held:
            A_ub.append(torch.nn.functional.pad(held.A_ub, (0, 1)))
            b_ub.append(held.b_ub)
            A_eq, b_eq = torch.nn.functional.pad(held.A_eq, (0, 1)).numpy(), held.b_eq.numpy()
        result = linprog(
            [0.0] * self.n_factors + [1.0],
            A_ub=torch.cat(A_ub).numpy(),
            b_ub=torch.cat(b_ub).numpy(),
            A_eq=A_eq,
            b_eq=b_eq,
            bounds=[(-1.0, 1.0)] * self.n_factors + [(0.0, None)],
            method="highs",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if result.status != 0 or result.x is None:
            return False
        slack = max(tolerance, _FEASIBILITY)
        alpha = torch.tensor(result.x[:-1], dtype=torch.float64).clamp(-1.0, 1.0)
        reached = bool(((G @ alpha - target).abs() <= slack).all())
        return reached and (held is None or bool(held.satisfied(alpha, slack)))

    def corners(self) -> Float[Tensor, "n S d"]:
        """All 2^p vertices of the factor box that satisfy the constraints (small p only)."""
        if self.n_factors > MAX_CORNER_FACTORS:
            raise RegionError(f"{self.n_factors} factors have too many corners; at most {MAX_CORNER_FACTORS}")
        alpha = torch.tensor(
            list(itertools.product((-1.0, 1.0), repeat=self.n_factors)), dtype=self.center.dtype
        )
        alpha = alpha.reshape(-1, self.n_factors).to(self.center)
        if self.constraints is not None:
            alpha = alpha[self.constraints.satisfied(alpha, tolerance=_FEASIBILITY)]
        return self.point(alpha)


_FEASIBILITY = 1e-9
"""How far outside a constraint a sampled point may be: sampling is for attack and never part of a proof."""


@dataclass(frozen=True)
class Ball:
    """An ℓ∞ ball around a prompt: one ε for all tokens, for chosen tokens, or a radius per token.

    Tokens are indices; `certify`, `circuit`, `output` and `radius` also take their texts.
    """

    eps: float | Mapping[int, float] | Mapping[str, float] | Sequence[float]
    tokens: Sequence[int | str] | int | str | None = None

    def around(self, prompt: Prompt | Tensor) -> Region:
        """The region of this ball around a prompt (or around an input of shape [S, d])."""
        x = prompt.x if isinstance(prompt, Prompt) else prompt
        if x.ndim != 2:
            raise RegionError(f"a ball stands around an input of shape [S, d], got {list(x.shape)}")
        per_token = torch.zeros(x.shape[0], dtype=x.dtype)
        eps: Any = self.eps.tolist() if hasattr(self.eps, "tolist") else self.eps
        several = isinstance(eps, Mapping) or (isinstance(eps, Sequence) and not isinstance(eps, str))
        if several and self.tokens is not None:
            raise RegionError("give one ε and the tokens that move, or a radius per token: not both")
        if isinstance(eps, Mapping):
            for token, value in eps.items():
                per_token[_token_index(token, len(x))] = _positive(value, "ε")
        elif several:
            if len(eps) != len(x):
                raise RegionError(f"{len(eps)} radii for {len(x)} tokens: give one per token")
            per_token[:] = torch.tensor([_positive(e, "ε", zero=True) for e in eps], dtype=x.dtype)
        else:
            for token in range(len(x)) if self.tokens is None else listed(self.tokens):
                per_token[_token_index(token, len(x))] = _positive(eps, "ε")
        if not bool((per_token > 0).any()):
            raise RegionError("no token moves: give at least one token with ε > 0")
        radius = per_token.to(x)[:, None].expand(x.shape).clone()
        return Region(x, radius=radius, label=str(self))

    def __str__(self) -> str:
        where = "" if self.tokens is None else f" on tokens {listed(self.tokens)}"
        eps: Any = self.eps.tolist() if hasattr(self.eps, "tolist") else self.eps
        eps = f"{eps:g}" if isinstance(eps, int | float) else str(eps)
        return f"ball ε={eps}{where}"


@dataclass(frozen=True, eq=False)
class Paraphrases:
    """The hull of paraphrases of equal length ("Beyond ε-balls"): x̄ + Σ αᵢ(xᵢ − x̄), α ∈ [-1, 1]^n.

    With `convex`, the factors are also convex weights (αᵢ ≥ 0, Σαᵢ = 1): exactly the paraphrases' convex hull.
    """

    prompts: Sequence[Prompt | Tensor | str]
    convex: bool = False

    def of(self, model: Transformer) -> Paraphrases:
        """The same paraphrases with texts as prompts of a model."""
        made = [model.prompt(given) if isinstance(given, str) else given for given in _several(self.prompts)]
        return replace(self, prompts=made)

    def region(self) -> Region:
        """The region these paraphrases span."""
        points = [self._point(given) for given in _several(self.prompts)]
        if len(points) < 2:
            raise RegionError("a paraphrase hull needs at least two paraphrases")
        lengths = [len(p) for p in points]
        if len(set(lengths)) > 1:
            raise RegionError(f"paraphrases must have equal length in tokens, got {lengths}")
        if len({p.shape for p in points}) > 1:
            raise RegionError(f"paraphrases must have one width, got {sorted({p.shape[-1] for p in points})}")
        stack = torch.stack(points)
        center = stack.mean(0)
        constraints = None
        if self.convex:
            n = len(points)
            constraints = Constraints.of(
                n, torch.ones(1, n), torch.ones(1), A_ub=-torch.eye(n), b_ub=torch.zeros(n)
            )
        kind = "convex hull" if self.convex else "hull"
        return Region(
            center, generators=stack - center, constraints=constraints, label=f"{kind} of {len(points)} texts"
        )

    @staticmethod
    def _point(given: Prompt | Tensor | str) -> Tensor:
        if isinstance(given, str):
            raise RegionError(
                "a text is no point yet: give model.prompt(text), or Paraphrases([…]).of(model)"
            )
        return given.x if isinstance(given, Prompt) else _numbers(given, "a paraphrase")


def listed(tokens: Sequence[Any] | Any) -> list[Any]:
    """Tokens as a list, also where a single one is given."""
    held = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(held) if isinstance(held, Iterable) and not isinstance(held, str) else [held]


def _several(prompts: Sequence[Prompt | Tensor | str]) -> list[Prompt | Tensor | str]:
    if isinstance(prompts, str | Prompt):
        raise RegionError("a paraphrase hull needs a list of at least two paraphrases")
    return list(prompts)


def _numbers(given: Any, what: str) -> Tensor:
    """A floating tensor of what was given: a tensor, an array, or lists."""
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RegionError(f"{what} must be a tensor of numbers, got {type(given).__name__}") from error
    return tensor if tensor.is_floating_point() else tensor.double()


def _positive(value: Any, what: str, zero: bool = False) -> float:
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not (number > 0 or (zero and number == 0)) or number == math.inf:
        raise RegionError(f"{what} must be a positive finite number, got {value!r}")
    return number


def _token_index(token: object, n_tokens: int) -> int:
    if not isinstance(token, SupportsIndex) or not -n_tokens <= int(token) < n_tokens:
        raise RegionError(f"there is no token {token!r}: the input has tokens 0 … {n_tokens - 1}")
    return int(token) % n_tokens
