"""Branch and bound over the factor box, for small sets: support function, emptiness, membership."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.absorb import absorb
from prooflens.sets.arrays import as_float, parse, sum_up
from prooflens.sets.compact import merge_columns
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, fresh_ids, replaced
from prooflens.sets.constraints import constrain
from prooflens.sets.enclose import interval_enclosure
from prooflens.sets.factors import monomials, pull_to_constraints, sample_factors, substitute_factor
from prooflens.sets.interval import Interval
from prooflens.sets.lagrange import constrained_upper, infeasible

Cell = tuple[tuple[Fraction, Fraction], ...]
"""A sub-box of the factors, (middle, radius) for each: dyadic, so exact."""


@dataclass(frozen=True)
class Support:
    """The support function in one direction, bracketed.

    Attributes:
        upper: proved: direction·x ≤ upper on the whole set; −inf if the set is proved empty.
        attained: the value at the best feasible factors found. They are feasible to the sampler's tolerance, so this
            is a witness and not a proof.
        alpha: those factors.
    """

    upper: float
    attained: float
    alpha: tuple[float, ...]


def support(
    z: ConstrainedPolynomialZonotope,
    direction: Float[Tensor, " n"],
    *,
    tolerance: float = 1e-3,
    max_cells: int = 500,
    seed: int = 0,
) -> Support:
    """Bracket max direction·x over z by best-first branch and bound with Lagrangian bounds in every cell.

    It stops when upper − attained ≤ tolerance, or after `max_cells` cells with the bound reached by then; both are
    sound. Independent generators enter as Σ_j |direction·GI_j|. It is not meant for more than a handful of factors.

    Args:
        z: the set.
        direction: a vector, shape [n].
        tolerance: the gap that is small enough.
        max_cells: the largest number of cells to bound.
        seed: seed of the sampler.

    Example:
        >>> parabola = ConstrainedPolynomialZonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1, 2]])
        >>> found = support(parabola, [1.0, -1.0])  # max α − α² = ¼ at α = ½
        >>> found.attained <= 0.25 <= found.upper <= 0.25 + 1e-3
        True
    """
    given, direction = z, as_float(parse(direction, "the direction"))
    if tuple(direction.shape) != (z.dim,):
        raise SetError(
            f"the direction has shape {tuple(direction.shape)}, but the set lies in dimension {z.dim}"
        )
    z = _boxed(_floats(z))
    f = torch.cat([(direction @ z.c)[None], direction @ z.G])
    spread = sum_up((direction @ z.GI).abs(), 0)
    sizes = torch.cat([z.c[:, None], z.G, z.GI], dim=1).abs()
    margin = float(up(spread + up(gamma(2 * z.dim + 4) * sum_up((direction.abs() @ sizes), 0) + TINY)))
    system = _System.of(z, f)
    attained, alpha = _best_sample(z, system, seed)
    upper = _branch(system, attained, tolerance, max_cells)
    if upper == float("-inf"):
        return Support(upper, upper, ())
    return Support(float(up(upper + margin)), attained + float(spread), alpha[: given.factors])


def constrained_enclosure(z: ConstrainedPolynomialZonotope) -> Interval:
    """Return the interval enclosure with every constraint used: one Lagrangian bound per coordinate and side.

    There is no branching. The box is never wider than `interval_enclosure` with method "best".

    Args:
        z: the set.

    Raises:
        SetError: if z is proved empty.

    Example:
        >>> z = ConstrainedPolynomialZonotope([0.0], [[1.0, 1.0]], A=[[1.0, -1.0]], b=[1.0], R=[[1, 0], [0, 1]])
        >>> round(constrained_enclosure(z).upper.item(), 6)  # α₁ + α₂ with α₁ − α₂ = 1: at (1, 0)
        1.0
    """
    z = _floats(z)
    plain = interval_enclosure(z, method="best")
    spread = sum_up(z.GI.abs())
    whole = _whole(z.factors)
    rows = torch.cat([z.c[:, None], z.G], dim=1)
    upper = torch.tensor([_System.of(z, row).upper_in(whole) for row in rows], dtype=torch.float64)
    lower = -torch.tensor([_System.of(z, -row).upper_in(whole) for row in rows], dtype=torch.float64)
    if not bool((upper.isfinite() & lower.isfinite()).all()):
        raise SetError("the set is empty: its constraints contradict each other")
    common = plain.intersect(Interval(down(lower - spread), up(upper + spread)))
    if common is None:
        raise SetError("the set is empty: its constraints do not meet its box")
    return common


def is_empty(z: ConstrainedPolynomialZonotope, *, max_cells: int = 500, seed: int = 0) -> bool | None:
    """Decide whether z is empty.

    Args:
        z: the set.
        max_cells: the largest number of cells to bound.
        seed: seed of the sampler.

    Returns:
        True if z is proved empty, False if feasible factors were found (to the sampler's tolerance), None if
        undecided.

    Example:
        >>> is_empty(ConstrainedPolynomialZonotope([0.0], [[1.0]], A=[[1.0]], b=[2.0], R=[[1]]))  # α = 2
        True
    """
    z = _floats(z)
    if (
        z.box is not None
        and interval_enclosure(replaced(z, box=None), method="best").intersect(z.box) is None
    ):
        return True
    z = _boxed(z)
    if z.constraints == 0:
        return False
    system = _System.of(z, torch.zeros(1 + z.dependent, dtype=torch.float64))
    if len(sample_factors(z, 64, torch.Generator().manual_seed(seed))):
        return False
    waiting = [_whole(z.factors)]
    for _ in range(max_cells):
        if not waiting:
            return True
        cell = waiting.pop(0)
        if not system.empty_in(cell):
            waiting.extend(_halves(cell))
    return True if not waiting else None


def contains(
    z: ConstrainedPolynomialZonotope, point: Float[Tensor, " n"], *, max_cells: int = 500, seed: int = 0
) -> bool | None:
    """Decide whether a point lies in z.

    The point is in z if and only if z with the constraint z(α) = point has feasible factors. The centre enters the
    constraint as a constant monomial, so that point − c is not rounded.

    Args:
        z: the set.
        point: a vector, shape [n].
        max_cells: the largest number of cells to bound.
        seed: seed of the sampler.

    Returns:
        False if it is proved to lie outside, True if it is within the sampler's tolerance of a point of z, None if
        undecided.

    Example:
        >>> parabola = ConstrainedPolynomialZonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1, 2]])
        >>> contains(parabola, [0.5, 0.25]), contains(parabola, [0.0, 1.0])
        (True, False)
    """
    z, point = absorb(_floats(z)), as_float(parse(point, "the point"))
    if tuple(point.shape) != (z.dim,):
        raise SetError(f"the point has shape {tuple(point.shape)}, but the set lies in dimension {z.dim}")
    if z.box is not None:
        if not bool(z.box.contains(point)):
            return False
        z = replaced(z, box=None)
    constant = torch.zeros((z.factors, 1), dtype=torch.int64)
    columns = torch.cat([z.c[:, None], z.G], dim=1)
    met = constrain(z, columns, point, torch.cat([constant, z.E], dim=1))
    empty = is_empty(met, max_cells=max_cells, seed=seed)
    return None if empty is None else not empty


@dataclass(frozen=True, eq=False)
class _System:
    """Objective f and constraints A m = b over one list of monomials E, merged from `terms` columns."""

    f: Tensor
    A: Tensor
    b: Tensor
    E: Tensor
    terms: int

    @classmethod
    def of(cls, z: ConstrainedPolynomialZonotope, f: Tensor) -> _System:
        constant = torch.zeros((z.factors, 1), dtype=torch.int64)
        E = torch.cat([constant, z.E, z.R], dim=1)
        q = z.constraints
        A = torch.cat([torch.zeros((q, 1 + z.dependent), dtype=torch.float64), z.A], dim=1)
        f = torch.cat([f, torch.zeros(z.R.shape[1], dtype=torch.float64)])
        # One column per monomial, or the linear program would take equal monomials for different variables.
        rows, merged = merge_columns(torch.cat([f[None, :], A]), E)
        return cls(rows[0], rows[1:], z.b, merged, int(E.shape[1]))

    def restricted(self, cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows (f, A) and exponents in the cell's own factors, and a bound of each row's rounding.

        A term g α^E becomes terms whose sizes add up to at most |g|, because |middle| + radius ≤ 1. Each is rounded a
        few times per factor and degree, and merged with at most as many others as there are terms, so γ of the sum
        bounds the row's error.
        """
        rows, E = torch.cat([self.f[None, :], self.A]), self.E
        size = sum_up(rows.abs())
        roundings = 16 + self.terms + 4 * len(cell) + 2 * int(E.sum())
        for k, (middle, radius) in enumerate(cell):
            if radius != 1:
                rows, E = substitute_factor(rows, E, k, middle, radius)
                roundings += int(E.shape[1])
                rows, E = merge_columns(rows, E)
        return rows, E, up(gamma(2 * roundings) * size + TINY)

    def upper_in(self, cell: Cell) -> float:
        """Bound f on the feasible part of the cell from above; −inf if that part is proved empty."""
        rows, E, error = self.restricted(cell)
        if infeasible(rows[1:], self.b, E, error[1:]):
            return float("-inf")
        plain = float(up(constrained_upper(rows[0], rows[:0], self.b[:0], E) + float(error[0])))
        if len(self.b) == 0:
            return plain
        return min(plain, _with_slack(rows, self.b, E, error))

    def empty_in(self, cell: Cell) -> bool:
        rows, E, error = self.restricted(cell)
        return infeasible(rows[1:], self.b, E, error[1:])


def _with_slack(rows: Tensor, b: Tensor, E: Tensor, error: Tensor) -> float:
    """Compute `constrained_upper` for constraints known up to ± error, by a slack variable of that size in each."""
    q, p = len(b), E.shape[0]
    powers = torch.zeros((p + q, E.shape[1] + q), dtype=torch.int64)
    powers[:p, : E.shape[1]] = E
    powers[p:, E.shape[1] :] = torch.eye(q, dtype=torch.int64)
    A = torch.cat([rows[1:], torch.diag(error[1:])], dim=1)
    f = torch.cat([rows[0], torch.zeros(q, dtype=torch.float64)])
    return float(up(constrained_upper(f, A, b, powers) + float(error[0])))


def _branch(system: _System, attained: float, tolerance: float, max_cells: int) -> float:
    """Return the largest bound of any cell that is left when the gap closes or the budget ends."""
    whole = _whole(system.E.shape[0])
    heap = [(-system.upper_in(whole), 0, whole)]
    count = 1
    while heap and count < max_cells and -heap[0][0] > attained + tolerance and heap[0][2]:
        bound, _, cell = heapq.heappop(heap)
        for part in _halves(cell):
            # A part lies in its parent, so the parent's bound holds for it too.
            heapq.heappush(heap, (max(bound, -system.upper_in(part)), count, part))
            count += 1
    return -heap[0][0] if heap else float("-inf")


def _best_sample(
    z: ConstrainedPolynomialZonotope, system: _System, seed: int
) -> tuple[float, tuple[float, ...]]:
    alpha = sample_factors(z, 512, torch.Generator().manual_seed(seed))
    for shrink in (0.3, 0.1, 0.03, 0.01, 0.003):
        if len(alpha) == 0:
            return float("-inf"), ()
        values = monomials(alpha, system.E) @ system.f
        best = alpha[values.argmax()]
        noise = torch.rand(
            (256, z.factors), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
        )
        moved = pull_to_constraints(z, (best + shrink * (2 * noise - 1)).clamp(-1, 1))
        alpha = torch.cat([best[None, :], moved])
    values = monomials(alpha, system.E) @ system.f
    return float(values.max()), tuple(alpha[values.argmax()].tolist())


def _whole(p: int) -> Cell:
    return ((Fraction(0), Fraction(1)),) * p


def _halves(cell: Cell) -> list[Cell]:
    """Cut the cell in two across its widest factor."""
    if not cell:
        return []
    k = max(range(len(cell)), key=lambda i: cell[i][1])
    middle, radius = cell[k]
    return [(*cell[:k], (middle + side * radius / 2, radius / 2), *cell[k + 1 :]) for side in (-1, 1)]


def _floats(z: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    box = None if z.box is None else Interval(as_float(z.box.lower), as_float(z.box.upper))
    return ConstrainedPolynomialZonotope(
        as_float(z.c), as_float(z.G), z.E, as_float(z.GI), as_float(z.A), as_float(z.b), z.R, z.ids, box
    )


def _boxed(z: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """Return z with its box as constraints: x_i(α) = m_i + r_i s_i, with a fresh s_i for each side that the box cuts.

    m ± r is rounded outward, so that no point of the set is lost. Independent generators become dependent.
    """
    if z.box is None:
        return z
    box, free = z.box, replaced(z, box=None)
    hull = interval_enclosure(free, method="best")
    cut = torch.nonzero((hull.lower < box.lower) | (hull.upper > box.upper)).flatten()
    if not len(cut):
        return free
    free = absorb(free)
    lower, upper = box.lower[cut], box.upper[cut]
    middle = (lower + upper) / 2
    radius = torch.maximum(up(upper - middle), up(middle - lower)).clamp(min=0.0)
    size, slacks = free.factors, len(cut)
    terms = torch.cat([torch.zeros((size, 1), dtype=torch.int64), free.E], dim=1)
    R = torch.block_diag(terms, torch.eye(slacks, dtype=torch.int64))
    A = torch.cat([free.c[cut, None], free.G[cut], -torch.diag(radius)], dim=1)
    return constrain(free, A, middle, R, (*free.ids, *fresh_ids(slacks)))
