"""The matrix of `taylor`'s last reading is the form's Hessian, and its bounds hold.

The assembled matrix is compared with automatic differentiation; what is beyond second order is asked alone, at points,
so that no slack of another term hides it; bounds of quadratic forms over the box are compared with all corners.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines import FormBounds, Forms
from prooflens.engines.taylor import Taylor, bound_part
from prooflens.engines.taylor.hessian import Hessian, hessian_batch
from prooflens.problem import Problem
from prooflens.regions import Region
from tests.engines.cases import MODELS, RANDOM_MODELS, input_of, model_of, problem_of, tiny_model
from tests.engines.support import assert_contains, attained, random_forms, random_problem


def output_of(problem: Problem) -> Forms:
    architecture = problem.model.architecture
    width = architecture.d_out or architecture.d_model
    generator = torch.Generator().manual_seed(5)
    return replace(Forms.of([], 2), logits=torch.randn(2, width, generator=generator, dtype=torch.float64))


class _Kept(Hessian):
    """A reading that keeps what was collected."""

    def linear_range(self, slope: Tensor) -> Tensor:
        self.collected, self.error = self.second.G.clone(), self.second.error.clone()
        return super().linear_range(slope)


def read(problem: Problem, forms: Forms) -> _Kept:
    """The reading after all forms have been walked."""
    with torch.no_grad():
        walk = Taylor().walk(problem, forms)
        reading = _Kept(walk.chains[0].root.half_widths, forms.size)
        bound_part(walk, problem, forms, reading)
    return reading


def differentiated(problem: Problem, forms: Forms) -> tuple[Tensor, Tensor]:
    """Gradients and Hessians in the region's factors."""

    def values(alpha: Tensor) -> Tensor:
        return attained(problem, forms, alpha[None])[0]

    zero = torch.zeros(problem.region.n_factors, dtype=torch.float64)
    return torch.func.jacfwd(values)(zero), torch.func.jacfwd(torch.func.jacrev(values))(zero)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", [0, 1, "output"])
def test_the_matrix_is_the_hessian(name: str, where: int | str) -> None:
    problem = problem_of(name, 1e-3)
    forms = output_of(problem) if where == "output" else random_forms(problem, int(where), 3, seed=2)
    reading = read(problem, forms)
    found = reading.collected + reading.collected.mT
    _, wanted = differentiated(problem, forms)
    for mine, real, error in zip(found, wanted, reading.error, strict=True):
        gap = torch.linalg.matrix_norm(mine - real, 2)
        assert gap <= 1e-9 * torch.linalg.matrix_norm(real) + 1e-13
        assert error <= 1e-6 * torch.linalg.matrix_norm(real) + 1e-12


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("eps", [1e-3, 2e-2])
def test_what_is_beyond_the_hessian_is_covered(name: str, eps: float) -> None:
    """|f(α) − f(0) − a·α − ½αᵀHα| at points, by the reading's bound without its quadratic part."""
    problem = problem_of(name, eps)
    forms = random_forms(problem, 1, 4, seed=3)
    a, H = differentiated(problem, forms)
    alpha = problem.region.sample(300, 4, corners=0.7)[1]
    values = attained(problem, forms, alpha)
    center = attained(problem, forms, torch.zeros_like(alpha[:1]))
    model = alpha @ a.T + 0.5 * torch.einsum("np,fpq,nq->nf", alpha, H, alpha)
    beyond = (values - center - model).abs().amax(0)
    with torch.no_grad():
        walk = Taylor().walk(problem, forms)
        part = bound_part(walk, problem, forms, _Beyond(walk.chains[0].root.half_widths, forms.size))
    assert bool((beyond <= 0.5 * (part.upper - part.lower) + 1e-12).all())


class _Beyond(Hessian):
    """A reading that leaves the quadratic part out."""

    def linear_range(self, slope: Tensor) -> Tensor:
        return slope.new_zeros(len(slope), 2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), p=st.integers(1, 7), curved=st.sampled_from([0.01, 0.3, 1.0, 10.0]))
def test_quadratic_forms_stay_below_their_bounds(seed: int, p: int, curved: float) -> None:
    """Over a box a quadratic form's largest value is found by all corners and many points."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(3, p, generator=generator, dtype=torch.float64)
    reading = Hessian(torch.ones(p, dtype=torch.float64), 3)
    reading.second.G = curved * torch.randn(3, p, p, generator=generator, dtype=torch.float64)
    H = reading.second.G + reading.second.G.mT
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=p)), dtype=torch.float64)
    inner = 2.0 * torch.rand(500, p, generator=generator, dtype=torch.float64) - 1.0
    points = torch.cat((corners, inner, torch.zeros(1, p, dtype=torch.float64)))
    values = points @ a.T + 0.5 * torch.einsum("np,fpq,nq->nf", points, H, points)
    found = reading.linear_range(a)
    assert bool((values.amax(0) <= found[:, 0]).all())
    assert bool((-values.amin(0) <= found[:, 1]).all())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    eps=st.sampled_from([1e-3, 1e-2]),
    **RANDOM_MODELS,
)
def test_outputs_of_random_models_are_contained(
    seed: int, eps: float, activation: str, place: str, kind: str, gated: bool
) -> None:
    model = tiny_model(seed, n_heads=2, activation=activation, norm_place=place, norm_kind=kind, gated=gated)
    problem = random_problem(model, 3, eps, seed)
    forms = output_of(problem)
    with torch.no_grad():
        walk = Taylor().walk(problem, forms)
        part = bound_part(walk, problem, forms, Hessian(walk.chains[0].root.half_widths, forms.size))
    found = FormBounds(part.lower, part.upper, -part.corner, part.corner)
    assert_contains(problem, forms, found, seed=seed)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("tokens", [[], [1]])
def test_regions_that_hardly_move(name: str, tokens: list[int]) -> None:
    """A point, and one moving token of several: factors that nothing reads, and matrices of zeros."""
    x = input_of(name)
    radius = torch.zeros_like(x)
    radius[tokens] = 1e-3
    problem = Problem(model_of(name), Region(x, radius=radius))
    forms = random_forms(problem, 1, 4, seed=1)
    with torch.no_grad():
        walk = Taylor().walk(problem, forms)
        part = bound_part(walk, problem, forms, Hessian(walk.chains[0].root.half_widths, forms.size))
    alpha = problem.region.sample(50, 0, corners=0.7)[1] if tokens else torch.zeros(1, 0, dtype=torch.float64)
    values = attained(problem, forms, alpha)
    assert bool((values <= part.upper).all())
    assert bool((values >= part.lower).all())
    assert bool((part.upper - part.lower < 1.0).all())


def test_no_matrix_is_made_that_does_not_fit() -> None:
    problem = problem_of("bert", 1e-3)
    p = problem.region.n_factors
    assert hessian_batch(64 * p * p, p) == 1
    assert hessian_batch(64 * p * p - 1, p) == 0


def test_sums_that_cancel_are_counted() -> None:
    """Large terms that leave a small matrix leave their rounding in the bound."""
    reading = Hessian(torch.ones(2, dtype=torch.float64), 1)
    big = torch.full((1, 1, 2), 1e12, dtype=torch.float64)
    for sign in (1.0, -1.0):
        reading.second.add(
            torch.ones(1, 2, dtype=torch.float64), sign * big, torch.zeros(1, dtype=torch.float64)
        )
    assert not bool(reading.second.G.any())
    assert float(reading.linear_range(torch.zeros(1, 2, dtype=torch.float64)).min()) > 1e-5
