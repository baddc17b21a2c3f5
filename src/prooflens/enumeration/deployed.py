"""What the precision that a model is deployed in changes over a family: measured at members, beside what was counted.

Members are counted in float64. Here those nearest to zero, and some drawn by chance, run in the other precision too, by
transformers' own module where it is the same model (`verdicts.deployed`). It proves nothing of other members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prooflens.enumeration.claims import parts_of
from prooflens.families import Family, Member
from prooflens.models.deployed import DeployedModel, own_forward
from prooflens.queries import Query
from prooflens.results.deployed import FamilyDifference
from prooflens.verdicts.deployed import deployed_model, margins_at, questions_at, reads_model
from prooflens.verdicts.question import Question
from prooflens.verdicts.sites import Vectors

DRAWN = 16
"""Members that are drawn by chance, beside those nearest to zero."""


@dataclass(eq=False)
class FamilyPrecision:
    """Measures margins of members in another precision.

    Attributes:
        family: the prompts.
        precision: `bfloat16` or `float32`.
        source: the folder of the model's weights, if it is known.
        vectors: the directions and dictionaries that claims name.
        seed: of the members that are drawn.
    """

    family: Family
    precision: str
    source: str | None
    vectors: Vectors | None = None
    seed: int = 0
    _whole: list[DeployedModel] = field(default_factory=list)

    def measured(self, query: Query, nearest: Sequence[Member]) -> FamilyDifference:
        """Measure a claim at members.

        Args:
            query: the claim.
            nearest: the members nearest to zero.
        """
        drawn = [
            member
            for shape, digits in self.family.draw(DRAWN, self.seed)
            for member in self.family.members(shape, digits)
        ]
        who: dict[str, None] = {}
        near = [self._margins(query, member, who) for member in nearest]
        far = [self._margins(query, member, who) for member in drawn]
        return FamilyDifference(
            ", ".join(who) or self.precision,
            len(near),
            largest_apart(near),
            len(far),
            largest_apart(far),
            sum((a > 0.0) != (b > 0.0) for a, b in (*near, *far)),
        )

    def _model(self, question: Question) -> DeployedModel:
        """Who runs a model in the other precision: the whole one is looked for once, others are run here."""
        model = question.problem.model
        if model.sha256 != self.family.model.sha256:
            return own_forward(model, self.precision, "the model is cut or read at a hook")
        if not self._whole:
            self._whole.append(deployed_model(question, self.precision))
        return self._whole[0]

    def _margins(self, query: Query, member: Member, who: dict[str, None]) -> tuple[float, float]:
        """The margin of a claim at a member, in float64 and in the other precision; infinite if the mask decides it.

        Those who ran the model in the other precision are added to `who`.
        """
        pairs = [(math.inf, math.inf)]
        model = self.family.model
        prompt = replace(model.prompt(list(member.ids)), roles=member.roles)
        for question in questions_at(model, prompt, parts_of(query), self.source, self.vectors):
            claims = [claim for claim in question.claims if reads_model(claim)]
            if not claims:
                continue
            problem, clean = question.problem, question.problem.region.reference[None]
            low = self._model(question)
            who[low.name] = None
            own, other = (margins_at(problem, claims, clean, held) for held in (None, low))
            pairs.append((float(own.amin()), float(other.amin())))
        return min(own for own, _ in pairs), min(other for _, other in pairs)


def largest_apart(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the largest distance of two margins; None if no margin is a number.

    Args:
        pairs: margins in float64 and in the other precision.
    """
    return max((abs(a - b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)), default=None)
