"""Verdicts at the edges: thresholds that are met exactly, values that are not numbers, regions that are points."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch

import prooflens as pl
from prooflens.engines import Bounds, Guarantee
from prooflens.errors import EngineError, RegionError
from prooflens.evaluation.soundness.cases import random_model
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.regions import Ball, Region
from prooflens.verdicts.evidence import Evidence


def encoder(factor: float) -> Transformer:
    """A small encoder with its queries and keys multiplied."""
    model = random_model("encoder", Random(0), 1)
    scaled = {
        name: tensor * (factor if ".q." in name or ".k." in name else 1.0)
        for name, tensor in model.weights.items()
    }
    return replace(model, weights=scaled)


def tokens(model: Transformer, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, model.architecture.d_model, generator=generator, dtype=torch.float64)


def test_a_threshold_that_is_met_exactly_is_not_broken() -> None:
    """Attention over two tokens is ½ each: the mass is not below ½, whatever rounding did to the threshold."""
    model = encoder(0.0)
    at, above = (
        pl.certify(model, tokens(model, 2), Ball(0.1), queries=f"0.0:mass>={tau}@{{0}}").outcomes
        for tau in (0.5, 0.5 + 1e-13)
    )
    assert {outcome.verdict for outcome in at} == {"unknown"}
    assert {outcome.verdict for outcome in above} == {"fails"}


def test_a_clean_value_that_is_not_a_number_breaks_nothing() -> None:
    model = encoder(1e200)
    x = tokens(model, 3)
    for outcome in pl.certify(
        model, x, Ball(1e-3), queries=["0.0:top1", "0.0:mass>=0.5", "0.0:entropy>=0.1"]
    ).outcomes:
        assert outcome.verdict == "unknown", (outcome.claim, outcome.claim.clean)


def test_what_is_known_stays_known_where_an_engine_has_no_number() -> None:
    model = encoder(1.0)
    (claim, *_) = pl.certify(model, tokens(model, 2), Ball(1e-3), queries="0.0:top1").outcomes
    evidence = Evidence.about(claim.claim)
    one, none = torch.ones(1, dtype=torch.float64), torch.full((1,), math.nan, dtype=torch.float64)
    evidence.learn([0], Bounds(one, 2.0 * one, Guarantee.PROVED, "first", 0.0), 0)
    evidence.learn([0], Bounds(none, none, Guarantee.PROVED, "second", 0.0), 0)
    assert evidence.bounds().lower.tolist() == [1.0]
    assert evidence.bounds().upper.tolist() == [2.0]


@pytest.mark.parametrize("engine", ["exact", "jacobian-proved"])
def test_engines_that_need_a_region_that_moves_say_so(engine: str) -> None:
    model = encoder(1.0)
    x = tokens(model, 2)
    with pytest.raises(EngineError, match="a region that moves"):
        pl.certify(model, x, Region(x, radius=torch.zeros_like(x)), queries="0.0:top1@0", engine=engine)


def test_the_constant_of_a_sum_is_kept_however_small_its_weight() -> None:
    model = encoder(1.0)
    problem = Problem(model, Ball(0.1).around(tokens(model, 2)))
    (claim,) = parse_query("1e-320 * 0.0:mass>=0.9@{0}@1 > 0").bind(problem.setting([0]))
    assert claim.functionals[0].constant < 0.0


def test_radii_are_searched_between_numbers_with_a_quotient() -> None:
    model = encoder(1.0)
    with pytest.raises(RegionError, match="finite quotient"):
        pl.radius(model, tokens(model, 2), "0.0:top1@0", between=(1e-300, 1e300))
