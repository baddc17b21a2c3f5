"""Bounds on segments, hulls and spans: what a model does at any of their points lies inside."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from prooflens.engines import FormBounds, Forms, forms_of
from prooflens.engines.chebyshev import Box, Chart, Chebyshev
from prooflens.engines.chebyshev.attention import ScoreValue, softmax
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.readings import first_moving
from prooflens.engines.chebyshev.values import Piece
from prooflens.engines.hidden import output_forms
from prooflens.engines.protocol import EngineOptions
from prooflens.errors import EngineError
from prooflens.evaluation.soundness.cases import FAMILIES, random_model
from prooflens.evaluation.soundness.forms import random_functionals
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.regions import Ball, Hull, Region, Segment, Span

Pool = Literal["none", "last"]
KINDS = ("segment", "hull", "span")


def inputs(model: Transformer, seed: int, tokens: int = 4, first: int = 0, far: float = 0.5) -> list[Tensor]:
    """An input, and three others that differ from it in the tokens from `first` on."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, tokens, model.architecture.d_model, generator=generator, dtype=torch.float64)
    x[1:, :first] = 0.0
    return [x[0], *(x[0] + far * move for move in x[1:])]


def region_of(kind: str, points: list[Tensor]) -> Region:
    if kind == "segment":
        return Segment(points[0], points[1]).region()
    if kind == "hull":
        return Hull(points[:3]).region()
    return Span(points[0], [point - points[0] for point in points[1:3]], 0.7).region()


def margins(problem: Problem, seed: int, layer: int) -> Forms:
    found = [f for f in random_functionals(problem, layer, random.Random(seed)) if f.name == "margin"][:12]
    return forms_of(found, problem.model.architecture.d_out or 0)


def crossed(problem: Problem, forms: Forms, bounds: FormBounds, points: int = 600) -> Tensor:
    """Which forms have a value outside their bounds at some point of the region."""
    x, _ = problem.region.sample(points, seed=3, corners=0.1)
    with torch.no_grad():
        seen = forms.evaluate(*problem.values(x, forms.layers, forms.logits is not None))
    room = 1e-11 * (1.0 + seen.abs().amax(0))
    return (seen.amin(0) < bounds.lower - room) | (seen.amax(0) > bounds.upper + room)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_point_of_a_region_lies_outside_the_bounds(family: str, seed: int) -> None:
    choose = random.Random(f"{family} {seed}")
    model = random_model(family, choose, 2)
    if not model.architecture.has_attention:
        return
    kind = choose.choice(KINDS)
    points = inputs(model, seed, first=choose.randrange(3), far=choose.choice((0.1, 0.5)))
    problem = Problem(model, region_of(kind, points))
    forms = margins(problem, seed, 1)
    found = Chebyshev(most_walks=12).bound_forms(problem, forms)
    assert not bool(crossed(problem, forms, found).any())
    signs = Chebyshev(most_walks=4).bound_forms(problem, replace(forms, signs=True))
    assert not bool(crossed(problem, forms, signs).any())


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "gemma2"])
def test_ranges_on_a_way_are_nearly_attained(family: str) -> None:
    model = random_model(family, random.Random(5), 2)
    problem = Problem(model, region_of("segment", inputs(model, 5, far=0.3)))
    forms = margins(problem, 5, 1)
    found = Chebyshev().bound_forms(problem, forms)
    alpha = torch.linspace(-1.0, 1.0, 801, dtype=torch.float64)[:, None]
    seen = forms.evaluate(*problem.values(problem.region.point(alpha), forms.layers, False))
    width = seen.amax(0) - seen.amin(0)
    assert bool(((found.upper - found.lower) <= 1.15 * width + 1e-6).all())


def test_outputs_of_the_last_token_and_of_a_pool_are_bounded() -> None:
    for family in ("gpt2", "bert", "encoder"):
        model = random_model(family, random.Random(2), 1)
        problem = Problem(model, region_of("hull", inputs(model, 2, far=0.2)))
        forms = output_forms(
            torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        )
        found = Chebyshev(most_walks=30).bound_forms(problem, forms)
        assert bool(found.lower.isfinite().all())
        assert not bool(crossed(problem, forms, found).any())


def test_rivals_are_the_margins_of_one_output_over_all_others() -> None:
    model = random_model("gpt2", random.Random(4), 1)
    problem = Problem(model, region_of("segment", inputs(model, 4, far=0.2)))
    found = Chebyshev().bound_rivals(problem, 1)
    weights = torch.tensor([[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    seen = problem.values(problem.region.sample(300, seed=1)[0], [], True)[1]
    assert seen is not None
    margin = seen @ weights.T
    for c in (0, 2):
        assert float(found.lower[c]) <= float(margin[:, c].min())
        assert float(margin[:, c].max()) <= float(found.upper[c])
    assert float(found.lower[1]) > 0.0


def test_tokens_in_front_of_the_first_that_moves_are_constants() -> None:
    model = random_model("llama", random.Random(8), 2)
    problem = Problem(model, region_of("segment", inputs(model, 8, first=2, far=0.4)))
    forms = margins(problem, 8, 1)
    found = Chebyshev(most_walks=20).bound_forms(problem, forms)
    assert not bool(crossed(problem, forms, found).any())
    still = forms.position < 2
    assert bool((found.upper - found.lower)[forms.index[still]].max() < 1e-8)


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "pythia", "bloom", "neo", "qwen3", "gemma2", "gemma3", "olmo2"]
)
@pytest.mark.parametrize("pool", ["none", "last"])
def test_bounds_hold_behind_constants_of_every_family(family: str, pool: Pool) -> None:
    """Scores of both kinds of rows, and outputs, where the first tokens do not move and are walked apart."""
    for seed in range(2):
        choose = random.Random(f"{family} {seed}")
        model = random_model(family, choose, 2)
        model = Transformer(replace(model.architecture, pool=pool), model.weights, name="decoder")
        first = choose.choice((1, 2, 3))
        problem = Problem(model, region_of(choose.choice(KINDS), inputs(model, seed, first=first, far=0.2)))
        assert first_moving(problem) == first
        weights = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for forms in (margins(problem, seed, 1), output_forms(weights)):
            found = Chebyshev(most_walks=8).bound_forms(problem, forms)
            assert not bool(crossed(problem, forms, found).any())


def test_the_output_is_that_of_the_last_real_token() -> None:
    """Only padding moves: the output is a constant, and that of a token in front of it."""
    model = random_model("gpt2", random.Random(3), 2)
    pools: tuple[Pool, ...] = ("none", "last")
    for pool in pools:
        plain = Transformer(replace(model.architecture, pool=pool), model.weights, name="decoder")
        points = inputs(plain, 3, first=3, far=0.5)
        problem = Problem(plain, Segment(points[0], points[1]).region(), torch.arange(4) < 3)
        forms = output_forms(torch.eye(3, dtype=torch.float64))
        found = Chebyshev().bound_forms(problem, forms)
        assert not bool(crossed(problem, forms, found).any())
        assert float((found.upper - found.lower).max()) < 1e-9


def test_a_weight_that_underflows_is_not_forgotten() -> None:
    """Where the centre's weight is 0 in float64 and another point's is not."""
    grid = Grid((4,), torch.zeros(1, dtype=torch.float64))
    runs = torch.zeros(1, 5, 1, 1, 2, dtype=torch.float64)
    runs[..., 1] = (-760.0 - 700.0 * grid.points[:, 0])[None, :, None, None]
    tiny = torch.full((1, 1, 1, 2), 1e-9, dtype=torch.float64)
    nobody: Any = None
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = softmax(ScoreValue(Piece(grid), runs, tiny, tiny, tiny, nobody, nobody, mask, None))
    real = math.exp(-60.0)
    assert float(found.most[..., 1]) >= real
    assert float(found.change[..., 1]) >= real
    interpolated = float((grid.coefficients(found.runs)[0][0, :, 0, 0, 1] * (-1.0) ** torch.arange(5)).sum())
    assert abs(real - interpolated) <= float(found.defect[..., 1])


def test_a_model_that_does_not_fit_is_refused_by_one_line() -> None:
    model = random_model("gpt2", random.Random(0), 1)
    problem = Problem(model, region_of("segment", inputs(model, 0)))
    with pytest.raises(EngineError, match="GiB for one piece"):
        Chebyshev().bound_forms(problem, margins(problem, 0, 0), EngineOptions(memory=1000))


def test_pieces_cover_the_region_and_their_bounds_hold_on_each() -> None:
    model = random_model("gpt2", random.Random(6), 2)
    problem = Problem(model, region_of("hull", inputs(model, 6, far=1.0)))
    forms = replace(margins(problem, 6, 1), signs=True)
    cover = Chebyshev().bound_forms(problem, forms).cover
    assert cover is not None
    assert float((cover.high - cover.low).prod(-1).sum()) == 4.0
    chart = Chart(problem.region)
    for low, high, lower, upper in zip(cover.low, cover.high, cover.lower, cover.upper, strict=True):
        box = Box(tuple(low.tolist()), tuple(high.tolist()))
        inside = box.at(
            torch.rand(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
        )
        seen = forms.evaluate(*problem.values(chart.inputs(inside), forms.layers, False))
        assert bool((seen.amin(0) >= lower - 1e-10).all() and (seen.amax(0) <= upper + 1e-10).all())


def test_the_chart_of_a_hull_reaches_its_corners_and_stays_inside() -> None:
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    region = Hull(list(x)).region()
    chart = Chart(region)
    corners = torch.tensor(
        [[-1.0, 0.3, 0.2], [1.0, -1.0, 0.0], [1.0, 1.0, -1.0], [1.0, 1.0, 1.0]], dtype=torch.float64
    )
    assert torch.allclose(chart.inputs(corners), x, atol=1e-12)
    some = torch.rand(200, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    assert region.constraints is not None
    assert bool(region.constraints.satisfied(chart.factors(some), 1e-12).all())
    assert chart.factors(some).abs().max() <= 1.0


def test_many_factors_are_refused_by_one_line() -> None:
    model = random_model("gpt2", random.Random(0), 1)
    problem = Problem(model, Ball(0.1).around(inputs(model, 0)[0]))
    with pytest.raises(EngineError, match="at most 6 factors"):
        Chebyshev().bound_forms(problem, margins(problem, 0, 0))
