"""What engines answer: bounds of forms and of functionals, their guarantee, and how they add up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import EngineError


class Guarantee(StrEnum):
    """What a bound is worth: proved with rounding included, or estimated."""

    PROVED = "proved"
    ESTIMATED = "estimated"


@dataclass(frozen=True)
class Tail:
    """How the outputs without a margin of their own were decided: how many by each stage, and how many are open.

    Attributes:
        box: decided by a box around the vector that the head reads.
        linear: decided by the linear part of that vector.
        direct: decided one by one.
        open: not decided.
    """

    box: int = 0
    linear: int = 0
    direct: int = 0
    open: int = 0

    @property
    def total(self) -> int:
        """The number of outputs in the tail."""
        return self.box + self.linear + self.direct + self.open

    @property
    def refined(self) -> int:
        """The number of outputs for which the first bound was not enough."""
        return self.total - self.box

    def __str__(self) -> str:
        named = {
            "by the box": self.box,
            "by the linear part": self.linear,
            "one by one": self.direct,
            "open": self.open,
        }
        parts = ", ".join(f"{count} {name}" for name, count in named.items() if count)
        return f"{self.total} other tokens: {parts}"


@dataclass(frozen=True, eq=False)
class Ledger:
    """How bounds add up, for a checker: the value at a corner, and what each token may add beyond it.

    For upper bounds f ≤ value + Σ_t penalty[t]; for lower bounds f ≥ value − Σ_t penalty[t]. `value` bounds f at the
    corner from the same side, the corner is a point of the region, and no penalty is negative.

    Attributes:
        corner: factors of the corner, shape [F, p].
        value: a bound of f at the corner, shape [F].
        penalty: what each token may add, shape [F, S].
    """

    corner: Float[Tensor, "F p"]
    value: Float[Tensor, " F"]
    penalty: Float[Tensor, "F S"]

    def select(self, chosen: Tensor) -> Ledger:
        """Return the entries of some forms."""
        return Ledger(self.corner[chosen], self.value[chosen], self.penalty[chosen])


@dataclass(frozen=True, eq=False)
class Cover:
    """Boxes of coordinates that cover a region, and what is proved on each.

    The coordinates are the region's factors; for a hull of k + 1 inputs they are those of `regions.shares_of`.

    Attributes:
        low: lower ends of the boxes, shape [P, k], binary fractions.
        high: upper ends.
        lower: lower bounds on every box, shape [P, F].
        upper: upper bounds on every box.
    """

    low: Float[Tensor, "P k"]
    high: Float[Tensor, "P k"]
    lower: Float[Tensor, "P F"]
    upper: Float[Tensor, "P F"]

    def select(self, chosen: Tensor) -> Cover:
        """Return what is proved of some forms."""
        return Cover(self.low, self.high, self.lower[:, chosen], self.upper[:, chosen])


@dataclass(frozen=True, eq=False)
class FormBounds:
    """Bounds of linear forms over a region.

    Attributes:
        lower: lower bounds, shape [F].
        upper: upper bounds, shape [F].
        lower_corner: factors near which the lower bounds are almost attained, shape [F, p], if the engine has them.
        upper_corner: the same for the upper bounds.
        lower_ledger: how the lower bounds add up, if the engine says so.
        upper_ledger: the same for the upper bounds.
        cover: pieces of the region and the bounds on each, if the engine cut it.
    """

    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    lower_corner: Float[Tensor, "F p"] | None = None
    upper_corner: Float[Tensor, "F p"] | None = None
    lower_ledger: Ledger | None = None
    upper_ledger: Ledger | None = None
    cover: Cover | None = None


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of functionals over a region, with their guarantee.

    Attributes:
        lower: lower bounds, shape [F].
        upper: upper bounds, shape [F].
        guarantee: what they are worth.
        engine: whose bounds they are.
        seconds: time spent.
        lower_corner: factors near which the lower bounds are almost attained, shape [F, p], if the engine has them.
        upper_corner: the same for the upper bounds.
        lower_ledger: how the lower bounds add up, if the engine says so.
        upper_ledger: the same for the upper bounds.
        tail: how the outputs without a margin of their own were decided, if there are any.
        cover: pieces of the region and the bounds on each, if the engine cut it.

    Example:
        >>> one = Bounds(torch.tensor([0.0]), torch.tensor([3.0]), Guarantee.PROVED, "crown", 0.1)
        >>> other = Bounds(torch.tensor([1.0]), torch.tensor([4.0]), Guarantee.PROVED, "taylor", 0.2)
        >>> both = one.intersect(other)
        >>> both.lower.item(), both.upper.item(), both.engine
        (1.0, 3.0, 'crown+taylor')
    """

    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    guarantee: Guarantee
    engine: str
    seconds: float
    lower_corner: Float[Tensor, "F p"] | None = field(default=None, repr=False)
    upper_corner: Float[Tensor, "F p"] | None = field(default=None, repr=False)
    lower_ledger: Ledger | None = field(default=None, repr=False)
    upper_ledger: Ledger | None = field(default=None, repr=False)
    tail: Tail | None = None
    cover: Cover | None = field(default=None, repr=False)

    def select(self, chosen: Int[Tensor, " M"]) -> Bounds:
        """Return the bounds of some of the functionals.

        Args:
            chosen: the numbers of the functionals to keep.
        """
        return Bounds(
            self.lower[chosen],
            self.upper[chosen],
            self.guarantee,
            self.engine,
            self.seconds,
            None if self.lower_corner is None else self.lower_corner[chosen],
            None if self.upper_corner is None else self.upper_corner[chosen],
            None if self.lower_ledger is None else self.lower_ledger.select(chosen),
            None if self.upper_ledger is None else self.upper_ledger.select(chosen),
            cover=None if self.cover is None else self.cover.select(chosen),
        )

    def intersect(self, other: Bounds) -> Bounds:
        """Return the better of two bounds at each end; an estimate never tightens a proof.

        Args:
            other: bounds of the same functionals with the same guarantee.

        Raises:
            EngineError: if the guarantees differ, or two proved bounds contradict each other.
        """
        if self.guarantee is not other.guarantee:
            raise EngineError("a proved bound and an estimated one cannot be intersected")
        engines = f"{self.engine}+{other.engine}"
        lower, upper, better_low, better_high = tighter(
            (self.lower, self.upper), (other.lower, other.upper), self.guarantee, engines
        )
        return Bounds(
            lower,
            upper,
            self.guarantee,
            engines,
            self.seconds + other.seconds,
            _choose(better_low, other.lower_corner, self.lower_corner),
            _choose(better_high, other.upper_corner, self.upper_corner),
        )


Ends = tuple[Float[Tensor, " F"], Float[Tensor, " F"]]
"""Lower and upper bounds."""


def tighter(
    old: Ends, new: Ends, guarantee: Guarantee, engines: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take the better of two bounds at each end: the only place that lets one bound improve another.

    Args:
        old: lower and upper bounds that are known.
        new: lower and upper bounds of the same functionals.
        guarantee: what both are worth.
        engines: whose bounds these are, for the error message.

    Returns:
        The better lower bounds, the better upper bounds, and where each is the new one. NaN improves nothing.

    Raises:
        EngineError: if both are proved and a lower bound exceeds an upper one, so that one of them is wrong.
    """
    better_low, better_high = new[0] > old[0], new[1] < old[1]
    lower, upper = torch.where(better_low, new[0], old[0]), torch.where(better_high, new[1], old[1])
    if guarantee is Guarantee.PROVED and bool((lower > upper).any()):
        raise EngineError(f"bounds of {engines} contradict each other: one of them is wrong")
    return lower, upper, better_low, better_high


def _choose(where: Tensor, yes: Tensor | None, no: Tensor | None) -> Tensor | None:
    if yes is None or no is None:
        return yes if no is None else no
    return torch.where(where[:, None], yes, no)
