"""Counting: denominators, what an attack leaves, and what happens when an engine is wrong."""

from dataclasses import dataclass

import pytest
import torch

from prooflens.engines import FormBounds, Forms, Guarantee
from prooflens.engines.attack import AttackBudget
from prooflens.engines.protocol import EngineBase, EngineOptions
from prooflens.evaluation.studies import StudyError
from prooflens.evaluation.studies.measure import StudyCase, answered, attacked, rows_of
from prooflens.models import Transformer
from prooflens.problem import Problem

BUDGET = AttackBudget(100, 2, 10)
QUERIES = {"Q1": "top1", "Q2": "mass>=0.3", "Q3": "entropy"}


@dataclass(frozen=True)
class Liar(EngineBase):
    """Says that every form stays within a hair of its clean value."""

    name: str = "liar"
    guarantee: Guarantee = Guarantee.PROVED

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        clean = torch.zeros(forms.size, dtype=torch.float64)
        scores = problem.setting(forms.layers).scores
        names = ("index", "layer", "head", "position", "key", "weight")
        places = zip(*(getattr(forms, name).tolist() for name in names), strict=True)
        for form, layer, head, position, key, weight in places:
            clean[form] += weight * scores[layer][head, position, key]
        return FormBounds(clean - 1e-12, clean + 1e-12)


def cases(toy: Transformer, eps: float, layer: int = 0, count: int = 2) -> list[StudyCase]:
    return [StudyCase.of(toy, toy.example(i), eps, QUERIES, layer) for i in range(count)]


def test_every_claim_is_in_the_denominator(toy: Transformer) -> None:
    asked = cases(toy, 0.02)
    rows = rows_of("g", asked, {"CPZ": "cpz", "IBP": "interval"}, BUDGET, {("CPZ", "Q1"): 85.0})
    assert [(row.label, row.engine, row.n) for row in rows] == [
        (query, engine, 2 * 2 * 4) for query in QUERIES for engine in ("cpz", "interval")
    ]
    assert rows[0].paper == 85.0
    assert rows[1].paper is None
    for row in rows:
        assert row.proved is not None
        assert row.attack is not None
        assert row.proved <= row.attack if row.unit == "%" else row.proved >= row.attack


def test_what_stands_stands_at_sampled_points(toy: Transformer) -> None:
    """A claim that a plain sample breaks does not stand; a proved one stands at every sample."""
    asked = cases(toy, 0.3, count=1)
    left, proofs = attacked(asked, AttackBudget(2000, 4, 30)), answered("layer0", asked)
    x = asked[0].problem.region.sample(500, seed=5)[0]
    scores = toy.scores(x, 0)
    for name in ("Q1", "Q2"):
        for claim, stands, proof in zip(
            asked[0].claims[name], left.holds[name], proofs.holds[name], strict=True
        ):
            (row,) = claim.rows
            holds = claim.holds_on({row: scores[:, row.head, row.position]})
            assert not (proof and not bool(holds.all()))
            assert not (proof and not stands)
            if not claim.clean_holds:
                assert not stands
    assert any(not stands for stands in left.holds["Q1"])


def test_attained_ranges_lie_inside_proved_ones(toy: Transformer) -> None:
    asked = cases(toy, 0.05, count=1)
    left, proofs = attacked(asked, BUDGET), answered("layer0", asked)
    for narrow, wide in zip(left.widths["Q3"], proofs.widths["Q3"], strict=True):
        assert 0.0 < narrow <= wide


def test_a_false_proof_is_an_error(toy: Transformer) -> None:
    with pytest.raises(StudyError, match=r"liar proved .* that the attack breaks"):
        rows_of("g", cases(toy, 0.5, count=1), {"CPZ": Liar()}, BUDGET)


def test_a_false_estimate_is_counted(toy: Transformer) -> None:
    rows = rows_of("g", cases(toy, 0.5, count=1), {"CPZ": Liar(guarantee=Guarantee.ESTIMATED)}, BUDGET)
    top = rows[0]
    assert top.proved is None
    assert top.estimated is not None
    assert top.attack is not None
    assert top.false == top.estimated - top.attack > 0
    assert "narrower than what the attack attains" in rows[-1].note


def test_a_refusal_is_a_row_with_the_reason(toy: Transformer) -> None:
    rows = rows_of("g", cases(toy, 0.01, layer=1, count=1), {"CPZ": "layer0"}, BUDGET)
    assert all(row.proved is None and row.note for row in rows)
