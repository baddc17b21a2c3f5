"""Norms of queries and keys, head by head, as one site of `taylor`.

Every head h of a token has a norm of its own, so the remainder is r = (r_1, …, r_H) with each r_h that of a
`NormSite` on the head's coordinates alone. For a covector v = (v_1, …, v_H) all bounds are sums over heads; the
ellipsoid of r is the sum of the heads' ellipsoids, each in its own coordinates; Jacobian and covectors are taken
block by block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import total
from prooflens.engines.relaxations.norms import grow
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.values import Value
from prooflens.models.sites import Norm


@dataclass(eq=False)
class HeadNormSite:
    """A norm of each head of queries or keys.

    Attributes:
        step: the norm; its weights are those of one head.
        source: the value that is normed, with as many heads as it has.
    """

    step: Norm
    source: Value

    @cached_property
    def width(self) -> int:
        """d_h."""
        return self.source.u.shape[-1] // self.source.heads

    @cached_property
    def sites(self) -> list[NormSite]:
        """The norms of all heads, each on its own coordinates."""
        return [NormSite(self.step, _head(self.source, h, self.width)) for h in range(self.source.heads)]

    @property
    def output(self) -> Float[Tensor, "S n"]:
        """The value at the centre."""
        heads: Tensor = self.source.u.unflatten(-1, (self.source.heads, self.width))
        return self.step(heads).flatten(-2)

    @cached_property
    def jacobian(self) -> Float[Tensor, "S n n"]:
        """The Jacobian of the output by the input: one block per head."""
        return self._placed([site.jacobian for site in self.sites]).sum(0)

    @cached_property
    def shape(self) -> Float[Tensor, "S n n"]:
        """An ellipsoid of the remainder, rounding included."""
        return total(list(self._placed([site.shape for site in self.sites])))

    def _placed(self, blocks: list[Float[Tensor, "S c c"]]) -> Float[Tensor, "H S n n"]:
        """Every head's block in the coordinates of all heads."""
        size = self.source.u.shape[-1]
        found = blocks[0].new_zeros(len(blocks), len(blocks[0]), size, size)
        for h, block in enumerate(blocks):
            here = slice(h * self.width, (h + 1) * self.width)
            found[h, :, here, here] = block
        return found

    def _parts(self, v: Float[Tensor, "F n"]) -> list[tuple[NormSite, Float[Tensor, "F c"]]]:
        return list(zip(self.sites, v.split(self.width, -1), strict=True))

    def pull(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F n"]:
        """The covector at the input."""
        return torch.cat([site.pull(part, t) for site, part in self._parts(v)], -1)

    def bound(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """sup of v·r and of −v·r over the region, with rounding."""
        return grow(torch.stack([site.bound(part, t) for site, part in self._parts(v)]).sum(0))

    def rest(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, " F"]:
        """sup |v·r − ½xᵀQx|, rounding of v included."""
        return grow(torch.stack([site.rest(part, t) for site, part in self._parts(v)]).sum(0))

    def noise(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, " F"]:
        """Rounding of the output at the centre and of the covector, seen over the region."""
        return grow(torch.stack([site.noise(part, t) for site, part in self._parts(v)]).sum(0))

    def quadratic(
        self, v: Float[Tensor, "F n"], t: int
    ) -> tuple[Float[Tensor, "F m m"], Float[Tensor, " F"]]:
        """Q with ½xᵀQx the second order of v·r for a move x of the root, and its rounding in the 2-norm.

        Adding up H matrices rounds by H units of their sizes, which each head's own bound covers many times over.
        """
        found = [site.quadratic(part, t) for site, part in self._parts(v)]
        return sum(Q for Q, _ in found), grow(sum(error for _, error in found))  # type: ignore[arg-type, return-value]


def _head(value: Value, h: int, width: int) -> Value:
    """One head of a value, as a value of its own: rows of its Jacobians; all of its noise may be in this head."""
    here = slice(h * width, (h + 1) * width)
    sources = {name: J[:, here] for name, J in value.sources.items()}
    return replace(value, u=value.u[:, here], J=value.J[:, here], sources=sources, heads=1, _blocks={})
