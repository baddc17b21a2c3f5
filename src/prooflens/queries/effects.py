"""Claims about the effect of an edit, as claims about two models side by side.

A model M and an edit M′ of it that read the same input are one network with twice the outputs: output i is that of M,
output C + i that of M′. The effect of the edit on a metric m, a weighted sum of outputs, is

    e(x) = m(M(x)) − m(M′(x)) = Σ w_i (output_i − output_{C+i}),

a functional like any other. Of a probability, m is one of the softmax of some outputs; of a divergence,
e(x) = KL(M(x) ‖ M′(x)) itself, which is never negative. `verdicts.effect` bounds it; runs keep it, and the checker
reads it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.queries.base import Claim, Condition, Query, Sense, Setting
from prooflens.queries.distributions import Divergence, Probability
from prooflens.queries.functionals import Atom, Functional, Logit

KINDS = ("range", "necessary", "faithful", "sufficient", "patched")


@dataclass(frozen=True)
class EffectQuery(Query):
    """Ask for the range of an effect, or claim something about it.

    Attributes:
        kind: `range` asks for bounds, `necessary` claims e ≥ δ, `faithful` abs(e) ≤ δ, `sufficient` the same answer,
            `patched` that m(M′(x)) is above 0, or below.
        metric: what is measured, in its short form.
        edit: what was done to the model, in words.
        threshold: δ; of `patched` the side, 1 for above 0 and −1 for below.
        inside: whether the metric is a readout.

    Example:
        >>> str(EffectQuery("necessary", "logit0-logit1", "without a1.h0", 0.5))
        'effect(logit0-logit1)>=0.5 without a1.h0'
        >>> str(EffectQuery("faithful", "logit0-logit1", "without a1.h0", 0.5))
        '|effect(logit0-logit1)|<=0.5 without a1.h0'
    """

    kind: str
    metric: str
    edit: str
    threshold: float = 0.0
    inside: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise QueryError(
                f"there is no claim {self.kind!r} about an effect: claims are {', '.join(KINDS)}"
            )
        if not math.isfinite(self.threshold):
            raise QueryError(f"{self.kind} takes a finite number, got {self.threshold}")
        if self.kind == "patched" and abs(self.threshold) != 1.0:
            raise QueryError(f"a side is 1 or -1, got {self.threshold}")
        if self.kind == "faithful" and self.threshold < 0.0:
            raise QueryError(
                f"an effect within {self.threshold} is none: give faithful a number of at least 0"
            )

    def __str__(self) -> str:
        effect = f"effect({self.metric})"
        texts = {
            "range": effect,
            "necessary": f"{effect}>={self.threshold!r}",
            "faithful": f"|{effect}|<={self.threshold!r}",
            "sufficient": "same answer",
            "patched": f"patched({self.metric}){self._side}0",
        }
        return f"{texts[self.kind]} {self.edit}"

    @property
    def words(self) -> str:
        """The claim in words, without the metric and the edit."""
        return {
            "range": "effect",
            "necessary": f"necessary: effect >= {self.threshold:g}",
            "faithful": f"faithful: |effect| <= {self.threshold:g}",
            "sufficient": "sufficient: the same answer",
            "patched": f"patched: metric of the edited model {self._side} 0",
        }[self.kind]

    @property
    def _side(self) -> str:
        return ">" if self.threshold > 0.0 else "<"

    @property
    def unit(self) -> str:
        """That of the metric."""
        kinds = {"prob(": "probability", "kl(": "nats"}
        found = next((unit for start, unit in kinds.items() if self.metric.startswith(start)), "output")
        return "readout" if self.inside else found

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Refuse: an effect is bound to two models (`verdicts.effect`).

        Args:
            setting: not used.
            heads: not used.
        """
        raise QueryError(f"{self} is about two models: ask for it with pl.effect")

    @property
    def parts(self) -> list[tuple[float, float, Sense]]:
        """The functionals, each as (sign of the effect, constant, what is wanted)."""
        if self.kind == "range":
            return [(1.0, 0.0, Sense.RANGE)]
        if self.kind == "necessary":
            return [(1.0, 0.0 - self.threshold, Sense.NONNEGATIVE)]
        if self.kind == "faithful":
            return [(1.0, self.threshold, Sense.NONNEGATIVE), (-1.0, self.threshold, Sense.NONNEGATIVE)]
        if self.kind == "patched":
            return [(self.threshold, 0.0, Sense.POSITIVE)]
        return []

    def claim(self, metric: Functional, outputs: int, clean: float) -> Claim:
        """Return the claim about both models side by side.

        Args:
            metric: what is measured, a functional of the outputs of one model.
            outputs: how many outputs a model has.
            clean: the effect at the region's reference; of `patched` the edited model's metric there.
        """
        conditions = []
        for sign, constant, sense in self.parts:
            terms = list[tuple[float, Atom]]()
            for weight, atom in metric.terms:
                if self.kind == "patched":
                    assert isinstance(atom, Logit)
                    terms.append((sign * weight, Logit(atom.index + outputs)))
                    continue
                if isinstance(atom, Divergence):  # of both models, not a difference of two
                    terms.append((sign * weight, atom.moved(outputs)))
                    continue
                terms.append((sign * weight, atom))
                if isinstance(atom, Logit):
                    terms.append((-sign * weight, Logit(atom.index + outputs)))
                elif isinstance(atom, Probability):
                    terms.append((-sign * weight, atom.moved(outputs)))
            conditions.append(Condition(Functional(tuple(terms), constant, self.words), sense))
        values = [constant + sign * clean for sign, constant, _ in self.parts]
        return Claim(self, (), tuple(conditions), torch.tensor(values, dtype=torch.float64))

    def bounds(self, lower: float, upper: float) -> tuple[Tensor, Tensor]:
        """Return bounds of the claim's functionals from those of the effect, rounded outward.

        Args:
            lower: no point has a smaller effect.
            upper: no point has a larger one.
        """
        ends = [(lower, upper) if sign > 0 else (-upper, -lower) for sign, _, _ in self.parts]
        shifts = [constant for _, constant, _ in self.parts]
        low = [_sum(a, c, -math.inf) for (a, _), c in zip(ends, shifts, strict=True)]
        high = [_sum(b, c, math.inf) for (_, b), c in zip(ends, shifts, strict=True)]
        return torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)

    def values(self, effects: Sequence[float]) -> Tensor:
        """Return the claim's functionals at points, shape [points, F].

        Args:
            effects: the effect at each of them.
        """
        rows = [[constant + sign * effect for sign, constant, _ in self.parts] for effect in effects]
        return torch.tensor(rows, dtype=torch.float64)


def _sum(a: float, b: float, toward: float) -> float:
    """a + b, exact or one place further outward: an end that meets its threshold exactly still meets it."""
    found = a + b
    if not math.isfinite(found):
        return found
    return found if Fraction(a) + Fraction(b) == Fraction(found) else math.nextafter(found, toward)
