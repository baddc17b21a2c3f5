"""Quadratic forms over the box with squares that join them: against all corners and points, and sums of forms."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines.relaxations.norms import guessed_eigenvalue
from prooflens.engines.taylor.corners import BoxForm, Majorised, evened, ranges, scales
from prooflens.engines.taylor.form_sums import FormSum

FORMS, CORNERS = 3, list(itertools.product([-1.0, 1.0], repeat=5))


def drawn(seed: int, curved: float) -> tuple[Tensor, Tensor, Majorised, Tensor]:
    """Slopes, quadratic forms, a square above a remainder, and points of the box."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    slope, G, Z = normal(FORMS, 5), curved * normal(FORMS, 5, 5), curved**0.5 * normal(FORMS, 4, 5)
    square = Majorised(Z.mT @ Z, torch.zeros(FORMS).double(), normal(FORMS).abs())
    inside = 2.0 * torch.rand(500, 5, generator=generator, dtype=torch.float64) - 1.0
    return slope, G + G.mT, square, torch.cat((torch.tensor(CORNERS, dtype=torch.float64), inside))


def form(points: Tensor, H: Tensor) -> Tensor:
    return 0.5 * torch.einsum("np,fpq,nq->nf", points, H, points)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), curved=st.sampled_from([1e-3, 0.05, 0.5, 5.0]))
def test_forms_with_squares_stay_below_their_bounds(seed: int, curved: float) -> None:
    slope, H, square, points = drawn(seed, curved)
    assert square.J is not None
    error = torch.zeros(FORMS).double()
    found = ranges(slope, H, error, lambda some: [Majorised(square.J[some], error[some], square.rest[some])])  # type: ignore[index]
    beside = form(points, square.J) + square.rest
    for side, sign in enumerate((1.0, -1.0)):
        reached = (sign * (points @ slope.T + form(points, H)) + beside).amax(0)
        assert bool((reached <= found[:, side]).all())
    # Of several majorants of the same remainder the best is taken.
    flat = Majorised(None, error, square.rest + form(points, square.J).amax(0) * 2.0)
    both = ranges(slope, H, error, lambda _: [flat, square])
    alone = ranges(slope, H, error, lambda _: [flat])
    assert bool((both <= torch.maximum(found, alone) * (1 + 1e-9)).all())


def test_where_a_form_is_steep_only_its_corner_counts() -> None:
    """Curvature below the slopes costs what it comes to at the corner of the linear part, and nothing beside it."""
    slope, H, square, _ = drawn(3, 1e-3)
    slope = slope.sign() * (1.0 + slope.abs())
    assert square.J is not None
    corner = slope.sign()
    at = slope.abs().sum(-1) + 0.5 * torch.einsum("fp,fpq,fq->f", corner, H + square.J, corner) + square.rest
    found = ranges(slope, H, torch.zeros(FORMS).double(), lambda _: [square])[:, 0]
    assert torch.allclose(found, at, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("curved", [0.02, 0.3, 3.0])
def test_the_bound_is_near_the_best_that_its_diagonal_allows(seed: int, curved: float) -> None:
    """Beside a fine search of the concave problem, and never above what the corner and the middle say."""
    slope, H, _, _ = drawn(seed, curved)
    error = torch.zeros(FORMS).double()
    one = BoxForm(slope, H, error, error)
    D = one.proved(scales(H))
    found = one.bound(D, one.s)
    z = torch.zeros_like(slope)
    M = torch.diag_embed(D) - H
    step = 0.5 / torch.linalg.matrix_norm(M, 2)[:, None]
    for _ in range(20_000):
        z = (z + step * (slope - (M @ z[..., None])[..., 0])).clamp(-1.0, 1.0)
    best = (slope * z).sum(-1) - 0.5 * torch.einsum("fp,fpq,fq->f", z, M, z) + 0.5 * D.sum(-1)
    assert bool((found >= best * (1.0 - 1e-9)).all())
    assert bool((found <= best * 1.1).all())
    for point in (one.s, torch.zeros_like(slope)):
        value, rounding = one.above(D, point)
        assert bool((found <= (value + rounding) * (1.0 + 1e-9)).all())


def test_a_diagonal_that_is_not_above_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eigenvalue is needed: half of the diagonal is not enough."""
    proved = BoxForm.proved
    monkeypatch.setattr(BoxForm, "proved", lambda self, shape: 0.2 * proved(self, shape))
    broken = 0
    for seed in range(40):
        slope, H, square, points = drawn(seed, 0.5)
        assert square.J is not None
        found = ranges(slope, H, torch.zeros(FORMS).double(), lambda _, square=square: [square])  # type: ignore[misc]
        reached = (points @ slope.T + form(points, H + square.J) + square.rest).amax(0)
        broken += int((reached > found[:, 0]).sum())
    assert broken > 0


def test_sums_of_forms_err_by_what_they_say() -> None:
    """Products with and without columns left out, in float32 sizes, against exact sums in rationals of two."""
    half_widths = torch.rand(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums, truth = FormSum(half_widths, 2), torch.zeros(2, 6, 6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for live in (None, torch.tensor([0, 2, 5])):
        columns = 6 if live is None else 3
        left = torch.randn(4, columns, generator=generator, dtype=torch.float64)
        right = torch.randn(2, 4, columns, generator=generator, dtype=torch.float64)
        sums.add(left, right, torch.zeros(2).double(), live)
        made = left.T @ right
        if live is None:
            truth += made
        else:
            truth[:, live[:, None], live] += made
    left, right = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    sums.add_to(1, left, right)
    truth[1] += left.T @ right
    H, error = sums.taken()
    assert torch.allclose(H, truth + truth.mT, rtol=1e-12)
    assert bool((torch.linalg.matrix_norm(H - truth - truth.mT, 2) <= error).all())
    assert bool((error < 1e-10).all())


@pytest.mark.parametrize("seed", range(5))
def test_the_guess_of_a_scaled_matrix_is_that_of_the_matrix_made(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(3, 12, 12, generator=generator, dtype=torch.float64)
    H = H + H.mT
    x = scales(H, torch.rand(3, 12, generator=generator, dtype=torch.float64))
    even, _ = evened(H, x)
    torch.testing.assert_close(guessed_eigenvalue(H, scale=x), guessed_eigenvalue(even), rtol=1e-9, atol=0.0)
