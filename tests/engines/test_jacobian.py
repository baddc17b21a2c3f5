"""The Jacobian connector: the paper's estimate breaks where it must, the proved one holds; interval Jacobians."""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from prooflens.engines import Forms, Guarantee, forms_of, get_engine
from prooflens.engines.jacobian import Jacobian, ProvedConnector, SampledConnector, jacobian
from prooflens.engines.jacobian.interval import interval_jacobian
from prooflens.engines.tensor_sets.steps import SetOptions
from prooflens.engines.tensor_sets.walk import propagate, score_steps
from prooflens.evaluation.soundness.cases import random_model
from prooflens.models.program import INPUT
from prooflens.models.sites import Scores
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.queries.attention import TopK
from prooflens.regions import Ball
from tests.engines.cases import model_of
from tests.engines.support import center_of
from tests.families import FAMILIES

TOLERANCE = 1e-9
"""Sampled points are computed in floats themselves."""


def problem(name: str, eps: float, index: int = 0) -> Problem:
    model = model_of(name)
    x = center_of(model, 4, index) if name in FAMILIES else model.example(index).x
    return Problem(model, Ball(eps).around(x))


def margins(asked: Problem, layer: int) -> Forms:
    return forms_of([f for claim in TopK(k=1).bind(asked.setting([layer])) for f in claim.functionals])


def worst(asked: Problem, forms: Forms, layer: int) -> tuple[Tensor, Tensor]:
    """The least and largest values of forms on samples and on the corners that `cpz` proposes."""
    corners = get_engine("cpz").bound_forms(asked, forms)
    assert corners.lower_corner is not None
    assert corners.upper_corner is not None
    x, _ = asked.region.sample(3000, seed=3)
    x = torch.cat((x, asked.region.point(torch.cat((corners.lower_corner, corners.upper_corner)))))
    values = forms.evaluate(asked.values(x, [layer], False)[0], None)
    return values.amin(0), values.amax(0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "eps"), [*((name, 0.02) for name in (*FAMILIES, "toy")), ("bert", 0.003)])
def test_interval_jacobians_contain_jacobians_of_points(name: str, eps: float) -> None:
    asked = problem(name, eps)
    layer = asked.model.architecture.n_layers - 1
    program = asked.model.program(4, [f"blocks.{layer}.attn.hook_q", f"blocks.{layer}.attn.hook_attn_scores"])
    names = [INPUT, *(step.out for step in program.steps)]
    walk = propagate(program, asked.region, SetOptions(), names)
    points, _ = asked.region.sample(12, seed=4)
    for label in names[1::3]:
        part = program.slice([label])
        slope = interval_jacobian(part, walk.sets, asked.region.dense_generators(), label)
        for x in points[:: 4 if "hook_q" not in label else 1]:
            found = jacobian(part, label, asked.region, x)
            slack = TOLERANCE * (1.0 + found.abs())
            assert bool(((found - slope.mid).abs() <= slope.rad + slack).all()), label


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "columns"),
    [*((name, 3) for name in (*FAMILIES, "toy", "toy-4layer")), ("toy", 1024), ("gpt2", 1024)],
)
def test_the_proved_connector_contains_the_value(name: str, columns: int) -> None:
    """Also with the region's factors fixed: what they determine plus the box covers the value."""
    asked = problem(name, 0.01)
    layer = asked.model.architecture.n_layers - 1
    source = asked.model.program(4, f"blocks.{layer}.attn.hook_q").steps[-1].inputs[0]
    made = ProvedConnector(columns=columns)(asked, source)
    assert made is not None
    x, alpha = asked.region.sample(1000, seed=5)
    determined, room = made.evaluate(alpha)
    found = asked.model.run(x, source)[source]
    assert bool(((found - determined).abs() <= room + TOLERANCE).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer"), [("toy", 0), ("toy", 1), ("toy-4layer", 3), ("gpt2", 1), ("llama", 1)]
)
def test_proved_bounds_hold(name: str, layer: int) -> None:
    asked = problem(name, 0.01)
    forms = margins(asked, layer)
    engine = get_engine("jacobian-proved")
    assert engine.guarantee is Guarantee.PROVED
    bounds = engine.bound_forms(asked, forms)
    low, high = worst(asked, forms, layer)
    assert bool((low >= bounds.lower - TOLERANCE).all())
    assert bool((high <= bounds.upper + TOLERANCE).all())


@pytest.mark.slow
def test_dropped_columns_on_a_segment_give_false_certificates() -> None:
    """Row 1 of soundness.md. Columns that are dropped go into r_t, and a score reads Σ w_k r_k, signs and all.

    A margin that the estimate certifies is broken by a concrete point. The proved connector keeps the same columns,
    puts the rest into a box, and claims nothing false.
    """
    false: Counter[int] = Counter()
    for index in (3, 4):
        asked = problem("toy", 0.05, index)
        forms = margins(asked, 1)
        low, high = worst(asked, forms, 1)
        for columns in (2, 16):
            estimate = Jacobian("jacobian", Guarantee.ESTIMATED, SampledConnector(columns=columns))
            guessed = estimate.bound_forms(asked, forms)
            false[columns] += int(((guessed.lower > 0) & (low < -TOLERANCE)).sum())
            proof = Jacobian("jacobian-proved", Guarantee.PROVED, ProvedConnector(columns=columns))
            proved = proof.bound_forms(asked, forms)
            assert bool(((low >= proved.lower - TOLERANCE) & (high <= proved.upper + TOLERANCE)).all())
    assert false[2] > 0
    assert false[16] > 0


def test_the_sampled_remainder_is_below_what_happens() -> None:
    """Rows 1 and 2, with every column kept: on toy-4layer, layer 3, concrete points leave the estimated bounds."""
    asked = problem("toy-4layer", 0.01)
    forms = margins(asked, 3)
    engine = get_engine("jacobian")
    assert engine.guarantee is Guarantee.ESTIMATED
    guessed = engine.bound_forms(asked, forms)
    low, high = worst(asked, forms, 3)
    assert bool(((low < guessed.lower - TOLERANCE) | (high > guessed.upper + TOLERANCE)).any())


def test_keeping_more_columns_never_loosens_the_proved_bound() -> None:
    asked = problem("toy", 0.02)
    forms = margins(asked, 1)
    widths = []
    for columns in (2, 8, 16, 32):
        proof = Jacobian("jacobian-proved", Guarantee.PROVED, ProvedConnector(columns=columns))
        bounds = proof.bound_forms(asked, forms)
        widths.append(float((bounds.upper - bounds.lower).mean()))
    assert widths == sorted(widths, reverse=True)


def test_remainders_of_normed_queries_and_keys_have_factors_of_their_own() -> None:
    """Each is linearised by itself: what one misses says nothing of what the other misses."""
    choose = random.Random(0)
    model = random_model("qwen3", choose, 2)
    x = torch.randn(3, model.architecture.d_model, generator=torch.Generator().manual_seed(0)).double()
    problem = Problem(model, Ball(0.01).around(x))
    engine = get_engine("jacobian-proved")
    assert isinstance(engine, Jacobian)
    (scores,) = score_steps(problem, Forms.of([(0, Row(1, 0, 2), 0, 1.0)], 1)).values()
    assert isinstance(scores, Scores)
    q, k = (set(made.ids.tolist()) for made in engine._read(problem, scores).values())
    fresh = problem.region.n_factors
    assert {i for i in q if i < fresh} & {i for i in k if i < fresh}
    assert {i for i in q if i >= fresh}
    assert not {i for i in q if i >= fresh} & {i for i in k if i >= fresh}
