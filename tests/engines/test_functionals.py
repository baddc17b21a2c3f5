"""Functionals from forms: every query, any engine, checked against sampling and sign steps."""

import pytest
import torch

from prooflens import Ball, load
from prooflens.engines import Bounds, Guarantee, get_engine
from prooflens.engines.functionals import bound_claims, bound_functionals
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.queries import Functional, parse_query
from prooflens.verdicts.decide import is_proved
from tests.engines.support import center_of, model_of
from tests.families import FAMILIES

QUERIES = [
    "top1",
    "top2",
    "rank2",
    "mass>=0.3",
    "mass>=0.1@{0,1}",
    "entropy",
    "entropy<=1.2",
    "spec{0}>{1}",
    "0.0:top1@-1 & 0.1:mass>=0.2@-1",
    "0.5 * 0.0:mass>=0.2@-1 + 1.5 * 0.1:spec{0}>{1}@-1 > 0",
]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "toy"])
@pytest.mark.parametrize("query", QUERIES)
def test_claims_are_bounded_soundly(family: str, query: str) -> None:
    model = model_of(family)
    for eps in (1e-3, 0.1):
        problem = Problem(model, Ball(eps).around(center_of(model, 4, 3)))
        claims = parse_query(query).bind(problem.setting([0]), heads="0")
        parts, together = bound_claims(get_engine("layer0"), problem, claims)
        assert together.guarantee is Guarantee.PROVED
        points = [problem.region.sample(200, 1, corners=0.9)[1]]
        points += [c for c in (together.lower_corner, together.upper_corner) if c is not None]
        scores, _ = problem.values(problem.region.point(torch.cat(points)), [0], False)
        for claim, bounds in zip(claims, parts, strict=True):
            rows = {row: scores[0][:, row.head, row.position] for row in claim.rows}
            values = claim.values(rows)
            assert bool((values >= bounds.lower).all())
            assert bool((values <= bounds.upper).all())
            if is_proved(claim, bounds):
                assert bool(claim.holds_on(rows).all())


def test_small_balls_give_tight_entropies_and_masses() -> None:
    model = load("toy")
    problem = Problem(model, Ball(1e-4).around(model.example(1)))
    for query in ("entropy", "mass>=0.2"):
        claims = parse_query(query).bind(problem.setting([0]))
        _, bounds = bound_claims(get_engine("layer0"), problem, claims)
        corners = torch.cat([c for c in (bounds.lower_corner, bounds.upper_corner) if c is not None])
        scores, _ = problem.values(problem.region.point(corners), [0], False)
        values = torch.cat(
            [c.values({row: scores[0][:, row.head, row.position] for row in c.rows}) for c in claims], -1
        )
        attained = values.amax(0) - values.amin(0)
        assert float(((bounds.upper - bounds.lower) / attained).max()) < 1.01


def test_proved_and_estimated_bounds_do_not_mix() -> None:
    low, high = torch.zeros(1), torch.ones(1)
    proved = Bounds(low, high, Guarantee.PROVED, "a", 0.0)
    estimated = Bounds(low, high / 2, Guarantee.ESTIMATED, "b", 0.0)
    with pytest.raises(EngineError, match="cannot be intersected"):
        proved.intersect(estimated)
    both = proved.intersect(Bounds(low - 1, high / 2, Guarantee.PROVED, "c", 1.0))
    assert (float(both.lower), float(both.upper)) == (0.0, 0.5)
    with pytest.raises(EngineError, match="contradict"):
        proved.intersect(Bounds(high * 2, high * 3, Guarantee.PROVED, "d", 0.0))


def test_a_constant_is_its_own_bound() -> None:
    model = load("toy")
    problem = Problem(model, Ball(0.1).around(model.example()))
    constant = Functional((), 0.25, "a constant")
    margin = parse_query("top1").bind(problem.setting([0]))[0].functionals[0]
    for functionals in ([constant], [constant, margin]):
        found = bound_functionals(get_engine("layer0"), problem, functionals)
        assert float(found.lower[0]) == float(found.upper[0]) == 0.25


def test_nothing_to_bound() -> None:
    model = load("toy")
    problem = Problem(model, Ball(0.1).around(model.example()))
    assert bound_functionals(get_engine("layer0"), problem, []).lower.shape == (0,)
