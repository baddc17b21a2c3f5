"""Queries about several rows at once, and about outputs."""

import math
from dataclasses import dataclass, field

from prooflens.errors import QueryError
from prooflens.queries.base import Claim, Condition, Query, Sense, Setting, make_claim
from prooflens.queries.functionals import Functional, logit_margin, tail_margin
from prooflens.queries.rows import Role


@dataclass(frozen=True)
class Circuit(Query):
    """Claim that several queries hold together or, with weights, that Σ w_h f_h > 0 for their functionals.

    A weighted sum is bounded jointly (the paper's cross-head remark). Each of its parts is about one row and has one
    functional: the log-odds of `mass`, the log-ratio of `spec` (a score margin for single tokens), or the slack of an
    entropy threshold.

    Attributes:
        parts: the queries; none of them is a circuit.
        weights: one weight per part; None to claim all parts.

    Raises:
        QueryError: if there are no parts, or the weights do not fit them.

    Example:
        >>> from prooflens.queries import TopK
        >>> print(Circuit((TopK(1, heads="0.1"), TopK(1, heads="1.0"))))
        0.1:top1 & 1.0:top1
    """

    parts: tuple[Query, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise QueryError("a circuit needs at least one part")
        if wrong := [part for part in self.parts if not isinstance(part, Query)]:
            raise QueryError(f"{wrong[0]!r} is no query: read short forms with parse_query")
        if any(isinstance(part, Circuit) for part in self.parts):
            raise QueryError("a circuit cannot hold another circuit; list all parts in one")
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
            if len(self.weights) != len(self.parts):
                raise QueryError(f"{len(self.parts)} parts need as many weights, got {len(self.weights)}")
            if not all(map(math.isfinite, self.weights)):
                raise QueryError(f"the weights of a sum are finite numbers, got {list(self.weights)}")

    def __str__(self) -> str:
        if self.weights is None:
            return " & ".join(map(str, self.parts))
        terms = (f"{weight!r} * {part}" for weight, part in zip(self.weights, self.parts, strict=True))
        return f"{' + '.join(terms)} > 0"

    @property
    def unit(self) -> str:
        """The unit that all parts share; `weighted sum`, or `several units` where they differ."""
        if self.weights is not None:
            return "weighted sum"
        units = {part.unit for part in self.parts}
        return units.pop() if len(units) == 1 else "several units"

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Return one claim about all rows of all parts.

        Args:
            setting: the prompt in the model.
            heads: the heads of parts that name none themselves.
        """
        bound = [part.bind(setting, heads) for part in self.parts]
        claims = [claim for part in bound for claim in part]
        rows = tuple(dict.fromkeys(row for claim in claims for row in claim.rows))
        tie = next((claim.tie for claim in claims if claim.tie is not None), None)
        if self.weights is None:
            conditions = [condition for claim in claims for condition in claim.conditions]
        else:
            conditions = [self._sum(bound, self.weights)]
        return [make_claim(self, setting, rows, conditions, tie)]

    def _sum(self, bound: list[list[Claim]], weights: tuple[float, ...]) -> Condition:
        """Return the condition Σ w f > 0 with its constant rounded down.

        The constant of a part already lies on the strict side of its threshold; a weight below 0 would turn it to the
        other.
        """
        total, slack, exact = Functional(()), 0.0, True
        for part, claims, weight in zip(self.parts, bound, weights, strict=True):
            conditions = [condition for claim in claims for condition in claim.conditions]
            if len(conditions) != 1 or conditions[0].sense is Sense.RANGE:
                raise QueryError(
                    f"part {str(part)!r} of a weighted sum has {len(conditions)} functionals and needs one with a "
                    "threshold: use mass, spec or an entropy threshold, one head and one position, as in "
                    "'0.3:spec{1}>{2}@-1'"
                )
            functional = conditions[0].functional
            total = total + functional.scaled(weight)
            if functional.constant:
                exact = False
                size = abs(weight) * (1.0 + abs(functional.constant))
                slack += size * (64 + 2 * len(weights)) * math.ulp(1.0) + math.ulp(0.0)
        constant = 0.0 if exact else math.nextafter(total.constant - slack, -math.inf)
        functional = Functional(total.terms, constant, str(self))
        return Condition(functional, Sense.POSITIVE, 0.0 if exact else 2.0 * slack)


MOST_DIRECT = 512
"""Up to this many outputs, `argmax` has one margin per output."""

CANDIDATES = 20
"""With more outputs, this many have a margin of their own (the paper's K); all others are one functional."""


@dataclass(frozen=True)
class Argmax(Query):
    """Claim that the model's answer y stays the clean one: Logit(y) − Logit(c) > 0 for every other class or token c.

    Attributes:
        answer: the class or token y, by its index or as a slot of a template; None for the clean answer.
        candidates: how many of the nearest others get a margin of their own; all the rest are one functional,
            Logit(y) − max of them. It changes how the claim is written, not what it says.

    Example:
        >>> import torch
        >>> from prooflens.queries import Setting, full_mask
        >>> setting = Setting({}, full_mask(1), n_layers=1, n_heads=1, logits=torch.tensor([1.0, 3.0]))
        >>> [claim] = Argmax().bind(setting)
        >>> claim.clean.tolist()  # 3 − 1
        [2.0]
    """

    candidates: int | None = field(default=None, compare=False)
    answer: int | Role | None = None

    def __post_init__(self) -> None:
        if self.candidates is not None and self.candidates < 1:
            raise QueryError(f"argmax needs at least one candidate, got {self.candidates}")

    def __str__(self) -> str:
        if isinstance(self.answer, Role):
            return f"argmax={{{self.answer}}}"
        return "argmax" if self.answer is None else f"argmax={self.answer}"

    @property
    def unit(self) -> str:
        """Differences of outputs."""
        return "logit margin"

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Return one claim, about no row of attention, with the nearest other outputs first.

        Args:
            setting: the prompt in the model; it needs the clean logits.
            heads: ignored, since the claim is about outputs.
        """
        if setting.logits is None:
            raise QueryError("argmax asks about outputs, but this model or setting has no logits")
        logits = setting.logits.double()
        ranked = logits.argsort(descending=True, stable=True).tolist()
        best = ranked[0] if self.answer is None else _output(self.answer, len(ranked))
        others = [index for index in ranked if index != best]
        equal = next((index for index in others[:1] if logits[index] == logits[best]), None)
        tie = None if equal is None else f"outputs {best} and {equal} tie on the clean input"
        direct = len(others)
        if len(ranked) > MOST_DIRECT:
            direct = min(self.candidates or CANDIDATES, direct)
        conditions = [Condition(logit_margin(best, index), Sense.POSITIVE) for index in others[:direct]]
        if direct < len(others):
            conditions.append(Condition(tail_margin(best, tuple(others[:direct])), Sense.POSITIVE))
        return [make_claim(self, setting, (), conditions, tie)]


@dataclass(frozen=True)
class Beats(Query):
    """Claim that one output stays above another: Logit(winner) − Logit(loser) > 0.

    Attributes:
        winner: the output that should be larger: its index, or the slot of a template whose token it is.
        loser: the output that should be smaller, likewise.

    Example:
        >>> str(Beats(3, 5))
        'logit3>logit5'
    """

    winner: int | Role
    loser: int | Role

    def __str__(self) -> str:
        sides = (f"{{{side}}}" if isinstance(side, Role) else str(side) for side in (self.winner, self.loser))
        return "logit{}>logit{}".format(*sides)

    @property
    def unit(self) -> str:
        """The difference of two outputs."""
        return "logit margin"

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Return one claim, about no row of attention.

        Args:
            setting: the prompt in the model; it needs the clean logits.
            heads: ignored, since the claim is about outputs.
        """
        size = 0 if setting.logits is None else len(setting.logits)
        winner, loser = (_output(index, size) for index in (self.winner, self.loser))
        condition = Condition(logit_margin(winner, loser), Sense.POSITIVE)
        tie = "an output does not beat itself" if winner == loser else None
        return [make_claim(self, setting, (), [condition], tie)]


def _output(named: int | Role, size: int) -> int:
    """The index of an output; an error if there is none, or if a slot has not been looked up."""
    if isinstance(named, Role):
        raise QueryError(f"{{{named}}} is a slot of a template, and this prompt is not a template's member")
    if named >= size:
        raise QueryError(f"there is no output {named}: the model has {size}")
    return named
