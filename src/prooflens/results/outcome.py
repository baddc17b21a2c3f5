"""How a claim ends: its verdict, the bounds behind it, and the point that breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prooflens.engines import Bounds
from prooflens.engines.attack import Witness
from prooflens.queries import Claim


class Verdict(StrEnum):
    """How a claim ends. Only `holds` is a proof, and `fails` always has a witness."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"
    ESTIMATED = "estimated"


STRENGTH = (Verdict.FAILS, Verdict.UNKNOWN, Verdict.ESTIMATED, Verdict.HOLDS)
"""Weakest first: several verdicts together are worth the weakest."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A claim's verdict, the bounds of its functionals, and the witness if it fails."""

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
        """The lower bound of the claim's weakest functional; ∞ for a claim with nothing to prove."""
        return float(self.bounds.lower.min()) if len(self.bounds.lower) else float("inf")

    @property
    def upper(self) -> float:
        """The upper bound of the smallest functional: with `lower` it encloses the claim's margin."""
        return float(self.bounds.upper.min()) if len(self.bounds.upper) else float("inf")

    @property
    def clean(self) -> float:
        """The weakest functional's value on the clean input."""
        return float(self.claim.clean.min()) if len(self.claim.clean) else float("inf")
