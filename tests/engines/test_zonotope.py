"""`zonotope`: strips, softmax and its sum, and bounds on every family."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.engines import get_engine
from prooflens.engines.tensor_sets.tensor_set import FactorIds, TensorSet
from prooflens.engines.tensor_sets.walk import propagate
from prooflens.engines.zonotope import AFFINE, AffineRules, ZonotopeEngine, strip
from prooflens.models.sites import Softmax
from prooflens.queries import Box
from tests.engines.cases import MODELS, margins, model_of, problem_of
from tests.engines.support import assert_contains, random_forms, random_problem
from tests.families import FAMILIES

TOLERANCE = 1e-9


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    start=st.floats(-20.0, 20.0),
    width=st.sampled_from([0.0, 1e-12, 1e-6, 1e-2, 1.0, 30.0]),
    slope=st.floats(-3.0, 3.0),
    touch=st.floats(-30.0, 30.0),
)
def test_strips_contain_their_function(start: float, width: float, slope: float, touch: float) -> None:
    """Whatever slope and touching point are."""
    low = torch.tensor([start], dtype=torch.float64)
    high = low + width
    c = 0.5 * low + 0.5 * high
    x = (low + width * torch.linspace(0.0, 1.0, 201, dtype=torch.float64)[:, None]).clamp(low, high)
    for f, derivative, box, z in (
        (torch.exp, torch.exp, Box(low, high), x),
        (torch.reciprocal, lambda t: -t.reciprocal().square(), Box(low.exp(), high.exp()), x.exp()),
    ):
        z = z.clamp(box.lower, box.upper)
        made = strip(f, derivative, c, box, torch.full_like(c, slope), torch.full_like(c, touch))
        line = made.value + made.slope * (z - c)
        loss = 2.0**-50 * (line.abs() + f(z))
        assert bool(((f(z) - line).abs() <= made.error + loss).all())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([1e-9, 1e-3, 0.1, 1.0, 5.0, 200.0]))
def test_softmax_contains_its_values_and_knows_its_sum(seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    S, p = 4, 5

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) * 2.0 - 1.0

    mask = torch.ones(S, S, dtype=torch.bool)
    mask = mask.tril() if seed % 2 else mask
    point = TensorSet.point(2.0 * draw(2, S, S))
    a = TensorSet(point.c, spread * draw(p, 2, S, S), torch.arange(p), point.Q, point.pairs, point.r)
    rules = AffineRules(AFFINE, FactorIds(p), 512)
    s = rules._softmax(Softmax("s", ("a",), mask), a)
    alpha = draw(300, p)
    alpha[::2] = alpha[::2].sign()
    scores = a.c + torch.tensordot(alpha, a.L, 1)
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    determined, room = s.evaluate(alpha)
    assert bool(((weights - determined).abs() <= room + TOLERANCE).all())
    low, high = s.hull()
    assert bool(((weights >= low - TOLERANCE) & (weights <= high + TOLERANCE)).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_stage_contains_sampled_points(name: str) -> None:
    problem = problem_of(name, 0.02)
    program = problem.model.program(problem.n_tokens)
    names = [step.out for step in program.steps]
    walk = propagate(program, problem.region, AFFINE, names, AffineRules, 256)
    x, alpha = problem.region.sample(400, seed=1)
    values = program.run(x)
    for label, z in walk.sets.items():
        found = values[label]
        determined, room = z.evaluate(alpha)
        gap = (found - determined).abs() - room - TOLERANCE * (1.0 + found.abs())
        assert float(gap.amax()) <= 0, label
        assert not len(z.Q)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_bounds_hold_on_every_family(name: str, layer: int) -> None:
    for seed, eps in ((0, 0.3), (1, 0.03), (2, 1e-3)):
        problem = random_problem(model_of(name), 4, eps, seed)
        forms = random_forms(problem, layer, 8, seed)
        assert_contains(problem, forms, get_engine("zonotope").bound_forms(problem, forms), seed)


def test_a_smaller_budget_is_not_tighter() -> None:
    problem = problem_of("toy", 0.02)
    forms = margins(problem, 1)
    widths = []
    for symbols in (64, 128, 512, 2048):
        found = ZonotopeEngine(symbols=symbols).bound_forms(problem, forms)
        widths.append(float((found.upper - found.lower).mean()))
    assert widths == sorted(widths, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "toy"])
def test_monotone_in_the_radius(name: str) -> None:
    before = None
    for eps in (1e-4, 1e-3, 2e-2):
        problem = problem_of(name, eps)
        found = ZonotopeEngine(symbols=256).bound_forms(problem, margins(problem, 1))
        width = found.upper - found.lower
        assert before is None or bool((width >= before * (1.0 - TOLERANCE)).all())
        before = width
