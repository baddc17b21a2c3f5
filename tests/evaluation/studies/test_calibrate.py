"""The radius at which an attack leaves a share: near it where there is one, else the smallest that was tried."""

import pytest

from prooflens.engines.attack import AttackBudget
from prooflens.evaluation.studies.calibrate import calibrated
from prooflens.evaluation.studies.measure import StudyCase, attacked
from prooflens.models import Transformer

BUDGET = AttackBudget(32, 1, 10)


@pytest.mark.parametrize(("share", "start"), [(0.75, 1e-3), (0.5, 1e-3), (0.5, 10.0)])
def test_the_attack_leaves_the_share(toy: Transformer, share: float, start: float) -> None:
    def cases(eps: float) -> list[StudyCase]:
        return [StudyCase.of(toy, toy.example(i), eps, {"Q1": "top1"}, 0) for i in range(5)]

    eps = calibrated(cases, "Q1", share, start, BUDGET)
    holds = attacked(cases(eps), BUDGET).holds["Q1"]
    assert abs(sum(holds) / len(holds) - share) <= 1 / len(holds)
    assert eps == float(f"{eps:.3g}")


def test_no_radius_leaves_more_than_the_clean_inputs(toy: Transformer) -> None:
    def cases(eps: float) -> list[StudyCase]:
        return [StudyCase.of(toy, toy.example(0), eps, {"Q1": "mass>=0.3"}, 0)]

    clean = attacked(cases(1e-9), BUDGET).holds["Q1"]
    assert sum(clean) < len(clean)
    found = calibrated(cases, "Q1", 1.0, 1e-6, BUDGET)
    assert attacked(cases(found), BUDGET).holds["Q1"] == clean
