r"""Where the next proof of a radius search is made: a guess from what attacks and earlier proofs say, no proof itself.

A proof of a claim below the first layer walks through the model and takes most of a minute on a laptop, so few must do.
What a proof says beside its verdict is how far down it let the margin come. With m the margin at the centre and L(ε)
the proved lower bound, the loss is taken as

    m − L(ε) ≈ a ε + b ε²,        a = m / ε_broken,

since an attack moves nearly along the gradient and brings the margin to 0 at ε_broken. One proof gives b, and the ε at
which the margin would be used up is where the next one is made. Engines stop where a sign is decided, so a proof that
succeeds may have had more to give: after k of them the next is at least 2ᵏ places further. Before the first proof the
guess is a third of ε_broken for each layer below.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

FIRST_SHARE = 1.0 / 3.0
"""Of what is broken, for each layer, where the first proof is made."""

GUESSES = 4
"""After so many proofs of a claim, halving ends the search."""


def guessed(
    grid: Sequence[float],
    good: int,
    bad: int,
    broken: int,
    clean: float,
    reached: Mapping[int, float],
    depth: int,
) -> int:
    """Return the place on the grid at which the next proof is made, between what is proved and what is not.

    Args:
        grid: the radii, smallest first.
        good: the largest place that is proved; −1 for none.
        bad: the smallest that is broken or was not proved; the length of the grid for none.
        broken: the smallest that is broken; the length of the grid for none.
        clean: the margin at the centre.
        reached: the margins that earlier proofs left, by place; negative where they proved nothing.
        depth: the layer that the claim reads.

    Example:
        >>> grid = [1.1 ** k for k in range(60)]
        >>> first = guessed(grid, -1, 50, 50, 1.0, {}, 1)
        >>> 0.3 < grid[first] / grid[50] < 0.34
        True
        >>> again = guessed(grid, first, 50, 50, 1.0, {first: 0.5}, 1)
        >>> 0.5 < grid[again] / grid[50] < 0.55
        True
    """
    middle = (good + bad) // 2
    if len(reached) >= GUESSES:
        return middle
    end = grid[broken] if broken < len(grid) else math.inf
    known = {place: value for place, value in reached.items() if math.isfinite(value)}
    if not known:
        if not reached and math.isfinite(end):
            return _between(grid, end * FIRST_SHARE**depth, good, bad)
        return middle
    # The proof nearest to the end tells most; where one succeeded, the largest such.
    proved = [p for p, value in known.items() if value > 0.0]
    place = max(proved, default=min(known))
    eps, loss = grid[place], clean - known[place]
    slope = clean / end
    bend = max(0.0, loss - slope * eps) / eps**2
    if not (clean > 0.0 and (bend > 0.0 or slope > 0.0)):
        return middle
    root = 2.0 * clean / (slope + math.sqrt(slope**2 + 4.0 * bend * clean))
    least = good + 2 ** len(proved) if proved else 0
    return min(max(_between(grid, root, good, bad), least), bad - 1)


def _between(grid: Sequence[float], eps: float, good: int, bad: int) -> int:
    """The largest place whose radius is at most ε, moved in between two others."""
    return min(max(bisect.bisect_right(grid, eps) - 1, good + 1), bad - 1)
