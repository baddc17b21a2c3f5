"""The same certificates in float64 and in Arb: 1,000 random small instances, no tolerance.

A bound of `layer0` is the form's value at a corner plus what the curvature may add; often that is nothing, and all that
separates the bound from an attained value is its allowance for rounding. So values at the engines' own corners, over
the reals, must lie inside their float64 bounds. Below, the steps of `interval` one by one: the box that float64
arithmetic gives must contain the box that the same formula gives in Arb.
"""

import random

import flint
import pytest
import torch

from prooflens.engines import Guarantee, engine_names, forms_of, get_engine
from prooflens.evaluation.soundness import modest, random_case
from prooflens.evaluation.soundness.forms import output_functionals, random_functionals
from prooflens.problem import Problem
from prooflens.queries import Functional
from tests.rounding.real import real_forms, real_points

INSTANCES = 600
FORMS = 3
CHEAP = ["interval", "layer0"]
CROWN = 16
"""One in so many instances is also given to `crown`."""
PROVED = [name for name in engine_names() if get_engine(name).guarantee is Guarantee.PROVED]


@pytest.fixture(autouse=True)
def _precision() -> None:
    flint.ctx.prec = 200


def _is_known(problem: Problem) -> bool:
    """Whether the checker knows every number of it exactly: given rotary frequencies it knows to a float32 unit."""
    plain = problem.region.constraints is None and problem.padding is None
    return plain and problem.n_tokens <= 3 and not problem.model.architecture.rope_given


def instance(seed: int) -> tuple[Problem, list[Functional]]:
    """A random model and region without constraints, on one to three tokens, and a few forms."""
    choose = random.Random(seed)
    case = random_case(seed)
    problem = case.problem
    while not _is_known(problem):
        seed += 10_000
        problem = random_case(seed).problem
    if choose.random() < 0.2 or not problem.model.architecture.has_attention:
        return problem, choose.sample(output_functionals(3, choose), FORMS)
    layer = choose.randrange(min(2, problem.model.architecture.n_layers))
    found = random_functionals(problem, layer, choose)
    return problem, found[:FORMS]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_float64_bounds_contain_the_real_values_at_their_corners(part: int) -> None:
    tight = tried = 0
    for seed in range(part, INSTANCES, 10):
        problem, functionals = instance(seed)
        forms = forms_of(functionals, 3)
        names = [*CHEAP, "crown"] if seed // 10 % CROWN == 0 else CHEAP
        if seed < 10 and problem.region.center.numel() <= 12:
            names = PROVED
        engines = [engine for name in names if (engine := modest(name)).refuses(problem, forms) is None]
        answers = {engine.name: engine.bound_forms(problem, forms) for engine in engines}
        best = min(answers.values(), key=lambda b: float((b.upper - b.lower)[0]))
        corners = [c[:1] for c in (best.lower_corner, best.upper_corner) if c is not None]
        alpha = torch.cat([torch.zeros(1, problem.region.n_factors, dtype=torch.float64), *corners])
        for values in real_forms(problem, forms, real_points(problem, alpha)):
            for name, bounds in answers.items():
                for value, low, high in zip(
                    values, bounds.lower.tolist(), bounds.upper.tolist(), strict=True
                ):
                    assert flint.arb(low) <= value <= flint.arb(high), (seed, name)
                    tried += 1
                    tight += name == "layer0" and float(high - value) < 1e-11 * (1.0 + abs(high))
    assert tried > 300
    assert tight > 0, "some bounds are nothing but value and rounding"
