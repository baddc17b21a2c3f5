"""Ranges of polynomials in the Chebyshev basis: Bernstein coefficients on cells of the box.

On a cell, a polynomial lies between its least and its greatest Bernstein coefficient there. The map from Chebyshev
coefficients to those of every cell is rational; it is computed exactly and rounded once.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.relaxations.norms import grow
from prooflens.numerics import gamma

CELLS = {1: 8, 2: 4}
"""Into how many cells each factor's interval is cut, by how many factors there are; 2 for more."""


def polynomial_range(
    grid: Grid, coefficients: Float[Tensor, "b N F"], off: Float[Tensor, "b F"]
) -> tuple[Float[Tensor, "b F"], Float[Tensor, "b F"]]:
    """Return proved lower and upper bounds of polynomials on the box.

    Args:
        grid: whose coefficients they are.
        coefficients: c_m of every polynomial.
        off: by how much each coefficient may be off.
    """
    cells = CELLS.get(len(grid.degrees), 2)
    b, _, F = coefficients.shape
    found, sizes = coefficients, coefficients.abs()
    for axis, degree in enumerate(grid.degrees):
        rows = torch.tensor(_to_bernstein(degree, cells), dtype=torch.float64).to(found)
        done = math.prod(cells * (d + 1) for d in grid.degrees[:axis])
        rest = math.prod(d + 1 for d in grid.degrees[axis + 1 :])
        found = torch.einsum("xm,bdmrf->bdxrf", rows, found.reshape(b, done, degree + 1, rest, F)).flatten(
            1, 3
        )
        sizes = torch.einsum(
            "xm,bdmrf->bdxrf", rows.abs(), sizes.reshape(b, done, degree + 1, rest, F)
        ).flatten(1, 3)
    rounding = grow(gamma(4 * grid.size + 16) * sizes.amax(1) + grid.size * off)
    return found.amin(1) - rounding, found.amax(1) + rounding


@lru_cache(maxsize=64)
def _to_bernstein(degree: int, cells: int) -> list[list[float]]:
    """Rows: Bernstein coefficients of all cells, one cell after the other. Columns: T_0 … T_D."""
    chebyshev: list[list[Fraction]] = [[Fraction(1)], [Fraction(0), Fraction(1)]]
    while len(chebyshev) <= degree:
        twice = [Fraction(0), *(2 * c for c in chebyshev[-1])]
        for power, c in enumerate(chebyshev[-2]):
            twice[power] -= c
        chebyshev.append(twice)
    rows = []
    for cell in range(cells):
        low, width = Fraction(2 * cell, cells) - 1, Fraction(2, cells)
        shifted = [_shifted(chebyshev[m], low, width, degree) for m in range(degree + 1)]
        for i in range(degree + 1):
            rows.append(
                [
                    float(
                        sum(
                            (Fraction(math.comb(i, j), math.comb(degree, j)) * a[j] for j in range(i + 1)),
                            Fraction(0),
                        )
                    )
                    for a in shifted
                ]
            )
    return rows


def _shifted(powers: list[Fraction], low: Fraction, width: Fraction, degree: int) -> list[Fraction]:
    """Coefficients, in s ∈ [0, 1], of a polynomial at low + width·s."""
    found = [Fraction(0)] * (degree + 1)
    for n, c in enumerate(powers):
        for j in range(n + 1):
            found[j] += c * math.comb(n, j) * low ** (n - j) * width**j
    return found
