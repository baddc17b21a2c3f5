"""Numbers far from 1: weights, inputs and radii whose squares or products leave float64, and what is proved of them.

Every engine's bounds must contain the values over the reals at corners and inside, or be infinite. What a product of
tiny numbers loses, and what overflows, must not make a bound tighter.
"""

from dataclasses import replace
from random import Random

import flint
import pytest
import torch
from torch import Tensor

from prooflens.engines import FormBounds, forms_of
from prooflens.evaluation.soundness import modest
from prooflens.evaluation.soundness.cases import random_model
from prooflens.evaluation.soundness.forms import output_functionals, random_functionals
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.regions import Ball
from prooflens.sets.bilinear import GramBlocks, extreme_eigenvalues, quick_eigenvalues
from tests.rounding.real import real_forms, real_points

ENGINES = ("interval", "layer0", "crown", "taylor", "cpz", "zonotope")

SCALES = {
    "tiny queries and keys": ("bert", {"blocks.0.q.": 1e-85, "blocks.0.k.": 1e-85}, 1.0, 0.1, None),
    "tiny scores of large inputs": ("bert", {"blocks.0.q.": 1e-120, "blocks.0.k.": 1e-120}, 1e10, 0.01, None),
    "tiny inputs": ("encoder", {}, 1e-85, 0.3, None),
    "tiny inputs and large keys": ("encoder", {"blocks.0.k.weight": 1e150}, 1e-200, 0.5, None),
    "large queries": ("encoder", {"blocks.0.q.": 1e30}, 1.0, 0.3, None),
    "large queries behind a norm": ("llama", {"blocks.0.q.": 1e40}, 1.0, 0.3, None),
    "huge inputs of a norm": ("llama", {}, 1e120, 0.3, None),
    "a norm whose slope vanishes": ("llama", {}, 1e150, 0.005, None),
    "a centred norm whose slope vanishes": ("gpt2", {}, 1e150, 0.05, None),
    "inputs of a norm whose squares overflow": ("gpt2", {}, 1e155, 0.3, None),
    "a norm whose slope overflows": ("llama", {}, 1e-110, 0.3, 1e-300),
    "a centred norm whose slope overflows": ("gpt2", {}, 1e-120, 0.2, 1e-300),
    "a norm without ε": ("llama", {}, 1e-162, 0.1, 0.0),
    "a norm of constant tokens without ε": ("gpt2", {}, 0.0, 0.1, 0.0),
    "a radius that vanishes": ("encoder", {}, 1.0, 1e-320, None),
    "a huge radius": ("gpt2", {}, 1.0, 1e100, None),
}


def scaled_problem(name: str, seed: int) -> Problem:
    """A small model with some weights multiplied, on two tokens; a ball of a share of the input's size."""
    family, factors, size, share, eps = SCALES[name]
    model = random_model(family, Random(seed), 1)
    weights = dict(model.weights)
    for start, factor in factors.items():
        weights |= {key: value * factor for key, value in weights.items() if key.startswith(start)}
    architecture = model.architecture if eps is None else replace(model.architecture, norm_eps=eps)
    model = Transformer(architecture, weights)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, architecture.d_model, generator=generator, dtype=torch.float64) * size
    return Problem(model, Ball(share * (size or 1.0)).around(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALES)
def test_bounds_of_numbers_far_from_one_contain_the_real_values(name: str) -> None:
    flint.ctx.prec = 400
    problem, choose = scaled_problem(name, seed=0), Random(0)
    compared = 0
    for functionals in (random_functionals(problem, 0, choose)[:4], output_functionals(3, choose)[:4]):
        forms = forms_of(functionals, 3)
        engines = [engine for engine in map(modest, ENGINES) if engine.refuses(problem, forms) is None]
        answers = {engine.name: engine.bound_forms(problem, forms) for engine in engines}
        for values in real_forms(problem, forms, real_points(problem, some_factors(problem, answers))):
            for engine_name, bounds in answers.items():
                assert not bool((bounds.lower.isnan() | bounds.upper.isnan()).any()), engine_name
                for value, low, high in zip(
                    values, bounds.lower.tolist(), bounds.upper.tolist(), strict=True
                ):
                    if value.is_finite():
                        assert not value < flint.arb(low), (engine_name, low, value)
                        assert not value > flint.arb(high), (engine_name, high, value)
                        compared += 1
    assert compared > 100


def some_factors(problem: Problem, answers: dict[str, FormBounds]) -> Tensor:
    """The centre, random corners and points, and the engines' own corners."""
    p = problem.region.n_factors
    signs = torch.randint(0, 2, (3, p), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    corners = [c[:1] for b in answers.values() for c in (b.lower_corner, b.upper_corner) if c is not None]
    zero = torch.zeros(1, p, dtype=torch.float64)
    distinct: Tensor = torch.cat([zero, signs, 0.3 * signs, *corners]).unique(dim=0)
    return distinct


@pytest.mark.parametrize("power", [-300, -80, -64, 64, 74, 120, 300])
def test_eigenvalues_of_products_scale(power: int) -> None:
    """The certificate normalises by powers of two: in float64, not in the float32 of torch's integer quotients."""
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    Z = X * 2.0**power
    gram = GramBlocks.of(Z @ Z.mT, Y @ Z.mT, Y @ Y.mT, 6)
    true = torch.linalg.eigvalsh(X.mT @ Y + Y.mT @ X)
    for minus, plus in (extreme_eigenvalues(gram), quick_eigenvalues(gram)):
        assert -true[0] <= minus * 2.0**-power < 3.0 * -true[0]
        assert true[-1] <= plus * 2.0**-power < 3.0 * true[-1]
