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
from prooflens.models import Prompt, Transformer, load
from prooflens.models.deployed import DeployedModel, checked_precision, own_forward, transformers_module
from prooflens.problem import Problem
from prooflens.queries import Claim, InsideQuery, Query
from prooflens.regions import Ball, Region
from prooflens.results import Outcome
from prooflens.results.deployed import Difference
from prooflens.results.outcome import least
from prooflens.verdicts.question import Question, ask
from prooflens.verdicts.sites import Vectors, by_place

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
        deployed = deployed_model(question, checked_precision(precision))
        return cls(problem, deployed, points)

    def measured(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return outcomes with the measured differences of their margins.

        Args:
            outcomes: how claims ended.
        """
        worst = [worst_point(self.problem, outcome) for outcome in outcomes]
        found = self.differences([outcome.claim for outcome in outcomes], worst)
        return [replace(outcome, deployed=one) for outcome, one in zip(outcomes, found, strict=True)]

    def differences(
        self, claims: Sequence[Claim], worst: Sequence[Float[Tensor, "1 S d"] | None]
    ) -> list[Difference]:
        """Return the measured differences of the margins of claims.

        Args:
            claims: the claims.
            worst: a point of interest for each of them, which is measured as well; None for none.
        """
        reading = [claim for claim in claims if reads_model(claim)]
        shared = iter(self._differences(reading, self.points).tolist() if reading else [])
        made = []
        for claim, point in zip(claims, worst, strict=True):
            found = Difference(self.deployed.name, None, None, None)
            if reads_model(claim):
                centre, *samples = next(shared)
                away = None if point is None else float(self._differences([claim], point)[0, 0])
                found = Difference(self.deployed.name, centre, away, max(samples, default=None))
            made.append(found)
        return made

    def within(self, region: Region | None) -> Precision:
        """Return the same measurement with points of another region around the same input.

        Args:
            region: where points are drawn; None for the clean input alone.
        """
        clean = self.points[:1]
        if region is None:
            return replace(self, points=clean)
        drawn, _ = region.sample(POINTS)
        return replace(self, problem=replace(self.problem, region=region), points=torch.cat((clean, drawn)))

    def _differences(self, claims: Sequence[Claim], points: Tensor) -> Float[Tensor, "claims n"]:
        return (
            margins_at(self.problem, claims, points) - margins_at(self.problem, claims, points, self.deployed)
        ).abs()


def reads_model(claim: Claim) -> bool:
    """Whether a claim reads anything of the model: what the mask alone decides has no margin.

    Args:
        claim: what is claimed.
    """
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


def questions_at(
    model: Transformer, prompt: Prompt, queries: Sequence[Query], source: str | None, vectors: Vectors | None
) -> list[Question]:
    """Bind queries to one prompt: those inside the model by the place that they read, the others together.

    Args:
        model: the model.
        prompt: the prompt, at which margins are to be measured; nothing is said of a region.
        queries: the claims.
        source: the folder of the model's weights, if it is known.
        vectors: the directions and dictionaries that queries name.
    """
    inside = [query for query in queries if isinstance(query, InsideQuery)]
    others = [query for query in queries if not isinstance(query, InsideQuery)]
    groups: list[Sequence[Query]] = [[*others]] if others else []
    groups += by_place(model, prompt, inside, vectors) if inside else []
    centred = Ball(1.0)  # only its centre is looked at
    return [ask(model, prompt, centred, queries=group, source=source, vectors=vectors) for group in groups]


def deployed_model(question: Question, precision: str) -> DeployedModel:
    """Return transformers' module where it is the same model, else our own forward pass, which says why.

    Args:
        question: the claims, whose margins in float64 say whether it is the same.
        precision: `bfloat16` or `float32`.
    """
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
        claims = [claim for claim in question.claims if reads_model(claim)]
        ours = margins_at(question.problem, claims, clean)
        theirs = margins_at(question.problem, claims, clean, same)
        if not bool(((ours - theirs).abs() <= SAME * (1.0 + ours.abs())).all()):
            raise ModelError("transformers' module computes other margins, even in float64")
        del same
        return transformers_module(Path(source), model, precision)
    except ModelError as error:
        return own_forward(model, precision, str(error))


def margins_at(
    problem: Problem, claims: Sequence[Claim], points: Tensor, deployed: DeployedModel | None = None
) -> Float[Tensor, "claims n"]:
    """Return the margin of each claim at each point, in float64 or as deployed.

    Args:
        problem: the float64 model.
        claims: the claims.
        points: inputs, shape [n, S, d].
        deployed: the model in another precision; None for float64.
    """
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
