"""Verdicts: what engines prove, what the attack breaks, and what is left unknown (the paper's Algorithm 1).

`settle` is the core: proved bounds first; where they do not decide, the attack looks for a point that breaks the
claim. `holds` is always a proof, `fails` always comes with a point that was run through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines import Bounds, Engine, Guarantee, Problem
from prooflens.engines.attack import Witness, break_claims
from prooflens.engines.attack_search import Budget
from prooflens.engines.functionals import bound_claims
from prooflens.errors import EngineError
from prooflens.queries import Claim


class Verdict(StrEnum):
    """How a claim ends."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False)
class Outcome:
    """A claim's verdict, the bounds of its functionals, and the witness if it fails."""

    claim: Claim
    verdict: Verdict
    bounds: Bounds
    witness: Witness | None
    reason: str

    @property
    def lower(self) -> float:
        """The proved lower bound of the claim's weakest functional; ∞ for a claim with nothing to prove."""
        return float(self.bounds.lower.min()) if len(self.bounds.lower) else float("inf")

    @property
    def clean(self) -> float:
        """The weakest functional's value on the clean input."""
        return float(self.claim.clean.min()) if len(self.claim.clean) else float("inf")


def settle(
    problem: Problem, claims: Sequence[Claim], engine: Engine, budget: Budget | None = None, seed: int = 0
) -> list[Outcome]:
    """A verdict for every claim: by proof, by the clean input itself, or by an attack on what is still open."""
    if engine.guarantee is not Guarantee.PROVED:
        raise EngineError(f"{engine.name} only estimates: it cannot decide that a claim holds")
    parts, _ = bound_claims(engine, problem, claims)
    verdicts: list[Verdict] = []
    for claim, bounds in zip(claims, parts, strict=True):
        if claim.tie is None and not claim.clean_holds:
            verdicts.append(Verdict.FAILS)
        else:
            verdicts.append(Verdict(claim.decide(bounds.lower, bounds.upper)))
    open_ = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.UNKNOWN and claims[i].tie is None]
    witnesses: dict[int, Witness] = {}
    if budget is not None and open_:
        starts = [parts[i].lower_corner for i in open_]
        found = break_claims(problem, [claims[i] for i in open_], budget, seed, starts)
        witnesses = {i: witness for i, witness in zip(open_, found, strict=True) if witness is not None}
    outcomes = []
    for i, (claim, bounds) in enumerate(zip(claims, parts, strict=True)):
        verdict = Verdict.FAILS if i in witnesses else verdicts[i]
        witness = witnesses.get(i)
        if verdict is Verdict.FAILS and witness is None:
            witness = _clean_witness(problem, claim)
        outcomes.append(Outcome(claim, verdict, bounds, witness, _reason(claim, verdict, i in witnesses)))
    return outcomes


def _clean_witness(problem: Problem, claim: Claim) -> Witness:
    """The zero perturbation, for a claim that the clean input already breaks."""
    center = problem.region.center
    zero: Float[Tensor, " p"] = torch.zeros(problem.region.n_factors).to(center)
    return Witness(center, zero, claim.clean)


def _reason(claim: Claim, verdict: Verdict, attacked: bool) -> str:
    if verdict is Verdict.HOLDS:
        return "proved on the whole region"
    if verdict is Verdict.FAILS:
        return "broken by a point of the region" if attacked else "the clean input breaks it"
    return claim.tie or "neither proved nor broken"
