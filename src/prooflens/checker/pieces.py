"""Regions of few factors (segments, hulls, spans) in pieces: what holds on boxes that cover them holds on them.

A piece |α − m| ≤ h, each h_k a power of two, is the region c + Gm ± G diag(h). Its centre is rounded, and what it is
off by goes into the walk as a ball around every token. Pieces are halved along the factor that is longest until the
claim is shown on each, or there are too many. A piece that no point of the constraints lies in needs no proof.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prooflens.checker.claims import Functional
from prooflens.checker.depth.shapes import Array, gamma, length, up
from prooflens.checker.network import Network
from prooflens.checker.proofs import NOTHING, Prover, Range
from prooflens.checker.region import Region

MOST_FACTORS = 6
MOST_PIECES = 128
"""How many pieces a claim is asked about at most."""

Box = tuple[tuple[float, ...], tuple[float, ...]]
"""Middles and half-widths."""


class Pieces:
    """Proofs of functionals on pieces of a region.

    Args:
        net: the network.
        region: a region of at most `MOST_FACTORS` factors.
        tell: called with what is being done; it may raise `OutOfTimeError`.
        kind: who bounds functionals on a piece.
    """

    def __init__(
        self, net: Network, region: Region, tell: Callable[[str], None], kind: type[Prover] = Prover
    ) -> None:
        self.net, self.region, self.tell, self.factors = net, region, tell, region.factors
        self.kind = kind
        self._provers: dict[Box, Prover] = {}

    def bounds(self, functional: Functional, enough: Callable[[Range], bool]) -> tuple[Range, int]:
        """A functional's range on the region, from pieces that are each good enough, and how many; or nothing.

        Args:
            functional: what is asked.
            enough: whether a range on a piece shows what is claimed.
        """
        k = self.region.n_factors
        left: list[Box] = [((0.0,) * k, (1.0,) * k)]
        low, high, asked = np.inf, -np.inf, 0
        while left:
            box = left.pop()
            if self._is_empty(box):
                continue
            asked += 1
            if asked > MOST_PIECES:
                return NOTHING, asked
            prover = self._prover(box)
            found = prover.bounds(functional, tight=False)
            if not enough(found):
                found = prover.bounds(functional, tight=True)
            if enough(found):
                low, high = min(low, found.low), max(high, found.high)
            else:
                left += _halves(box)
        return Range(low, high), asked

    def _prover(self, box: Box) -> Prover:
        if box not in self._provers:
            middle, half = (np.array(side) for side in box)
            G, c = self.factors, self.region.center
            center = c + G @ middle
            size = np.abs(c) + np.abs(G) @ np.abs(middle)
            blur = up(gamma(len(middle) + 4) * length(size)) if any(middle) else np.zeros(len(c))
            # A half-width is a power of two, so G diag(h) is exact but for underflow, which the ball covers as well.
            piece = Region(center=center, generators=np.moveaxis(G * half, -1, 0))
            self._provers[box] = self.kind(self.net, piece, self.tell, blur)
        return self._provers[box]

    def _is_empty(self, box: Box) -> bool:
        """Whether some constraint of the region excludes every point of a piece, with room for rounding."""
        if self.region.A_ub is None:
            return False
        A: Array = self.region.A_ub
        middle, half = (np.array(side) for side in box)
        least = A @ middle - np.abs(A) @ half
        room = 1e-9 * (1.0 + np.abs(A).sum(-1) + np.abs(self.region.b_ub))
        return bool((least > self.region.b_ub + room).any())


def _halves(box: Box) -> list[Box]:
    """The two halves of a piece along its longest factor."""
    middle, half = box
    k = int(np.argmax(half))
    found = []
    for sign in (-1.0, 1.0):
        m, h = list(middle), list(half)
        h[k] = half[k] / 2
        m[k] = middle[k] + sign * h[k]
        found.append((tuple(m), tuple(h)))
    return found
