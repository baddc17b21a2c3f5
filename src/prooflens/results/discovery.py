"""What `discover` returns: a circuit, the proof that it is faithful, and why each of its parts is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prooflens.certificate.store import RunWriter, write_atomically
from prooflens.results.effects import Effect, FamilyEffects
from prooflens.results.outcome import Verdict

Found = Effect | FamilyEffects


@dataclass(frozen=True)
class Trial:
    """One part that was tried: what taking it out, with all that was out by then, does.

    Attributes:
        part: the part.
        out: how many parts were out before it.
        verdict: of the claim that the effect of them all stays within ±δ; only `holds` takes the part out.
        lower: no effect is smaller: proved on a region, over a family the least one.
        upper: no effect is larger, likewise.
    """

    part: str
    out: int
    verdict: Verdict
    lower: float
    upper: float


def _decided(found: Found) -> bool:
    """Whether it is known that the circuit without a part is, or is not, faithful."""
    return Verdict.FAILS in found.verdicts or found.verdicts == [Verdict.HOLDS]


@dataclass(frozen=True, eq=False)
class Discovery:
    """A circuit that was found by taking parts out, and what it rests on.

    Attributes:
        model: the model's name.
        model_sha256: its fingerprint.
        metric: what is measured.
        delta: how far the metric of the circuit may be from the model's.
        where: the region, or the family of prompts.
        circuit: the parts that are left, layer by layer.
        removed: those that are taken out, in this order.
        trials: all parts that were tried, in their order.
        certificate: the effect of taking all of `removed` out; None if nothing could be.
        needed: for every part of the circuit, the effect of taking it out as well.
        seconds: time spent.
    """

    model: str
    model_sha256: str
    metric: str
    delta: float
    where: str
    circuit: Sequence[str]
    removed: Sequence[str]
    trials: Sequence[Trial]
    certificate: Found | None
    needed: Mapping[str, Found]
    seconds: float

    @property
    def open(self) -> list[str]:
        """Parts of the circuit that no witness shows to be needed, and no proof to be superfluous."""
        return [part for part, found in self.needed.items() if not _decided(found)]

    @property
    def superfluous(self) -> list[str]:
        """Parts without which the circuit is proved faithful as well; a search leaves none."""
        return [part for part, found in self.needed.items() if found.verdicts == [Verdict.HOLDS]]

    @property
    def needed_everywhere(self) -> list[str]:
        """Parts without which *every* point is off by more than δ: proved on a region, seen of every member."""
        ends = {part: found.ends for part, found in self.needed.items()}
        return [part for part, (low, high) in ends.items() if low > self.delta or high < -self.delta]

    @property
    def faithful(self) -> Verdict:
        """Whether the circuit is within ±δ of the model: one that was found is, one that was given need not be."""
        return Verdict.HOLDS if self.certificate is None else self.certificate.verdicts[0]

    @property
    def minimal(self) -> bool:
        """Whether no part can be taken out of the circuit alone: for each a witness is off by more than δ."""
        return not self.open and not self.superfluous

    @property
    def verdicts(self) -> list[Verdict]:
        """Whether the circuit is faithful, and whether it is minimal."""
        known = Verdict.UNKNOWN if self.open else Verdict.HOLDS
        return [self.faithful, Verdict.FAILS if self.superfluous else known]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and texts."""
        return {
            "model": self.model,
            "model_sha256": self.model_sha256,
            "metric": self.metric,
            "faithful": self.delta,
            "where": self.where,
            "circuit": list(self.circuit),
            "removed": list(self.removed),
            "circuit_is_faithful": self.faithful.value,
            "minimal": self.minimal,
            "needed_everywhere": self.needed_everywhere,
            "superfluous": self.superfluous,
            "open": self.open,
            "trials": [vars(trial) | {"verdict": trial.verdict.value} for trial in self.trials],
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        total = len(self.circuit) + len(self.removed)
        lines = [
            f"{self.model}, {self.metric} within ±{self.delta:g} on {self.where}:",
            f"  circuit of {len(self.circuit)} of {total} parts: {', '.join(self.circuit) or 'none'}",
        ]
        if self.certificate is not None:
            lower, upper = self.certificate.ends
            effect = f" has an effect in [{lower:.6g}, {upper:.6g}]: {self.faithful.value}"
            if isinstance(self.certificate, Effect) and not (math.isfinite(lower) and math.isfinite(upper)):
                effect = f": {self.faithful.value} ({self.certificate.claims[0].reason})"
            lines.append(f"  taking the others out{effect}")
        told = {"superfluous": self.superfluous, "open": self.open}
        left = "; ".join(f"{word}: {', '.join(names)}" for word, names in told.items() if names)
        if self.needed_everywhere:
            lines.append(f"  needed at every point: {', '.join(self.needed_everywhere)}")
        lines.append(f"  {left or 'every part is needed'}; {len(self.trials)} trials, {self.seconds:.1f} s")
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: Path | str, **configuration: object) -> None:
        """Write a folder: `circuit.json`, the run `certificate`, and a run per part of the circuit in `needed`.

        Args:
            path: the folder; it must be empty, or not exist.
            configuration: what was asked for, kept in every `run.json`.
        """
        folder = Path(path)
        RunWriter.check_room(folder)
        if self.certificate is not None:
            self.certificate.save(folder / "certificate", **configuration)
        for part, found in self.needed.items():
            found.save(folder / "needed" / part, **configuration)
        text = json.dumps({"nodes": dict.fromkeys(self.circuit, True), **self.to_dict()}, indent=1)

        def write(place: Path) -> None:
            place.write_text(text + "\n", encoding="utf-8")

        write_atomically(folder / "circuit.json", write)
