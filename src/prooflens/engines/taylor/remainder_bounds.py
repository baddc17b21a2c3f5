"""What a covector misses at the sites that it passes: the readings of `taylor`, from quick to thorough.

A walk (`taylor.walk`) takes covectors back through chains; a reading says what each site adds. `Supports` asks the
ellipsoids that were made on the way forward and stops at the first root. `Eigenvalues` asks every norm and network
about this very covector and goes on to the input. `taylor.hessian` has the third: all second orders in one matrix.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.relaxations.norms import length
from prooflens.engines.taylor.chain import Chain
from prooflens.numerics import gamma


class Supports:
    """Support functions of ellipsoids, as far as the root of the chain."""

    deep: bool = False
    """Whether to go on to the input."""
    may_stop: bool = True
    """Whether the ellipsoid of a root may stand for everything before it."""

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """sup of v·r and of −v·r at a norm or a network, for token t."""
        found = support(chain.shapes[name][t], v) + chain.sites[name].noise(v, t)
        return found[:, None].expand(-1, 2)

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """The same at the mixing of the chain, for one token of the next root."""
        assert chain.mixed is not None
        return support(chain.mixed[place], u)[:, None].expand(-1, 2)

    def products(self, chain: Chain, forms: Forms) -> Float[Tensor, "H S S"]:
        """What each score of a layer misses beyond first order in q and k."""
        assert chain.scores is not None
        second, cross = chain.scores.products
        return second + cross

    def arrive(self, chain: Chain) -> None:
        """All covectors of a chain have come to its root."""

    def linear_range(self, slope: Float[Tensor, "F p"]) -> Float[Tensor, "F 2"]:
        """How far the linear part goes up and down over the box |α̂| ≤ 1."""
        steep = (
            slope.abs().sum(-1) + gamma(slope.shape[-1] + 64) * 4.0 * length(slope) * slope.shape[-1] ** 0.5
        )
        found: Tensor = steep[:, None].expand(-1, 2)
        return found


class Eigenvalues(Supports):
    """One eigenvalue per network and covector, where that is less, as far as the input."""

    deep = True

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """As `Supports`, or what the site says of this covector."""
        return torch.minimum(super().site(chain, name, v, t), chain.sites[name].bound(v, t))
