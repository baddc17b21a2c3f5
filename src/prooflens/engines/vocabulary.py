r"""Functionals of the output for heads with many outputs: named tokens directly, all others through a proved tail.

**Named tokens.** A functional Σ_c κ_c Logit(c) is the linear form v·h + β of the vector h that the head reads, with
v = Σ κ_c w_c. So the model gets another head, one row v per functional, and any engine bounds its outputs:
differences of rows are taken before anything is bounded. v is rounded:
|fl(v) − v|·|h| ≤ γ Σ|κ_c||w_c|·sup|h| is added.

**The tail.** Logit(y) − max_{c ∈ T} Logit(c) is the smallest of (w_y − w_c)·h + b_y − b_c, c ∈ T. Of each a lower
bound is wanted, cheapest first, and only tokens that are still open go on:

| stage | bound of \|Δw·(h − h₀)\| | cost for V tokens |
|---|---|---|
| box | \|Δw\|·(ρ + E), or ‖Δw‖₂ sup‖h − h₀‖₂ (the paper's, here proved) | V·d |
| linear | ‖Δw·A‖₁ + \|Δw\|·E | d·p per open token |
| direct | the engine's own bound of the functional | one functional per open token, at most `MOST_DIRECT` |
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.bounds import Bounds, FormBounds, Guarantee, Tail
from prooflens.engines.hidden import (
    BoundsHidden,
    HiddenBounds,
    Reach,
    headless,
    hidden_bounds,
    output_forms,
)
from prooflens.engines.protocol import NO_OPTIONS, Engine, EngineOptions, OutOfTimeError, Stopwatch
from prooflens.engines.relaxations.interval_walk import value_boxes
from prooflens.engines.rivals import BoundsRivals, bound_by_itself, is_tail, tail_parts
from prooflens.models import OUTPUT
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem
from prooflens.queries import Atom, Claim, Condition, Functional
from prooflens.queries.base import make_claim
from prooflens.queries.functionals import Logit, OutputAtom

CHUNK_ELEMENTS = 2**24
"""How many numbers of a matrix over the vocabulary are held at a time (128 MiB)."""

CHALLENGERS = 256
"""How many of the nearest tokens of a tail are attacked."""

MOST_DIRECT = 64
"""If more tokens than this are open after the linear stage, they are not asked about one by one."""


def reads_vector(problem: Problem, functional: Functional) -> bool:
    """Say whether a functional is better bounded through the vector that the head reads (tails, logits of a
    token)."""
    architecture = problem.model.architecture
    if architecture.d_out is None or not functional.terms:
        return False
    about = all(isinstance(atom, OutputAtom) for _, atom in functional.terms)
    return about and (architecture.pool == "none" or is_tail(functional))


def margin_model(problem: Problem, functionals: Sequence[Functional]) -> tuple[Problem, Float[Tensor, " F"]]:
    """Return the problem with one output per linear functional, and what rounding of its head may add to each.

    Args:
        problem: the model and the region.
        functionals: linear functionals of the outputs.
    """
    weight, bias = problem.model.head
    rows, offsets, sizes = [], [], []
    for functional in functionals:
        kappa, index = _terms(functional, weight)
        rows.append(kappa @ weight[index])
        offsets.append(kappa @ bias[index])
        sizes.append(torch.cat((kappa.abs() @ weight[index].abs(), (kappa.abs() @ bias[index].abs())[None])))
    box = value_boxes(headless(problem), [OUTPUT])[OUTPUT]
    largest = torch.cat((torch.maximum(box.lower.abs(), box.upper.abs()), box.lower.new_ones(1)))
    longest = max(len(functional.terms) for functional in functionals)
    slack = up(gamma(longest + weight.shape[-1] + 8) * (torch.stack(sizes) @ largest) + TINY)
    model = problem.model.with_head(torch.stack(rows), torch.stack(offsets))
    return replace(problem, model=model), slack


def _terms(functional: Functional, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and indices of the logits of a linear functional."""
    pairs = [(weight, atom.index) for weight, atom in functional.terms if isinstance(atom, Logit)]
    assert len(pairs) == len(functional.terms)
    weights, index = zip(*pairs, strict=True)
    return torch.tensor(weights).to(like), torch.tensor(index, device=like.device)


def bound_margins(
    engine: Engine,
    problem: Problem,
    functionals: Sequence[Functional],
    options: EngineOptions = NO_OPTIONS,
) -> FormBounds:
    """Bound linear functionals of the output by any engine; their constants are left out.

    Args:
        engine: who bounds the outputs of the model with another head.
        problem: the model and the region.
        functionals: linear functionals of the outputs.
        options: memory that may be used, and who is told of progress.
    """
    asked, slack = margin_model(problem, functionals)
    found = engine.bound_forms(asked, output_forms(torch.eye(len(functionals), dtype=torch.float64)), options)
    if engine.guarantee is not Guarantee.PROVED:
        return found
    slack = slack.to(found.lower)
    lower, upper = _numbers(down(found.lower - slack), up(found.upper + slack))
    return replace(
        found,
        lower=lower,
        upper=upper,
        lower_ledger=None,
        upper_ledger=None,
    )


def _numbers(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Replace NaN by ∓∞, because NaN would hide what another engine knows."""
    return lower.nan_to_num(-torch.inf, torch.inf, -torch.inf), upper.nan_to_num(
        torch.inf, torch.inf, -torch.inf
    )


def _margins(
    engine: Engine,
    problem: Problem,
    functionals: Sequence[Functional],
    known: HiddenBounds | None,
    options: EngineOptions,
) -> FormBounds:
    """Bound margins by an engine's own enclosure if it has one; only what that leaves open is asked one by one."""
    if known is None or known.A is None:
        return bound_margins(engine, problem, functionals, options)
    weight, bias = problem.model.head
    pairs = [_terms(functional, weight) for functional in functionals]
    rows = torch.stack([kappa @ weight[index] for kappa, index in pairs])
    shift = torch.stack([kappa @ bias[index] for kappa, index in pairs])
    largest, d = known.largest, weight.shape[-1]
    size = torch.stack(
        [kappa.abs() @ (weight[index].abs() @ largest + bias[index].abs()) for kappa, index in pairs]
    )
    value = rows @ known.h0 + shift
    longest = max(len(index) for _, index in pairs)
    far = up(known.reach_linear(rows) + up(gamma(d + longest + 16) * 4.0 * size + TINY))
    corner = torch.where(rows @ known.A >= 0, 1.0, -1.0).to(rows)
    found = FormBounds(*_numbers(down(value - far), up(value + far)), -corner, corner)
    constants = torch.tensor([f.constant for f in functionals]).to(value)
    open_ = ((found.lower + constants <= 0.0) & (found.upper + constants >= 0.0)).nonzero()[:, 0].tolist()
    if open_:
        with suppress(OutOfTimeError):  # what the enclosure says stands
            again = bound_margins(engine, problem, [functionals[i] for i in open_], options)
            found.lower[open_] = torch.maximum(found.lower[open_], again.lower)
            found.upper[open_] = torch.minimum(found.upper[open_], again.upper)
    return found


def bound_tail(
    engine: Engine,
    problem: Problem,
    functional: Functional,
    known: HiddenBounds | None = None,
    options: EngineOptions = NO_OPTIONS,
) -> tuple[float, float, Tail]:
    """Bound Logit(y) − max over the tail T; the lower bound holds for every token of T.

    Args:
        engine: who is asked.
        problem: the model and the region.
        functional: a tail (`is_tail`).
        known: an enclosure of the vector that the head reads; None to ask the engine for it.
        options: memory that may be used, and who is told of progress.

    Returns:
        The lower bound, the upper bound, and how the tokens of T were decided.
    """
    with torch.no_grad():
        known = known or hidden_bounds(engine, problem, options)
        return _Tail(engine, problem, functional, known, options).run()


@dataclass(eq=False)
class _Tail:
    """One pass over the vocabulary."""

    engine: Engine
    problem: Problem
    functional: Functional
    known: HiddenBounds
    options: EngineOptions

    def run(self) -> tuple[float, float, Tail]:
        """Decide tokens by the box, then by the linear part, then one by one."""
        weight, _ = self.problem.model.head
        (winner, left), rest = tail_parts(self.functional), torch.ones(len(weight), dtype=torch.bool)
        rest[list(left)] = False
        tokens = rest.nonzero()[:, 0].to(weight.device)
        self.winner = winner
        lower, upper = self._stage(tokens, self.known.reach_box)
        open_ = (~(lower > 0)).nonzero()[:, 0]
        by_box, by_linear, by_direct = len(tokens) - len(open_), 0, 0
        if len(open_) and not self.known.is_box:
            low, high = self._stage(tokens[open_], self.known.reach_linear)
            lower[open_] = torch.maximum(lower[open_], low)
            upper[open_] = torch.minimum(upper[open_], high)
            still = ~(lower[open_] > 0)
            by_linear, open_ = int((~still).sum()), open_[still]
        if 0 < len(open_) <= MOST_DIRECT and bool(lower[open_].isfinite().any()):
            margins = [self._margin(int(c)) for c in tokens[open_]]
            found = bound_margins(self.engine, self.problem, margins, self.options)
            lower[open_] = torch.maximum(lower[open_], found.lower.to(lower))
            upper[open_] = torch.minimum(upper[open_], found.upper.to(upper))
            still = ~(lower[open_] > 0)
            by_direct, open_ = int((~still).sum()), open_[still]
        return float(lower.min()), float(upper.min()), Tail(by_box, by_linear, by_direct, len(open_))

    def _margin(self, token: int) -> Functional:
        return Functional(((1.0, Logit(self.winner)), (-1.0, Logit(token))), name=f"token {token}")

    def _stage(self, tokens: Int[Tensor, " n"], spread: Reach) -> tuple[Tensor, Tensor]:
        """Bound Δw·h + Δb for some tokens, chunk by chunk."""
        weight, bias = self.problem.model.head
        h0, largest, d = self.known.h0, self.known.largest, weight.shape[-1]
        p = 1 if self.known.A is None else self.known.A.shape[-1]
        lows, highs = [], []
        for some in tokens.split(max(1, CHUNK_ELEMENTS // max(d, p))):
            delta, shift = weight[self.winner] - weight[some], bias[self.winner] - bias[some]
            value = delta @ h0 + shift
            # Rounding of Δw and Δb (one each), of the product and the sum, all relative to |Δw|·|h| + |Δb|.
            slack = up(gamma(d + 8) * 2.0 * (delta.abs() @ largest + shift.abs()) + TINY)
            far = up(spread(delta) + slack)
            low, high = _numbers(down(value - far), up(value + far))
            lows.append(low)
            highs.append(high)
        return torch.cat(lows), torch.cat(highs)


def bound_outputs(
    engine: Engine,
    problem: Problem,
    functionals: Sequence[Functional],
    options: EngineOptions = NO_OPTIONS,
) -> Bounds:
    """Bound functionals for which `reads_vector` is true, with the engine's guarantee.

    Args:
        engine: who is asked.
        problem: the model and the region.
        functionals: functionals of the outputs.
        options: memory that may be used, and who is told of progress.
    """
    watch = Stopwatch(problem.model.device)
    size = len(functionals)
    if isinstance(engine, BoundsRivals) and (whole := bound_by_itself(engine, problem, functionals, options)):
        return whole
    lower, upper = (torch.empty(size, dtype=torch.float64) for _ in range(2))
    direct = [i for i, f in enumerate(functionals) if not is_tail(f)]
    corners: list[Tensor | None] = [None, None]
    known = None
    if len(direct) < size or isinstance(engine, BoundsHidden):
        known = hidden_bounds(engine, problem, options)
    if direct:
        found = _margins(engine, problem, [functionals[i] for i in direct], known, options)
        constants = torch.tensor([functionals[i].constant for i in direct], dtype=torch.float64)
        lower[direct] = down(found.lower.cpu() + constants)
        upper[direct] = up(found.upper.cpu() + constants)
        if len(direct) == size:
            corners = [found.lower_corner, found.upper_corner]
    tail = None
    for i, functional in enumerate(functionals):
        if is_tail(functional):
            low, high, tail = bound_tail(engine, problem, functional, known, options)
            lower[i], upper[i] = low, high
    return Bounds(
        lower, upper, engine.guarantee, engine.name, watch.seconds(), corners[0], corners[1], tail=tail
    )


def output_refusal(engine: Engine, problem: Problem, options: EngineOptions = NO_OPTIONS) -> str | None:
    """Say why an engine cannot bound the vector that the head reads, or return None if it can."""
    return engine.refuses(
        headless(problem), output_forms(torch.eye(problem.model.headless.architecture.d_model)), options
    )


def narrowed(problem: Problem, claim: Claim, most: int = CHALLENGERS) -> tuple[Problem, Claim]:
    """Return a claim with only the nearest tokens of its tail: what breaks it breaks the original claim.

    The model of the new problem has only the outputs that are named, so that an attack need not compute the others.

    Args:
        problem: the model and the region.
        claim: the claim.
        most: how many of the nearest tokens to keep.
    """
    layers = sorted({row.layer for row in claim.rows})
    setting = problem.setting(layers, output=True)
    assert setting.logits is not None
    ranked = setting.logits.argsort(descending=True, stable=True).tolist()
    terms: list[tuple[Condition, tuple[tuple[float, Atom], ...]]] = []
    for condition in claim.conditions:
        if not is_tail(condition.functional):
            terms.append((condition, condition.functional.terms))
            continue
        winner, left = tail_parts(condition.functional)
        near = [c for c in ranked[: most + len(left)] if c not in left][:most]
        terms += [(condition, ((1.0, Logit(winner)), (-1.0, Logit(c)))) for c in near]
    named = dict.fromkeys(atom.index for _, part in terms for _, atom in part if isinstance(atom, Logit))
    place = {token: i for i, token in enumerate(named)}
    weight, bias = problem.model.head
    chosen = torch.tensor(list(named), device=weight.device)
    small = replace(problem, model=problem.model.with_head(weight[chosen], bias[chosen]))

    def moved(atom: Atom) -> Atom:
        return Logit(place[atom.index]) if isinstance(atom, Logit) else atom

    conditions = [
        replace(
            condition,
            functional=replace(condition.functional, terms=tuple((w, moved(atom)) for w, atom in part)),
        )
        for condition, part in terms
    ]
    there = small.setting(layers, output=True)
    return small, make_claim(claim.query, there, claim.rows, conditions, claim.tie)
