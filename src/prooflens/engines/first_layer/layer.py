"""The steps from the input to the scores of layer 0, with their spectral norms and absolute-value chains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.models import INPUT, scores_name
from prooflens.models.sites import Affine, Norm, Rotary, Scores, Softcap
from prooflens.numerics import down, gamma, lambda_max_upper, up
from prooflens.problem import Problem
from prooflens.sets.bilinear import GramBlocks, extreme_eigenvalues

LEAST_SIZE = 2.0**-200
"""Added to chains of absolute values: γ times it covers what products of tiny numbers lose to underflow."""


LARGEST = 2.0**200
"""The largest length of a norm's input, and the largest n, that are worked with."""


class Spectra(NamedTuple):
    """σ(M) per head, query and key, and λ₋, λ₊ with −λ₋ ⪯ M + Mᵀ ⪯ λ₊ per head."""

    cross: Float[Tensor, "H S S"]
    low: Float[Tensor, " H"]
    high: Float[Tensor, " H"]


def _unit_tables(turn: Rotary, scores: Scores) -> tuple[Rotary, Scores]:
    """Return the rotation with entries of at most 1, and scores by a scale that makes up for it.

    YaRN multiplies cosines and sines by a factor. Both queries and keys are divided by a power of two, which is exact,
    and so is its square in the scale.
    """
    largest = float(torch.maximum(turn.cos.abs().max(), turn.sin.abs().max()))
    power = 2.0 ** max(0, math.ceil(math.log2(largest)))
    made = replace(turn, cos=turn.cos / power, sin=turn.sin / power)
    return made, replace(scores, scale=scores.scale * power**2)


def _map_of(maps: dict[str, Affine], letter: str, width: int) -> Affine:
    """Return the map to queries or keys, cut into heads; where all heads are normed together it comes in one piece."""
    name = f"blocks.0.attn.hook_{letter}"
    step = maps[f"{name}_flat"] if f"{name}_flat" in maps else maps[name]
    return replace(step, out_shape=(len(step.weight) // width, width))


@dataclass(frozen=True, eq=False)
class Drift:
    """What is added to every score: t·g·(x − x₀) at its query and at its key, with a factor t of its own each.

    Attributes:
        query: t at the query, by head, query and key.
        key: t at the key.
        by_query: g of the query's token, by token and head.
        by_key: g of the key's token, by token and query head.
    """

    query: Float[Tensor, "H S S"]
    key: Float[Tensor, "H S S"]
    by_query: Float[Tensor, "S H d"]
    by_key: Float[Tensor, "S H d"]


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """What is known of model and region up to the scores of layer 0, prepared once.

    Attributes:
        problem: the model and the region.
        norm: the norm before the first attention; None for post-norm models.
        q: the map to queries.
        k: the map to keys.
        rotary: RoPE; None for models without it.
        scores: the step that makes scores.
        options: with the workspace in which spectra are shared by prompts of one length.
        drift: what is added to scores; None for nothing.
    """

    problem: Problem
    norm: Norm | None
    q: Affine
    k: Affine
    rotary: Rotary | None
    scores: Scores
    options: EngineOptions = NO_OPTIONS
    drift: Drift | None = None

    @classmethod
    def of(cls, problem: Problem, options: EngineOptions = NO_OPTIONS) -> FirstLayer:
        """Find the steps between the input and the scores of layer 0.

        Args:
            problem: the model and the region.
            options: with a workspace in which spectra are shared by prompts of one length.
        """
        steps = problem.model.program(problem.n_tokens, scores_name(0), problem.padding).steps
        steps = steps[:-1] if isinstance(steps[-1], Softcap) else steps
        norms = [step for step in steps if isinstance(step, Norm) and step.inputs == (INPUT,)]
        maps = {step.out: step for step in steps if isinstance(step, Affine)}
        rotaries = [step for step in steps if isinstance(step, Rotary)]
        last = steps[-1]
        assert isinstance(last, Scores)
        turn = rotaries[0] if rotaries else None
        if turn is not None:
            turn, last = _unit_tables(turn, last)
        q, k = (_map_of(maps, letter, problem.model.architecture.head_dim) for letter in "qk")
        return cls(problem, norms[0] if norms else None, q, k, turn, last, options)

    @property
    def center(self) -> Float[Tensor, "S d"]:
        """The centre of the region, x₀."""
        return self.problem.region.center

    @cached_property
    def n_heads(self) -> int:
        """The number of query heads, H."""
        return self.q.out_shape[0]

    @cached_property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.n_heads // self.k.out_shape[0]

    @cached_property
    def reach(self) -> Float[Tensor, " S"]:
        """sup ‖x_t − x₀_t‖₂ over the region per token, rounded up."""
        spread = self.problem.region.half_widths()
        return up(spread.square().sum(-1).sqrt() * (1.0 + gamma(spread.shape[-1] + 8)))

    @cached_property
    def size(self) -> Float[Tensor, "S d"]:
        """sup |x| over the region per coordinate; with a LayerNorm |x| + mean|x|, the size of m's terms."""
        size = up(self.center.abs() + self.problem.region.half_widths()) + LEAST_SIZE
        if self.norm is not None and self.norm.centred:
            size = up(size + up(size.mean(-1, keepdim=True) * (1.0 + gamma(size.shape[-1] + 2))))
        return size

    @cached_property
    def n_high(self) -> Float[Tensor, " S"]:
        """An upper bound of n over the region; ∞ if ε is 0 and a token may be constant, or if n⁴ leaves float64."""
        if self.norm is None:
            return torch.ones_like(self.reach)
        d = self.center.shape[-1]
        m = self.center - self.center.mean(-1, keepdim=True) if self.norm.centred else self.center
        length = down(m.square().sum(-1).sqrt() * (1.0 - gamma(4 * d + 16)))
        # The centred vector itself errs by γ_{d+2} of the size of its terms.
        lost = up(self.size.square().sum(-1).sqrt() * (2.0 * gamma(d + 8)))
        least = down(down(length - lost) - self.reach).clamp(min=0.0)
        square = down(least * least) / d * (1.0 - gamma(4))
        found = up(torch.rsqrt(down(square + self.norm.eps * (1.0 - gamma(2)))) * (1.0 + gamma(4)))
        return torch.where((found < LARGEST) & (length < LARGEST), found, torch.inf)

    def roundoff(self, entries: int) -> float:
        """Return ρ: forms of `entries` entries, and their slopes, err by at most ρ times their absolute-value
        chains."""
        region = self.problem.region
        lengths = self.center.shape[-1], self.q.out_shape[1], self.center.shape[0], entries
        summed = 0 if region.generators is None else region.n_factors
        base = gamma(8 * sum(lengths) + 2 * summed + 256)
        if self.norm is None:
            return base
        # Relative error of n: the variance is a sum of squares of m̂, each off by γ_{d+2} of its terms' size.
        ratio = self.size.square().mean(-1) * self.n_high.square()
        eta = gamma(self.center.shape[-1] + 16) * (4.0 + 4.0 * float(ratio.max()))
        return up(base + 8.0 * eta) if eta < 2.0**-10 else float("inf")

    @cached_property
    def z_size(self) -> Float[Tensor, "S d"]:
        """The absolute-value chain of z."""
        if self.norm is None:
            return self.size
        size = self.size * self.n_high[:, None]
        size = size if self.norm.weight is None else size * (self.norm.weight.abs() + LEAST_SIZE)
        return size if self.norm.bias is None else size + self.norm.bias.abs()

    def _head_size(self, step: Affine) -> Float[Tensor, "S H d_h"]:
        bias = None if step.bias is None else step.bias.abs()
        size = torch.nn.functional.linear(self.z_size, step.weight.abs() + LEAST_SIZE, bias)
        size = size.reshape(len(size), *step.out_shape)
        return size if self.rotary is None else self.turned_size(size)

    def turned_size(self, size: Tensor) -> Tensor:
        """Return a chain after a rotation: |cos|, |sin| ≤ 1, so a coordinate gains at most its partner."""
        return size + size.roll(size.shape[-1] // 2, -1)

    @cached_property
    def q_size(self) -> Float[Tensor, "S H d_h"]:
        """The absolute-value chain of queries."""
        return self._head_size(self.q)

    @cached_property
    def k_size(self) -> Float[Tensor, "S H d_h"]:
        """The absolute-value chain of keys, one per query head."""
        return self._head_size(self.k).repeat_interleave(self.group, -2)

    def head_weight(self, step: Affine, head: int) -> Float[Tensor, "d_h d"]:
        """Return the rows of one head; key heads are shared by groups."""
        index = head if step is self.q else head // self.group
        return step.weight.reshape(*step.out_shape, -1)[index]

    def head_bias(self, step: Affine, head: int) -> Tensor | None:
        """Return the bias of one head."""
        index = head if step is self.q else head // self.group
        return None if step.bias is None else step.bias.reshape(step.out_shape)[index]

    def turn(
        self, values: Float[Tensor, "N d_h"], positions: Tensor, back: bool = False
    ) -> Float[Tensor, "N d_h"]:
        """Apply RoPE at the given positions, or its transpose.

        Args:
            values: vectors of one head, shape [N, d_h].
            positions: the position of each.
            back: apply the transpose.
        """
        if self.rotary is None:
            return values
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]
        half = values.shape[-1] // 2
        first, second = values[..., :half], values[..., half:]
        if back:
            swapped = torch.cat((second * sin[..., half:], -first * sin[..., :half]), -1)
            return values * cos + swapped
        return values * cos + torch.cat((-second, first), -1) * sin

    def head_weights(self, step: Affine) -> Float[Tensor, "H d_h d"]:
        """Return the matrices of all query heads or, shared by groups, of their key heads."""
        weight = step.weight.reshape(*step.out_shape, -1)
        return weight if step is self.q else weight.repeat_interleave(self.group, 0)

    def turned_weights(self, head: int) -> tuple[Float[Tensor, "S d_h d"], Float[Tensor, "S d_h d"], float]:
        """Return R_tQ̂ and R_tK̂ for every position t, with γ and centring, and by how much their terms exceed
        them."""
        turned, spread = [], 1.0
        positions = torch.arange(len(self.center), device=self.center.device)
        for step in (self.q, self.k):
            weight = self.head_weight(step, head)
            if self.norm is not None and self.norm.weight is not None:
                weight = weight * self.norm.weight
            size = float(weight.norm())
            if self.norm is not None and self.norm.centred:
                weight = weight - weight.mean(-1, keepdim=True)
            spread = max(spread, 2.0 * size / max(float(weight.norm()), 2.0**-500))
            columns = weight.T.expand(len(positions), -1, -1)
            turned.append(self.turn(columns, positions[:, None].expand(columns.shape[:2])).mT)
        return turned[0], turned[1], spread

    @cached_property
    def spectra(self) -> Spectra:
        """The verified spectral norms of all heads, with scale and γ; of weights and positions alone."""
        if self.problem.padding is not None:
            return self._spectra()
        name = f"spectra of the first layer, {len(self.center)} tokens"
        return self.options.shared(name, self.problem.model, self._spectra)

    def _spectra(self) -> Spectra:
        gain = None if self.norm is None else self.norm.weight
        Q, K = self.head_weights(self.q), self.head_weights(self.k)
        # Multiplying by the gain errs by u per entry, like the scaling that GramBlocks allows for.
        Q, K = (Q, K) if gain is None else (Q * gain, K * gain)
        d, S = Q.shape[-1], self.center.shape[0]
        QQ, KK, KQ = Q @ Q.mT, K @ K.mT, K @ Q.mT
        if not bool((QQ.isfinite() & KK.isfinite()).all()):
            nothing = Q.new_full((len(Q), S, S), torch.inf)
            return Spectra(nothing, nothing[:, 0, 0], nothing[:, 0, 0])
        nothing = torch.zeros_like(KQ)
        minus, plus = extreme_eigenvalues(GramBlocks.of(QQ, KQ, KK, d))
        if self.rotary is None:
            _, cross = extreme_eigenvalues(GramBlocks.of(QQ, nothing, KK, d))
            cross = cross[:, None, None].expand(-1, S, S)
        else:
            cross, extra = self._turned_spectra(QQ, KK, d)
            minus, plus = up(minus + extra), up(plus + extra)
        factor = self.scores.scale * (1.0 + gamma(4))
        return Spectra(up(cross * factor), up(minus * factor), up(plus * factor))

    def _turned_spectra(self, QQ: Tensor, KK: Tensor, d: int) -> tuple[Tensor, Tensor]:
        """Return σ(Q̃ᵀR_iᵀR_jK̃) for all i and j, and what rounding of the tables may add to λ± at i = j."""
        turns, gap = self._turns
        turned = turns @ KK[:, None] @ turns.mT
        # T has two entries of size about 1 per row: |T||K||K|ᵀ|T|ᵀ is at most 2(1 + 2⁻²⁰) times as large as |K||K|ᵀ.
        gram = GramBlocks.of(QQ[:, None], torch.zeros_like(turned), turned, 3 * d + 128)
        _, by_distance = extreme_eigenvalues(gram)
        grams = torch.stack([QQ, KK])
        trace = grams.diagonal(dim1=-2, dim2=-1).sum(-1)
        norms = up(lambda_max_upper(0.5 * (grams + grams.mT)) + up(gamma(d + 64) * trace))
        both = up(up(norms[0] * norms[1]).sqrt())
        spill = up(both[:, None, None] * gap)
        cross = up(by_distance[:, _distances(self.center)] + spill)
        return cross, up(2.0 * spill.diagonal(dim1=-2, dim2=-1).amax(-1))

    @cached_property
    def _turns(self) -> tuple[Float[Tensor, "D d_h d_h"], Float[Tensor, "S S"]]:
        """R₀ᵀR_o (or R_oᵀR₀) for every distance o, and how far R_iᵀR_j is from it in the 2-norm.

        On a pair of coordinates R_iᵀR_j is the complex number ē_i e_j, e = cos + i sin: norms are absolute values.
        """
        assert self.rotary is not None
        half = self.rotary.cos.shape[-1] // 2
        e = torch.complex(self.rotary.cos[:, :half], self.rotary.sin[:, :half])
        base = torch.cat((e[1:].flip(0).conj() * e[0], e[0].conj() * e))
        pairs = e.conj()[:, None] * e[None, :]
        gap = (pairs - base[_distances(self.center)]).abs().amax(-1)
        # At i = j the spectra use the identity instead of the tables' |e|².
        gap = torch.maximum(gap, torch.diag((e.abs().square() - 1.0).abs().amax(-1)))
        turns = torch.diag_embed(base.real.repeat(1, 2))
        turns[:, :half, half:] = torch.diag_embed(-base.imag)
        turns[:, half:, :half] = torch.diag_embed(base.imag)
        return turns, up(gap + gamma(64))


def _distances(x: Float[Tensor, "S d"]) -> Tensor:
    """Return where the distance j − i stands among −(S−1) … S−1, for all i and j."""
    position = torch.arange(len(x), device=x.device)
    return position[None, :] - position[:, None] + len(x) - 1
