"""A mean of tokens as a new root: x = Σ_t share_t y_t, y a value of a chain, which a pooler reads.

A chain goes token by token, so that what mixes tokens starts the next one, as attention does. The mean is affine: the
root has the linear part Σ share_t A_t, a source r_s at token t comes by share_t J_{s,t}, and nothing is of second
order. Shares are floats, within one rounding of what the model divides by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.shapes import Array, ball, gamma, image, total, up
from prooflens.checker.depth.values import ROOT, Chain, Value


@dataclass(eq=False)
class PoolSite:
    """A weighted sum of the tokens of a value: one token.

    Attributes:
        stream: the value.
        shares: the weight of each of its tokens.
        tokens: the tokens that there are behind it.
    """

    stream: Value
    shares: Array
    tokens: list[int] = field(default_factory=lambda: [0])

    @cached_property
    def noises(self) -> dict[int, float]:
        """What the values are known to, and rounding: of shares, of the sum, of the linear part and of Jacobians."""
        y, weight = self.stream, np.abs(self.shares)
        found = (weight * (y.slip + gamma(len(weight) + 16) * 4.0 * y.size)).sum()
        return {0: float(up(np.asarray(found)))}

    @cached_property
    def beyond(self) -> dict[int, Array]:
        """The shape of what is beyond second order: rounding."""
        return {0: ball(np.asarray(self.noises[0]), self.stream.c.shape[1])}

    @property
    def missed(self) -> dict[int, Array]:
        """The shape of what is made here besides a linear map: `beyond` alone."""
        return self.beyond

    @cached_property
    def behind(self) -> Chain:
        """The chain that begins with the mean."""
        y, chain = self.stream, self.stream.chain
        parts = [self.beyond[0]]
        for s, J in y.jacobians.items():
            if s != ROOT:
                parts += [image(w * J[t], chain.shapes[s][t]) for t, w in enumerate(self.shares)]
        c, N = (np.tensordot(self.shares, x, 1)[None] for x in (y.c, y.linear))
        A = np.moveaxis(self.shares[:, None, None] * y.J, 0, 1)[None]
        return chain.followed_by(c, N, total(parts)[None], A)

    def form(self, v: Array, t: int) -> tuple[Quadratic, float]:
        """The second order as a covector sees it: none.

        Args:
            v: the covector.
            t: the token behind the mean.
        """
        nothing = np.zeros((0, self.stream.chain.N.shape[-1]))
        return Quadratic(np.zeros((1, 0)), nothing, nothing), 0.0

    def pull(self, v: Array, t: int) -> dict[str, dict[int, Array]]:
        """Covectors behind the mean [..., d], taken back to the tokens.

        Args:
            v: the covectors.
            t: the token behind the mean.
        """
        return {"stream": {place: w * v for place, w in enumerate(self.shares.tolist())}}
