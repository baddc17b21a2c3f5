"""A program cut where tokens meet: `taylor` reads it as token-wise chains between attentions.

Between two attentions every step works on one token at a time. The value that a chain starts from is its *root*: the
input, the residual stream after an attention, or the pooled token. A chain is made of norms, feed-forward networks
(an affine map, an activation, perhaps a gate, an affine map: one step here), SoLUs, affine maps, rotations and
residual sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from prooflens.engines.forms import Forms
from prooflens.errors import EngineError
from prooflens.models.program import INPUT, OUTPUT, Program, scores_name
from prooflens.models.sites import (
    Add,
    Affine,
    AnyStep,
    Elementwise,
    Function,
    Mix,
    Norm,
    Pool,
    Product,
    Rotary,
    Scores,
    Shift,
    Softcap,
    Softmax,
    Solu,
)
from prooflens.models.spread import FREE
from prooflens.problem import Problem


@dataclass(frozen=True, eq=False)
class FeedForward:
    """A network y = W_d(φ(W_u x + b_u)) + b_d, or W_d(φ(W_g x) ⊙ (W_u x)) with a gate; without `down`, W_d = I."""

    out: str
    source: str
    function: Function
    up: Affine
    gate: Affine | None
    down: Affine | None

    @property
    def bent(self) -> Affine:
        """The affine map in front of the activation."""
        return self.up if self.gate is None else self.gate


TokenStep = Norm | FeedForward | Solu | Affine | Rotary | Shift | Add


@dataclass(frozen=True, eq=False)
class Attention:
    """The names of the values at which tokens meet: root = stream + W_O Σ_j s_j v_j."""

    q: str
    k: str
    v: str
    stream: str
    output: Affine


@dataclass(eq=False)
class Segment:
    """A chain from its root, the scores it ends in, and how it goes on: by attention, by pooling, or not at all."""

    root: str
    steps: list[TokenStep] = field(default_factory=list)
    layer: int | None = None
    scores: Scores | None = None
    cap: float | None = None
    """c of the cap c·tanh(a/c) that scores go through, if they go through one."""
    attention: Attention | None = None
    pool: Pool | None = None
    head: Affine | None = None
    final: str | None = None
    """The value that the head reads or, without a head, the output itself."""


def asked_segments(problem: Problem, forms: Forms) -> list[Segment]:
    """Return the chains of a problem's model up to what forms read, in order.

    Args:
        problem: the model and the region.
        forms: what is asked.
    """
    wanted = [scores_name(layer) for layer in forms.layers] + ([OUTPUT] if forms.logits is not None else [])
    free = problem.model.architecture.free_until if problem.model.architecture.free else -1
    named = [*wanted, *([FREE] if free >= 0 else [])]
    return segments_of(problem.model.program(problem.n_tokens, named, problem.padding), free)


def segments_of(program: Program, free: int = -1) -> list[Segment]:
    """Return the chains of a program, in order.

    A model and an edit of it at any value of a set carry the same free coordinates, so that their chains are the same
    in front of the edit.

    Args:
        program: the steps of a model.
        free: the last layer through whose attention free coordinates are carried; −1 for none.

    Raises:
        EngineError: if the program has a step that `taylor` does not know.
    """
    found = [Segment(INPUT)]
    makers = {step.out: step for step in program.steps}
    swallowed: set[str] = set()
    mixed: dict[str, tuple[Mix, Scores]] = {}
    for step in program.steps:
        here = found[-1]
        if step.out in swallowed:
            continue
        if isinstance(step, Scores):
            here.scores, here.layer = step, sum(s.scores is not None for s in found[:-1])
        elif isinstance(step, Softcap) and isinstance(makers[step.inputs[0]], Scores):
            here.cap = step.cap
        elif isinstance(step, Mix):
            softmax = makers[step.inputs[0]]
            assert isinstance(softmax, Softmax)
            scores = makers[softmax.inputs[0]]
            scores = makers[scores.inputs[0]] if isinstance(scores, Softcap) else scores
            assert isinstance(scores, Scores)
            mixed[step.out] = (step, scores)
            behind, layer = _behind(program, step, swallowed), sum(s.attention is not None for s in found)
            beside = (FREE,) if layer <= free else ()
            if beside or not _joins(behind, step):
                swallowed |= _stacked(program, behind, step, scores, beside, found)
        elif isinstance(step, Affine) and step.inputs[0] in mixed:
            mixed[step.out] = mixed[step.inputs[0]]
        elif isinstance(step, Add) and step.inputs[1] in mixed:
            mix, scores = mixed[step.inputs[1]]
            output = makers[step.inputs[1]]
            assert isinstance(output, Affine)
            q, k = scores.inputs
            here.attention = Attention(q, k, mix.inputs[1], step.inputs[0], output)
            found.append(Segment(step.out))
        elif isinstance(step, Pool):
            here.pool = step
            found.append(Segment(step.out))
        elif isinstance(step, Affine) and (network := _network(program, step)) is not None:
            if step.out not in network[1]:
                here.steps.append(step)
            here.steps.append(network[0])
            swallowed |= network[1]
        elif isinstance(step, Affine) and step.out == OUTPUT:
            here.head, here.final = step, step.inputs[0]
        elif isinstance(step, Norm | Solu | Affine | Rotary | Shift | Add):
            here.steps.append(step)
        elif not isinstance(step, Softmax):
            raise EngineError(f"taylor has no rule for the step that makes {step.out}")
    last = found[-1]
    if last.final is None and any(step.out == OUTPUT for step in program.steps):
        last.final = last.steps[-1].out if last.steps else last.root
    return found


def _behind(program: Program, mix: Mix, made: set[str]) -> list[AnyStep]:
    """The steps that follow a mixing, but for those whose values are there already."""
    return [step for step in program.steps[program.steps.index(mix) + 1 :] if step.out not in made]


def _joins(behind: list[AnyStep], mix: Mix) -> bool:
    """Say whether a mixing goes through one map into a residual sum, and nothing before that is read behind it."""
    maps = [step for step in behind if mix.out in step.inputs]
    if len(maps) != 1 or not isinstance(maps[0], Affine):
        return False
    sums = [i for i, step in enumerate(behind) if maps[0].out in step.inputs]
    if len(sums) != 1 or not isinstance(behind[sums[0]], Add) or behind[sums[0]].inputs[1] != maps[0].out:
        return False
    after = behind[sums[0] :]
    made = {step.out for step in after}
    return all(name in made for step in after[1:] for name in step.inputs)


def _stacked(
    program: Program,
    behind: list[AnyStep],
    mix: Mix,
    scores: Scores,
    beside: tuple[str, ...],
    found: list[Segment],
) -> set[str]:
    """Append the segment behind an attention that is not simply added to the stream; return what it makes.

    Its root holds everything that is read later: values x of the chain, and maps W z of what attention mixes. They
    stand one above the other, (x, W z) = (x, 0) + (0, W) z, so that the root is again a value plus a mixing; x + W z is
    one part where nobody reads the two apart. The new segment starts by reading all parts off the root. What is named
    `beside` stands there in any case, behind the other values.
    """
    here = found[-1]
    maps = [step for step in behind if isinstance(step, Affine) and step.inputs == (mix.out,)]
    made = {step.out for step in behind} | {mix.out}
    read = dict.fromkeys(name for step in behind for name in step.inputs if name not in made)
    live = [*(name for name in read if name not in beside), *beside]
    if not maps or not live:
        raise EngineError(f"taylor has no rule for what reads {mix.out}")
    like, joined = maps[0].weight, _joined(behind, maps, live)
    if joined is not None:
        live = [name for name in live if name != joined.inputs[0]]
    parts = [*live, *(step.out if joined is None else joined.out for step in maps)]
    sizes = [_width(program, name) for name in live] + [len(step.weight) for step in maps]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    eye = torch.eye(sum(sizes), dtype=like.dtype, device=like.device)
    below = like.new_zeros(sum(sizes), like.shape[1])
    bias = like.new_zeros(sum(sizes))
    for step, start in zip(maps, starts[len(live) :], strict=True):
        below[start : start + len(step.weight)] = step.weight
        if step.bias is not None:
            bias[start : start + len(step.weight)] = step.bias
    stem, above = f"{maps[0].out}.stack", ""
    values = [*live, *([] if joined is None else joined.inputs[:1])]
    for name, start, size in zip(values, starts, sizes, strict=False):
        part = f"{stem}.{name}"
        here.steps.append(Affine(part, (name,), eye[:, start : start + size], None, 1, (sum(sizes),)))
        if above:
            here.steps.append(Add(f"{part}.sum", (above, part)))
        above = f"{part}.sum" if above else part
    has_bias = any(step.bias is not None for step in maps)
    both = Affine(stem, (mix.out,), below, bias if has_bias else None, maps[0].in_dims, (sum(sizes),))
    q, k = scores.inputs
    here.attention = Attention(q, k, mix.inputs[1], above, both)
    after = Segment(f"{stem}.root of {', '.join(parts)}")  # walks to other ends may hold other parts
    for name, start, size in zip(parts, starts, sizes, strict=True):
        after.steps.append(Affine(name, (after.root,), eye[start : start + size], None, 1, (size,)))
    found.append(after)
    return {step.out for step in maps} | (set() if joined is None else {joined.out})


def _joined(behind: list[AnyStep], maps: list[Affine], live: list[str]) -> Add | None:
    """The residual sum of the only map of a mixing and a value, if nothing else reads either of them."""
    readers = [step for step in behind if maps[0].out in step.inputs]
    if len(maps) != 1 or len(readers) != 1 or not isinstance(readers[0], Add):
        return None
    stream, added = readers[0].inputs
    alone = sum(stream in step.inputs for step in behind) == 1
    return readers[0] if added == maps[0].out and stream in live and alone else None


def _width(program: Program, name: str) -> int:
    """How many coordinates a token of a value has: those of the last affine map before it, or of the input."""
    makers = {step.out: step for step in program.steps}
    while name in makers and not isinstance(makers[name], Affine):
        name = makers[name].inputs[0]
    made = makers.get(name)
    if isinstance(made, Affine):
        return len(made.weight)
    return next(step.weight.shape[1] for step in program.steps if isinstance(step, Affine))


def _network(program: Program, first: Affine) -> tuple[FeedForward, set[str]] | None:
    """Return the feed-forward network that starts with this affine map, and the names of the steps it takes in.

    A map that others read as well is no step of the network alone, and a network whose neurons are read ends with them.
    """
    readers: dict[str, list[AnyStep]] = {}
    for step in program.steps:
        for name in step.inputs:
            readers.setdefault(name, []).append(step)
    bent = next((step for step in readers.get(first.out, []) if isinstance(step, Elementwise)), None)
    if bent is None:
        return None
    after = readers.get(bent.out, [])
    last, gate, up = bent.out, None, first
    names = {bent.out} | ({first.out} if len(readers[first.out]) == 1 else set())
    if len(after) == 1 and isinstance(after[0], Product):
        makers = {step.out: step for step in program.steps}
        other = makers[after[0].inputs[1]]
        assert isinstance(other, Affine)
        gate, up, last = first, other, after[0].out
        names |= {last} | ({other.out} if len(readers[other.out]) == 1 else set())
        after = readers.get(last, [])
    down = after[0] if len(after) == 1 and isinstance(after[0], Affine) else None
    if down is not None:
        last = down.out
        names.add(last)
    return FeedForward(last, first.inputs[0], bent.function, up, gate, down), names
