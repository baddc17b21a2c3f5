"""Random distributions over outputs of a model and of an edit of it: their effects against an attack."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from prooflens.engines import Engine
from prooflens.engines.attack.effects import attack_metric
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.distributions import MOST_OUTPUTS, Distribution, bound_distribution
from prooflens.evaluation.soundness.cases import Case
from prooflens.evaluation.soundness.forms import compare
from prooflens.evaluation.soundness.record import SoundnessReport
from prooflens.problem import Problem
from prooflens.queries import DistributionQuery, Functional


def try_distributions(
    case: Case,
    problem: Problem,
    edited: Problem,
    engines: Sequence[Engine],
    budget: AttackBudget,
    choose: random.Random,
    report: SoundnessReport,
) -> None:
    """Bound the effect of an edit on a probability and on a divergence over some outputs, and attack both.

    Args:
        case: a random model and region.
        problem: the model and the region.
        edited: the edited one and the same region.
        engines: who is asked.
        budget: how hard what they prove is attacked.
        choose: draws the outputs.
        report: gets the counts and what was violated.
    """
    outputs = problem.model.architecture.d_out or 0
    if outputs < 2:
        return
    among = choose.sample(range(outputs), choose.randint(2, min(outputs, MOST_OUTPUTS, 8)))
    weight, bias = problem.model.head
    other_weight, other_bias = edited.model.head
    small = replace(problem, model=problem.model.with_head(weight[among], bias[among]))
    other = replace(edited, model=edited.model.with_head(other_weight[among], other_bias[among]))
    for target in (choose.randrange(len(among)), None):
        measured = Distribution(len(among), target)
        kind = "divergence" if target is None else "probability"
        query = DistributionQuery(None if target is None else among[target], tuple(among))
        functional = Functional(((1.0, query.atom(outputs)),), 0.0, f"effect on a {kind}")
        answers = {engine.name: bound_distribution(engine, small, other, measured) for engine in engines}
        reached = attack_metric(small, other, measured.metrics, budget, case.seed, list(answers.values()))
        for name, bounds in answers.items():
            ends = bounds.lower.to(reached.lower), bounds.upper.to(reached.upper)
            found = replace(bounds, lower=ends[0], upper=ends[1])
            compare(case, name, [functional], found, reached.lower, reached.upper, report)
