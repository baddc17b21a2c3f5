"""What a query is bound to (`Setting`), what binding makes of it (`Claim`), and the query itself (`Query`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.queries.functionals import Functional, Scores
from prooflens.queries.masks import keys_of
from prooflens.queries.programs import Boxes, functional_bounds
from prooflens.queries.rows import Row, Token, find_tokens, parse_heads


class Sense(StrEnum):
    """What is wanted of a functional."""

    POSITIVE = ">0"
    NONNEGATIVE = ">=0"
    RANGE = "range"

    def met(self, lower: Float[Tensor, "..."], upper: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Whether every value between two bounds is as wanted: the only place that says so.

        Args:
            lower: lower bounds of a functional, any shape; at a point, its value.
            upper: upper bounds, the same shape; at a point, its value.

        Returns:
            True where it is: a lower bound beyond zero or, for a range, both ends finite. NaN never is.
        """
        if self is Sense.RANGE:
            return lower.isfinite() & upper.isfinite()
        return lower > 0 if self is Sense.POSITIVE else lower >= 0


@dataclass(frozen=True, eq=False)
class Setting:
    """A prompt in a model, as far as queries need it: clean scores, mask and names."""

    scores: Mapping[int, Float[Tensor, "H S S"]]
    mask: Bool[Tensor, "S S"]
    n_layers: int
    n_heads: int
    tokens: tuple[str, ...] | None = None
    logits: Float[Tensor, " C"] | None = None
    windows: Mapping[int, Bool[Tensor, "S S"]] = field(default_factory=dict)
    """Masks of the layers that look at a window only; all others have `mask`."""

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.mask.shape[0]

    def keys(self, position: int, layer: int | None = None) -> tuple[int, ...]:
        """The keys that take part in the row of a position, in a layer; without one, in a layer without a window."""
        return keys_of(self.mask if layer is None else self.windows.get(layer, self.mask), position)

    def row(self, row: Row) -> Float[Tensor, " S"]:
        """The clean scores of a row, in float64."""
        return self.scores[row.layer][row.head, row.position].double()

    def rows(self, rows: Iterable[Row]) -> dict[Row, Float[Tensor, " S"]]:
        """The clean scores of several rows."""
        return {row: self.row(row) for row in rows}

    def heads(self, text: str | None) -> list[tuple[int, int]]:
        """The heads a text names, or all of the layers whose scores are here."""
        if text is None:
            return [(layer, head) for layer in sorted(self.scores) for head in range(self.n_heads)]
        found = parse_heads(text, self.n_layers, self.n_heads)
        if missing := sorted({layer for layer, _ in found} - set(self.scores)):
            raise QueryError(f"heads {text!r} need the scores of layers {missing}, which were not computed")
        return found

    def positions(self, tokens: tuple[Token, ...] | None) -> list[int]:
        """The query positions that tokens name, or all that read at least one key."""
        if tokens is None:
            return [i for i in range(self.size) if self.keys(i)]
        found = find_tokens(tokens, self.size, self.tokens)
        for position in found:
            if not self.keys(position):
                raise QueryError(f"position {position} is padding: it attends to nothing")
        return found


@dataclass(frozen=True)
class Condition:
    """One functional and what is wanted of it."""

    functional: Functional
    sense: Sense
    blur: float = 0.0
    """How far rounding may have moved the threshold to the strict side: what misses it by less breaks nothing."""

    def broken(self, value: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Whether a value contradicts the sense; NaN never does, nor what only the rounding of the threshold misses."""
        if self.sense is Sense.RANGE:
            return torch.zeros_like(value, dtype=torch.bool)
        strict = self.sense is Sense.POSITIVE and self.blur == 0.0
        return value <= 0 if strict else value < -self.blur


@dataclass(frozen=True, eq=False)
class Claim:
    """A statement about one setting: all its conditions hold. An empty list of them is true by the mask alone."""

    query: "Query"
    rows: tuple[Row, ...]
    conditions: tuple[Condition, ...]
    clean: Float[Tensor, " F"]
    """The functionals' values on the clean input."""
    tie: str | None = None
    """Why the clean answer is not unique, if it is not: then the verdict is `unknown` with this reason."""

    def __str__(self) -> str:
        return f"{self.query} on {', '.join(map(str, self.rows))}" if self.rows else str(self.query)

    @property
    def functionals(self) -> tuple[Functional, ...]:
        """The functionals, in the order of every bound that `met` takes."""
        return tuple(condition.functional for condition in self.conditions)

    @property
    def wants_range(self) -> bool:
        """Whether the answer is a proved range, not a sign."""
        return any(condition.sense is Sense.RANGE for condition in self.conditions)

    @property
    def clean_holds(self) -> bool:
        """Whether the clean input satisfies it."""
        return bool(self.met(self.clean, self.clean))

    @property
    def clean_breaks(self) -> bool:
        """Whether the clean input contradicts it: then it `fails`, where the region holds that input."""
        return self.broken_by(self.clean)

    def broken_by(self, values: Float[Tensor, " F"]) -> bool:
        """Whether the values at a point contradict it; a point at which one of them is NaN says nothing."""
        if bool(values.isnan().any()):
            return False
        ends = zip(self.conditions, values, strict=True)
        return any(bool(condition.broken(value)) for condition, value in ends)

    def values(self, scores: Scores, logits: Float[Tensor, "... C"] | None = None) -> Float[Tensor, "... F"]:
        """The functionals on concrete points."""
        if not self.conditions:
            batch = next(iter((*scores.values(), torch.zeros(1))))
            return torch.zeros((*batch.shape[:-1], 0), dtype=torch.float64)
        return torch.stack([f.value(scores, logits) for f in self.functionals], -1)

    def holds_on(self, scores: Scores, logits: Float[Tensor, "... C"] | None = None) -> Bool[Tensor, "..."]:
        """Whether concrete points satisfy it, by the same functionals that engines bound."""
        values = self.values(scores, logits)
        return self.met(values, values)

    @staticmethod
    def programs(claims: Sequence["Claim"], boxes: Boxes) -> Float[Tensor, "... N"]:
        """`program` of many claims at once: all heads, positions and samples in one batch."""
        sizes = [len(claim.conditions) for claim in claims]
        lower, _ = functional_bounds([f for claim in claims for f in claim.functionals], boxes)
        parts = lower.split(sizes, -1)
        none = torch.full(lower.shape[:-1], float("inf"), dtype=lower.dtype, device=lower.device)
        return torch.stack([part.amin(-1) if part.shape[-1] else none for part in parts], -1)

    def bounds(self, boxes: Boxes) -> tuple[Float[Tensor, "... F"], Float[Tensor, "... F"]]:
        """Proved bounds of its functionals over weight boxes Δ_S ∩ [s̲, s̄] of its rows."""
        return functional_bounds(self.functionals, {row: boxes[row] for row in self.rows if row in boxes})

    def program(self, boxes: Boxes) -> Float[Tensor, "..."]:
        """A proved lower bound of its smallest functional over weight boxes: its margin (∞ without conditions)."""
        return Claim.programs([self], {row: boxes[row] for row in self.rows if row in boxes})[..., 0]

    def met_each(self, lower: Float[Tensor, "... F"], upper: Float[Tensor, "... F"]) -> Bool[Tensor, "... F"]:
        """Say of each condition whether bounds of the functionals satisfy it.

        Args:
            lower: lower bounds, one per functional; at a point, the values.
            upper: upper bounds, one per functional; at a point, the values.
        """
        met = torch.zeros_like(lower, dtype=torch.bool)
        senses = [condition.sense for condition in self.conditions]
        for sense in set(senses):
            here = [i for i, other in enumerate(senses) if other is sense]
            met[..., here] = sense.met(lower[..., here], upper[..., here])
        return met

    def met(self, lower: Float[Tensor, "... F"], upper: Float[Tensor, "... F"]) -> Bool[Tensor, "..."]:
        """Say whether bounds of the functionals satisfy all conditions; ties are not looked at.

        Args:
            lower: lower bounds, one per functional; at a point, the values.
            upper: upper bounds, one per functional; at a point, the values.
        """
        return self.met_each(lower, upper).all(-1)


class Query(ABC):
    """A question, not yet about a prompt. `str(query)` is its short form, which `parse_query` reads back."""

    @abstractmethod
    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """The claims it makes about a setting; `heads` are those asked when the query names none itself."""


def make_claim(
    query: Query,
    setting: Setting,
    rows: tuple[Row, ...],
    conditions: Iterable[Condition],
    tie: str | None = None,
) -> Claim:
    """A claim with its clean values computed from the setting."""
    conditions = tuple(conditions)
    scores = setting.rows(rows)
    logits = None if setting.logits is None else setting.logits.double()
    clean = [condition.functional.value(scores, logits).double() for condition in conditions]
    values = torch.stack(clean) if clean else torch.zeros(0, dtype=torch.float64)
    return Claim(query, rows, conditions, values, tie)
