r"""Layer-0 scores of models that norm queries and keys (Qwen 3, Gemma 3, OLMo 2), for `layer0`.

With RMS norms of queries and keys a score is a product of two positive scalars and a plain score,

    s_ij = n_i m_j a_ij + bias_ij,  a_ij = scale · (Rγ_q q_i)·(Rγ_k k_j),  n = (‖q‖²/w + ε)^{-½}, m = (‖k‖²/w + ε)^{-½}:

a is what `layer0` bounds anyway, with γ_q and γ_k in the weights of queries and keys. A form Σ w_e s_e has c = n_i m_j
at each entry. With ĉ, ã and ∇c of the centre,

    Σ w c a  =  Σ w ĉ (a + ã/ĉ ∇c·δ)  +  Σ w (c − ĉ)(a − ã)  +  Σ w ã (c − ĉ − ∇c·δ),        δ = x − x₀.

The first sum is a form of plain scores with a linear function of the input added to each (`Drift`), which `layer0`
bounds; the others are of second order and are bounded term by term. **The query's norm drops out of signs:** in a form
that reads one row n_i is common to all entries, so c = m_j, and the range of the rest is multiplied by n_i > 0 at the
end.

**Ranges of n and m.** m = φ(v), φ(v) = v^{-½}, v = ‖k‖²/w + ε, and ‖k‖² = ‖k⁰‖² + 2k⁰·δk + ‖δk‖². The functional k⁰·k
and each coordinate of k are functions v·y of the norm in front: over the region they are linear up to ½K‖δ‖² with
K = √2 max(1, 3εn²) n²‖Pv‖/√d (`layer0`). Beyond its tangent φ is at most ⅜ v̲^{-5/2} Δv².

**Rounding.** Weights γW are floats of their own: the score of the real weights differs by 4u of its chain of absolute
values. Gradients are used as computed, and what they err by counts as a move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.first_layer.layer import Drift, FirstLayer
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineOptions
from prooflens.models import scores_name
from prooflens.models.sites import Affine, Norm
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF
from prooflens.problem import Problem
from prooflens.queries import Box


def no_rule(problem: Problem) -> str | None:
    """Say why norms of queries and keys cannot be taken apart; None if they can, or there are none.

    Args:
        problem: the model and the region.
    """
    norms = _norms(problem)
    if any(norm.centred or norm.bias is not None for norm in norms.values()):
        return "layer0 has no rule for LayerNorms of queries and keys (qk_norm): ask taylor or crown"
    return None


def _norms(problem: Problem) -> dict[str, Norm]:
    """Return the norms of queries and keys of layer 0, by letter."""
    steps = problem.model.program(problem.n_tokens, scores_name(0), problem.padding).steps
    ends = {f"blocks.0.attn.hook_{letter}{end}": letter for letter in "qk" for end in ("", "_flat")}
    return {ends[step.inputs[0]]: step for step in steps if isinstance(step, Norm) and step.inputs[0] in ends}


@dataclass(frozen=True, eq=False)
class Scalars:
    """The scalars (‖k‖²/w + ε)^{-½} of queries or keys over a region, by token and query head.

    Attributes:
        box: a range.
        middle: the value at the centre, as computed.
        slope: its gradient there, as computed.
        off: how far it may be from its middle.
        rest: how far it may be from its first order.
    """

    box: Box
    middle: Float[Tensor, "S H"]
    slope: Float[Tensor, "S H d"]
    off: Float[Tensor, "S H"]
    rest: Float[Tensor, "S H"]

    def shared(self, heads: int) -> Scalars:
        """Return one column per query head."""
        times = heads // self.middle.shape[1]

        def each(x: Tensor) -> Tensor:
            return x.repeat_interleave(times, 1)

        box = Box(*map(each, self.box))
        return Scalars(box, each(self.middle), each(self.slope), each(self.off), each(self.rest))


@dataclass(frozen=True, eq=False)
class NormedScores:
    """The plain scores under normed ones, and the scalars that make the difference.

    Attributes:
        view: the first layer with γ in its weights, without norms of queries and keys and without a bias of scores.
        n: the queries' scalars.
        m: the keys' scalars.
        center: the plain scores at the centre, as computed.
        bias: the bias of scores; None for none.
    """

    view: FirstLayer
    n: Scalars
    m: Scalars
    center: Float[Tensor, "H S S"]
    bias: Float[Tensor, "H S S"] | None

    @classmethod
    def of(cls, problem: Problem, options: EngineOptions) -> NormedScores:
        """Take the scores of a problem apart.

        Args:
            problem: the model and the region; `no_rule` has none against it.
            options: with a workspace in which spectra are shared.
        """
        plain = FirstLayer.of(problem, options)
        norms, H = _norms(problem), plain.n_heads
        n, m = (
            _scalars(plain, step, norms[letter]).shared(H)
            for letter, step in (("q", plain.q), ("k", plain.k))
        )
        view = replace(
            plain,
            q=_scaled(plain.q, norms["q"]),
            k=_scaled(plain.k, norms["k"]),
            scores=replace(plain.scores, bias=None),
        )
        return cls(view, n, m, _center_scores(view), plain.scores.bias)

    def drifting(self, one_row: bool) -> FirstLayer:
        """Return the first layer whose scores have the first order of the scalars added.

        Args:
            one_row: whether forms read one row, so that the queries' scalars are left out.
        """
        at_key = self.center / self.m.middle.T[:, None, :]
        at_query = self.center / self.n.middle.T[:, :, None]
        drift = Drift(at_query * (0.0 if one_row else 1.0), at_key, self.n.slope, self.m.slope)
        made = replace(self.view, drift=drift)
        vars(made)["spectra"] = self.view.spectra  # of the weights alone, and dear
        return made

    def single_scores(self, forms: Forms) -> tuple[Forms, Tensor]:
        """Return a form for every score that some form reads, and which of them each entry is.

        Args:
            forms: what is asked.
        """
        places = torch.stack((forms.head, forms.position, forms.key))
        each, which = places.unique(dim=1, return_inverse=True)
        head, position, key = each
        count = len(key)
        ones, first = torch.ones(count, dtype=forms.weight.dtype), torch.zeros(count, dtype=torch.long)
        return Forms(count, torch.arange(count), first, head, position, key, ones), which

    def frozen(
        self, forms: Forms, low: Float[Tensor, " N"], high: Float[Tensor, " N"], one_row: bool
    ) -> tuple[Forms, Float[Tensor, " F"]]:
        """Replace the scalars by their middles: forms of drifting scores, and how far off they are.

        Args:
            forms: what is asked.
            low: for each entry, a lower bound of its plain score.
            high: an upper bound of it.
            one_row: whether all forms read one row each.
        """
        form, h, i, j = (c.to(low.device) for c in (forms.index, forms.head, forms.position, forms.key))
        weight = forms.weight.to(low)
        n, m, center = self.n, self.m, self.center[h, i, j]
        if one_row:
            middle, top = m.middle[j, h], m.box.upper[j, h]
            off, rest = m.off[j, h], m.rest[j, h]
        else:
            middle = n.middle[i, h] * m.middle[j, h]
            top = up(n.box.upper[i, h] * m.box.upper[j, h])
            cross = n.off[i, h] * m.off[j, h]
            off = n.middle[i, h] * m.off[j, h] + m.middle[j, h] * n.off[i, h] + cross
            rest = n.middle[i, h] * m.rest[j, h] + m.middle[j, h] * n.rest[i, h] + cross
        chain = (self.view.q_size[i, h] * self.view.k_size[j, h]).sum(-1) * self.view.scores.scale
        # The real weights γW differ from the floats that stand for them; so do all products of middles (γ₁₆).
        lost = 4.0 * UNIT_ROUNDOFF * chain * (1.0 + gamma(self.view.q.out_shape[1] + 16))
        around = torch.maximum(high - center, center - low).clamp(min=0.0) + lost
        slack = off * around + (rest + gamma(16) * (middle + off)) * (center.abs() + around) + top * lost
        total = low.new_zeros(forms.size).index_add(0, form, weight.abs() * slack)
        total = up(total * (1.0 + gamma(len(form) + 64))) + TINY
        total = torch.where(total.isnan(), torch.inf, total)
        return replace(forms, weight=(weight * torch.where(middle.isfinite(), middle, 1.0)).cpu()), total

    def thawed(
        self, forms: Forms, lower: Tensor, upper: Tensor, one_row: bool
    ) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
        """Multiply forms that read one row by their query's scalar, and add what biases contribute.

        Args:
            forms: what is asked.
            lower: lower bounds without that scalar.
            upper: upper bounds without it.
            one_row: whether all forms read one row each.
        """
        form, h, i, j = (c.to(lower.device) for c in (forms.index, forms.head, forms.position, forms.key))
        if one_row:
            least, most = lower.new_ones(forms.size), lower.new_ones(forms.size)
            least[form], most[form] = self.n.box.lower[i, h], self.n.box.upper[i, h]
            lower = down(lower * torch.where(lower > 0.0, least, most))
            upper = up(upper * torch.where(upper > 0.0, most, least))
        lower = torch.where(lower.isnan(), -torch.inf, lower)
        upper = torch.where(upper.isnan(), torch.inf, upper)
        if self.bias is None:
            return lower, upper
        terms = forms.weight.to(lower) * self.bias[h, i, j]
        constant = torch.zeros_like(lower).index_add(0, form, terms)
        size = torch.zeros_like(lower).index_add(0, form, terms.abs())
        error = up(gamma(2 * len(form) + 16) * size) + TINY
        return down(down(lower + constant) - error), up(up(upper + constant) + error)


def _center_scores(view: FirstLayer) -> Float[Tensor, "H S S"]:
    """Evaluate the plain scores at the centre; any numbers near them will do."""
    y = view.center
    if view.norm is not None:
        y = view.norm(y)
    heads = []
    place = torch.arange(len(y), device=y.device)
    for head in range(view.n_heads):
        q, k = (
            view.turn(
                torch.nn.functional.linear(y, view.head_weight(step, head), view.head_bias(step, head)), place
            )
            for step in (view.q, view.k)
        )
        heads.append(q @ k.T * view.scores.scale)
    return torch.stack(heads)


def one_row(forms: Forms) -> Bool[Tensor, " F"]:
    """Say of each form whether all of its entries read one head and one query.

    Args:
        forms: what is asked.
    """
    row = forms.head * (int(forms.position.max()) + 1 if len(forms.position) else 1) + forms.position
    least = torch.full((forms.size,), 2**62).scatter_reduce(0, forms.index, row, "amin")
    most = torch.full((forms.size,), -1).scatter_reduce(0, forms.index, row, "amax")
    return least == most


def _scaled(step: Affine, norm: Norm) -> Affine:
    """Return the map to queries or keys with the norm's scales in it."""
    if norm.weight is None:
        return step
    gain = norm.weight.repeat(len(step.weight) // len(norm.weight))
    bias = None if step.bias is None else step.bias * gain
    return replace(step, weight=step.weight * gain[:, None], bias=bias)


def _scalars(view: FirstLayer, step: Affine, norm: Norm) -> Scalars:
    """Expand (‖k‖²/w + ε)^{-½} over the region, by token and by head; one column if all heads are normed together.

    Args:
        view: the first layer, without scales in its weights.
        step: the map to queries or keys.
        norm: their norm.
    """
    whole = view.problem.model.architecture.qk_norm == "whole"
    groups, width = (1, len(step.weight)) if whole else step.out_shape
    rows = []
    for t in range(len(view.center)):
        square, slope, linear, curved, around = _squares(view, step, t, groups, width)
        grow = 1.0 + gamma(4 * width + 64)
        # v at the centre and its range; what `square` itself errs by is part of `curved`.
        v = square / width + norm.eps
        low = down(
            down((square - 2.0 * (linear + curved)) / width) * (2.0 - grow) + norm.eps * (1.0 - gamma(4))
        )
        low = torch.maximum(low, torch.full_like(low, norm.eps * (1.0 - gamma(4))))
        high = up(
            up((square + 2.0 * (linear + curved) + around) / width) * grow + norm.eps * (1.0 + gamma(4))
        )
        box = Box(down(high.rsqrt() * (1.0 - gamma(8))), up(low.rsqrt() * (1.0 + gamma(8))))
        middle = v.rsqrt()
        tangent = 0.5 * middle**3
        gap = torch.maximum(up(high - v), up(v - low))
        beyond = tangent * (2.0 * curved + around) / width + 0.375 * low.rsqrt() ** 5 * gap.square()
        rest = up((beyond + gamma(64) * (middle + tangent * gap)) * grow) + TINY
        off = up(torch.maximum(up(box.upper - middle), up(middle - box.lower))) + TINY
        rows.append((box.lower, box.upper, middle, slope * (-2.0 / width * tangent)[:, None], off, rest))
    lower, upper, middle, slope, off, rest = (torch.stack(side) for side in zip(*rows, strict=True))
    # What is not known, or leaves the range in which products are safe, is unbounded.
    usable = (upper < 2.0**200) & middle.isfinite() & slope.isfinite().all(-1)
    infinite = torch.full_like(off, torch.inf)
    return Scalars(
        Box(torch.where(usable, lower, 0.0), torch.where(usable, upper, torch.inf)),
        torch.where(usable, middle, 1.0),
        torch.where(usable[..., None], slope, 0.0),
        torch.where(usable & ~off.isnan(), off, infinite),
        torch.where(usable & ~rest.isnan(), rest, infinite),
    )


def _squares(
    view: FirstLayer, step: Affine, t: int, groups: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Expand ‖k‖² of one token's groups of coordinates: ‖k⁰‖² + 2(∇·δ ± curved) + [0, around].

    Returns:
        ‖k⁰‖² as computed, ∇ of k⁰·k by the input, how much its linear part moves, `curved`, rounding included, and
        `around` ≥ ‖k − k⁰‖².
    """
    pre = view.norm
    x = view.center[t]
    y, n = x, x.new_ones(())
    if pre is not None:
        m = x - x.mean() if pre.centred else x
        n = torch.rsqrt(m.square().mean() + pre.eps)
        y = m * n
    z = y if pre is None or pre.weight is None else y * pre.weight
    z = z if pre is None or pre.bias is None else z + pre.bias
    k = torch.nn.functional.linear(z, step.weight, step.bias)
    roundoff = view.roundoff(len(step.weight))
    chain = torch.nn.functional.linear(view.z_size[t], step.weight.abs())
    chain = chain if step.bias is None else chain + step.bias.abs()
    wrong = (up(2.0 * roundoff * chain) + TINY).reshape(groups, width)
    # Every coordinate of k, then k⁰·k of every group, as functionals of z.
    parts = k.reshape(groups, width)
    along = torch.einsum("gw,gwd->gd", parts, step.weight.reshape(groups, width, -1))
    sizes = torch.einsum("gw,gwd->gd", parts.abs(), step.weight.abs().reshape(groups, width, -1))
    _, linear, curved = _moves(view, t, y, n, step.weight, step.weight.abs(), roundoff)
    radius = up(up(linear + curved).reshape(groups, width) + wrong)
    slope, linear, curved = _moves(view, t, y, n, along, sizes, roundoff)
    grow = 1.0 + gamma(4 * width + 64)
    square = parts.square().sum(-1)
    curved = up((curved + (parts.abs() * wrong).sum(-1)) * grow + gamma(2 * width + 16) * square)
    return square, slope, linear, curved, up(radius.square().sum(-1) * grow)


def _moves(
    view: FirstLayer, t: int, y: Tensor, n: Tensor, v: Tensor, size: Tensor, roundoff: float
) -> tuple[Float[Tensor, "F d"], Float[Tensor, " F"], Float[Tensor, " F"]]:
    """Expand functionals v·z of one token's input of the projections over the region.

    Args:
        view: the first layer.
        t: the token.
        y: the norm's unscaled output at the centre, or the input itself.
        n: the norm's scalar at the centre.
        v: the functionals, shape [F, d].
        size: the absolute-value chains of v.
        roundoff: the relative error of their slopes.

    Returns:
        Their slopes as computed, how much the linear part moves, and a bound of what is beyond it, rounding included.
    """
    pre, region = view.norm, view.problem.region
    d = v.shape[-1]
    curved = v.new_zeros(len(v))
    slope, slope_size = v, size
    if pre is not None:
        gain = 1.0 if pre.weight is None else pre.weight
        gain_size = 1.0 if pre.weight is None else pre.weight.abs()
        read, read_size = v * gain, size * gain_size
        if pre.centred:
            read = read - read.mean(-1, keepdim=True)
            read_size = read_size + read_size.mean(-1, keepdim=True)
        slope = n * (read - y * (read @ y)[:, None] / d)
        top = view.n_high[t]
        large = view.size[t] * top
        slope_size = top * (read_size + large * (read_size @ large)[:, None] / d)
        length = read.square().sum(-1).sqrt() * (1.0 + gamma(2 * d + 64)) + 2.0 * roundoff * read_size.sum(-1)
        bend = 2.0**0.5 * (3.0 * pre.eps * top.square()).clamp(min=1.0) * top.square() * d**-0.5
        curved = up(0.5 * bend * length * view.reach[t].square() * (1.0 + gamma(64)))
    if region.generators is None:
        assert region.radius is not None
        pulled, pulled_size = (part.abs() @ region.radius[t] for part in (slope, slope_size))
    else:
        G = region.generators[:, t]
        pulled, pulled_size = (slope @ G.T).abs().sum(-1), (slope_size @ G.abs().T).sum(-1)
    linear = up(pulled * (1.0 + gamma(2 * (d + region.n_factors) + 16))) + TINY
    return slope, linear, up(curved + up(2.0 * roundoff * pulled_size)) + TINY
