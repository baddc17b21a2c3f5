"""Engine `layer0`: sound on every family and region, tight where it can be, honest where it knows nothing."""

import itertools

import pytest
import torch

from prooflens import Ball, Region, load
from prooflens.engines import Forms, Guarantee, forms_of, get_engine
from prooflens.errors import EngineError
from prooflens.models import Architecture, Transformer
from prooflens.models.train import initial_weights
from prooflens.problem import Problem
from prooflens.queries import Row, TopK
from tests.engines.support import assert_contains, attained, center_of, model_of, random_forms, random_problem
from tests.families import FAMILIES

ENGINE = get_engine("layer0")


@pytest.mark.parametrize("family", [*FAMILIES, "toy", "toy-induction"])
@pytest.mark.parametrize("eps", [1e-3, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_bounds_contain_everything_found(family: str, eps: float, seed: int) -> None:
    problem = random_problem(model_of(family), 4, eps, seed)
    forms = random_forms(problem, 0, 12, seed)
    assert_contains(problem, forms, ENGINE.bound_forms(problem, forms), seed)


@pytest.mark.parametrize("family", [*FAMILIES, "toy"])
def test_one_token_and_two(family: str) -> None:
    for n_tokens in (1, 2):
        problem = Problem(model_of(family), Ball(0.1).around(center_of(model_of(family), n_tokens, 5)))
        forms = random_forms(problem, 0, 6, 5)
        assert_contains(problem, forms, ENGINE.bound_forms(problem, forms))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_padding(family: str) -> None:
    model = model_of(family)
    padding = torch.tensor([True, True, True, False])
    problem = Problem(model, Ball(0.05).around(center_of(model, 4, 7)), padding)
    forms = random_forms(problem, 0, 8, 7)
    assert_contains(problem, forms, ENGINE.bound_forms(problem, forms))


def test_against_all_vertices_of_a_small_ball() -> None:
    """With the query token at rest a margin is linear, its extremes are at vertices, and the engine must be exact."""
    architecture = Architecture("encoder", 1, 2, 4, 4, "relu", pool="mean", d_out=2)
    weights = initial_weights(architecture, torch.Generator().manual_seed(0))
    model = Transformer(
        architecture, {name: 2.0 * tensor.detach().double() for name, tensor in weights.items()}
    )
    for seed, eps in itertools.product(range(8), (0.02, 0.1)):
        problem = Problem(model, Ball(eps, tokens=[0, 1]).around(center_of(model, 3, seed)))
        row = Row(0, seed % 2, 2)
        forms = Forms.of([(0, row, 0, 1.0), (0, row, 1, -1.0)], 1)
        found = ENGINE.bound_forms(problem, forms)
        alpha = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=8)), dtype=torch.float64)
        values = attained(problem, forms, alpha)[:, 0]
        assert float(found.upper[0]) >= float(values.max())
        assert float(found.upper[0]) == pytest.approx(float(values.max()), rel=1e-9, abs=1e-9)
        assert float(found.lower[0]) == pytest.approx(float(values.min()), rel=1e-9, abs=1e-9)


def test_margins_of_the_toy_are_nearly_exact() -> None:
    model = load("toy")
    problem = Problem(model, Ball(0.02).around(model.example(0)))
    forms = forms_of([f for claim in TopK(1).bind(problem.setting([0])) for f in claim.functionals])
    found = ENGINE.bound_forms(problem, forms)
    assert found.lower_corner is not None
    assert found.upper_corner is not None
    low = attained(problem, forms, found.lower_corner).diagonal()
    high = attained(problem, forms, found.upper_corner).diagonal()
    assert float(((found.upper - found.lower) / (high - low)).max()) < 1.05


@pytest.mark.parametrize("family", [*FAMILIES, "toy"])
def test_a_larger_ball_never_helps(family: str) -> None:
    model = model_of(family)
    x = center_of(model, 4, 11)
    setting = Problem(model, Ball(1.0).around(x)).setting([0])
    functionals = [f for claim in TopK(1).bind(setting) for f in claim.functionals]
    forms = forms_of(functionals)
    proved = torch.ones(forms.size, dtype=torch.bool)
    for eps in (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3):
        now = ENGINE.bound_forms(Problem(model, Ball(eps).around(x)), forms).lower > 0
        assert not bool((now & ~proved).any())
        proved = now


def test_a_region_that_holds_a_constant_token_is_not_bounded() -> None:
    """Without ε the norm of a token that may be constant has no bound; nothing finite may be claimed."""
    module = FAMILIES["gpt2"]()
    module.config.layer_norm_epsilon = 0.0
    model = load(module)
    problem = Problem(model, Ball(0.1).around(torch.zeros(3, 16, dtype=torch.float64)))
    forms = random_forms(problem, 0, 5, 1)
    found = ENGINE.bound_forms(problem, forms)
    assert bool((found.upper == torch.inf).all())
    assert bool((found.lower == -torch.inf).all())


def test_constraints_only_help() -> None:
    """Corners may violate a region's constraints; the bounds are about the larger box and stay valid."""
    from prooflens.regions import Constraints

    model = load("toy")
    x = center_of(model, 4, 2)
    generators = torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.05
    free = Problem(model, Region(x, generators=generators))
    tied = Problem(
        model,
        Region(x, generators=generators, constraints=Constraints.of(3, torch.ones(1, 3), torch.zeros(1))),
    )
    forms = random_forms(free, 0, 6, 2)
    assert torch.equal(ENGINE.bound_forms(free, forms).upper, ENGINE.bound_forms(tied, forms).upper)


def test_what_it_refuses() -> None:
    model = load("toy")
    problem = Problem(model, Ball(0.1).around(model.example()))
    deeper = Forms.of([(0, Row(1, 0, 0), 0, 1.0)], 1)
    with pytest.raises(EngineError, match="layer 0 only"):
        ENGINE.bound_forms(problem, deeper)
    single = model.to(dtype=torch.float32)
    problem = Problem(single, Ball(0.1).around(single.example()))
    with pytest.raises(EngineError, match="float64"):
        ENGINE.bound_forms(problem, Forms.of([(0, Row(0, 0, 0), 0, 1.0)], 1))
    with pytest.raises(EngineError, match="engines: "):
        get_engine("layer00")


def test_no_forms_at_all() -> None:
    model = load("toy")
    problem = Problem(model, Ball(0.1).around(model.example()))
    found = ENGINE.bound_forms(problem, Forms.of([], 0))
    assert found.lower.shape == (0,)
    assert ENGINE.guarantee is Guarantee.PROVED


@pytest.mark.parametrize("family", [*FAMILIES, "toy"])
@pytest.mark.parametrize("coupled", [False, True])
def test_forms_of_all_widths_at_once_are_bounded_as_one_at_a_time(family: str, coupled: bool) -> None:
    """Single scores, margins and sums over a row stand in chunks of their own, and come back in order."""
    model = model_of(family)
    region = Ball(0.01).around(center_of(model, 4, 3))
    if coupled:
        generators = 0.01 * torch.randn(3, *region.center.shape, generator=torch.Generator().manual_seed(3))
        region = Region(region.center, generators=generators.double())
    problem = Problem(model, region)
    row = Row(0, 1, 3)
    entries = [(0, row, key, 0.25) for key in range(4)] + [(1, row, 3, 1.0)]
    entries += [(2, row, 1, 1.0), (2, row, 0, -1.0), (3, row, 2, 1.0), (4, row, 3, 2.0), (4, row, 2, -1.0)]
    forms = Forms.of(entries, 6)
    found = ENGINE.bound_forms(problem, forms)
    assert forms.tokens_read(4).sum(-1).tolist() == [4, 1, 3, 2, 2, 0]
    for number in range(forms.size):
        alone = ENGINE.bound_forms(problem, forms.select(torch.tensor([number])))
        for one, many in ((alone.lower, found.lower), (alone.upper, found.upper)):
            assert float(one[0]) == pytest.approx(float(many[number]), rel=1e-9, abs=1e-9)
        assert found.upper_corner is not None
        assert alone.upper_corner is not None
        assert torch.equal(found.upper_corner[number], alone.upper_corner[0])
    assert_contains(problem, forms, found)
