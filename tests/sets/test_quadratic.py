"""Bounds of quadratics against vertex enumeration, dense sampling and exact rational evaluation."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets import inner_product_range, lemma_upper, product_range, quadratic_range, quadratic_upper
from prooflens.sets.quadratic import scalar_maximum

relaxed = settings(max_examples=60, deadline=None, derandomize=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def factor_points(p: int, seed: int = 0) -> Tensor:
    """All corners (p ≤ 10), uniform points, faces and the centre."""
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=p)), dtype=torch.float64)
    inside = torch.rand(4000, p, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    faces = torch.where(random(4000, p, seed=seed + 1).abs() < 0.7, inside.sign(), inside)
    return torch.cat([corners, inside, faces, torch.zeros(1, p, dtype=torch.float64)])


def values(alpha: Tensor, c: Tensor, a: Tensor, H: Tensor) -> Tensor:
    return c + alpha @ a + 0.5 * torch.einsum("bi,ij,bj->b", alpha, H, alpha)


def exact_value(alpha: Tensor, c: Tensor, a: Tensor, H: Tensor) -> Fraction:
    x = [Fraction(t) for t in alpha.tolist()]
    total = Fraction(float(c))
    for i, t in enumerate(x):
        total += Fraction(float(a[i])) * t
        total += sum((Fraction(float(H[i, j])) * t * x[j] for j in range(len(x))), Fraction(0)) / 2
    return total


@relaxed
@given(a=st.floats(-1e3, 1e3), d=st.floats(-1e3, 1e3))
def test_scalar_maximum_is_the_maximum(a: float, d: float) -> None:
    """Exact: the maximum lies at t = ±1 or, for d < 0, at t = −a/d when that is inside."""
    A, D = Fraction(a), Fraction(d)
    candidates = [abs(A) + D / 2]
    if D < 0 and abs(A) <= -D:
        candidates.append(A * A / (-2 * D))
    truth = max(candidates)
    bound = Fraction(
        float(scalar_maximum(torch.tensor(a, dtype=torch.float64), torch.tensor(d, dtype=torch.float64)))
    )
    assert bound >= truth
    assert (
        bound - truth
        <= Fraction(10) ** -14 * (abs(truth) + Fraction(10) ** -280) + abs(D) * Fraction(10) ** -15
    )


def test_scalar_maximum_with_negative_curvature_inside_and_outside() -> None:
    a = torch.tensor([0.0, 1.0, 3.0, -3.0, 2.0, 0.0], dtype=torch.float64)
    d = torch.tensor([-2.0, -2.0, -2.0, -2.0, -2.0, 0.0], dtype=torch.float64)
    truth = torch.tensor([0.0, 0.25, 2.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.allclose(scalar_maximum(a, d), truth, atol=1e-15)
    assert bool((scalar_maximum(a, d) >= truth).all())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["indefinite", "convex", "concave", "nonsymmetric", "sparse"])
def test_quadratic_range_contains_corners_and_samples(kind: str, seed: int) -> None:
    p = 1 + seed % 10
    c, a, H = random(1, seed=seed)[0], random(p, seed=seed + 1), random(p, p, seed=seed + 2)
    if kind != "nonsymmetric":
        H = H + H.mT
    if kind == "convex":
        H = H @ H.mT
    elif kind == "concave":
        H = -H @ H.mT - torch.eye(p, dtype=torch.float64)
    elif kind == "sparse":
        H = H * (random(p, p, seed=seed + 3).abs() > 1.2)
    alpha = factor_points(p, seed)
    seen = values(alpha, c, a, H)
    box = quadratic_range(c, a, H)
    assert float(box.lower) <= float(seen.min())
    assert float(seen.max()) <= float(box.upper) <= float(lemma_upper(c, a, H)) * (1 + 1e-14) + 1e-14
    best = alpha[seen.argmax()]
    assert Fraction(float(box.upper)) >= exact_value(best, c, a, H), "in exact arithmetic, not to a tolerance"


def test_bounds_are_tight_where_they_can_be() -> None:
    """Diagonal quadratics and exact ties: the bound equals the maximum up to rounding, and does not fall below it."""
    H = torch.diag(torch.tensor([2.0, -4.0, 0.0], dtype=torch.float64))
    a = torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64)
    # 1·t + t²: 2; 2t − 2t²: ½ at t = ½; −½t: ½; together 3.
    top = float(quadratic_upper(torch.zeros(1, dtype=torch.float64)[0], a, H))
    assert 3.0 <= top <= 3.0 + 1e-13
    all_ones = torch.ones(4, 4, dtype=torch.float64)
    top = float(
        quadratic_upper(torch.tensor(0.1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), all_ones)
    )
    assert Fraction(0.1) + 8 <= Fraction(top) <= Fraction(0.1) + 8 + Fraction(1, 10**9)


def test_paper_row_10_counts_each_pair_once() -> None:
    """Soundness.md row 10: the coefficient of α₁α₂ in αᵀMα is M₁₂ + M₂₁, whatever the paper's 2|M₁₂| says."""
    zero = torch.zeros(2, dtype=torch.float64)
    upper_only = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    antisymmetric = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    asymmetric = torch.tensor([[0.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    for M, maximum in (
        (upper_only, 1.0),
        (upper_only + upper_only.T, 2.0),
        (antisymmetric, 0.0),
        (asymmetric, 4.0),
    ):
        # αᵀMα = ½αᵀ(2M)α; the paper's 2Σ_{i<j}|M_ij| would give 2 in each case.
        for bound in (lemma_upper, quadratic_upper):
            assert maximum <= float(bound(zero[0], zero, 2.0 * M)) <= maximum + 1e-12


def test_more_reweightings_never_loosen_and_eigenvalues_beat_the_lemma() -> None:
    c, a = torch.zeros(3, dtype=torch.float64), random(3, 40, seed=1)
    H = random(3, 40, 40, seed=2)
    H = H + H.mT
    bounds = [quadratic_upper(c, a, H, reweightings=k) for k in range(5)]
    for looser, tighter in itertools.pairwise(bounds):
        assert bool((tighter <= looser).all())
    assert bool((bounds[-1] < 0.75 * lemma_upper(c, a, H)).all())


@relaxed
@given(data=st.data())
def test_quadratic_on_awkward_numbers(data: st.DataObject) -> None:
    """Tiny, huge and equal entries; the truth from exact arithmetic at every corner and the centre."""
    p = data.draw(st.integers(1, 4))
    number = st.sampled_from([0.0, 1.0, -1.0, 0.1, 1e-17, -1e-17, 1e8, -1e8, 1 / 3, 2.0**-1050, 1e100])
    H = torch.tensor([[data.draw(number) for _ in range(p)] for _ in range(p)], dtype=torch.float64)
    a = torch.tensor([data.draw(number) for _ in range(p)], dtype=torch.float64)
    c = torch.tensor(data.draw(number), dtype=torch.float64)
    box = quadratic_range(c, a, H)
    corners = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=p)), dtype=torch.float64)
    exact = [exact_value(alpha, c, a, H) for alpha in corners]
    assert Fraction(float(box.lower)) <= min(exact)
    assert max(exact) <= Fraction(float(box.upper))


@pytest.mark.parametrize(("M", "p"), [(1, 3), (1, 9), (2, 8), (3, 10), (4, 9), (5, 6)])
@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_product_range_contains_and_matches_the_dense_form(M: int, p: int, seed: int, tight: bool) -> None:
    c, a, U, V = (
        random(*shape, seed=seed + i) for i, shape in enumerate([(2,), (2, p), (2, M, p), (2, M, p)])
    )
    box = product_range(c, a, U, V, tight=tight)
    alpha = factor_points(p, seed)
    for k in range(2):
        seen = c[k] + alpha @ a[k] + ((alpha @ U[k].T) * (alpha @ V[k].T)).sum(-1)
        assert float(box.lower[k]) <= float(seen.min())
        assert float(seen.max()) <= float(box.upper[k])
        dense = quadratic_range(c[k], a[k], U[k].T @ V[k] + V[k].T @ U[k], reweightings=0)
        assert float(box.upper[k] - box.lower[k]) <= 1.7 * float(dense.width)


@pytest.mark.parametrize("seed", range(40))
def test_product_range_in_exact_arithmetic(seed: int) -> None:
    """At the best of all points of {−1, 0, 1}ᵖ, with ties, equal factors, silent columns and scales far apart."""
    p, M = 3 + seed % 5, 1 + seed % 3
    U, V = 10.0 ** (seed % 13 - 6) * random(M, p, seed=seed), random(M, p, seed=seed + 1)
    if seed % 4 == 0:
        V = U.clone()
    elif seed % 4 == 1:
        U, V = U.sign(), V.sign()
    if seed % 7 == 0:
        U[:, :2] = 0.0
    c, a = random(1, seed=seed + 2)[0], seed % 3 * random(p, seed=seed + 3)
    alpha = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=p)), dtype=torch.float64)
    seen = c + alpha @ a + ((alpha @ U.T) * (alpha @ V.T)).sum(-1)
    product = [
        [sum(Fraction(u) * Fraction(v) for u, v in zip(x, y, strict=True)) for y in V.T.tolist()]
        for x in U.T.tolist()
    ]
    for tight in (True, False):
        box = product_range(c, a, U, V, tight=tight)
        for best in (alpha[seen.argmax()], alpha[seen.argmin()]):
            x = [int(t) for t in best.tolist()]
            exact = Fraction(float(c)) + sum(Fraction(g) * t for g, t in zip(a.tolist(), x, strict=True))
            exact += sum(product[i][j] * x[i] * x[j] for i in range(p) for j in range(p))
            assert Fraction(float(box.lower)) <= exact <= Fraction(float(box.upper))


def test_product_range_degenerate() -> None:
    """Equal, opposite, zero and rank-deficient factors; the rank-one square (u·α)² has maximum ‖u‖₁², minimum 0."""
    u = random(1, 7, seed=1)
    zero, none = torch.zeros(1, dtype=torch.float64), torch.zeros(1, 7, dtype=torch.float64)
    square = product_range(zero, none, u[None], u[None])
    assert float(square.upper[0]) >= float(u.abs().sum() ** 2)
    assert -1e-9 <= float(square.lower[0]) <= 0.0
    negative = product_range(zero, none, u[None], -u[None])
    assert float(negative.upper[0]) <= 1e-9
    nothing = product_range(zero, none, torch.zeros(1, 2, 7, dtype=torch.float64), random(1, 2, 7))
    assert -1e-100 <= float(nothing.lower[0]) <= 0.0 <= float(nothing.upper[0]) <= 1e-100
    quick = product_range(zero, none, torch.zeros(1, 2, 7, dtype=torch.float64), random(1, 2, 7), tight=False)
    assert float(quick.width[0]) <= 1e-100, "a token without perturbation adds nothing"
    for tight in (True, False):
        uneven = product_range(zero, none, 1e-9 * u[None], 1e9 * u[None], tight=tight)
        assert (
            float(u.abs().sum() ** 2) * (1 - 1e-12)
            <= float(uneven.upper[0])
            <= float(u.abs().sum() ** 2) * 1.001
        )
    twice = product_range(zero, none, torch.cat([u, u])[None], torch.cat([u, u])[None])
    assert float(twice.upper[0]) >= 2 * float(u.abs().sum() ** 2)
    tiny = product_range(zero, none, 1e-120 * u[None], 1e-120 * u[None])
    assert float(tiny.upper[0]) >= float((1e-120 * u.abs().sum()) ** 2)
    large = product_range(zero, none, 1e120 * u[None], 1e120 * u[None])
    assert float(large.upper[0]) >= float((1e120 * u.abs().sum()) ** 2)


@pytest.mark.parametrize("seed", range(4))
def test_inner_product_range_is_attacked(seed: int) -> None:
    """Random signs, then sign ascent (α ← sign of the gradient): no attack gets past a bound."""
    cQ, cK = random(3, 6, seed=seed), random(4, 6, seed=seed + 1)
    GQ, GK = 0.1 * random(3, 6, 30, seed=seed + 2), 0.1 * random(4, 6, 30, seed=seed + 3)
    box, tight = inner_product_range(cQ, GQ, cK, GK), inner_product_range(cQ, GQ, cK, GK, tight=True)
    assert tuple(box.lower.shape) == (3, 4)
    assert bool((tight.width <= box.width).all())
    assert bool((box.width <= 1.2 * tight.width).all())
    for i, j in itertools.product(range(3), range(4)):
        H = GQ[i].T @ GK[j] + GK[j].T @ GQ[i]
        a = GQ[i].T @ cK[j] + GK[j].T @ cQ[i]
        for sign, bound in ((1.0, tight.upper[i, j]), (-1.0, -tight.lower[i, j])):
            alpha = random(200, 30, seed=seed).sign()
            for _ in range(30):
                alpha = (sign * (a + alpha @ H)).sign()
            reached = (sign * values(alpha, cQ[i] @ cK[j], a, H)).max()
            assert float(reached) <= float(bound)
            assert float(bound) <= float(reached) + 0.7 * float(H.abs().sum() / 2)


def test_inner_product_range_in_exact_arithmetic() -> None:
    """With no factors at all the score is a number, and the interval around it must hold the exact one."""
    cQ, cK = random(5, 33, seed=8), random(5, 33, seed=9)
    G = torch.zeros(5, 33, 70, dtype=torch.float64)
    box = inner_product_range(cQ, G, cK, G)
    for i, j in itertools.product(range(5), repeat=2):
        exact = sum(Fraction(x) * Fraction(y) for x, y in zip(cQ[i].tolist(), cK[j].tolist(), strict=True))
        assert Fraction(float(box.lower[i, j])) <= exact <= Fraction(float(box.upper[i, j]))
    assert float(box.width.max()) < 1e-11


def test_wrong_shapes_and_types_are_refused() -> None:
    a, H = random(3), random(3, 3)
    with pytest.raises(SetError, match="3 factors"):
        quadratic_upper(a[0], a, random(2, 2))
    with pytest.raises(SetError, match="float64"):
        quadratic_upper(a[0].float(), a.float(), H.float())
    with pytest.raises(SetError, match="NaN"):
        quadratic_upper(a[0] * float("nan"), a, H)
    with pytest.raises(SetError, match="shapes"):
        inner_product_range(random(2, 3), random(2, 3, 5), random(2, 4), random(2, 4, 5))
    with pytest.raises(SetError, match="positive"):
        product_range(a[0], random(9), random(2, 9), random(2, 9), scale=torch.zeros(9, dtype=torch.float64))
