"""Quadratic forms of the factors over the box: a diagonal above them, and the point where what is left is highest.

For K symmetric and a diagonal D ⪰ K, D ≥ 0, M = D − K is positive semidefinite, and over the box |α| ≤ 1

    a·α + ½ αᵀKα  =  a·α + ½ αᵀDα − ½ αᵀMα  ≤  ½ Σ D_k + ½ zᵀMz + ‖a − Mz‖₁          for every z,

as α_k² ≤ 1 and −½αᵀMα ≤ ½zᵀMz − (Mz)·α. From z = 0 that is ‖a‖₁ + ½ΣD; from the corner s = sign a of a steep form it
is the value there. The best z is where the concave a·α − ½αᵀMα is highest: a few projected steps find it, and none of
them has to be proved.

**Where a form is steep, D costs nothing**: a coordinate that stays at the end of the box, z_k = ±1, may have as much
more of D as its slope |a − Mz|_k without any change. So D is λ times a shape, λ a verified eigenvalue, and the next
shape has these slopes added: with it λ is smaller, and the coordinates in the middle pay less. Of K mostly its value
at one corner counts, as a rule a small share of what it attains somewhere else.

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
FOLLOW = 1.0
"""How much the first shape follows the slopes of a form, against the mean length of the rows."""
SHAPES = 3
"""How many shapes of D are tried one after the other."""
STEPS = 6
"""Steps towards the highest point for each of them; more gain nothing that can be seen."""
STRETCHINGS = 4
"""Steps of the power iteration that guesses how long a step may be."""


def evened(
    H: Float[Tensor, "F p p"], x: Float[Tensor, "F p"]
) -> tuple[Float[Tensor, "F p p"], Float[Tensor, " F"]]:
    """Scale matrices by a positive diagonal X.

    Args:
        H: symmetric matrices, shape [F, p, p].
        x: the diagonal, shape [F, p].

    Returns:
        X^{-½}HX^{-½}, exactly symmetric, and by how much it rounds in the 2-norm. If λ is at least its largest
        eigenvalue, λX ⪰ H.
    """
    root = x.sqrt()
    even = H / root[:, :, None] / root[:, None, :]
    even = 0.5 * (even + even.mT)
    # Two quotients, a sum, and x for the square of its rounded root: fewer than 16 roundings.
    return even, gamma(16) * frobenius(even)


def scales(H: Float[Tensor, "F p p"], steep: Float[Tensor, "F p"] | None = None) -> Float[Tensor, "F p"]:
    """Return a diagonal to scale matrices by: the lengths of their rows, and what else is given.

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
    shape, z = torch.ones_like(slope), torch.zeros_like(slope)
    for number, choice in enumerate(choices):
        guess, its_shape, its_z = _joined(slope, H, error, choice).guessed()
        better = guess < best
        chosen = torch.where(better, number, chosen)
        best = torch.where(better, guess, best)
        shape, z = (torch.where(better[:, None], new, old) for new, old in ((its_shape, shape), (its_z, z)))
    found = torch.full_like(error, torch.inf)
    for which in chosen.unique().tolist():
        form = _joined(slope, H, error, choices[which])
        found = torch.where(chosen == which, form.bound(form.proved(shape), z), found)
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
        self.bent = self._times(self.s)
        self.blur = gamma(p + 8) * K.abs().sum(-1)
        self.steep = slope.abs().sum(-1)

    def guessed(self) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"], Float[Tensor, "F p"]]:
        """Return the bound that is likely to be found, the shape of D that it needs, and the point z."""
        follow = self.slope.abs()
        shape = scales(self.K, FOLLOW * follow / (follow.mean(-1, keepdim=True) + 2.0**-300))
        z, found = self.s, []
        for _ in range(SHAPES):
            D = guessed_eigenvalue(self.K, scale=shape).clamp(min=0.0)[:, None] * shape
            z = self.highest(D, z)
            found.append((self.above(D, z)[0], shape, z))
            shape = D + (self.slope - self._left(D, z)).abs() + 2.0**-300
        values, shapes, points = (torch.stack(part) for part in zip(*found, strict=True))
        best = values.nan_to_num(nan=torch.inf).argmin(0)
        rows = torch.arange(len(best), device=best.device)
        return values[best, rows], shapes[best, rows], points[best, rows]

    def proved(self, shape: Float[Tensor, "F p"]) -> Float[Tensor, "F p"]:
        """Return a diagonal above K.

        Args:
            shape: its shape, positive numbers.
        """
        even, noise = evened(self.K, shape)
        return (top_eigenvalue(even) + noise)[:, None] * shape

    def _times(self, z: Float[Tensor, "F p"]) -> Float[Tensor, "F p"]:
        return (self.K @ z[..., None])[..., 0]

    def _left(self, D: Float[Tensor, "F p"], z: Float[Tensor, "F p"]) -> Float[Tensor, "F p"]:
        """Return Mz."""
        return D * z - self._times(z)

    def highest(self, D: Float[Tensor, "F p"], z: Float[Tensor, "F p"]) -> Float[Tensor, "F p"]:
        """Return about the point of the box where a·α − ½αᵀMα is highest, by projected steps with momentum.

        Args:
            D: diagonals above K, or nearly.
            z: where to start.
        """
        scale = D + EVEN * D.mean(-1, keepdim=True) + 2.0**-300
        root, x = scale.sqrt(), self.s
        for _ in range(STRETCHINGS):
            x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=2.0**-400)
            x = self._left(D, x / root) / root
        far = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        step = 1.0 / (1.2 * far.clamp(min=1.0) * scale)
        ahead, momentum = z, 1.0
        for _ in range(STEPS):
            before, z = z, (ahead + step * (self.slope - self._left(D, ahead))).clamp(-1.0, 1.0)
            following = 0.5 * (1.0 + (1.0 + 4.0 * momentum**2) ** 0.5)
            ahead = z + ((momentum - 1.0) / following) * (z - before)
            momentum = following
        return z.nan_to_num(nan=0.0)

    def above(
        self, D: Float[Tensor, "F p"], z: Float[Tensor, "F p"], moved: Float[Tensor, "F p"] | None = None
    ) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
        """Return ½ΣD + ½zᵀMz + ‖a − Mz‖₁ + rest, and what all of it rounds by.

        Args:
            D: diagonals above K.
            z: points with |z_k| ≤ 1.
            moved: Kz; None to have it made.
        """
        p = self.slope.shape[-1]
        bent = self._times(z) if moved is None else moved
        Mz = D * z - bent
        value = 0.5 * D.sum(-1) + 0.5 * (z * Mz).sum(-1) + (self.slope - Mz).abs().sum(-1)
        # Kz errs by `blur` and counts at most three halves times; all else are sums of p terms of these sizes, of which
        # D counts twice. An error of K in the 2-norm counts p/2 times, as |α|² ≤ p.
        sizes = self.steep + bent.abs().sum(-1) + D.sum(-1)
        rounding = gamma(4 * p + 64) * 4.0 * sizes + 2.0 * self.blur.sum(-1)
        return value + self.rest, rounding + 0.5 * self.error * p

    def bound(self, D: Float[Tensor, "F p"], z: Float[Tensor, "F p"]) -> Float[Tensor, " F"]:
        """Bound the forms by a diagonal above K, from near z, from the corner or from 0.

        Args:
            D: diagonals above K.
            z: points of the box.
        """
        zero = torch.zeros_like(z)
        places = (self.highest(D, self.highest(D, z)), None), (self.s, self.bent), (zero, zero)
        found = []
        for point, moved in places:
            value, rounding = self.above(D, point, moved)
            found.append(grow(value + rounding))
        return torch.stack(found).nan_to_num(nan=torch.inf).amin(0)
