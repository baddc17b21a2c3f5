"""How one claim ended: its verdict, the bounds behind it, and the point that breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prooflens.engines import Bounds
from prooflens.engines.attack import Witness
from prooflens.queries import Claim


class Verdict(StrEnum):
    """How a claim ended. Only `holds` is a proof, and `fails` always comes with a witness."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"
    ESTIMATED = "estimated"


STRENGTH = (Verdict.FAILS, Verdict.UNKNOWN, Verdict.ESTIMATED, Verdict.HOLDS)
"""Verdicts, weakest first: several verdicts together are worth the weakest."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A claim's verdict and what it rests on.

    Attributes:
        claim: what was claimed.
        verdict: how it ended.
        bounds: proved or estimated bounds of the claim's functionals.
        witness: a point that breaks the claim, if it fails.
        reason: one sentence that says why the verdict is what it is.
        engine: whose evidence the verdict rests on.
        attack: the smallest value of the weakest functional that was attained.
        seconds: time spent.
    """

    claim: Claim
    verdict: Verdict
    bounds: Bounds
    witness: Witness | None
    reason: str
    engine: str = ""
    """Whose evidence the verdict rests on: engines joined by `+`, `attack`, `clean` or `mask`."""
    attack: float | None = None
    """The smallest value of the weakest functional that was attained; None if nothing was attacked."""
    seconds: float = 0.0

    @property
    def lower(self) -> float:
        """The lower bound of the weakest functional; ∞ for a claim with nothing to prove."""
        return float(self.bounds.lower.min()) if len(self.bounds.lower) else float("inf")

    @property
    def upper(self) -> float:
        """The smallest upper bound of all functionals: `lower` and `upper` enclose the claim's margin."""
        return float(self.bounds.upper.min()) if len(self.bounds.upper) else float("inf")

    @property
    def clean(self) -> float:
        """The smallest value of all functionals on the clean input."""
        return float(self.claim.clean.min()) if len(self.claim.clean) else float("inf")
