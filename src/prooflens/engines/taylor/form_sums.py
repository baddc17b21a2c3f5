"""Sums of quadratic forms of the factors, one matrix for each of several forms, with the rounding of the sum."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.norms import frobenius, grow, product_error
from prooflens.engines.taylor.values import Root
from prooflens.numerics import gamma


class FormSum:
    """Matrices H = G + Gᵀ to which products, and squares at the tokens of a root, are added.

    Args:
        half_widths: half-widths of the factors, shape [p].
        forms: how many there are.
    """

    def __init__(self, half_widths: Float[Tensor, " p"], forms: int) -> None:
        self.half_widths = half_widths
        p = len(half_widths)
        self.G = half_widths.new_zeros(forms, p, p)
        """½(G + Gᵀ) = ½H in factors of half-width 1."""
        self.error = half_widths.new_zeros(forms)
        """Of what was added to G, in the 2-norm."""
        self.sizes = half_widths.new_zeros(forms)
        """The Frobenius norms of what was added, all together: no sum on the way is larger."""
        self.sums = 0
        self.at_root: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, t: int, Q: Float[Tensor, "F n n"], error: Float[Tensor, " F"]) -> None:
        """Keep ½xᵀQx of a token of the root until all covectors of its chain have come there.

        Args:
            t: the token.
            Q: symmetric matrices, shape [F, n, n].
            error: bounds of their error in the 2-norm, shape [F].
        """
        if t in self.at_root:
            before, old = self.at_root[t]
            Q, error = before + Q, old + error + gamma(8) * (frobenius(before) + frobenius(Q))
        self.at_root[t] = Q, error

    def arrive(self, root: Root) -> None:
        """Add what was kept.

        Args:
            root: the root of the chain.
        """
        for t, (Q, error) in self.at_root.items():
            N = root.N[t] * self.half_widths
            live = (N != 0).any(0).nonzero()[:, 0]
            N = N[:, live]
            right = 0.5 * Q @ N
            size = frobenius(N).square()
            # NᵀQN: two sums of d terms and the products with half-widths; 4 and 4 are to spare.
            slip = product_error(4 * sum(N.shape) + 64, frobenius(Q) * size * 4.0)
            self.add(N, right, slip + 0.5 * error * size, live)
        self.at_root = {}

    def add(
        self,
        left: Float[Tensor, "n q"],
        right: Float[Tensor, "F n q"],
        error: Float[Tensor, " F"],
        live: Tensor | None = None,
    ) -> None:
        """Add leftᵀ right to G.

        Args:
            left: the same for all forms.
            right: one for every form.
            error: what the product errs by in the 2-norm, shape [F].
            live: the rows and columns of G that it is added to; None for all.
        """
        if live is None or len(live) == len(self.half_widths):
            torch.baddbmm(self.G, left.T.expand(len(right), -1, -1), right, out=self.G)
        else:
            self.G[:, live[:, None], live] += left.T @ right
        self.error = grow(self.error + error)
        self.sizes = grow(self.sizes + frobenius(left) * frobenius(right))
        self.sums += 1

    def add_to(self, form: int, left: Float[Tensor, "n p"], right: Float[Tensor, "n p"]) -> None:
        """Add leftᵀ right to G of one form.

        Args:
            form: which one.
            left: shape [n, p].
            right: shape [n, p].
        """
        self.G[form] += left.T @ right
        size = frobenius(left) * frobenius(right)
        self.error[form] += product_error(len(left) + 64, size * 4.0)
        self.sizes[form] += size
        self.sums += 1

    def taken(self) -> tuple[Float[Tensor, "F p p"], Float[Tensor, " F"]]:
        """Return H and bounds of its error in the 2-norm, and let go of what was collected."""
        H = self.G + self.G.mT
        self.G = H[:0]  # what was collected is in H now, and each of these is large
        # Adding to G rounds by a unit of what is there then, and so does this sum.
        return H, grow(2.0 * (self.error + gamma(self.sums + 8) * self.sizes) + gamma(8) * frobenius(H))
