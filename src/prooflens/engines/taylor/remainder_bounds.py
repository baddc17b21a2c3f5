"""Bounds of the remainders that a covector collects on its way back, from quick to thorough.

A walk (`taylor.walk`) takes covectors back through chains and asks at each site for a bound of the remainder there.
`Supports` uses the ellipsoids that were made on the way forward, and stops at the first root. `Eigenvalues` asks
every norm and network about this very covector and goes on to the input. `taylor.hessian` has the third kind: all
second orders in one matrix.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.relaxations.norms import length
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.numerics import gamma


class Supports:
    """Bound remainders by the support functions of ellipsoids, as far as the root of the chain."""

    deep: bool = False
    """Whether to go on to the input."""
    may_stop: bool = True
    """Whether the ellipsoid of a root may stand for everything before it."""

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Bound v·r and −v·r at a norm or a network.

        Args:
            chain: the chain.
            name: the name of the site's output.
            v: covectors there, shape [F, n].
            t: the token.
        """
        found = support(chain.shapes[name][t], v) + chain.sites[name].noise(v, t)
        return found[:, None].expand(-1, 2)

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """Bound u·r and −u·r at the mixing of the chain.

        Args:
            chain: the chain.
            place: the place of a token among those of the next root.
            u: covectors there, shape [F, d].
        """
        assert chain.mixed is not None
        return support(chain.mixed[place], u)[:, None].expand(-1, 2)

    def products(self, chain: Chain, forms: Forms) -> Float[Tensor, "H S S"]:
        """Return what each score of a layer misses beyond first order in q and k."""
        assert chain.scores is not None
        second, cross = chain.scores.products
        return second + cross

    def arrive(self, chain: Chain) -> None:
        """Be told that all covectors of a chain have come to its root."""

    def moving(self, walk: TaylorWalk, forms: Forms, slope: Float[Tensor, "F p"]) -> None:
        """Be told that all covectors have come to the input; `taylor.third_order` then walks again.

        Args:
            walk: the walk forward.
            forms: what is bounded.
            slope: their linear parts, shape [F, p].
        """

    def linear_range(self, slope: Float[Tensor, "F p"]) -> Float[Tensor, "F 2"]:
        """Bound the linear part from above and below over the box |α̂| ≤ 1.

        Multiplying by the half-widths and adding up p terms errs by γ_{p+1}‖slope‖₁ ≤ γ_{p+1}√p‖slope‖₂; 64 and 4 are
        to spare.
        """
        steep = (
            slope.abs().sum(-1) + gamma(slope.shape[-1] + 64) * 4.0 * length(slope) * slope.shape[-1] ** 0.5
        )
        found: Tensor = steep[:, None].expand(-1, 2)
        return found


class Eigenvalues(Supports):
    """Bound remainders by one eigenvalue per network and covector, where that is less, as far as the input."""

    deep = True

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Return the bound of `Supports`, or the site's own bound for this covector if that is less.

        Args:
            chain: the chain.
            name: the name of the site's output.
            v: covectors there, shape [F, n].
            t: the token.
        """
        return torch.minimum(super().site(chain, name, v, t), chain.sites[name].bound(v, t))
