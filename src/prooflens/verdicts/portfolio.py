"""Who is asked, and in which order: cheap engines first, an attack in between, dear engines on what is left.

Only functionals that are still open go to the next stage, and a claim that is proved or broken takes no further part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from prooflens.engines import Engine, get_engine
from prooflens.engines.attack import attack_claims
from prooflens.engines.functionals import bound_functionals, refusal
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.engines.rivals import is_tail
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.queries import Claim, Functional
from prooflens.verdicts.breaks import is_way, moved_to_first_break
from prooflens.verdicts.evidence import ATTACK, Evidence
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import default_budget, is_small


def depth_of(problem: Problem, claim: Claim) -> int:
    """The deepest layer that a claim reads; the number of layers if it reads outputs."""
    if any(f.logits for f in claim.functionals):
        return problem.model.architecture.n_layers
    return max((row.layer for f in claim.functionals for row in f.rows), default=0)


def gather_evidence(problem: Problem, evidence: Sequence[Evidence], settings: Settings) -> None:
    """Run the stages on claims of one depth, in place; stops as soon as nothing is open.

    An engine that refuses is passed over, unless it is the only one that was asked for: then its reason is the error.
    """
    depth = max((depth_of(problem, item.claim) for item in evidence), default=0)
    only = len(settings.engines) == 1
    for stage in settings.stages:
        if not stage.applies(problem, depth):
            continue
        if stage.engine == ATTACK:
            attack(problem, evidence, settings, stage.share)
        else:
            prove(problem, evidence, get_engine(stage.engine), settings.options, required=only)


def prove(
    problem: Problem,
    evidence: Sequence[Evidence],
    engine: Engine,
    options: EngineOptions = NO_OPTIONS,
    required: bool = False,
) -> None:
    """Ask one engine about every functional that is still open.

    Args:
        problem: the model and the region.
        evidence: what is known of each claim; what the engine says is added.
        engine: who is asked.
        options: what it may use.
        required: whether it is an error if the engine refuses; otherwise it is passed over.
    """
    for linear in (True, False):
        # Apart, since a call that is all margins keeps the ledger of its bounds.
        asked = [(item, chosen) for item in evidence if (chosen := _chosen(item, linear))]
        functionals = [item.claim.functionals[i] for item, chosen in asked for i in chosen]
        if not functionals:
            continue
        if reason := refusal(engine, problem, functionals, options):
            if required:
                raise EngineError(f"{engine.name} cannot answer: {reason}")
            continue
        bounds = bound_functionals(engine, problem, functionals, options=options)
        first = 0
        for item, chosen in asked:
            item.learn(chosen, bounds, first)
            item.seconds += bounds.seconds * len(chosen) / len(functionals)
            first += len(chosen)


def _chosen(item: Evidence, linear: bool) -> list[int]:
    """The functionals of a claim to ask about; a vocabulary is worth asking once the named tokens are beaten."""
    functionals = item.claim.functionals
    chosen = [i for i in item.wanted() if _is_margin(functionals[i]) is linear]
    if len(item.missing()) > len(chosen):
        chosen = [i for i in chosen if not is_tail(functionals[i])]
    return chosen


def _is_margin(functional: Functional) -> bool:
    return functional.is_linear and functional.constant == 0.0


def attack(problem: Problem, evidence: Sequence[Evidence], settings: Settings, share: float = 1.0) -> None:
    """Look for points that break what is not proved; remember how far down each claim was brought.

    Args:
        problem: the model and the region.
        evidence: what is known of each claim; witnesses and attained values are added.
        settings: budget and seed.
        share: the share of the budget to use.
    """
    targets = [item for item in evidence if item.open and not item.claim.wants_range]
    budget = (settings.budget or default_budget(problem)).part(share)
    if not targets or not (budget.samples or budget.restarts):
        return
    start = time.perf_counter()
    starts = [item.corners() for item in targets]
    fast = not is_small(problem)
    result = attack_claims(problem, [item.claim for item in targets], budget, settings.seed, starts, fast)
    seconds = (time.perf_counter() - start) / len(targets)
    found = zip(targets, result.witnesses, result.values.tolist(), result.alpha, strict=True)
    for item, witness, value, alpha in found:
        item.witness = witness
        if witness is not None and is_way(problem.region):
            moved = moved_to_first_break(problem, item.claim, witness)
            item.witness, item.share = moved if moved is not None else (witness, None)
        item.seconds += seconds
        if math.isfinite(value) and (item.attack is None or value < item.attack):
            item.attack, item.reached = value, alpha
