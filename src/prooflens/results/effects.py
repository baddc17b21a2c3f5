"""What `effect` and `family_effects` return: bounds of an edit's effect, what points attain, verdicts, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from jaxtyping import Float
from torch import Tensor

from prooflens.certificate.store import RunWriter
from prooflens.engines.attack import Witness
from prooflens.families import Family
from prooflens.queries.effects import EffectQuery
from prooflens.results.families import ENUMERATED, family_header, shape_tensors
from prooflens.results.frame import EditedModel, Subject
from prooflens.results.outcome import Outcome, Verdict
from prooflens.results.record import edited_entry, edited_tensors
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
    def ends(self) -> tuple[float, float]:
        """The proved ends of the effect."""
        return self.lower, self.upper

    @property
    def verdicts(self) -> list[Verdict]:
        """How every claim ended."""
        return [row.verdict for row in self.claims]

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


FAMILY_EFFECTS = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("model", "model_sha256", "edited", "edited_sha256", "metric", "word")
        ),
        *((name, pa.int64()) for name in ("members", "asked")),
        *((name, pa.float64()) for name in ("least", "most", "mean")),
        *((name, pa.string()) for name in ("least_text", "most_text")),
        *((name, pa.list_(pa.int64())) for name in ("least_ids", "most_ids")),
        *((name, pa.int64()) for name in ("necessary", "faithful", "same", "patched")),
    ]
)
"""The columns of a run about effects over a family; the last four are counts of members."""


@dataclass(frozen=True)
class FamilyEffect:
    """The effect of one edit over a family of prompts, every member run through both models in float64.

    Attributes:
        model: the edited model.
        least: the smallest effect, and the prompt that has it.
        most: the largest one, likewise.
        least_ids: the tokens of the prompt with the smallest effect.
        most_ids: those of the one with the largest.
        mean: the mean over all members that were run.
        necessary: how many members have an effect of at least δ; None if it was not asked.
        faithful: how many have one within ±δ; None if it was not asked.
        same: on how many both models give the same answer; None if it was not asked.
        patched: on how many the metric has the side that it has on the other prompt; None if it was not asked.
    """

    model: EditedModel
    least: tuple[float, str]
    most: tuple[float, str]
    least_ids: tuple[int, ...]
    most_ids: tuple[int, ...]
    mean: float
    necessary: int | None = None
    faithful: int | None = None
    same: int | None = None
    patched: int | None = None

    @property
    def edited(self) -> str:
        """The edited model's name."""
        return self.model.name

    @property
    def counts(self) -> dict[str, int]:
        """On how many members each claim that was asked holds, by its name."""
        asked = {"necessary": self.necessary, "faithful": self.faithful, "same answer": self.same}
        asked["patched"] = self.patched
        return {name: count for name, count in asked.items() if count is not None}

    def to_dict(self) -> dict[str, Any]:
        """The row as plain numbers and texts, by the names of its columns."""
        return {
            "edited": self.model.name,
            "edited_sha256": self.model.sha256,
            "least": self.least[0],
            "least_text": self.least[1],
            "least_ids": list(self.least_ids),
            "most": self.most[0],
            "most_text": self.most[1],
            "most_ids": list(self.most_ids),
            "mean": self.mean,
            "necessary": self.necessary,
            "faithful": self.faithful,
            "same": self.same,
            "patched": self.patched,
        }


@dataclass(frozen=True, eq=False)
class FamilyEffects:
    """The effects of some edits, each by itself, over a family of prompts.

    Attributes:
        family: the prompts, as tokens of the model.
        asked: how many members were run.
        word: `enumerated` if every member was run, `estimated` if a sample was.
        metric: what is measured.
        necessary: the δ of the counts of that name; None if it was not asked.
        faithful: likewise.
        seconds: time spent.
        source: the folder of the model's weights, if it is known.
        rows: one per edit.
        patched: the tokens of the other prompt, whose side members are to take; None if it was not asked.
    """

    family: Family
    asked: int
    word: str
    metric: str
    necessary: float | None
    faithful: float | None
    seconds: float
    source: str | None
    rows: Sequence[FamilyEffect]
    patched: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> FamilyEffect:
        return self.rows[number]

    @property
    def members(self) -> int:
        """How many members the family has."""
        return self.family.size

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest effect of all edits on all members."""
        return min(row.least[0] for row in self.rows), max(row.most[0] for row in self.rows)

    @property
    def verdicts(self) -> list[Verdict]:
        """How every claim of every edit ended: `holds` if it does on every member, `estimated` on those of a sample."""
        counts = [count for row in self.rows for count in row.counts.values()]
        whole = Verdict.HOLDS if self.word == ENUMERATED else Verdict.ESTIMATED
        return [whole if count == self.asked else Verdict.FAILS for count in counts]

    @property
    def claimed(self) -> dict[str, float]:
        """The thresholds of the counts, by name."""
        asked = {"necessary": self.necessary, "faithful": self.faithful}
        return {name: delta for name, delta in asked.items() if delta is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and texts."""
        model = self.family.model
        return {
            "model": model.name,
            "model_sha256": model.sha256,
            "family": {"label": self.family.label, "members": self.members},
            "asked": self.asked,
            "word": self.word,
            "metric": self.metric,
            "claimed": self.claimed,
            "seconds": self.seconds,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.metric} over {self.family.label}: {self.asked:,} of {self.members:,} members, {self.word}"
        ]
        for row in self.rows:
            told = "".join(f", {name} on {n:,}" for name, n in row.counts.items())
            lines.append(
                f"  {row.edited}: [{row.least[0]:.6g}, {row.most[0]:.6g}], mean {row.mean:.6g}{told}"
            )
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: Path | str, **configuration: object) -> None:
        """Write a run directory, which `prooflens query` and `check` read (`docs/interventions.md`).

        Args:
            path: the directory; it must not hold a run yet.
            configuration: what was asked for, kept in `run.json`.
        """
        held = family_header("family effects", self.family, self.source, configuration, self.seconds)
        held |= {"edits": [edited_entry(row.model) for row in self.rows], "claimed": self.claimed}
        if self.patched is not None:
            held["patched_ids"] = list(self.patched)
        tensors = shape_tensors(self.family)
        for number, row in enumerate(self.rows):
            tensors |= edited_tensors(row.model, f"edit/{number}")
        model = self.family.model
        about: dict[str, Any] = {
            "model": model.name,
            "model_sha256": model.sha256,
            "metric": self.metric,
            "word": self.word,
        }
        about |= {"members": self.members if self.members < 2**63 else None, "asked": self.asked}
        entries = [about | row.to_dict() for row in self.rows]
        columns = {name: [entry[name] for entry in entries] for name in FAMILY_EFFECTS.names}
        writer = RunWriter.create(Path(path), held)
        writer.append(pa.table(columns, schema=FAMILY_EFFECTS), tensors)
        writer.finish()
