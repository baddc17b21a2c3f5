"""Values of `taylor`: u(x) = u + Aα + e, with A the computed Jacobian and e in an ellipsoid.

Chains are token-wise, so A = J N: J = ∂u/∂root per token, N = ∂root/∂α. Over the box |α_k| ≤ half_k

    Aα ∈ E(P),   P = J NNᵀ Jᵀ Σ half²,        e = Σ_s J_s r_s ∈ E(B),

where the *sources* s are the root's own remainder and the remainders of the sites of the chain, each in an ellipsoid
(`taylor_shapes`), and J_s is the Jacobian of the value by the output of that site. A remainder is made once and from
then on moved by linear maps, which lose nothing. Rounding since the last site is a ball, `noise`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor_norms import frobenius, grow, length, product_error, top_eigenvalue
from prooflens.engines.taylor_shapes import ball, gram, image, total, trace
from prooflens.numerics import gamma


@dataclass(eq=False)
class Root:
    """Where a chain starts: its value, N per token, and the shape of e."""

    u: Float[Tensor, "S d"]
    N: Float[Tensor, "S d p"]
    B: Float[Tensor, "S d d"]
    half: Float[Tensor, " p"]
    """Half-widths of the factors: α is scaled so that what reads it does so evenly (`Walk._widths`)."""

    @cached_property
    def support(self) -> Float[Tensor, " S"]:
        """Squared length of the box of those factors that a token's root depends on."""
        return grow((self.N != 0).any(1).to(self.N) @ self.half.square())

    @cached_property
    def gram(self) -> Float[Tensor, "S d d"]:
        """NNᵀ."""
        return gram(self.N)

    @cached_property
    def stretch(self) -> Float[Tensor, " S"]:
        """sup ‖Nα‖₂, crudely, for rounding."""
        return grow(frobenius(self.N) * length(self.half))


@dataclass(eq=False)
class Value:
    """A value of a chain, all tokens."""

    u: Float[Tensor, "S n"]
    J: Float[Tensor, "S n d"]
    root: Root
    sources: dict[str, Float[Tensor, "S n m"]]
    """J_s by source."""
    shapes: dict[str, Float[Tensor, "S m m"]]
    """The shapes of all remainders of the chain so far, by source."""
    noise: Float[Tensor, " S"]
    """Rounding of u, J and the sources since the last site, in the 2-norm."""
    heads: int = 1
    _blocks: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def shape_a(self) -> Float[Tensor, "S n n"]:
        """The shape of Aα."""
        found: Tensor = image(self.J, self.root.gram) * self.root.support[:, None, None]
        return found

    @cached_property
    def shape_e(self) -> Float[Tensor, "S n n"]:
        """The shape of e."""
        parts = [image(J, self.shapes[s]) for s, J in self.sources.items()]
        slip = product_error(self.J.shape[-1], frobenius(self.J) * self.root.stretch)
        return total([*parts, ball(grow(self.noise + slip), self.u.shape[1])])

    @cached_property
    def shape(self) -> Float[Tensor, "S n n"]:
        """The shape of u(x) − u."""
        return total([self.shape_a, self.shape_e])

    def blocks(self, name: str) -> Float[Tensor, "S h c c"]:
        """The diagonal blocks of one of the shapes, head by head."""
        if name not in self._blocks:
            M: Tensor = getattr(self, name)
            S, n = self.u.shape
            c = n // self.heads
            split = M.reshape(S, self.heads, c, self.heads, c)
            self._blocks[name] = split.diagonal(dim1=1, dim2=3).movedim(-1, 1).contiguous()
        return self._blocks[name]

    @cached_property
    def tau(self) -> Float[Tensor, "S h"]:
        """sup ‖Aα‖₂, head by head where there are heads."""
        return grow(top_eigenvalue(self.blocks("shape_a")).sqrt())

    @cached_property
    def e(self) -> Float[Tensor, "S h"]:
        """sup ‖e‖₂, head by head."""
        return grow(top_eigenvalue(self.blocks("shape_e")).sqrt())

    @cached_property
    def reach(self) -> Float[Tensor, "S h"]:
        """sup ‖u(x) − u‖₂, head by head."""
        return grow(self.tau + self.e)

    @cached_property
    def size(self) -> Float[Tensor, " S"]:
        """sup ‖u(x)‖₂, crudely."""
        return grow(length(self.u) + trace(self.shape_a).sqrt() + trace(self.shape_e).sqrt())

    @cached_property
    def stretch(self) -> Float[Tensor, " S"]:
        """The size of all linear parts, for rounding."""
        found = frobenius(self.J) * self.root.stretch + self.noise
        for s, J in self.sources.items():
            found = found + frobenius(J) * trace(self.shapes[s]).sqrt()
        return grow(found)

    @cached_property
    def ellipsoid(self) -> Float[Tensor, "S n n"]:
        """L with u(x) − u ∈ L{‖ξ‖ ≤ 1}: the matrix is lifted, and the factor's residual is measured to be less."""
        n = self.u.shape[1]
        lift = 1e-9 * trace(self.shape) + 2.0**-800
        M = self.shape.clone()
        M.diagonal(dim1=-2, dim2=-1).add_(lift[:, None])
        L = torch.linalg.cholesky_ex(M).L
        residual = frobenius(L @ L.mT - M) + product_error(n, frobenius(L).square())
        fits = residual + gamma(16) * frobenius(M) < lift
        return torch.where(fits[:, None, None], L, torch.inf)
