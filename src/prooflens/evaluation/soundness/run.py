"""The loop of a soundness run: cases of every kind, one after the other, until the time is up."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

from prooflens.engines import Engine, Guarantee, engine_names, get_engine
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.chebyshev import Chebyshev
from prooflens.engines.crown.alpha import AlphaCrown
from prooflens.engines.crown.branch import BetaCrown
from prooflens.engines.exact import Exact
from prooflens.engines.functionals import bound_claims, refusal
from prooflens.errors import EngineError
from prooflens.evaluation.soundness.cases import DRAWN, family_of, random_case
from prooflens.evaluation.soundness.claims import try_case
from prooflens.evaluation.soundness.counts import try_counts
from prooflens.evaluation.soundness.effects import try_effects
from prooflens.evaluation.soundness.forms import try_forms
from prooflens.evaluation.soundness.planted import planted_case
from prooflens.evaluation.soundness.record import SoundnessReport, Violation
from prooflens.evaluation.soundness.second import SecondProof
from prooflens.verdicts.decide import is_proved

KINDS = ("claims", "forms", "planted", "counts", "effects", "reads")
"""claims: queries and their bounds, one engine at a time; forms: hundreds of linear forms, all engines at once;
planted: false claims that look true; counts: layer 0 over a whole vocabulary, against every prompt; effects: random
edits of random models, jointly and alone; reads: forms of values inside random models."""

OWN_MODELS = ("planted", "counts")
"""Kinds whose cases have models of their own, of no family."""

EVERY = 60.0
"""Seconds between two reports to `keep`."""

FORMS_BUDGET = AttackBudget(128, 2, 10)
"""Of the attack on forms: they are many, and the engines' corners are among the starts."""


def run(
    cases: int,
    seed: int = 0,
    engines: Sequence[str] | None = None,
    budget: AttackBudget | None = None,
    seconds: float = math.inf,
    progress: Callable[[str, float], None] | None = None,
    kinds: Sequence[str] = ("claims",),
    keep: Callable[[SoundnessReport], None] | None = None,
    families: Sequence[str] | None = None,
) -> SoundnessReport:
    """Try so many random cases of every kind (or stop after so many seconds) with all proved engines.

    Args:
        cases: how many cases of every kind.
        seed: the number of the first case.
        engines: names of engines; None for all.
        budget: how hard cases are attacked; None for the usual effort of each kind.
        seconds: when to stop.
        progress: is told what is done and its share; None for silence.
        kinds: kinds of cases, of `KINDS`.
        keep: is handed the report now and then and at the end, so that a run that is stopped leaves what it did.
        families: only seeds that draw models of these families, of `DRAWN`; None for every seed.

    Raises:
        EngineError: if a kind, family or engine is not known, no engine proves, or there would be no case.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise EngineError(f"there is no kind of case {unknown[0]!r}: kinds are {', '.join(KINDS)}")
    if cases < 1 or not seconds > 0:
        raise EngineError("a run without cases attacks nothing: give at least one case and some time")
    seeds = chosen_seeds(seed, families, kinds)
    report, start = SoundnessReport(), time.perf_counter()
    chosen = [modest(name) for name in engines or engine_names() if name != SecondProof.name]
    proved = [engine for engine in chosen if engine.guarantee is Guarantee.PROVED]
    if not proved and SecondProof.name not in (engines or ()):
        raise EngineError(
            f"{', '.join(engine.name for engine in chosen)} only estimates: there is no proof to attack"
        )
    tell, kept = progress or (lambda stage, share: None), 0.0
    for number, case_seed in zip(range(cases), seeds, strict=False):
        report.seconds = time.perf_counter() - start
        if report.seconds > seconds:
            break
        if keep is not None and report.seconds > kept + EVERY:
            keep(report)
            kept = report.seconds
        share = max(number / cases, min(report.seconds / seconds, 1.0))
        tell(f"{report.bounds} bounds, {len(report.violations)} violations", share)
        if "claims" in kinds:
            try_case(random_case(case_seed), proved, budget or AttackBudget(200, 4, 20), report)
        second = [SecondProof()] if engines is None or SecondProof.name in engines else []
        if "forms" in kinds:
            try_forms(random_case(case_seed), [*proved, *second], budget or FORMS_BUDGET, report)
        if "reads" in kinds:
            try_forms(random_case(case_seed), proved, budget or FORMS_BUDGET, report, "reads")
        if "effects" in kinds:
            try_effects(random_case(case_seed), [*proved, *second], budget or FORMS_BUDGET, report)
        if "planted" in kinds:
            try_planted(case_seed, proved, report)
        if "counts" in kinds:
            try_counts(case_seed, report)
    report.seconds = time.perf_counter() - start
    if keep is not None:
        keep(report)
    return report


def chosen_seeds(seed: int, families: Sequence[str] | None, kinds: Sequence[str]) -> Iterator[int]:
    """Return the numbers of the cases that are tried, in order.

    Args:
        seed: the first one.
        families: the families that are drawn; None for all.
        kinds: the kinds of cases.

    Raises:
        EngineError: if a family is not known, or cases of a kind are of no family.
    """
    if families is None:
        return itertools.count(seed)
    if unknown := [family for family in families if family not in DRAWN]:
        raise EngineError(f"there is no family {unknown[0]!r} to draw: families are {', '.join(DRAWN)}")
    if own := [kind for kind in kinds if kind in OWN_MODELS]:
        raise EngineError(
            f"cases of the kind {own[0]!r} are of no family: leave out --family or --kind {own[0]}"
        )
    return (number for number in itertools.count(seed) if family_of(number) in families)


def modest(name: str) -> Engine:
    """An engine by name; those that search with few steps, since what they return when they stop is proved as well."""
    if name == "exact":
        return Exact(tolerance=1e-3, max_cells=64, max_slow_cells=4)
    if name == "chebyshev":
        return Chebyshev(most_walks=8)
    if name == "beta-crown":
        return BetaCrown(steps=3, part_steps=3, most_parts=64)
    return AlphaCrown(steps=3, inner_steps=1) if name == "alpha-crown" else get_engine(name)


def try_planted(seed: int, engines: Sequence[Engine], report: SoundnessReport) -> None:
    """No engine may certify a claim that one corner of the ball breaks."""
    report.cases["planted"] += 1
    planted = planted_case(seed, about_output=seed % 2 == 0)
    problem, claim = planted.problem, planted.claim
    for engine in engines:
        if refusal(engine, problem, claim.functionals) is None:
            (bounds,), _ = bound_claims(engine, problem, [claim])
            report.planted[engine.name] += 1
            if is_proved(claim, bounds):
                what = f"{claim} has a planted counterexample and was proved"
                report.violations.append(Violation(seed, "planted", engine.name, what))
