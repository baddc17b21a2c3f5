"""Quadratic forms of the factors over the box, bounded at the corner that their linear part points to.

For K symmetric and a diagonal D ⪰ K, D ≥ 0, over the box |α| ≤ 1,

    a·α + ½ αᵀKα ≤ ‖a‖₁ + ½ Σ D_k,
    a·α + ½ αᵀKα ≤ m(s) + Σ_k max(0, 2(D_k − G_k))        at the corner s = sign a, G = s ⊙ (a + Ks),

with m the left-hand side: for α = s − s ⊙ β, β ∈ [0, 2]ᵖ, it is m(s) − G·β + ½ βᵀ(sKs)β ≤ m(s) + Σ max over β_k of
the convex −G_kβ_k + ½D_kβ_k², which is attained at 0 or 2. D is λ times a shape, λ a verified eigenvalue. **Where a
form is steep, D costs nothing**: shapes that follow |a| leave 2(D_k − G_k) negative, and of K only its value at one
corner counts, as a rule a small share of what it attains somewhere else.

So what majorises a remainder by a square of the factors is worth more here than its largest value, which no other
remainder attains at the same α: a `Majorised` joins ½ αᵀJα + rest to the form before any bound is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.norms import CHUNK, frobenius, grow, guessed_eigenvalue, top_eigenvalue
from prooflens.numerics import gamma

EVEN = 0.05
"""The shortest row of a matrix that is used as a scale, as a share of the mean; any positive scale is valid."""
STEEP = (0.0, 3.0, 10.0, 30.0)
"""How much shapes follow the slopes, against the lengths of the rows; the better one is taken."""


def evened(
    H: Float[Tensor, "F p p"], steep: Float[Tensor, "F p"] | None = None
) -> tuple[Float[Tensor, "F p p"], Float[Tensor, "F p"], Float[Tensor, " F"]]:
    """Scale matrices by the lengths of their rows, and by what else is given.

    Args:
        H: symmetric matrices, shape [F, p, p].
        steep: what is added to the lengths, in units of their mean; None for nothing.

    Returns:
        X^{-½}HX^{-½}, exactly symmetric, the diagonal of X, and by how much the first rounds in the 2-norm. If λ is at
        least its largest eigenvalue, λX ⪰ H.
    """
    x = scales(H, steep)
    root = x.sqrt()
    even = H / root[:, :, None] / root[:, None, :]
    even = 0.5 * (even + even.mT)
    # Two quotients, a sum, and x for the square of its rounded root: fewer than 16 roundings.
    return even, x, gamma(16) * frobenius(even)


def scales(H: Float[Tensor, "F p p"], steep: Float[Tensor, "F p"] | None = None) -> Float[Tensor, "F p"]:
    """Return the diagonal X by which `evened` scales matrices.

    Args:
        H: symmetric matrices, shape [F, p, p].
        steep: what is added to the lengths of the rows, in units of their mean; None for nothing.
    """
    lengths = torch.linalg.vector_norm(H, dim=-1)
    share = EVEN if steep is None else EVEN + steep
    found: Tensor = lengths + share * lengths.mean(-1, keepdim=True) + 2.0**-300
    return found


class Majorised(NamedTuple):
    """A bound ½ αᵀJα + rest of |what forms have beside their first and second order|.

    Attributes:
        J: exactly symmetric matrices, shape [F, p, p]; None for 0.
        error: bounds of their error in the 2-norm, shape [F].
        rest: constants, shape [F].
    """

    J: Float[Tensor, "F p p"] | None
    error: Float[Tensor, " F"]
    rest: Float[Tensor, " F"]


def ranges(
    slope: Float[Tensor, "F p"],
    H: Float[Tensor, "F p p"],
    error: Float[Tensor, " F"],
    remainders: Callable[[slice], Sequence[Majorised]] | None = None,
) -> Float[Tensor, "F 2"]:
    """Bound ±(a·α + ½αᵀHα) and all that is majorised over the box, for + and −.

    Args:
        slope: a, shape [F, p].
        H: exactly symmetric matrices, shape [F, p, p].
        error: bounds of their error in the 2-norm, shape [F].
        remainders: majorants of the remainders of some of the forms, of which the best is taken; None for no remainder.
    """
    step = max(1, CHUNK // max(1, slope.shape[-1] ** 2))
    found = []
    for start in range(0, len(slope), step):
        some = slice(start, start + step)
        zero = torch.zeros_like(error[some])
        choices = [Majorised(None, zero, zero)] if remainders is None else remainders(some)
        sides = [_largest(slope[some], sign * H[some], error[some], choices) for sign in (1.0, -1.0)]
        found.append(torch.stack(sides, -1))
    return torch.cat(found) if found else slope.new_zeros(0, 2)


def _largest(
    slope: Float[Tensor, "f p"],
    H: Float[Tensor, "f p p"],
    error: Float[Tensor, " f"],
    choices: Sequence[Majorised],
) -> Float[Tensor, " f"]:
    """Bound a·α + ½αᵀHα + remainders over the box; −(a·α) + … is the same at −α.

    Which choice and shape are best is guessed, form by form, and proved after that.
    """
    best = torch.full_like(error, torch.inf)
    chosen = torch.zeros_like(error, dtype=torch.long)
    several = len(choices) * len(STEEP) > 1
    for number, choice in enumerate(choices if several else ()):
        form = _joined(slope, H, error, choice)
        for kind, steep in enumerate(STEEP):
            guess = form.bound(form.guessed(steep))
            better = guess < best
            chosen = torch.where(better, len(STEEP) * number + kind, chosen)
            best = torch.where(better, guess, best)
    found = torch.full_like(error, torch.inf)
    for which in chosen.unique().tolist():
        form = _joined(slope, H, error, choices[which // len(STEEP)])
        proved = form.bound(form.proved(STEEP[which % len(STEEP)]))
        found = torch.where(chosen == which, proved, found)
    return found


def _joined(
    slope: Float[Tensor, "f p"], H: Float[Tensor, "f p p"], error: Float[Tensor, " f"], choice: Majorised
) -> BoxForm:
    """Add what majorises the remainders to forms: a sum of two matrices rounds by a unit of itself."""
    if choice.J is None:
        return BoxForm(slope, H, error, choice.rest)
    K = H + choice.J
    return BoxForm(slope, K, grow(error + choice.error + gamma(8) * frobenius(K)), choice.rest)


class BoxForm:
    """a·α + ½αᵀKα + rest over the box, for several forms.

    Args:
        slope: a, shape [F, p].
        K: exactly symmetric matrices, shape [F, p, p].
        error: bounds of their error in the 2-norm, shape [F].
        rest: what is added, shape [F].
    """

    def __init__(
        self,
        slope: Float[Tensor, "F p"],
        K: Float[Tensor, "F p p"],
        error: Float[Tensor, " F"],
        rest: Float[Tensor, " F"],
    ) -> None:
        self.slope, self.K, self.error, self.rest = slope, K, error, rest
        p = slope.shape[-1]
        self.s = torch.where(slope >= 0, 1.0, -1.0).to(slope)
        self.bent = self.s * (K @ self.s[..., None])[..., 0]
        self.blur = gamma(p + 8) * K.abs().sum(-1)
        self.steep = slope.abs().sum(-1)

    def _slopes(self, steep: float) -> Float[Tensor, "F p"]:
        """The slopes in units of their mean, `steep` times."""
        follow = self.slope.abs()
        return steep * follow / (follow.mean(-1, keepdim=True) + 2.0**-300)

    def guessed(self, steep: float) -> Float[Tensor, "F p"]:
        """Return a diagonal that is likely above K.

        Args:
            steep: how much it follows the slopes.
        """
        x = scales(self.K, self._slopes(steep))
        return guessed_eigenvalue(self.K, scale=x)[:, None] * x

    def proved(self, steep: float) -> Float[Tensor, "F p"]:
        """Return a diagonal above K.

        Args:
            steep: how much it follows the slopes.
        """
        even, x, noise = evened(self.K, self._slopes(steep))
        return (top_eigenvalue(even) + noise)[:, None] * x

    def bound(self, D: Float[Tensor, "F p"]) -> Float[Tensor, " F"]:
        """Bound the forms by a diagonal above K, from 0 or from the corner.

        Args:
            D: diagonals, shape [F, p].
        """
        p = self.slope.shape[-1]
        flat = self.steep + 0.5 * D.sum(-1)
        G = self.s * self.slope + self.bent - self.blur
        over = (2.0 * (D - G)).clamp(min=0.0).sum(-1)
        corner = self.steep + 0.5 * (self.bent + self.blur).sum(-1) + over
        # Sums of p terms of this size; an error of K in the 2-norm counts p/2 times, as |α|² ≤ p.
        rounding = gamma(4 * p + 64) * (self.steep + self.bent.abs().sum(-1) + D.sum(-1))
        return grow(torch.minimum(flat, corner) + rounding + 0.5 * self.error * p + self.rest)
