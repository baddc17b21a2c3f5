"""Every inequality about ellipsoids, against members of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.checker.depth import shapes
from prooflens.checker.depth.boxes import Quadric, largest_on_box
from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.values import factor_weights

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 6)
SCALES = st.sampled_from([1e-150, 1e-8, 1.0, 1e8])
often = settings(max_examples=150, deadline=None)


def random(seed: int, *shape: int, scale: float = 1.0) -> shapes.Array:
    """Numbers of very different sizes."""
    rng = np.random.default_rng(seed)
    return np.asarray(scale * rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 2, shape))


def members(A: shapes.Array, n: int, seed: int) -> shapes.Array:
    """Points Aξ with ‖ξ‖ = 1, of the ellipsoid of shape AAᵀ."""
    xi = np.random.default_rng(seed).standard_normal((n, A.shape[1]))
    return np.asarray(xi / np.linalg.norm(xi, axis=1, keepdims=True) @ A.T)


def holds(M: shapes.Array, points: shapes.Array, seed: int) -> bool:
    """Whether no covector sees a point outside of E(M)."""
    W = np.concatenate((np.random.default_rng(seed).standard_normal((20, len(M))), np.eye(len(M)), points))
    return bool((np.abs(points @ W.T) <= shapes.supports(M, W) * (1 + 1e-13)).all())


@often
@given(SEEDS, SIZES, SIZES, SIZES, SCALES)
def test_images_sums_and_balls(seed: int, n: int, m: int, p: int, scale: float) -> None:
    A, B, L = random(seed, n, p, scale=scale), random(seed + 1, n, m), random(seed + 2, m, n)
    x, y = members(A, 30, seed), members(B, 30, seed + 1)
    assert holds(shapes.image(L, shapes.gram(A)), x @ L.T, seed)
    assert holds(shapes.total([shapes.gram(A), shapes.gram(B)]), x + y, seed)
    assert holds(shapes.ball(shapes.length(x).max(), n), x, seed)
    assert holds(shapes.scaled(shapes.gram(A), 4.0), 2.0 * x, seed)


@often
@given(SEEDS, SIZES, SIZES, SCALES)
def test_boxes_and_budgets(seed: int, n: int, m: int, scale: float) -> None:
    g, X = random(seed, n, m, scale=scale), np.abs(random(seed + 1, m))
    rng = np.random.default_rng(seed)
    corners = np.sign(rng.standard_normal((30, m))) * X
    assert holds(shapes.box(g, X), corners @ g.T, seed)
    t = rng.dirichlet(np.ones(m), 30)
    assert holds(shapes.spread(g, X**2), (np.sqrt(t) * X * np.sign(corners)) @ g.T, seed)
    c = shapes.shares(X)
    assert sum(1 / c) <= 1.0


@often
@given(SEEDS, SIZES, SIZES, SIZES)
def test_eigenvalues_and_meetings(seed: int, n: int, m: int, p: int) -> None:
    A, B = random(seed, n, m), random(seed + 1, n, p)
    M, N = shapes.gram(A), shapes.gram(B)
    top, both = np.linalg.norm(A, 2) ** 2, np.linalg.norm(A.T @ B, 2)
    assert top * (1 - 1e-12) <= shapes.largest(M) <= 1.1 * top + 1e-9
    loose = 1.1 * both + 0.01 * np.sqrt(top) * np.linalg.norm(B, 2)
    assert both * (1 - 1e-12) <= shapes.meeting(M, N) <= loose
    K = random(seed, n, n)
    K = K + K.T
    value = float(np.linalg.eigvalsh(K)[-1])
    assert shapes.top_eigenvalue(K) >= max(0.0, value * (1 - 1e-12))


def test_eigenvalues_of_wide_matrices_are_proved_by_a_factor() -> None:
    A = np.random.default_rng(0).standard_normal((200, 150))
    top = np.linalg.norm(A, 2) ** 2
    assert top <= shapes.largest(shapes.gram(A)) <= 1.4 * top
    assert shapes.top_eigenvalue(-shapes.gram(A)) <= 1e-3 * top
    assert shapes.top_eigenvalue(np.pad(shapes.gram(A), (0, 200))) <= 2.0 * top
    assert shapes.top_eigenvalue(np.full((200, 200), np.inf)) == np.inf
    assert shapes.meeting(np.full((2, 2), np.nan), np.eye(2)) == np.inf


@often
@given(SEEDS, SIZES, SIZES, SIZES)
def test_quadratic_maps(seed: int, n: int, m: int, o: int) -> None:
    L, R, C = random(seed, m, n), random(seed + 1, m, n), random(seed + 2, o, m)
    A, B = random(seed + 3, n, n), random(seed + 4, n, n)
    x, e = members(A, 30, seed), members(B, 30, seed + 1)
    for form in (Quadratic(C, L, R), Quadratic(C, L, L)):

        def q(y: shapes.Array, form: Quadratic = form) -> shapes.Array:
            return np.asarray(((y @ form.L.T) * (y @ form.R.T)) @ form.C.T)

        assert holds(form.shape(shapes.gram(A)), q(x), seed)
        assert holds(form.cross(shapes.gram(A), shapes.gram(B)), q(x + e) - q(x) - q(e), seed)
        v = random(seed + 5, o)
        H, error = form.hessian(v)
        off = np.abs(0.5 * np.einsum("bi,ij,bj->b", x, H, x) - q(x) @ v)
        assert (off <= 0.5 * error * (x**2).sum(1) + 1e-12 * np.abs(q(x)) @ np.abs(v)).all()


@often
@given(SEEDS, st.integers(1, 7), st.sampled_from([0.01, 1.0, 30.0]))
def test_quadratic_forms_on_a_box(seed: int, p: int, slope: float) -> None:
    K = random(seed, p, p)
    H, a = K + K.T, random(seed + 1, p, scale=slope)
    bound = largest_on_box(a, Quadric(H, 0.0))
    rng = np.random.default_rng(seed)
    corners = np.array(np.meshgrid(*[[-1.0, 1.0]] * p)).reshape(p, -1).T
    points = np.concatenate((corners, rng.uniform(-1, 1, (200, p))))
    found = points @ a + 0.5 * np.einsum("bi,ij,bj->b", points, H, points)
    assert found.max() <= bound
    assert largest_on_box(a, Quadric(H, 1.0)) >= bound + 0.49 * p


@often
@given(SEEDS, SIZES, SIZES)
def test_weights_of_factors_hold_the_box(seed: int, n: int, p: int) -> None:
    A = random(seed, n, p)
    w = factor_weights(A)
    assert (1 / w**2).sum() <= 1.0
    corners = np.sign(np.random.default_rng(seed).standard_normal((50, p)))
    assert holds(shapes.gram(A * w), corners @ A.T, seed)
