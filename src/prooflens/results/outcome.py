"""How one claim ended: its verdict, the bounds behind it, and the point that breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from prooflens.engines import Bounds
from prooflens.engines.attack import Witness
from prooflens.queries import Claim
from prooflens.results.asked import Asked
from prooflens.results.deployed import Difference


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
        asked: who was asked, who was not, and what those would need.
        deployed: how far its margin was measured to move in the precision that the model is deployed in.
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
    asked: tuple[Asked, ...] = ()
    deployed: Difference | None = None

    @property
    def lower(self) -> float:
        """The lower bound of the weakest functional; ∞ for a claim that the mask alone decides."""
        return least(self.claim, self.bounds.lower)

    @property
    def upper(self) -> float:
        """The smallest upper bound of all functionals: `lower` and `upper` enclose the claim's margin."""
        return least(self.claim, self.bounds.upper)

    @property
    def clean(self) -> float:
        """The smallest value of all functionals on the clean input."""
        return least(self.claim, self.claim.clean)


def least(claim: Claim, values: Tensor) -> float:
    """Return the smallest of some values of a claim's functionals, in the unit of its query.

    Functionals that read nothing are constants that only say what the mask decides; they have no unit and do not
    count.

    Args:
        claim: what is claimed.
        values: bounds or values of its functionals, in their order.

    Returns:
        The smallest value; ∞ where every functional is decided by the mask.
    """
    read = [i for i, f in enumerate(claim.functionals) if (f.rows or f.logits) and i < len(values)]
    return float(values[read].min()) if read else float("inf")
