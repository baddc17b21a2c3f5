"""A proof of the accuracy of a one-layer model on the largest-token task, without running the inputs.

Fix the last token. Times Σ_j e^{a_j} > 0, the margin of the answer m over a rival c is Σ_j (p_j[t_j, m] − p_j[t_j, c])
with p_j[t] = e^{a_j(t)} (L_j(t) + D): a sum of one term per position. Inputs are cells: some positions are fixed, the
largest token is m, and the others are at most m. The least margin of a cell takes the least term at every free
position, except that one of them holds m itself where no fixed position does. A cell whose least margin is positive for
all rivals is right as a whole; others are cut by fixing one more position, down to single inputs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.attention_only.enumeration import Accuracy
from prooflens.engines.attention_only.tables import OneLayer
from prooflens.models import Transformer
from prooflens.models.tasks import TokenTask
from prooflens.numerics import gamma
from prooflens.numerics.rounding import UNIT_ROUNDOFF

TILE = 2**14
"""Cells that are bounded together."""


def bound_largest(model: Transformer, task: TokenTask) -> Accuracy:
    """Prove on how many inputs, at least and at most, a one-layer model names the largest token.

    What is proved: over the real numbers, from the float64 embeddings on, the logit of the largest token is above all
    others on at least `right` and at most `most` inputs.

    Args:
        model: an attention-only model of one layer and one head, as `check_model` accepts it.
        task: a task that asks for the largest token.
    """
    started = time.perf_counter()
    tables = OneLayer.of(model, task.length)
    right = wrong = cells = 0
    with torch.no_grad():
        for last in range(task.vocabulary):
            found = _LastToken.of(tables, last).count()
            right, wrong, cells = right + found[0], wrong + found[1], cells + found[2]
    seconds = time.perf_counter() - started
    return Accuracy(task.name, "proved", right, task.inputs - wrong, task.inputs, None, cells, seconds)


@dataclass(frozen=True, eq=False)
class _LastToken:
    """All inputs with one last token.

    Attributes:
        last: the token.
        parts: p_j[t, c] as computed.
        errors: how far they are from the real numbers, times one positive factor.
    """

    last: int
    parts: Float[Tensor, "n V C"]
    errors: Float[Tensor, "n V C"]

    @classmethod
    def of(cls, tables: OneLayer, last: int) -> _LastToken:
        """Make p and its errors: e^a errs by what a does and by 4 ulp, L + D by their own errors and a rounding."""
        shifted = tables.scores[last] - tables.scores[last].max()
        off = tables.score_error[last] + 2.0 * UNIT_ROUNDOFF * shifted.abs()
        e = shifted.exp()
        e_error = e * (torch.expm1(off) * 1.5 + 16.0 * UNIT_ROUNDOFF) + 2.0**-900
        inner = tables.written + tables.direct[last]
        inner_error = tables.written_error + tables.direct_error[last] + 2.0 * UNIT_ROUNDOFF * inner.abs()
        parts = e[..., None] * inner
        errors = (e + e_error)[..., None] * inner_error + e_error[..., None] * inner.abs()
        # Sums of n parts, and of their errors, round once per term, relative to their terms.
        errors = (errors + gamma(8 * len(parts) + 16) * parts.abs()) * (1.0 + gamma(64)) + 2.0**-900
        return cls(last, parts, errors)

    def count(self) -> tuple[int, int, int]:
        """Return how many inputs are surely right and surely wrong, and how many cells were bounded."""
        n, V, _ = self.parts.shape
        free = self._free()
        sums = self.parts[n - 1, self.last][None].expand(V, -1)
        errors = self.errors[n - 1, self.last][None].expand(V, -1)
        answer = torch.arange(V)
        kept = answer >= self.last
        top = torch.full((V,), self.last)
        stack = [(0, sums[kept], errors[kept], answer[kept], top[kept])]
        right = wrong = cells = 0
        while stack:
            depth, *cell = stack.pop()
            sums, errors, answer, top = cell
            cells += len(sums)
            left = n - 1 - depth
            low, high = self._margins(sums, errors, answer, top, free[depth])
            holds = low > 0.0
            if left == 0:
                right, wrong = right + int(holds.sum()), wrong + int((high <= 0.0).sum())
                continue
            sizes = [
                (m + 1) ** left - (0 if m == t else m**left)
                for m, t in zip(answer[holds].tolist(), top[holds].tolist(), strict=True)
            ]
            right += sum(sizes)
            open_ = (~holds).nonzero()[:, 0]
            for some in open_.split(max(1, TILE // V)):
                stack.append((depth + 1, *self._cut(depth, *(part[some] for part in cell))))
        return right, wrong, cells

    def _cut(
        self, depth: int, sums: Tensor, errors: Tensor, answer: Tensor, top: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fix the next position: any token up to the answer, and the answer itself at the last chance."""
        n, V, _ = self.parts.shape
        token = torch.arange(V)
        fits = token[None] <= answer[:, None]
        if depth == n - 2:
            fits &= (top == answer)[:, None] | (token[None] == answer[:, None])
        cell, chosen = fits.nonzero(as_tuple=True)
        return (
            sums[cell] + self.parts[depth, chosen],
            errors[cell] + self.errors[depth, chosen],
            answer[cell],
            torch.maximum(top[cell], chosen),
        )

    def _free(self) -> list[tuple[Tensor, Tensor]]:
        """Return, by depth, the least sums of free positions by answer m and rival: up to m, and m at least once."""
        n, V, C = self.parts.shape
        above = torch.ones(V, V, dtype=torch.bool).tril(-1)[:, :, None]
        m = torch.arange(V)
        least, own = [], []
        for parts, errors in zip(self.parts[:-1], self.errors[:-1], strict=True):
            # [t, m, c]; the errors have what their own differences round.
            margin = (parts - errors)[:, :, None] - (parts + errors)[:, None, :]
            own.append(margin[m, m])
            least.append(margin.masked_fill_(above, torch.inf).amin(0))
        found = []
        for depth in range(n):
            if depth == n - 1:
                found.append((self.parts.new_zeros(V, C), self.parts.new_zeros(V, C)))
                continue
            total = torch.stack(least[depth:]).sum(0)
            once = [total - a + b for a, b in zip(least[depth:], own[depth:], strict=True)]
            size = torch.stack([part.abs() for part in (*least, *own)]).sum(0) * gamma(4 * n + 16)
            found.append((total - size, torch.stack(once).amin(0) - size))
        return found

    def _margins(
        self,
        sums: Tensor,
        errors: Tensor,
        answer: Int[Tensor, " N"],
        top: Tensor,
        free: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return proved least margins over all rivals, and for single inputs the largest they may be."""
        rest = torch.where((top == answer)[:, None], free[0][answer], free[1][answer])
        right = sums.gather(-1, answer[:, None])
        slack = (errors.gather(-1, answer[:, None]) + errors) * (1.0 + gamma(32))
        # Three sums round, relative to what they add: the sums of parts have that in their errors.
        low = (right - sums + rest - slack - 8.0 * UNIT_ROUNDOFF * rest.abs()).scatter(
            -1, answer[:, None], torch.inf
        )
        high = (right - sums + slack).scatter(-1, answer[:, None], torch.inf)
        return low.amin(-1), high.amin(-1)
