"""Questions about layer 0: their claims, who proves them, what an attack leaves and what it attains."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prooflens import Ball, Transformer
from prooflens.engines import Bounds, get_engine
from prooflens.engines.attack import break_claims
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.functionals import bound_claims
from prooflens.problem import Problem
from prooflens.queries import Claim, parse_query
from prooflens.statistics import Rate
from prooflens.verdicts.decide import is_proved


@dataclass(frozen=True)
class Question:
    """A problem and the claims about it that read at least two keys."""

    problem: Problem
    claims: list[Claim]

    @classmethod
    def of(cls, model: Transformer, x: Tensor, eps: float, query: str = "top1") -> "Question":
        problem = Problem(model, Ball(eps).around(x))
        claims = [claim for claim in parse_query(query).bind(problem.setting([0])) if claim.functionals]
        return cls(problem, claims)

    def bounds(self, engine: str) -> list[Bounds]:
        return bound_claims(get_engine(engine), self.problem, self.claims)[0]

    def proved(self, engine: str) -> int:
        return self.count(self.bounds(engine))

    def count(self, parts: Sequence[Bounds]) -> int:
        """How many claims these bounds prove."""
        return sum(is_proved(claim, part) for claim, part in zip(self.claims, parts, strict=True))

    def standing(
        self, parts: Sequence[Bounds], budget: AttackBudget, on_proved: AttackBudget | None = None
    ) -> int:
        """How many claims an attack leaves standing; those that are proved may get a budget of their own.

        A claim that is proved and broken is a defect, and an error.
        """
        left = 0
        proved = [is_proved(claim, part) for claim, part in zip(self.claims, parts, strict=True)]
        for kind, tries in ((True, on_proved or budget), (False, budget)):
            chosen = [i for i, holds in enumerate(proved) if holds is kind]
            if not chosen:
                continue
            claims, starts = [self.claims[i] for i in chosen], [parts[i].lower_corner for i in chosen]
            found = break_claims(self.problem, claims, tries, seed=0, starts=starts)
            if kind and any(witness is not None for witness in found):
                raise AssertionError("a claim was proved and is broken")
            left += sum(w is None and c.clean_holds for c, w in zip(claims, found, strict=True))
        return left


def rates(
    questions: Sequence[Question], budget: AttackBudget, on_proved: AttackBudget | None = None
) -> list[str]:
    """layer0, attack, interval."""
    proved = standing = coarse = total = 0
    for question in questions:
        parts = question.bounds("layer0")
        proved += question.count(parts)
        standing += question.standing(parts, budget, on_proved)
        coarse += question.proved("interval")
        total += len(question.claims)
    return [str(Rate(number, total)) for number in (proved, standing, coarse)]


def attained_spread(question: Question, parts: Sequence[Bounds], samples: int) -> Tensor:
    """The range of every claim's functional over samples and the engine's corners."""
    region = question.problem.region
    corners = [c for part in parts for c in (part.lower_corner, part.upper_corner) if c is not None]
    alpha = torch.cat((region.sample(samples)[1], *corners))
    low = torch.full((len(question.claims),), torch.inf, dtype=torch.float64)
    high = -low
    for some in alpha.split(500):
        with torch.no_grad():
            scores, _ = question.problem.values(region.point(some), [0], output=False)
        for i, claim in enumerate(question.claims):
            values = claim.values({row: scores[0][:, row.head, row.position] for row in claim.rows})
            low[i], high[i] = torch.minimum(low[i], values.min()), torch.maximum(high[i], values.max())
    return high - low


def attained_spread_of_margins(question: Question, parts: Sequence[Bounds]) -> Tensor:
    """What the engine's own corners attain of every margin: a lower bound of the true width."""
    region = question.problem.region
    found = []
    for claim, part in zip(question.claims, parts, strict=True):
        sides = []
        for corner in (part.upper_corner, part.lower_corner):
            assert corner is not None
            with torch.no_grad():
                scores, _ = question.problem.values(region.point(corner), [0], output=False)
            values = claim.values({row: scores[0][:, row.head, row.position] for row in claim.rows})
            sides.append(values.diagonal())
        found.append(sides[0] - sides[1])
    return torch.cat(found)
