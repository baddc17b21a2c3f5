"""How far margins move in the precision that a model is deployed in: measured at points, beside what is proved.

A proof is about the model in exact arithmetic. Whoever runs it in bfloat16 wants to know whether the proved margin is
large beside what that precision changes. `Precision.measured` runs both at the clean input, at the point that breaks
the claim or the corner where its weakest bound is nearly attained, and at 64 points of the region. It proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models import load
from prooflens.models.deployed import DeployedModel, checked_precision, own_forward, transformers_module
from prooflens.problem import Problem
from prooflens.queries import Claim
from prooflens.results import Outcome
from prooflens.results.deployed import Difference
from prooflens.results.outcome import least
from prooflens.verdicts.question import Question

POINTS = 64
"""How many points of the region are drawn."""

BATCH = 8
"""So many points run at a time."""

SAME = 1e-3
"""By how much, relatively, margins of transformers' module in float64 may differ from ours before it is not believed to
be the same model; it drops to float32 inside norms, whatever its precision."""


@dataclass(frozen=True, eq=False)
class Precision:
    """Measures margins of a problem in another precision.

    Attributes:
        problem: the float64 model and the region.
        deployed: the model in the other precision.
        points: the clean input, then points drawn from the region.
    """

    problem: Problem
    deployed: DeployedModel
    points: Float[Tensor, "n S d"]

    @classmethod
    def of(cls, question: Question, precision: str | None) -> Precision | None:
        """Find who can run the model of a question in another precision; None if none was asked for.

        Args:
            question: the claims.
            precision: `bfloat16`, `float32`, or None.

        Raises:
            ModelError: if models are not deployed in that precision.
        """
        if precision is None:
            return None
        problem = question.problem
        drawn, _ = problem.region.sample(POINTS)
        points = torch.cat((problem.region.reference[None], drawn))
        deployed = _deployed(question, checked_precision(precision))
        return cls(problem, deployed, points)

    def measured(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return outcomes with the measured differences of their margins.

        Args:
            outcomes: how claims ended.
        """
        reading = [outcome.claim for outcome in outcomes if _reads(outcome.claim)]
        shared = iter(self._differences(reading, self.points).tolist() if reading else [])
        made = []
        for outcome in outcomes:
            found = Difference(self.deployed.name, None, None, None)
            if _reads(outcome.claim):
                centre, *samples = next(shared)
                worst = worst_point(self.problem, outcome)
                away = None if worst is None else float(self._differences([outcome.claim], worst)[0, 0])
                found = Difference(self.deployed.name, centre, away, max(samples, default=None))
            made.append(replace(outcome, deployed=found))
        return made

    def _differences(self, claims: Sequence[Claim], points: Tensor) -> Float[Tensor, "claims n"]:
        return (
            _margins(self.problem, claims, points) - _margins(self.problem, claims, points, self.deployed)
        ).abs()


def _reads(claim: Claim) -> bool:
    """Whether a claim reads anything of the model: what the mask alone decides has no margin."""
    return any(f.rows or f.logits for f in claim.functionals)


def worst_point(problem: Problem, outcome: Outcome) -> Float[Tensor, "1 S d"] | None:
    """Return where a claim is broken, or the corner at which its weakest bound is nearly attained; None for neither.

    Args:
        problem: the model and the region.
        outcome: how the claim ended.
    """
    if outcome.witness is not None:
        return outcome.witness.x.to(problem.region.center)[None]
    bounds = outcome.bounds
    corners = bounds.lower_ledger.corner if bounds.lower_ledger is not None else bounds.lower_corner
    if corners is None or not len(corners):
        return None
    weakest = int(bounds.lower.argmin())
    return problem.region.point(corners[weakest : weakest + 1].to(problem.region.center))


def _deployed(question: Question, precision: str) -> DeployedModel:
    """Transformers' module where it is the same model, else our own forward pass, which says why."""
    model, source = question.problem.model, question.subject.source
    if source is None:
        return own_forward(model, precision, "no folder that transformers reads is known for it")
    try:
        if load(source).uncapped.sha256 != model.sha256:
            raise ModelError(
                "the model is edited, cut or read at a hook, and transformers runs the whole one"
            )
        same = transformers_module(Path(source), model, "float64")
        clean = question.problem.region.reference[None]
        claims = [claim for claim in question.claims if _reads(claim)]
        ours = _margins(question.problem, claims, clean)
        theirs = _margins(question.problem, claims, clean, same)
        if not bool(((ours - theirs).abs() <= SAME * (1.0 + ours.abs())).all()):
            raise ModelError("transformers' module computes other margins, even in float64")
        del same
        return transformers_module(Path(source), model, precision)
    except ModelError as error:
        return own_forward(model, precision, str(error))


def _margins(
    problem: Problem, claims: Sequence[Claim], points: Tensor, deployed: DeployedModel | None = None
) -> Float[Tensor, "claims n"]:
    """The margin of each claim at each point, in float64 or as deployed."""
    rows = list(dict.fromkeys(row for claim in claims for f in claim.functionals for row in f.rows))
    layers = sorted({row.layer for row in rows})
    output = any(f.logits for claim in claims for f in claim.functionals)
    parts = []
    with torch.no_grad():
        for x in points.split(BATCH):
            if deployed is None:
                scores, logits = problem.values(x, layers, output)
            else:
                scores, read = deployed.values(x, layers, output)
                logits = None if read is None else problem.read_output(read)
            held = {row: scores[row.layer][:, row.head, row.position] for row in rows}
            values = [claim.values(held, logits).double().cpu() for claim in claims]
            margins = [[least(c, at) for at in v] for c, v in zip(claims, values, strict=True)]
            parts.append(torch.tensor(margins, dtype=torch.float64))
    return torch.cat(parts, dim=1)
