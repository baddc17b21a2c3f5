"""Interpolation at Chebyshev points of a box [−1, 1]^k, with its error.

The *runs* of a value are what the model gives at the points of a tensor grid, D + 1 Chebyshev points per factor. P is
the polynomial through them: degree at most D in each factor, P = Σ_m c_m T_m(α) with T_m a product of Chebyshev
polynomials, |T_m| ≤ 1 on the box.

For f analytic in one factor inside the ellipse with foci ±1 and half-axes summing to r, and |f| ≤ M there, the
interpolant at D + 1 points misses f by at most 4Mr^{−D}/(r − 1) on [−1, 1]: |a_n| ≤ 2Mr^{−n} for the coefficients of
f, and aliasing counts those beyond D twice. Factor by factor, f − I₁…I_k f = Σ_i I₁…I_{i−1}(f − I_i f), so errors add
up with the Lebesgue constants Λ of the factors before; in the i-th term only the i-th factor leaves the real line. On
the ellipse |T_n| ≤ (rⁿ + r^{−n})/2, so |P − c₀| ≤ Σ_{m≠0} |c_m| (rⁿ + r^{−n})/2 there, n = m_i. *What P's own degree
can hold is interpolated without error and may be taken off f before M is bounded.*

A bound on an ellipse is crude, and r^{−D} makes up for it only if D is large. So steps that are cheap to evaluate are
also run at the points of a grid of two or three times the degree (`Finer`): how far the two interpolants are apart is
*seen*, and only what the finer one misses is bounded on an ellipse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.norms import grow
from prooflens.numerics import gamma

RADII = (1.25, 1.5, 2.0, 2.5, 3.2, 4.0, 5.0, 6.5, 8.0, 11.0, 16.0, 24.0, 40.0, 80.0)
"""The ellipses that are tried; every one gives a valid bound."""


MOST_POINTS = 7000
"""Finer grids of more points than this are not used: what they would show is bounded on ellipses."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Chebyshev points of a box of k factors.

    Attributes:
        degrees: D per factor; no factor at all makes a grid of one point.
        like: a tensor whose precision and device everything gets.
    """

    degrees: tuple[int, ...]
    like: Tensor

    @property
    def size(self) -> int:
        """How many points there are."""
        return math.prod(degree + 1 for degree in self.degrees)

    @cached_property
    def points(self) -> Float[Tensor, "N k"]:
        """The points, the last factor running fastest. Rounded: callers count how far inputs move by that."""
        axes = [torch.tensor(_points(degree), dtype=torch.float64) for degree in self.degrees]
        if not axes:
            return self.like.new_zeros(1, 0)
        return torch.cartesian_prod(*axes).reshape(self.size, len(axes)).to(self.like)

    @cached_property
    def transforms(self) -> list[Float[Tensor, "n n"]]:
        """The map from runs to coefficients, factor by factor."""
        found = []
        for degree in self.degrees:
            n = degree + 1
            rows = [
                [
                    (1.0 if m == 0 else 2.0) / n * math.cos(m * (2 * j + 1) * math.pi / (2 * n))
                    for j in range(n)
                ]
                for m in range(n)
            ]
            found.append(torch.tensor(rows, dtype=torch.float64).to(self.like))
        return found

    @cached_property
    def exponents(self) -> Float[Tensor, "k N"]:
        """The degree of every T_m in every factor."""
        axes = [torch.arange(degree + 1, dtype=torch.float64) for degree in self.degrees]
        if not axes:
            return self.like.new_zeros(0, 1)
        return torch.cartesian_prod(*axes).reshape(self.size, len(axes)).T.to(self.like)

    @cached_property
    def linear(self) -> tuple[int, ...]:
        """Where the coefficients of the factors themselves stand."""
        strides, step = [], 1
        for degree in reversed(self.degrees):
            strides.append(step)
            step *= degree + 1
        return tuple(reversed(strides))

    @cached_property
    def finer(self) -> Finer:
        """A grid of two or three times the degree, where a defect is seen rather than bounded; itself if too large."""
        times = 3 if len(self.degrees) == 1 else 2
        size = math.prod(times * degree + 1 for degree in self.degrees)
        return Finer.of(self, times if size <= MOST_POINTS else 1)

    @cached_property
    def threefold(self) -> Finer:
        """A grid of three times the degree: products of three polynomials are known by their values there."""
        return Finer.of(self, 3)

    @property
    def lebesgue(self) -> float:
        """Λ: an interpolant is at most so many times as large as its runs."""
        found = math.prod((2.0 / math.pi) * math.log(degree + 1) + 1.0 for degree in self.degrees)
        return found * (1.0 + 2.0**-32)

    @property
    def _rounding(self) -> float:
        """How much a computed coefficient may be off, as a share of the largest run.

        An entry of the transform is at most 2^k/N, off by a few u; a coefficient sums N of their products.
        """
        return 2.0 ** len(self.degrees) * gamma(2 * self.size + 64 * len(self.degrees) + 64)

    def coefficients(
        self, runs: Float[Tensor, "b N *n"]
    ) -> tuple[Float[Tensor, "b N *n"], Float[Tensor, "b ..."]]:
        """Return the coefficients c_m, c₀ first, and by how much each of them may be off.

        Args:
            runs: values at the points.
        """
        found = along(self.transforms, runs)
        return found, grow(self._rounding * runs.abs().amax(1))

    def moves(self, coefficients: Tensor, off: Tensor) -> Float[Tensor, "b ..."]:
        """Bound |P − c₀| on the box, with c₀ as computed: Σ_{m≠0} |c_m| and all that rounding moves."""
        return grow(coefficients[:, 1:].abs().sum(1) + self.size * off)

    @cached_property
    def _powers(self) -> Float[Tensor, "k r N"]:
        """sup |T_n| = (rⁿ + r^{−n})/2 on every ellipse, n = m_i, for every factor i and every m; 0 for m = 0."""
        radii = torch.tensor(RADII, dtype=torch.float64).to(self.like)
        powers = radii[None, :, None] ** self.exponents[:, None, :]
        found = 0.5 * (powers + 1.0 / powers) * (1.0 + 2.0**-40)
        found[..., 0] = 0.0
        return found

    def on_ellipses(
        self, sizes: Float[Tensor, "b N *n"], off: Float[Tensor, "b ..."]
    ) -> Float[Tensor, "k r b *n"]:
        """Bound Σ_{m≠0} |c_m| sup|T_m|, for every factor i and every ellipse r in it.

        Args:
            sizes: |c_m|, or norms of vectors c_m.
            off: by how much each may be off.
        """
        found = torch.einsum("irm,bm...->irb...", self._powers, sizes)
        rounding = self._powers.sum(-1) + 1.0  # and c₀ itself
        return grow(found + rounding.reshape(*rounding.shape, *(1 for _ in off.shape)) * off)

    @cached_property
    def _errors(self) -> Float[Tensor, "k r"]:
        """Λ₁…Λ_{i−1} · 4r^{−D}/(r − 1) for every factor and ellipse."""
        rows, before = [], 1.0
        for degree in self.degrees:
            rows.append([before * 4.0 * r**-degree / (r - 1.0) * (1.0 + 2.0**-32) for r in RADII])
            before *= (2.0 / math.pi) * math.log(degree + 1) + 1.0
        return torch.tensor(rows, dtype=torch.float64).reshape(len(self.degrees), len(RADII)).to(self.like)

    def defect(
        self, most: Float[Tensor, "k r b *n"], plain: Float[Tensor, "b ..."] | None = None
    ) -> Float[Tensor, "b ..."]:
        """Bound how far the interpolant of a function is from it, on the box.

        Args:
            most: M for every factor and ellipse; ∞ or NaN where the function has none.
            plain: a bound of the function on the box itself, which gives (1 + Λ) times as much; None for none.
        """
        if not self.degrees:
            return most.new_zeros(most.shape[2:])
        errors = self._errors.reshape(*self._errors.shape, *(1 for _ in most.shape[2:]))
        each = (most.nan_to_num(nan=torch.inf, posinf=torch.inf) * errors).amin(1)
        found = grow(each.sum(0))
        return found if plain is None else torch.minimum(found, grow((1.0 + self.lebesgue) * plain))


@dataclass(frozen=True, eq=False)
class Finer:
    """A grid of a multiple of a degree, and how interpolants get there.

    Attributes:
        coarse: the grid that it refines.
        grid: the finer grid.
        values: the map from runs to the interpolant at the finer points, factor by factor.
    """

    coarse: Grid
    grid: Grid
    values: list[Float[Tensor, "n m"]]

    @classmethod
    def of(cls, coarse: Grid, times: int) -> Finer:
        """Refine a grid.

        Args:
            coarse: the grid.
            times: by what its degrees are multiplied.
        """
        fine = Grid(tuple(times * degree for degree in coarse.degrees), coarse.like)
        values = []
        for few, many, transform in zip(coarse.degrees, fine.degrees, coarse.transforms, strict=True):
            angles = [(2 * j + 1) * math.pi / (2 * (many + 1)) for j in range(many + 1)]
            rows = [[math.cos(m * t) for m in range(few + 1)] for t in angles]
            values.append(torch.tensor(rows, dtype=torch.float64).to(coarse.like) @ transform)
        return cls(coarse, fine, values)

    def at(self, runs: Float[Tensor, "b N *n"]) -> tuple[Float[Tensor, "b n *n"], Float[Tensor, "b ..."]]:
        """Return the interpolant at the finer points, and by how much that may be off.

        An entry of the map sums N products of cosines of at most 2^k, each off by a few u.

        Args:
            runs: values at the points of the coarse grid.
        """
        found = along(self.values, runs)
        k, N = len(self.coarse.degrees), self.coarse.size
        off = 4.0**k * N * gamma(4 * N + 64 * k + 64)
        return found, grow(off * runs.abs().amax(1))

    def padded(self, coefficients: Float[Tensor, "b N *n"]) -> Float[Tensor, "b n *n"]:
        """Return coefficients of the coarse grid among those of the finer one."""
        few, many = ([degree + 1 for degree in grid.degrees] for grid in (self.coarse, self.grid))
        b, rest = len(coefficients), coefficients.shape[2:]
        found = coefficients.new_zeros(b, *many, *rest)
        found[(slice(None), *(slice(n) for n in few))] = coefficients.reshape(b, *few, *rest)
        return found.reshape(b, self.grid.size, *rest)

    def apart(
        self, runs: Float[Tensor, "b N *n"], fine_runs: Float[Tensor, "b n *n"]
    ) -> Float[Tensor, "b ..."]:
        """Bound, on the box, how far the interpolants of one function on the two grids are apart.

        Args:
            runs: the function at the points of the coarse grid.
            fine_runs: the function at the finer points.
        """
        coarse, off = self.coarse.coefficients(runs)
        fine, fine_off = self.grid.coefficients(fine_runs)
        apart = (fine - self.padded(coarse)).abs().sum(1)
        return grow(apart + self.coarse.size * off + self.grid.size * fine_off)


def along(maps: list[Float[Tensor, "n m"]], runs: Float[Tensor, "b N *n"]) -> Float[Tensor, "b M *n"]:
    """Apply a linear map to every factor's own dimension of values on a grid.

    Args:
        maps: a matrix for each factor.
        runs: values, the last factor running fastest.
    """
    found = runs.reshape(len(runs), *(part.shape[1] for part in maps), -1)
    for axis, part in enumerate(maps, 1):
        found = torch.tensordot(part, found, dims=([1], [axis])).movedim(0, axis)
    return found.reshape(len(runs), -1, *runs.shape[2:])


def _points(degree: int) -> list[float]:
    n = degree + 1
    return [math.cos((2 * j + 1) * math.pi / (2 * n)) for j in range(n)]
