"""Queries about values inside a model: neurons, directions, features of dictionaries.

Each is a linear readout w·h + b of one hook at one position, with a threshold or without (then its range is asked for).
`verdicts.sites` makes them outputs of the model that ends at the hook (`models.reads`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from prooflens.errors import QueryError
from prooflens.numerics import gamma, up
from prooflens.queries.base import Claim, Condition, Query, Sense, Setting, make_claim
from prooflens.queries.functionals import Functional, Logit, Standing
from prooflens.queries.rows import Named, Role, write_tokens

COMPARISONS = (">", ">=", "<", "<=")


@dataclass(frozen=True)
class OutputLevel(Query):
    """Claim that one output stays on one side of a number, or ask for its range.

    Attributes:
        index: the number of the output.
        comparison: `>`, `>=`, `<` or `<=`; None to ask for the range.
        threshold: the number.

    Example:
        >>> str(OutputLevel(3, ">=", 0.5)), str(OutputLevel(3))
        ('logit3>=0.5', 'logit3')
    """

    index: int
    comparison: str | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_level(self.comparison, self.threshold)

    def __str__(self) -> str:
        return f"logit{self.index}{level_text(self.comparison, self.threshold)}"

    @property
    def unit(self) -> str:
        """Outputs."""
        return "output"

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Return one claim, about no row of attention.

        Args:
            setting: the prompt in the model; it needs the clean logits.
            heads: ignored, since the claim is about outputs.
        """
        size = 0 if setting.logits is None else len(setting.logits)
        if self.index >= size:
            raise QueryError(f"there is no output {self.index}: the model has {size}")
        condition = level_condition(self.index, self.comparison, self.threshold)
        return [make_claim(self, setting, (), [condition])]


@dataclass(frozen=True)
class SiteQuery(Query):
    """Claim something about a linear readout of a value inside the model, or ask for its range.

    Attributes:
        kind: `neuron`, `read` or `feature`.
        place: the hook of `read`; the layer of `neuron`; None for `feature`, whose dictionary knows it.
        name: the name of the direction or dictionary; empty for `neuron`.
        index: the number of the neuron or feature; None for `read`.
        comparison: `>`, `>=`, `<` or `<=`; None to ask for the range.
        threshold: the number; of a feature, beyond what makes it active.
        position: the token at which it is read: an index, a text, or a slot of a template.

    Example:
        >>> str(SiteQuery("neuron", "5", "", 1234, ">", 0.0, -1))
        'neuron 5.1234>0.0@-1'
    """

    kind: str
    place: str | None
    name: str
    index: int | None
    comparison: str | None = None
    threshold: float = 0.0
    position: Named = field(default=-1)

    def __post_init__(self) -> None:
        check_level(self.comparison, self.threshold)

    def __str__(self) -> str:
        at = write_tokens((self.position,))
        at = f"{{{at}}}" if isinstance(self.position, Role) else at
        level = level_text(self.comparison, self.threshold)
        if self.kind == "read":
            return f"read({self.place}@{at},{self.name}){level}"
        if self.kind == "feature":
            words = {(">", 0.0): " active", ("<=", 0.0): " off"}.get(
                (self.comparison or "", self.threshold), level
            )
            return f"feature {self.name}.{self.index}{words}@{at}"
        return f"neuron {self.place}.{self.index}{level}@{at}"

    @property
    def unit(self) -> str:
        """Values of readouts."""
        return "readout"

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Refuse: a site is bound to the model that ends at its hook (`verdicts.sites`).

        Args:
            setting: not used.
            heads: not used.
        """
        raise inside_alone(self)


@dataclass(frozen=True)
class TopFeature(SiteQuery):
    """Claim that a feature stays above 0 and among the k largest of its dictionary, or that it stays not so.

    That is what `active` and `off` mean of a TopK dictionary.

    Attributes:
        k: how many features are the largest.

    Example:
        >>> str(TopFeature("feature", None, "SAE", 512, ">", 0.0, -1, 32))
        'feature SAE.512 top32@-1'
    """

    k: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise QueryError(f"at least one feature is the largest, got top{self.k}")
        if (self.comparison, self.threshold) not in ((">", 0.0), ("<=", 0.0)):
            raise QueryError("a feature is among the largest or is not: write 'top32' or 'not top32'")

    def __str__(self) -> str:
        at = write_tokens((self.position,))
        at = f"{{{at}}}" if isinstance(self.position, Role) else at
        word = "top" if self.comparison == ">" else "not top"
        return f"feature {self.name}.{self.index} {word}{self.k}@{at}"


def inside_alone(query: Query) -> QueryError:
    """Return the error of a query about a value inside the model that stands beside others.

    Args:
        query: the query.
    """
    return QueryError(
        f"{query} is about a value inside the model: ask it alone, or join it to others by & in `circuit`"
    )


def check_level(comparison: str | None, threshold: float) -> None:
    """Raise a `QueryError` unless a comparison is one that there is and its threshold a finite number.

    Args:
        comparison: `>`, `>=`, `<` or `<=`; None for a range.
        threshold: the number.
    """
    if comparison is not None and comparison not in COMPARISONS:
        raise QueryError(f"{comparison!r} does not compare: write {', '.join(COMPARISONS)}")
    if not math.isfinite(threshold):
        raise QueryError(f"a threshold is a finite number, got {threshold}")


def level_text(comparison: str | None, threshold: float) -> str:
    """Return how a comparison is written; nothing for a range.

    Args:
        comparison: `>`, `>=`, `<` or `<=`; None for a range.
        threshold: the number.
    """
    return "" if comparison is None else f"{comparison}{threshold!r}"


def level_condition(
    index: int, comparison: str | None, threshold: float, error: float = 0.0, name: str = ""
) -> Condition:
    """Return what a comparison wants of an output: that ±(output − threshold) is > 0 or ≥ 0, or its range.

    Args:
        index: the number of the output.
        comparison: `>`, `>=`, `<` or `<=`; None for the range.
        threshold: the number.
        error: how far the output may be off from what is meant; it is counted to the strict side.
        name: what the functional is called.
    """
    name = name or f"logit[{index}]"
    if comparison is None:
        return Condition(Functional(((1.0, Logit(index)),), name=name), Sense.RANGE)
    sign = 1.0 if comparison.startswith(">") else -1.0
    sense = Sense.NONNEGATIVE if comparison.endswith("=") else Sense.POSITIVE
    constant = 0.0 - sign * threshold
    strict = constant if error == 0.0 else math.nextafter(constant - error, -math.inf)
    functional = Functional(((sign, Logit(index)),), strict, f"{name} {comparison} {threshold:g}")
    return Condition(functional, sense, 2.0 * (constant - strict))


def compared_condition(
    first: int, second: int, comparison: str, error: float = 0.0, name: str = ""
) -> Condition:
    """Return what a comparison of two outputs wants: that ±(first − second) is > 0 or ≥ 0.

    Args:
        first: the number of the one output.
        second: the number of the other.
        comparison: `>`, `>=`, `<` or `<=`.
        error: how far their difference may be off from what is meant; it is counted to the strict side.
        name: what the functional is called.
    """
    sign = 1.0 if comparison.startswith(">") else -1.0
    sense = Sense.NONNEGATIVE if comparison.endswith("=") else Sense.POSITIVE
    strict = 0.0 if error == 0.0 else math.nextafter(-error, -math.inf)
    terms = ((sign, Logit(first)), (-sign, Logit(second)))
    return Condition(Functional(terms, strict, name), sense, -2.0 * strict)


def standing_condition(standing: Standing, comparison: str, error: float = 0.0, name: str = "") -> Condition:
    """Return what a claim about the largest outputs wants: that a standing is > 0, or ≤ 0.

    Args:
        standing: the output, its rivals, and how many are the largest.
        comparison: `>` or `<=`.
        error: how far an output and a difference of two may be off from what is meant; counted to the strict side.
        name: what the functional is called.
    """
    sign = 1.0 if comparison == ">" else -1.0
    strict = 0.0 if error == 0.0 else math.nextafter(-error, -math.inf)
    sense = Sense.POSITIVE if comparison == ">" else Sense.NONNEGATIVE
    return Condition(Functional(((sign, standing),), strict, name), sense, -2.0 * strict)


def sum_error(size: float, terms: int) -> float:
    """Bound the rounding of a sum of products.

    Args:
        size: the sum of the sizes of its terms, as computed.
        terms: how many there are.
    """
    return float(up(gamma(terms + 8) * torch.tensor(size, dtype=torch.float64)))
