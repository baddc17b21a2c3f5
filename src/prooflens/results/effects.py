"""What `effect` and `family_effects` return: bounds of an edit's effect, what points attain, verdicts, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack import Witness
from prooflens.queries.effects import EffectQuery
from prooflens.results.frame import Subject
from prooflens.results.outcome import Outcome, Verdict
from prooflens.results.tables import Results


@dataclass(frozen=True, eq=False)
class EffectPoint:
    """A point of the region, run through both models.

    Attributes:
        x: the point, shape [S, d].
        alpha: its factors, shape [p].
        effect: the metric of the model minus that of the edited one, there.
    """

    x: Float[Tensor, "S d"]
    alpha: Float[Tensor, " p"]
    effect: float


@dataclass(frozen=True, eq=False)
class EffectClaim:
    """A claim about an effect and how it ended.

    Attributes:
        claim: in words: `necessary: effect >= 0.5`, `faithful: |effect| <= 0.1`, `sufficient: the same answer`.
        verdict: `holds` is a proof for every point of the region, `fails` has a witness.
        reason: why, in one line.
        witness: the point that breaks it; None if none was found.
    """

    claim: str
    verdict: Verdict
    reason: str
    witness: Witness | None = None


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of an edit on a metric over a region: m(M(x)) − m(M′(x)).

    Attributes:
        subject: the model, the edited model, the prompt and the region.
        metric: what is measured.
        clean: the metric of the model and of the edited one at the prompt.
        lower: no point of the region has a smaller effect; proved.
        upper: no point has a larger one; proved.
        least: the smallest effect that a point was found to have.
        most: the largest one.
        engine: whose bounds they are.
        seconds: time spent.
        outcomes: the range of the effect, and behind it every claim, with bounds and witnesses.
    """

    subject: Subject
    metric: str
    clean: tuple[float, float]
    lower: float
    upper: float
    least: EffectPoint
    most: EffectPoint
    engine: str
    seconds: float
    outcomes: Sequence[Outcome]

    @property
    def edited(self) -> str:
        """The edited model's name."""
        assert self.subject.edited is not None
        return self.subject.edited.name

    @property
    def edited_sha256(self) -> str:
        """Its fingerprint; that of its readout, where a value inside the model is measured."""
        assert self.subject.edited is not None
        return self.subject.edited.sha256

    @property
    def claims(self) -> list[EffectClaim]:
        """What was claimed, and how it ended."""
        return [
            EffectClaim(outcome.claim.query.words, outcome.verdict, outcome.reason, outcome.witness)
            for outcome in self.outcomes
            if isinstance(outcome.claim.query, EffectQuery) and outcome.claim.query.kind != "range"
        ]

    @property
    def results(self) -> Results:
        """The range of the effect and every claim as rows, as `certify` returns them."""
        return Results.of(self.outcomes, self.subject)

    def save(self, path: Path | str, **configuration: object) -> None:
        """Write a run directory with rows, bounds, witnesses and both fingerprints (`docs/interventions.md`).

        Args:
            path: the directory; it must not hold a run yet.
            configuration: what was asked for, kept in `run.json`.
        """
        self.results.save(path, **configuration)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the points, as plain numbers and texts."""
        return {
            "model": self.subject.model,
            "model_sha256": self.subject.model_sha256,
            "edited": self.edited,
            "edited_sha256": self.edited_sha256,
            "tokens": list(self.subject.tokens),
            "region": self.subject.region.label,
            "metric": self.metric,
            "clean": {
                "model": self.clean[0],
                "edited": self.clean[1],
                "effect": self.clean[0] - self.clean[1],
            },
            "proved": [self.lower, self.upper],
            "attained": [self.least.effect, self.most.effect],
            "engine": self.engine,
            "seconds": self.seconds,
            "claims": [
                {
                    "claim": row.claim,
                    "verdict": row.verdict.value,
                    "reason": row.reason,
                    "witness": None if row.witness is None else row.witness.values.tolist(),
                }
                for row in self.claims
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.metric}: {self.subject.model} minus {self.edited}, {self.subject.region.label}",
            f"  clean {self.clean[0]:.6g} − {self.clean[1]:.6g} = {self.clean[0] - self.clean[1]:.6g}",
            f"  proved in [{self.lower:.6g}, {self.upper:.6g}] by {self.engine}; "
            f"attained [{self.least.effect:.6g}, {self.most.effect:.6g}]",
        ]
        lines += [f"  {row.claim}: {row.verdict.value} ({row.reason})" for row in self.claims]
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class FamilyEffect:
    """The effect of one edit over a family of prompts, every member run through both models in float64.

    Attributes:
        edited: the edited model's name.
        edited_sha256: its fingerprint.
        least: the smallest effect, and the prompt that has it.
        most: the largest one, likewise.
        mean: the mean over all members that were run.
        necessary: how many members have an effect of at least δ; None if it was not asked.
        faithful: how many have one within ±δ; None if it was not asked.
        same: on how many both models give the same answer; None if it was not asked.
    """

    edited: str
    edited_sha256: str
    least: tuple[float, str]
    most: tuple[float, str]
    mean: float
    necessary: int | None = None
    faithful: int | None = None
    same: int | None = None


@dataclass(frozen=True, eq=False)
class FamilyEffects:
    """The effects of some edits, each by itself, over a family of prompts.

    Attributes:
        model: the model's name.
        model_sha256: its fingerprint.
        label: the family in one line.
        members: how many members the family has.
        asked: how many were run.
        word: `enumerated` if every member was run, `estimated` if a sample was.
        metric: what is measured.
        seconds: time spent.
        rows: one per edit.
    """

    model: str
    model_sha256: str
    label: str
    members: int
    asked: int
    word: str
    metric: str
    seconds: float
    rows: Sequence[FamilyEffect]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> FamilyEffect:
        return self.rows[number]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and texts."""
        return {**vars(self), "rows": [vars(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [f"{self.metric} over {self.label}: {self.asked:,} of {self.members:,} members, {self.word}"]
        for row in self.rows:
            counts = {"necessary": row.necessary, "faithful": row.faithful, "same answer": row.same}
            told = "".join(f", {name} on {n:,}" for name, n in counts.items() if n is not None)
            lines.append(
                f"  {row.edited}: [{row.least[0]:.6g}, {row.most[0]:.6g}], mean {row.mean:.6g}{told}"
            )
        return "\n".join(lines)

    __repr__ = __str__
