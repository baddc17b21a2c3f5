"""Every proved bound of a random question's functionals is attacked, and every claim that is proved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prooflens.engines import Bounds, Engine
from prooflens.engines.attack import break_claims
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.functionals import bound_claims, refusal
from prooflens.errors import ProoflensError
from prooflens.evaluation.soundness.cases import Case
from prooflens.evaluation.soundness.record import SoundnessReport, Violation
from prooflens.problem import Problem
from prooflens.queries import Claim, Functional
from prooflens.queries.base import Condition, Sense, make_claim
from prooflens.verdicts.decide import is_proved

GROWTH = 1.6
"""How much larger the region of the monotonicity check is."""

EXACT_FACTORS = 12
"""Problems with at most this many factors are also given to `exact`, if all their functionals are linear."""


def try_case(case: Case, engines: Sequence[Engine], budget: AttackBudget, report: SoundnessReport) -> None:
    """Ask all engines about one case, and attack what they prove.

    Args:
        case: a model, a region and claims.
        engines: who is asked.
        budget: how hard proved claims are attacked.
        report: where the outcome is counted.
    """
    report.cases["claims"] += 1
    functionals = [f for claim in case.claims for f in claim.functionals]
    together: Bounds | None = None
    for engine in engines:
        if refusal(engine, case.problem, functionals) or not _affordable(engine, case):
            continue
        parts, bounds = bound_claims(engine, case.problem, case.claims)
        _attack_bounds(case, engine.name, bounds, budget, report)
        _note_gap(case, bounds, report)
        _attack_claims(case, engine.name, parts, budget, report)
        _check_growth(case, engine, parts, report)
        try:
            together = bounds if together is None else together.intersect(bounds)
        except ProoflensError as error:
            report.violations.append(Violation(case.seed, case.family, engine.name, str(error)))


def _affordable(engine: Engine, case: Case) -> bool:
    """Branch and bound works form by form, and a curved functional needs a form for every pair of keys."""
    linear = all(f.is_linear for claim in case.claims for f in claim.functionals)
    return engine.name != "exact" or (case.problem.region.n_factors <= EXACT_FACTORS and linear)


def _attack_bounds(
    case: Case, engine: str, bounds: Bounds, budget: AttackBudget, report: SoundnessReport
) -> None:
    """Every finite bound as a claim of its own, attacked."""
    asked = [
        (query, f) for query, claim in zip(case.queries, case.claims, strict=True) for f in claim.functionals
    ]
    setting = case.problem.setting(_layers(case), output=_about_output(case))
    targets: list[Claim] = []
    starts: list[Tensor | None] = []
    for i, (query, functional) in enumerate(asked):
        for side, corners in ((bounds.lower, bounds.lower_corner), (bounds.upper, bounds.upper_corner)):
            limit = float(side[i])
            if math.isnan(limit):
                report.violations.append(
                    Violation(case.seed, case.family, engine, f"NaN bound of {functional.name}")
                )
            elif math.isfinite(limit) and (functional.rows or functional.logits):
                sign = 1.0 if side is bounds.lower else -1.0
                shifted = Functional(
                    tuple((sign * w, atom) for w, atom in functional.terms),
                    sign * functional.constant - sign * limit,
                    f"{functional.name} {'≥' if sign > 0 else '≤'} {limit!r}",
                )
                rows = functional.rows
                targets.append(
                    make_claim(case.claims[0].query, setting, rows, [Condition(shifted, Sense.NONNEGATIVE)])
                )
                starts.append(None if corners is None else corners[i : i + 1])
                report.attacked[(case.family, engine, query)] += 1
    for target, witness in zip(
        targets, break_claims(case.problem, targets, budget, case.seed, starts), strict=True
    ):
        excess = 0.0 if witness is None else float(-witness.values.min())
        # Shifting the constant by the bound and evaluating the sum round: a few units in the last place of its terms.
        if excess > 64 * 2.0**-53 * (1.0 + _size(target)):
            what = f"{target.functionals[0].name} broken by {excess:.3g}"
            report.violations.append(Violation(case.seed, case.family, engine, what))


def _size(target: Claim) -> float:
    return abs(target.functionals[0].constant) + float(target.clean.abs().max())


def _note_gap(case: Case, bounds: Bounds, report: SoundnessReport) -> None:
    """The least slack of a proved bound over what its engine's corners attain, relative to the range attained there."""
    region = case.problem.region
    corners = [c for c in (bounds.lower_corner, bounds.upper_corner) if c is not None]
    alpha = torch.cat((torch.zeros(1, region.n_factors).to(region.center), *corners))
    with torch.no_grad():
        scores, logits = case.problem.values(region.point(alpha), _layers(case), _about_output(case))
        values = [
            claim.values({row: scores[row.layer][:, row.head, row.position] for row in claim.rows}, logits)
            for claim in case.claims
        ]
    found = torch.cat(values, -1)
    slack = torch.minimum(found.amin(0) - bounds.lower, bounds.upper - found.amax(0))
    spread = found.amax(0) - found.amin(0)
    relative = (slack / spread)[spread > 0]
    if len(relative):
        report.note_slack(bounds.engine, float(relative.min()))


def _attack_claims(
    case: Case, engine: str, parts: Sequence[Bounds], budget: AttackBudget, report: SoundnessReport
) -> None:
    held = [
        claim
        for claim, bounds in zip(case.claims, parts, strict=True)
        if _reads(claim) and not claim.wants_range and is_proved(claim, bounds)
    ]
    report.proved += len(held)
    for claim, witness in zip(held, break_claims(case.problem, held, budget, case.seed + 1), strict=True):
        if witness is not None:
            report.violations.append(
                Violation(case.seed, case.family, engine, f"{claim} was proved and is broken")
            )


def _check_growth(case: Case, engine: Engine, parts: Sequence[Bounds], report: SoundnessReport) -> None:
    """A larger region never turns `unknown` into `holds`."""
    problem = case.problem
    larger = Problem(problem.model, problem.region.scaled(GROWTH), problem.padding)
    if problem.region.constraints is not None:
        return
    grown, _ = bound_claims(engine, larger, case.claims)
    for claim, small, large in zip(case.claims, parts, grown, strict=True):
        if claim.wants_range or not claim.conditions:
            continue
        if is_proved(claim, large) and not is_proved(claim, small):
            what = f"{claim} is proved on the larger region only"
            report.violations.append(Violation(case.seed, case.family, engine.name, what))


def _reads(claim: Claim) -> bool:
    """Whether anything can move the claim: a mass over all keys is a constant."""
    return any(f.rows or f.logits for f in claim.functionals)


def _layers(case: Case) -> list[int]:
    return sorted({row.layer for claim in case.claims for row in claim.rows})


def _about_output(case: Case) -> bool:
    return any(f.logits for claim in case.claims for f in claim.functionals)
