"""Linear programs against HiGHS and against the greedy solution in exact rationals."""

from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import block_diag

from prooflens.errors import EmptyPolytopeError
from prooflens.queries.simplex import (
    argmin,
    checked_box,
    group_difference,
    maximise,
    maximum_mass,
    minimise,
    minimum_mass,
    output_hull,
    pairwise_margins,
    tighten,
)

from .boxes import random_boxes

SIZES = range(1, 9)
PER_SIZE = 1250  # eight sizes: 10,000 boxes


def highs(cost: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The minimum of every row's program, many rows in one block-diagonal program."""
    count, size = cost.shape
    values = np.empty(count)
    for start in range(0, count, 250):
        part = slice(start, min(start + 250, count))
        rows = part.stop - start
        sums: Any = block_diag([np.ones((1, size))] * rows, format="csr")
        solution = linprog(
            cost[part].ravel(),
            A_eq=sums,
            b_eq=np.ones(rows),
            bounds=list(zip(lower[part].ravel(), upper[part].ravel(), strict=True)),
            method="highs-ds",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        assert solution.status == 0, solution.message
        assert solution.x is not None
        values[part] = (cost[part] * solution.x.reshape(rows, size)).sum(1)
    return values


def exact_minimum(cost: list[float], lower: list[float], upper: list[float]) -> Fraction | None:
    """The greedy optimum in rationals, or None if the polytope of these very floats is empty."""
    low, high = [Fraction(x) for x in lower], [Fraction(x) for x in upper]
    budget = 1 - sum(low)
    if budget < 0 or sum(high) < 1:
        return None
    value = sum((Fraction(c) * x for c, x in zip(cost, low, strict=True)), Fraction(0))
    for c, floor, ceiling in sorted(zip(cost, low, high, strict=True)):
        given_here = min(budget, ceiling - floor)
        value += Fraction(c) * given_here
        budget -= given_here
    return value


@pytest.mark.parametrize("size", SIZES)
def test_linear_programs_equal_highs_and_stay_on_the_safe_side(size: int) -> None:
    lower, upper, _ = random_boxes(PER_SIZE, size, seed=size)
    cost = torch.randn(PER_SIZE, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    cost[::7] = cost[::7].sign()
    bound = minimise(cost, lower, upper)
    reference = highs(cost.numpy(), lower.numpy(), upper.numpy())
    assert np.abs(bound.numpy() - reference).max() <= 1e-12
    assert torch.equal(maximise(-cost, lower, upper), -bound)
    for row in range(PER_SIZE):
        truth = exact_minimum(cost[row].tolist(), lower[row].tolist(), upper[row].tolist())
        if truth is not None:
            assert Fraction(float(bound[row])) <= truth
            assert truth - Fraction(float(bound[row])) <= Fraction(1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_closed_forms_equal_the_general_program(size: int) -> None:
    """Evidence mass, specialisation, pairwise margins and box tightening are the LP at costs −1, 0, 1."""
    lower, upper, point = random_boxes(PER_SIZE, size, seed=100 + size)
    kind = torch.randint(-1, 2, (PER_SIZE, size), generator=torch.Generator().manual_seed(size))
    plus, minus = kind == 1, kind == -1
    close = partial(torch.testing.assert_close, rtol=0.0, atol=1e-13)
    close(group_difference(plus, minus, lower, upper), minimise(kind.double(), lower, upper))
    mass = minimum_mass(plus, lower, upper)
    close(mass, minimise(plus.double(), lower, upper).clamp_min(0))
    assert (mass <= (point * plus).sum(-1)).all()
    assert (maximum_mass(plus, lower, upper) >= (point * plus).sum(-1)).all()
    # Lemma of prop:evidence_mass, with its D and its capacities.
    budget = 1 - lower.sum(-1)
    room = ((upper - lower) * ~plus).sum(-1)
    torch.testing.assert_close(
        mass, (lower * plus).sum(-1) + (budget - room).clamp_min(0), rtol=0, atol=1e-12
    )

    eye = torch.eye(size, dtype=torch.float64)
    margins = pairwise_margins(lower, upper)
    costs = eye[:, None, :] - eye[None, :, :]
    wanted = minimise(costs, lower[:, None, None], upper[:, None, None])
    close(margins, wanted)

    box = tighten(lower, upper)
    close(box.lower, minimise(eye, lower[:, None], upper[:, None]).maximum(lower))
    close(box.upper, maximise(eye, lower[:, None], upper[:, None]).minimum(upper))
    assert (box.lower <= point).all()
    assert (point <= box.upper).all()


def test_the_argmin_is_feasible_and_attains_the_bound() -> None:
    lower, upper, _ = random_boxes(2000, 6, seed=5)
    cost = torch.randn(2000, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    point = argmin(cost, lower, upper)
    assert ((point >= lower) & (point <= upper + 1e-15)).all()
    torch.testing.assert_close(point.sum(-1), torch.ones(2000, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close((cost * point).sum(-1), minimise(cost, lower, upper), rtol=0, atol=1e-13)


def test_check_values_of_peers_12() -> None:
    """Box [0, 1]³ with sum 1.5, scaled to sum 1: the five minima of the list, by hand (fill the cheapest first)."""
    cases = {(3, 2, 0): 1, (-3, -1, 2): -3.5, (1, -2, -5): -6, (-2, -3, -1): -4, (-2, 1, 1): -1.5}
    cost = torch.tensor(list(cases), dtype=torch.float64)
    upper = torch.full((3,), 1 / 1.5, dtype=torch.float64)
    bound = 1.5 * minimise(cost, torch.zeros(3, dtype=torch.float64), upper)
    wanted = torch.tensor(list(cases.values()), dtype=torch.float64)
    torch.testing.assert_close(bound, wanted, rtol=0, atol=1e-13)


def test_separation_witness() -> None:
    """thm:separation, S = 3: apart the bounds give 0 (fails), on the simplex max(s_2 − s_1) = −0.2 (holds).

    By hand: Σs̲ = 1, so the only pattern is (.5, .3, .2).
    """
    lower = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    upper = torch.tensor([0.7, 0.5, 0.4], dtype=torch.float64)
    assert float(upper[1] - lower[0]) == 0.0
    assert float(-pairwise_margins(lower, upper)[0, 1]) == pytest.approx(-0.2, abs=1e-14)


@given(
    size=st.integers(2, 9),
    delta=st.floats(1e-3, 0.4),
    excess=st.floats(1e-3, 2.0),
    share=st.floats(0.01, 0.99),
)
def test_separation_theorem_under_its_condition(size: int, delta: float, excess: float, share: float) -> None:
    """thm:separation holds if E·S/(S−1) < 1 − Sδ (row 9), with a gap of at least E/(S−1) between the two tests."""
    delta = min(delta, share / size)
    excess = min(excess, share * (1 - size * delta) * (size - 1) / size)
    lower, upper = separation_box(size, delta, excess)
    assert float(upper[1]) - float(lower[0]) > 0, "apart, the bounds cannot certify token 0"
    worst = -float(pairwise_margins(lower, upper)[0, 1])
    assert worst < 0, "on the simplex they can"
    assert float(upper[1] - lower[0]) - worst >= excess / (size - 1) - 1e-12


def test_separation_needs_its_condition() -> None:
    """Row 9: the paper's construction with E·S/(S−1) ≥ 1 − Sδ does not certify, although E > 0."""
    lower, upper = separation_box(3, 0.1, 0.6)
    assert 0.6 * 3 / 2 >= 1 - 3 * 0.1
    assert -float(pairwise_margins(lower, upper)[0, 1]) >= 0


def separation_box(size: int, delta: float, excess: float) -> tuple[torch.Tensor, torch.Tensor]:
    """s̄_1 = 1 − (S−1)δ, s̄_k = δ + E/(S−1), s̲ = δ."""
    lower = torch.full((size,), delta, dtype=torch.float64)
    upper = torch.full((size,), delta + excess / (size - 1), dtype=torch.float64)
    upper[0] = 1 - (size - 1) * delta
    return lower, upper


def test_gap_theorem() -> None:
    """thm:gap: the width lost without the simplex is Σ η V^ub + Σ ξ V^lb with Σ η = E and Σ ξ = D."""
    lower, upper, _ = random_boxes(500, 5, seed=9)
    generator = torch.Generator().manual_seed(9)
    v_low = torch.rand(500, 5, 3, generator=generator, dtype=torch.float64)
    v_high = v_low + torch.rand(500, 5, 3, generator=generator, dtype=torch.float64)
    low, high = output_hull(lower, upper, v_low, v_high)
    apart = (upper[..., None] * v_high).sum(1) - (lower[..., None] * v_low).sum(1)
    best_high = argmin(-v_high.mT, lower[:, None], upper[:, None])
    best_low = argmin(v_low.mT, lower[:, None], upper[:, None])
    eta, xi = upper[:, None] - best_high, best_low - lower[:, None]
    assert (eta >= -1e-15).all()
    assert (xi >= 0).all()
    excess, deficit = upper.sum(-1, keepdim=True) - 1, 1 - lower.sum(-1, keepdim=True)
    torch.testing.assert_close(eta.sum(-1), excess.expand(-1, 3), rtol=0, atol=1e-13)
    torch.testing.assert_close(xi.sum(-1), deficit.expand(-1, 3).clamp_min(0), rtol=0, atol=1e-13)
    gap = (eta * v_high.mT).sum(-1) + (xi * v_low.mT).sum(-1)
    torch.testing.assert_close(apart - (high - low), gap, rtol=0, atol=1e-12)


def test_output_hull_is_attained_and_contains_samples() -> None:
    lower, upper, point = random_boxes(300, 6, seed=21)
    generator = torch.Generator().manual_seed(3)
    v_low = torch.randn(300, 6, 4, generator=generator, dtype=torch.float64)
    v_high = v_low + torch.rand(300, 6, 4, generator=generator, dtype=torch.float64)
    low, high = output_hull(lower, upper, v_low, v_high)
    middle = (point[..., None] * (v_low + v_high) / 2).sum(1)
    assert ((low <= middle + 1e-14) & (middle <= high + 1e-14)).all()


@pytest.mark.parametrize(
    ("lower", "upper", "words"),
    [
        ([0.6, 0.6], [0.7, 0.7], "lower bounds sum to 1.2, more than 1"),
        ([0.1, 0.1], [0.2, 0.3], "upper bounds sum to 0.5, less than 1"),
        ([0.5, 0.4], [0.4, 0.9], "at token 0: lower 0.5 exceeds upper 0.4"),
        ([0.5, float("nan")], [0.6, 0.9], "NaN"),
    ],
)
def test_an_empty_polytope_names_its_contradiction(
    lower: list[float], upper: list[float], words: str
) -> None:
    low, high = torch.tensor([lower], dtype=torch.float64), torch.tensor([upper], dtype=torch.float64)
    good = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    low, high = torch.cat([good[0], low]), torch.cat([good[1], high])
    with pytest.raises(EmptyPolytopeError, match=words):
        minimise(torch.ones(2), low, high)
    if "NaN" not in words:
        with pytest.raises(EmptyPolytopeError, match=r"row \(1,\)"):
            checked_box(low, high)


def test_wider_boxes_never_help() -> None:
    """Rule 4: the bound of a nested chain of boxes only falls."""
    lower, upper, point = random_boxes(500, 7, seed=12)
    cost = torch.randn(500, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chain = [
        minimise(cost, point + t * (lower - point), (point + t * (upper - point)).clamp_max(1))
        for t in (0.25, 0.5, 1.0)
    ]
    assert all((narrow >= wide - 1e-14).all() for narrow, wide in pairwise(chain))
