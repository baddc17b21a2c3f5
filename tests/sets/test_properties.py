"""For random sets and random factors: exact operations reproduce the true image, enclosures contain it.

Exact operations run twice: on float64 against a tolerance of rounding size, and on rationals with equality.
"""

import itertools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.errors import SetError
from prooflens.sets import (
    ConstrainedPolynomialZonotope,
    Interval,
    PolynomialZonotope,
    absorb,
    affine_map,
    bernstein_upper,
    cartesian_product,
    compact,
    constrain,
    constrained_enclosure,
    constraint_residual,
    contains,
    disjoint,
    elementwise_product,
    evaluate,
    exact_difference,
    exact_sum,
    inner_product,
    intersect,
    interval_enclosure,
    is_empty,
    minkowski_sum,
    quadratic_map,
    reduce_girard,
    reduce_keep,
    relax_exponents,
    release,
    restructure,
    sample,
    sample_factors,
    scalar_product,
    split,
    stack,
    support,
    tighten_independent,
    zonotope_enclosure,
)
from prooflens.sets.lagrange import constrained_upper, lagrangian_upper
from prooflens.sets.range_bounds import Method

Numbers = Any
"""A float64 tensor, or an array of rationals."""

Operation = Callable[
    [ConstrainedPolynomialZonotope, ConstrainedPolynomialZonotope], ConstrainedPolynomialZonotope
]

relaxed = settings(max_examples=40, deadline=None, derandomize=True)


def array(data: st.DataObject, shape: tuple[int, ...], rational: bool) -> Numbers:
    """Entries that are exact in both worlds and awkward in neither: sixteenths."""
    count = int(np.prod(shape))
    entries = [
        Fraction(n, 16) for n in data.draw(st.lists(st.integers(-40, 40), min_size=count, max_size=count))
    ]
    filled = np.array(entries, dtype=object).reshape(shape)
    return filled if rational else torch.tensor(filled.astype(float))


def draw_set(
    data: st.DataObject,
    dim: int,
    *,
    rational: bool = False,
    ids: tuple[int, ...] = (1, 2, 3),
    max_degree: int = 3,
    independent: int = 1,
    constrained: bool = True,
) -> ConstrainedPolynomialZonotope:
    """A set whose constraint, if any, is met at α = 0 and on a whole surface through it."""
    h, p = data.draw(st.integers(1, 4)), len(ids)
    E = np.array(data.draw(st.lists(st.integers(0, max_degree), min_size=p * h, max_size=p * h))).reshape(
        p, h
    )
    parts = (
        array(data, (dim,), rational),
        array(data, (dim, h), rational),
        E,
        array(data, (dim, independent), rational),
    )
    if not constrained:
        return PolynomialZonotope(*parts, ids=ids)
    R = np.eye(p, 2, dtype=int)
    return ConstrainedPolynomialZonotope(
        *parts, array(data, (1, 2), rational), array(data, (1,), rational) * 0, R, ids
    )


def draw_factors(data: st.DataObject, z: ConstrainedPolynomialZonotope) -> tuple[Numbers, Numbers]:
    alpha, beta = array(data, (1, z.factors), True), array(data, (1, z.independent), True)
    return np.clip(alpha, -1, 1), np.clip(beta, -1, 1)


def at(z: ConstrainedPolynomialZonotope, values: Mapping[int, Fraction], beta: Numbers = None) -> Numbers:
    """z at factors given by id, a dict of id to value; factors not named are 0."""
    exact = isinstance(z.c, np.ndarray)
    if z.independent == 0:
        beta = None
    entries = [[Fraction(values.get(label, 0)) for label in z.ids]]
    alpha: Numbers = np.array(entries, dtype=object).reshape(1, z.factors)
    if exact:
        return evaluate(z, alpha, beta)[0]

    def to_float(x: Numbers) -> torch.Tensor:
        return torch.tensor(np.asarray(x, dtype=float))

    return evaluate(z, to_float(alpha), None if beta is None else to_float(beta))[0]


def agrees(x: Numbers, y: Numbers) -> bool:
    if isinstance(x, np.ndarray):
        return bool((x == y).all())
    return bool(torch.allclose(x, y, rtol=1e-12, atol=1e-11))


EXACT: dict[str, tuple[Operation, Callable[[Numbers, Numbers], Numbers]]] = {
    "sum": (lambda x, y: exact_sum(x, y), lambda u, v: u + v),
    "difference": (lambda x, y: exact_difference(x, y), lambda u, v: u - v),
    "elementwise": (lambda x, y: elementwise_product(x, y), lambda u, v: u * v),
    "inner": (lambda x, y: inner_product(x, y), lambda u, v: (u[None, :] * v[None, :]).sum(1)),
    "stack": (
        lambda x, y: stack(x, y),
        lambda u, v: np.concatenate([u, v]) if isinstance(u, np.ndarray) else torch.cat([u, v]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rational", [False, True], ids=["float64", "rational"])
@pytest.mark.parametrize("name", EXACT)
@relaxed
@given(data=st.data())
def test_binary_operations_are_exact_on_shared_factors(
    name: str, rational: bool, data: st.DataObject
) -> None:
    """At any factors: op(x, y)(α) = op(x(α), y(α)); ids shared in part; constraints of both survive."""
    operation, truth = EXACT[name]
    x = draw_set(data, 2, rational=rational, ids=(1, 2, 3), independent=0)
    y = draw_set(data, 2, rational=rational, ids=(3, 1, 7), independent=0)
    z = operation(x, y)
    values = dict(zip((1, 2, 3, 7), [*draw_factors(data, x)[0][0].tolist(), Fraction(1, 2)], strict=True))
    assert agrees(at(z, values), truth(at(x, values), at(y, values)))
    assert z.constraints == 2, "thm:constraint_preservation: constraints accumulate"
    if rational:

        def residuals(w: ConstrainedPolynomialZonotope) -> list[Fraction]:
            alpha: Numbers = np.array([[values[label] for label in w.ids]], dtype=object)
            return constraint_residual(w, alpha)[0].tolist()

        assert set(residuals(z)) == {*residuals(x), *residuals(y)}


@pytest.mark.parametrize("rational", [False, True], ids=["float64", "rational"])
@relaxed
@given(data=st.data())
def test_unary_operations_are_exact(rational: bool, data: st.DataObject) -> None:
    z = draw_set(data, 2, rational=rational)
    alpha, beta = draw_factors(data, z)
    values = dict(zip(z.ids, alpha[0].tolist(), strict=True))
    point = at(z, values, beta)
    M, offset = array(data, (3, 2), rational), array(data, (3,), rational)
    assert agrees(at(affine_map(z, M, offset), values, beta), M @ point + offset)
    assert agrees(at(compact(z), values, np.resize(beta, (1, compact(z).independent))), point)
    absorbed = absorb(z)
    fresh = dict(zip(absorbed.ids[z.factors :], beta[0].tolist(), strict=True))
    assert absorbed.independent == 0
    assert agrees(at(absorbed, values | fresh), point)
    assert release(absorbed).independent >= z.independent
    Q = [array(data, (2, 2), rational) for _ in range(2)]
    image = quadratic_map(absorbed, Q)
    forms = [point @ q @ point for q in Q]
    expected = np.array(forms, dtype=object) if rational else torch.stack(forms)
    assert agrees(at(image, values | fresh), expected)
    scalar = affine_map(absorbed, array(data, (1, 2), rational))
    product = scalar_product(scalar, absorbed)
    assert agrees(at(product, values | fresh), at(scalar, values | fresh) * point)
    for set_ in (affine_map(z, M), absorbed, image, product, compact(z)):
        assert set_.constraints == z.constraints
        zero: Numbers = torch.zeros(1, set_.factors, dtype=torch.float64)
        if rational:
            zero = np.full((1, set_.factors), Fraction(0), dtype=object)
        assert bool((constraint_residual(set_, zero) == 0).all())


@pytest.mark.parametrize("rational", [False, True], ids=["float64", "rational"])
@relaxed
@given(data=st.data())
def test_split_is_a_cover(rational: bool, data: st.DataObject) -> None:
    """α_k in the left half is 2α_k + 1 in the new factor, in the right half 2α_k − 1."""
    z = draw_set(data, 2, rational=rational)
    alpha, beta = draw_factors(data, z)
    values = dict(zip(z.ids, alpha[0].tolist(), strict=True))
    left, right = split(z, 1)
    side, shift = (left, 1) if values[2] <= 0 else (right, -1)
    inside = values | {side.ids[1]: 2 * values[2] + shift}
    assert abs(inside[side.ids[1]]) <= 1
    assert agrees(at(side, inside, beta), at(z, values, beta))
    assert left.ids[1] != right.ids[1] != z.ids[1]


@relaxed
@given(data=st.data())
def test_minkowski_and_cartesian_take_every_pair(data: st.DataObject) -> None:
    x, y = draw_set(data, 2), draw_set(data, 2)
    total, pair = minkowski_sum(x, y), cartesian_product(x, y)
    assert len(total.ids) == len(pair.ids) == 6
    assert disjoint(x, y).dependent == y.dependent
    (a, b), (c, d) = draw_factors(data, x), draw_factors(data, y)
    at_x, at_y = dict(zip(x.ids, a[0], strict=True)), dict(zip(y.ids, c[0], strict=True))
    both = at_x | dict(zip(total.ids[3:], c[0], strict=True))
    keep = [np.concatenate([b, d], axis=1)[:, : total.independent]]
    if total.independent == 2:
        assert agrees(at(total, both, keep[0]), at(x, at_x, b) + at(y, at_y, d))
    both = at_x | dict(zip(pair.ids[3:], c[0], strict=True))
    if pair.independent == 2:
        assert agrees(at(pair, both, keep[0]), torch.cat([at(x, at_x, b), at(y, at_y, d)]))


@relaxed
@given(data=st.data(), method=st.sampled_from(["shift", "best"]))
def test_enclosures_contain_every_sample(data: st.DataObject, method: Method) -> None:
    z = draw_set(data, 2, independent=2)
    points = sample(z, 300, torch.Generator().manual_seed(0))
    box, zonotope = interval_enclosure(z, method=method), zonotope_enclosure(z)
    assert len(points) > 0
    assert bool(box.contains(points).all())
    assert bool(zonotope.interval().contains(points).all())
    assert bool(zonotope.reduce(1).interval().contains(points).all())
    direction = torch.tensor([0.6, -0.8], dtype=torch.float64)
    assert float((points @ direction).max()) <= float(zonotope.support(direction)) + 1e-12


@relaxed
@given(data=st.data())
def test_bernstein_contains_and_is_exact_at_corners(data: st.DataObject) -> None:
    z = draw_set(data, 1, max_degree=4, constrained=False, independent=0)
    alpha = torch.rand(500, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    seen = evaluate(z, torch.cat([alpha, corners]))
    assert float(seen.max()) <= float(bernstein_upper(z.c, z.G, z.E)[0])


@pytest.mark.slow
@relaxed
@given(data=st.data(), k=st.integers(0, 4), order=st.sampled_from([1, 1.5, 2, 3]))
def test_reductions_contain_the_set(data: st.DataObject, k: int, order: float) -> None:
    """Whatever direction: the reduced set's part for the same α differs by no more than its new box."""
    z = draw_set(data, 2, independent=2)
    for reduced in (reduce_keep(z, k), reduce_girard(z, order), relax_exponents(z), restructure(z)):
        assert reduced.constraints == z.constraints
        alpha = sample_factors(z, 100, torch.Generator().manual_seed(2))
        beta = (
            torch.rand(len(alpha), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2 - 1
        )
        point = evaluate(z, alpha, beta)
        values = torch.zeros(len(alpha), reduced.factors, dtype=torch.float64)
        for column, label in enumerate(reduced.ids):
            if label in z.ids:
                values[:, column] = alpha[:, z.ids.index(label)]
        rest = point - evaluate(reduced, values)
        fresh = [i for i, label in enumerate(reduced.ids) if label not in z.ids]
        moving = reduced.G[:, (reduced.E[fresh] > 0).any(dim=0)] if fresh else reduced.G[:, :0]
        assert bool((rest.abs() <= reduced.GI.abs().sum(1) + moving.abs().sum(1) + 1e-12).all())
        hull = interval_enclosure(reduced)
        assert bool(hull.contains(point).all())
    assert reduce_keep(z, k).dependent <= max(k, 0) or z.dependent <= k
    assert reduce_girard(z, order).order <= max(order, 1) or z.order <= order


@relaxed
@given(data=st.data())
def test_more_kept_generators_never_widen_the_hull(data: st.DataObject) -> None:
    z = draw_set(data, 3, independent=1)
    widths = [interval_enclosure(reduce_keep(z, k)).width for k in range(z.dependent + 1)]
    for fewer, more in itertools.pairwise(widths):
        assert bool((more <= fewer * (1 + 1e-13) + 1e-13).all())


@relaxed
@given(data=st.data())
def test_tightened_independent_generators_keep_every_point_in_the_box(data: st.DataObject) -> None:
    z = draw_set(data, 2, independent=2, constrained=False)
    points = sample(z, 400, torch.Generator().manual_seed(4))
    middle = points.mean(dim=0)
    box = Interval(middle - 1.0, middle + 1.0)
    tightened = tighten_independent(z, box)
    assert bool((tightened.GI.abs().sum(1) <= z.GI.abs().sum(1) * (1 + 1e-12)).all())
    alpha = sample_factors(z, 400, torch.Generator().manual_seed(5))
    beta = torch.rand(400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) * 2 - 1
    point = evaluate(z, alpha, beta)
    inside = box.contains(point)
    rest = (point - evaluate(z, alpha))[inside]
    assert bool((rest.abs() <= tightened.GI.diagonal() + 1e-12).all())
    assert bool(interval_enclosure(tightened).contains(point[inside]).all())


def test_row_11_the_papers_tightening_cuts_a_point_and_ours_keeps_it() -> None:
    """Soundness.md row 11: dep(α) = α, GI = 2, box [−1,1]; the point p = 1 at α = −1 has p − α = 2."""
    z = PolynomialZonotope([0.0], [[1.0]], [[1]], [[2.0]], ids=[1])
    box = Interval([-1.0], [1.0])
    lower, upper = interval_enclosure(PolynomialZonotope([0.0], [[1.0]], [[1]])).lower, 1.0
    paper = max(float(lower) - -1.0, 1.0 - upper, 0.0)
    assert paper <= 1e-15, "Eq. tighten_gi leaves GI = 0, so p − α = 0 for every point"
    ours = tighten_independent(z, box)
    gap = affine_map(
        exact_difference(ours, PolynomialZonotope([0.0], [[1.0]], [[1]], ids=[1])),
        torch.ones(1, 1, dtype=torch.float64),
    )
    assert float(interval_enclosure(gap).upper[0]) >= 2.0
    assert float(ours.GI[0, 0]) >= 2.0
    assert float(interval_enclosure(ours).upper[0]) == 1.0, "and the box is used when a hull is taken"


def test_constrained_enclosure_uses_the_constraints() -> None:
    """α₁ + α₂ = 0.2 pins the first coordinate, and leaves [−0.8, 1] of [−1, 1] to α₁."""
    z = ConstrainedPolynomialZonotope(
        [0.0, 0.0],
        [[1.0, 1.0], [1.0, 0.0]],
        [[1, 0], [0, 1]],
        [[0.0], [0.5]],
        [[1.0, 1.0]],
        [0.2],
        [[1, 0], [0, 1]],
    )
    box = constrained_enclosure(z)
    assert box.lower.tolist() == pytest.approx([0.2, -1.3])
    assert box.upper.tolist() == pytest.approx([0.2, 1.5])
    assert float(box.lower[0]) <= 0.2 <= float(box.upper[0])
    second = sample(z, 200, torch.Generator().manual_seed(8))[:, 1]
    assert float(box.lower[1]) <= float(second.min()) <= float(second.max()) <= float(box.upper[1])
    with pytest.raises(SetError, match="empty"):
        constrained_enclosure(constrain(z, [[1.0, 1.0]], [0.3], [[1, 0], [0, 1]]))


def test_a_wrong_multiplier_is_still_a_bound() -> None:
    """Weak duality: whatever y the solver might return, f + yᵀ(b − h) bounds f on the feasible set."""
    f, A, b = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, -2.0, 0.5], [[1.0, 1.0, 0.0]], [0.2]))
    E = torch.tensor([[1, 0, 2], [0, 1, 0]])
    alpha = torch.linspace(-0.8, 1.0, 1001, dtype=torch.float64)
    truth = float((alpha - 2 * (0.2 - alpha) + 0.5 * alpha**2).max())
    for y in (-1e9, -3.0, -2.0, 0.0, 1e-7, 2.7, 1e9):
        bound = lagrangian_upper(f, A, b, E, torch.tensor([y], dtype=torch.float64))
        assert bound >= truth
    assert constrained_upper(f, A, b, E) == pytest.approx(truth, abs=1e-9)


def test_cancellation_of_shared_factors() -> None:
    z = PolynomialZonotope([1.0, 2.0], [[1.0, 3.0], [0.5, -1.0]], [[1, 2], [0, 1]], ids=[1, 2])
    nothing = exact_difference(z, z)
    assert nothing.dependent == 0
    assert nothing.c.tolist() == [0.0, 0.0]


def test_intersection_and_injection() -> None:
    """Two crossing segments meet in one point; a constraint that contradicts it empties the set."""
    x = PolynomialZonotope([0.0, 0.0], [[1.0], [1.0]], [[1]], ids=[1])
    y = PolynomialZonotope([0.5, 0.0], [[0.0], [1.0]], [[1]], ids=[2])
    met = intersect(x, y)
    assert is_empty(met) is False
    found = support(met, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert 0.5 <= found.upper <= 0.501
    assert contains(met, torch.tensor([0.5, 0.5], dtype=torch.float64)) is True
    assert is_empty(constrain(met, [[1.0]], [0.9], [[1]], ids=[1])) is True
    empty = support(
        constrain(met, [[1.0]], [0.9], [[1]], ids=[1]), torch.tensor([1.0, 0.0], dtype=torch.float64)
    )
    assert empty.upper == float("-inf")


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_support_and_membership_agree_with_samples(data: st.DataObject) -> None:
    z = draw_set(data, 2, max_degree=2)
    points = sample(z, 200, torch.Generator().manual_seed(7))
    direction = torch.tensor([1.0, -0.5], dtype=torch.float64)
    bracket = support(z, direction, max_cells=8)
    assert float((points @ direction).max()) <= bracket.upper + 1e-12
    assert contains(z, points[0], max_cells=4) is not False
