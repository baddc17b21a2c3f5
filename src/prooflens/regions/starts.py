"""Where regions inside a model start: points that are residual streams, and what these were computed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from prooflens.models.prompt import Origin, Prompt


class Start(NamedTuple):
    """A point of a region that is a residual stream: its factors (None for the centre), and where it comes from."""

    factors: Float[Tensor, " p"] | None
    origin: Origin


def starts_of(given: Sequence[object], factors: Sequence[Tensor | None]) -> tuple[Start, ...]:
    """Return the points of a region that are residual streams.

    Args:
        given: prompts, or anything else, which is no stream that says where it comes from.
        factors: the factors of each of them in the region; None for its centre.
    """
    pairs = zip(given, factors, strict=True)
    return tuple(
        Start(where, point.origin)
        for point, where in pairs
        if isinstance(point, Prompt) and point.origin is not None
    )
