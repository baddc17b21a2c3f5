"""What a query is bound to (`Setting`), what binding makes of it (`Claim`), and the query itself (`Query`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.queries.functionals import Functional, Scores
from prooflens.queries.masks import keys_of
from prooflens.queries.programs import Boxes, functional_bounds
from prooflens.queries.rows import Named, Row, find_tokens, parse_heads


class Sense(StrEnum):
    """What is wanted of a functional: positive, nonnegative, or a proved range."""

    POSITIVE = ">0"
    NONNEGATIVE = ">=0"
    RANGE = "range"

    def met(self, lower: Float[Tensor, "..."], upper: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Say whether every value between two bounds is as wanted: the only place that decides this.

        Args:
            lower: lower bounds of a functional, any shape; at a point, its value.
            upper: upper bounds, the same shape; at a point, its value.

        Returns:
            True where a lower bound is beyond zero or, for a range, where both ends are finite; False for NaN.

        Example:
            >>> Sense.POSITIVE.met(torch.tensor([0.0, 0.1]), torch.tensor([1.0, 1.0])).tolist()
            [False, True]
        """
        if self is Sense.RANGE:
            return lower.isfinite() & upper.isfinite()
        return lower > 0 if self is Sense.POSITIVE else lower >= 0


@dataclass(frozen=True, eq=False)
class Setting:
    """What queries need of a prompt in a model: clean scores, masks and names.

    Attributes:
        scores: clean pre-softmax scores [H, S, S] by layer.
        mask: True where a key takes part, shape [S, S].
        n_layers: the number of layers of the model.
        n_heads: the number of heads in each layer.
        tokens: the texts of the tokens; None if there are none.
        logits: the clean output; None if it was not computed.
        windows: masks of the layers that look at a window only.
    """

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
        """The number of tokens, S."""
        return self.mask.shape[0]

    def keys(self, position: int, layer: int | None = None) -> tuple[int, ...]:
        """Return the keys that take part in the row of a position, in a layer; None: without a window.

        Args:
            position: the query position.
            layer: the layer, from 0; None for the mask without a window.
        """
        return keys_of(self.mask if layer is None else self.windows.get(layer, self.mask), position)

    def row(self, row: Row) -> Float[Tensor, " S"]:
        """Return the clean scores of a row, in float64.

        Args:
            row: layer, head and query position.
        """
        return self.scores[row.layer][row.head, row.position].double()

    def rows(self, rows: Iterable[Row]) -> dict[Row, Float[Tensor, " S"]]:
        """Return the clean scores of several rows.

        Args:
            rows: layers, heads and query positions.
        """
        return {row: self.row(row) for row in rows}

    def heads(self, text: str | None) -> list[tuple[int, int]]:
        """Return the heads that a text names, as (layer, head).

        Args:
            text: as in `"2.4"` or `"0-2"`; None for all heads of the layers whose scores are here.

        Raises:
            QueryError: if there is no such head, or its scores were not computed.
        """
        if text is None:
            return [(layer, head) for layer in sorted(self.scores) for head in range(self.n_heads)]
        found = parse_heads(text, self.n_layers, self.n_heads)
        if missing := sorted({layer for layer, _ in found} - set(self.scores)):
            raise QueryError(f"heads {text!r} need the scores of layers {missing}, which were not computed")
        return found

    def positions(self, tokens: tuple[Named, ...] | None) -> list[int]:
        """Return the query positions that tokens name; None names all that read at least one key.

        Args:
            tokens: indices, texts or roles; None for all.

        Raises:
            QueryError: if there is no such token, or it is padding.
        """
        if tokens is None:
            return [i for i in range(self.size) if self.keys(i)]
        found = find_tokens(tokens, self.size, self.tokens)
        for position in found:
            if not self.keys(position):
                raise QueryError(f"position {position} is padding: it attends to nothing")
        return found


@dataclass(frozen=True)
class Condition:
    """One functional and what is wanted of it.

    Attributes:
        functional: a scalar of scores or outputs.
        sense: whether it should be > 0, ≥ 0, or have a proved range.
        blur: how far rounding may have moved the functional's threshold.
    """

    functional: Functional
    sense: Sense
    blur: float = 0.0
    """How far rounding may have moved the threshold to the strict side; a smaller miss breaks nothing."""

    def broken(self, value: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Say whether a value contradicts the sense. NaN never does, nor a miss of at most `blur`.

        Args:
            value: values of the functional at points.
        """
        if self.sense is Sense.RANGE:
            return torch.zeros_like(value, dtype=torch.bool)
        strict = self.sense is Sense.POSITIVE and self.blur == 0.0
        return value <= 0 if strict else value < -self.blur


@dataclass(frozen=True, eq=False)
class Claim:
    """A statement about one setting: all its conditions hold. A claim without conditions is true by the mask alone.

    Attributes:
        query: the query that the claim comes from.
        rows: the rows of attention that it is about.
        conditions: functionals and what is wanted of each.
        clean: the values of the functionals on the clean input.
        tie: why the clean answer is not unique; None if it is unique.
    """

    query: "Query"
    rows: tuple[Row, ...]
    conditions: tuple[Condition, ...]
    clean: Float[Tensor, " F"]
    """The values of the functionals on the clean input."""
    tie: str | None = None
    """Why the clean answer is not unique, if it is not: the verdict is then `unknown` with this reason."""

    def __str__(self) -> str:
        return f"{self.query} on {', '.join(map(str, self.rows))}" if self.rows else str(self.query)

    @cached_property
    def functionals(self) -> tuple[Functional, ...]:
        """The functionals of the conditions, in the order of every bound that `met` takes."""
        return tuple(condition.functional for condition in self.conditions)

    @cached_property
    def wants_range(self) -> bool:
        """Whether the answer is a proved range and not a sign."""
        return any(condition.sense is Sense.RANGE for condition in self.conditions)

    @property
    def clean_holds(self) -> bool:
        """Whether the clean input satisfies the claim."""
        return bool(self.met(self.clean, self.clean))

    @property
    def clean_breaks(self) -> bool:
        """Whether the clean input contradicts the claim: it then `fails`, if the region holds that input."""
        return self.broken_by(self.clean)

    def broken_by(self, values: Float[Tensor, " F"]) -> bool:
        """Say whether the values at a point contradict the claim; a point with a NaN says nothing.

        Args:
            values: the values of the functionals at the point, in their order.
        """
        if bool(values.isnan().any()):
            return False
        ends = zip(self.conditions, values, strict=True)
        return any(bool(condition.broken(value)) for condition, value in ends)

    def values(self, scores: Scores, logits: Float[Tensor, "... C"] | None = None) -> Float[Tensor, "... F"]:
        """Evaluate the functionals at concrete points.

        Args:
            scores: pre-softmax scores of the claim's rows, with any batch dimensions.
            logits: the outputs, if the claim is about them.
        """
        if not self.conditions:
            batch = next(iter((*scores.values(), torch.zeros(1))))
            return torch.zeros((*batch.shape[:-1], 0), dtype=torch.float64)
        return torch.stack([f.value(scores, logits) for f in self.functionals], -1)

    def holds_on(self, scores: Scores, logits: Float[Tensor, "... C"] | None = None) -> Bool[Tensor, "..."]:
        """Say whether concrete points satisfy the claim, by the same functionals that engines bound.

        Args:
            scores: pre-softmax scores of the claim's rows, with any batch dimensions.
            logits: the outputs, if the claim is about them.
        """
        values = self.values(scores, logits)
        return self.met(values, values)

    @staticmethod
    def programs(claims: Sequence["Claim"], boxes: Boxes) -> Float[Tensor, "... N"]:
        """Compute `program` of many claims at once: all heads, positions and samples in one batch.

        Args:
            claims: what is claimed.
            boxes: weight boxes of all their rows.
        """
        sizes = [len(claim.conditions) for claim in claims]
        lower, _ = functional_bounds([f for claim in claims for f in claim.functionals], boxes)
        parts = lower.split(sizes, -1)
        none = torch.full(lower.shape[:-1], float("inf"), dtype=lower.dtype, device=lower.device)
        return torch.stack([part.amin(-1) if part.shape[-1] else none for part in parts], -1)

    def bounds(self, boxes: Boxes) -> tuple[Float[Tensor, "... F"], Float[Tensor, "... F"]]:
        """Bound the functionals over weight boxes Δ_S ∩ [s̲, s̄] of the claim's rows; the bounds are proved.

        Args:
            boxes: a box of attention weights for each row.
        """
        return functional_bounds(self.functionals, {row: boxes[row] for row in self.rows if row in boxes})

    def program(self, boxes: Boxes) -> Float[Tensor, "..."]:
        """Bound the smallest functional from below over weight boxes: the claim's margin, ∞ without conditions.

        Args:
            boxes: a box of attention weights for each row.
        """
        return Claim.programs([self], {row: boxes[row] for row in self.rows if row in boxes})[..., 0]

    def met_each(self, lower: Float[Tensor, "... F"], upper: Float[Tensor, "... F"]) -> Bool[Tensor, "... F"]:
        """Say of each condition whether bounds of the functionals satisfy it.

        Args:
            lower: lower bounds, one per functional; at a point, the values.
            upper: upper bounds, one per functional; at a point, the values.
        """
        senses = [condition.sense for condition in self.conditions]
        if senses and all(sense is senses[0] for sense in senses):
            return senses[0].met(lower, upper)
        met = torch.zeros_like(lower, dtype=torch.bool)
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
    """A question that is not yet about a prompt. `str(query)` is its short form, which `parse_query` reads back."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """What its functionals are measured in: `score margin`, `log-odds`, `nats` or `logit margin`."""

    @abstractmethod
    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Return the claims that the query makes about a setting.

        Args:
            setting: the prompt in the model.
            heads: the heads to ask if the query names none itself.
        """


def make_claim(
    query: Query,
    setting: Setting,
    rows: tuple[Row, ...],
    conditions: Iterable[Condition],
    tie: str | None = None,
) -> Claim:
    """Make a claim, with its clean values computed from the setting.

    Args:
        query: the query that the claim comes from.
        setting: the prompt in the model.
        rows: the rows of attention that it is about.
        conditions: functionals and what is wanted of each.
        tie: why the clean answer is not unique; None if it is unique.
    """
    conditions = tuple(conditions)
    scores = setting.rows(rows)
    logits = None if setting.logits is None else setting.logits.double()
    clean = [condition.functional.value(scores, logits).double() for condition in conditions]
    values = torch.stack(clean) if clean else torch.zeros(0, dtype=torch.float64)
    return Claim(query, rows, conditions, values, tie)
