"""Many prompts of one length at once: as a prefix tree, in which every prefix goes through a causal model once.

Rows of tokens that stand in lexicographic order share their beginnings. The tree is cut into segments: positions
a … b − 1 at which as many prefixes are different. A segment runs through all steps together; its queries attend to
their own keys and to those of their ancestors, which earlier segments kept. Every step is the model's own, restricted
to the segment's positions, so the values are those of `Transformer.run` up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.models.program import INPUT, OUTPUT, Program, scores_name
from prooflens.models.reads import find_hook, value_name
from prooflens.models.sites import AnyStep, Mix, Pool, Rotary, Scores, Shift, Softmax
from prooflens.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Segment:
    """Positions at which a tree does not branch.

    Attributes:
        start: the first position.
        stop: the position behind the last.
        rows: for every node, a row of tokens that passes through it.
        parents: for every node, the node of the segment before it; None at the root.
        node_of: for every row, its node here.
    """

    start: int
    stop: int
    rows: Int[Tensor, " n"]
    parents: Int[Tensor, " n"] | None
    node_of: Int[Tensor, " B"]


def segments(ids: Int[Tensor, "B S"]) -> list[Segment]:
    """Cut the prefix tree of rows that stand in lexicographic order (equal beginnings side by side).

    Args:
        ids: tokens, shape [B, S].

    Example:
        >>> tree = segments(torch.tensor([[5, 1, 2, 3], [5, 1, 2, 4], [5, 2, 2, 3]]))
        >>> [(part.start, part.stop, len(part.rows)) for part in tree]
        [(0, 1, 1), (1, 3, 2), (3, 4, 3)]
    """
    new = torch.ones_like(ids, dtype=torch.bool)
    new[1:] = (ids[1:] != ids[:-1]).cumsum(1) > 0
    counts = new.sum(0).tolist()
    found: list[Segment] = []
    start = 0
    for stop in range(1, len(counts) + 1):
        if stop < len(counts) and counts[stop] == counts[start]:
            continue
        first = new[:, start]
        node_of = first.long().cumsum(0) - 1
        rows = first.nonzero()[:, 0]
        parents = found[-1].node_of[rows] if found else None
        found.append(Segment(start, stop, rows, parents, node_of))
        start = stop
    return found


def restricted(step: AnyStep, start: int, stop: int) -> AnyStep:
    """Return the step for queries at positions start … stop − 1 alone, and keys up to there.

    Args:
        step: a step of a program for at least `stop` tokens.
        start: the first position.
        stop: the position behind the last.
    """
    here = slice(start, stop)
    if isinstance(step, Rotary):
        return replace(step, cos=step.cos[here], sin=step.sin[here])
    if isinstance(step, Shift):
        return replace(step, offset=step.offset[here])
    if isinstance(step, Softmax):
        return replace(step, mask=step.mask[..., here, :stop])
    if isinstance(step, Scores):
        bias = None if step.bias is None else step.bias[:, here, :stop]
        return replace(step, bias=bias, mask=step.mask[..., here, :stop])
    if isinstance(step, Pool):
        return replace(step, weights=step.weights[here])
    return step


@dataclass(eq=False)
class Kept:
    """What a segment leaves to those behind it.

    Attributes:
        values: its keys and values by name, one entry per node.
        ancestor: for every node of the present segment, its ancestor here.
    """

    values: dict[str, Tensor]
    ancestor: Int[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class Reading:
    """What claims read of many prompts of one length.

    Attributes:
        scores: rows of scores by layer and query position, shape [B, H, keys]; keys behind the position may be missing.
        hidden: the vector from which the head computes the outputs that claims are about, shape [B, d]; None if it was
            not asked for.
        values: values of hooks by name and token, shape [B, n].
    """

    scores: dict[tuple[int, int], Float[Tensor, "B H K"]]
    hidden: Float[Tensor, "B d"] | None
    values: dict[tuple[str, int], Float[Tensor, "B n"]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs prompts of one length, given as tokens, as far as claims read them.

    Attributes:
        model: the model.
        rows: layers and query positions of the scores that are read.
        output: whether the vector is read from which the head computes the outputs.
        program: the steps up to there.
        as_tree: run prefixes once; False runs every prompt by itself, in one batch.
        sites: hooks and tokens whose values are read, with the names that the program gives to them.
    """

    model: Transformer
    rows: tuple[tuple[int, int], ...]
    output: bool
    program: Program
    as_tree: bool
    sites: tuple[tuple[str, int, str], ...] = ()

    @classmethod
    def of(
        cls,
        model: Transformer,
        n_tokens: int,
        rows: Iterable[tuple[int, int]],
        output: bool,
        as_tree: bool = True,
        sites: Iterable[tuple[str, int]] = (),
    ) -> Runner:
        """Prepare runs; a model that reads tokens behind a position runs as a list whatever is asked for.

        Args:
            model: the model.
            n_tokens: the length of the prompts.
            rows: layers and query positions of the scores that are read.
            output: whether the vector is read from which the head computes the outputs.
            as_tree: run prefixes once, where the model can.
            sites: hooks and tokens whose values are read.
        """
        read = tuple(dict.fromkeys(rows))
        wanted = [*dict.fromkeys(scores_name(model.check_layer(layer)) for layer, _ in read)]
        bare = model.headless
        tree = model.architecture.causal and not (output and bare.architecture.pool != "last")
        places = tuple(dict.fromkeys(sites))
        made = {step.out for step in bare.program(n_tokens).steps} if places else set()
        named = {hook: value_name(made, find_hook(model.architecture, hook)) for hook, _ in places}
        program = bare.program(n_tokens, [*wanted, *([OUTPUT] if output else []), *named.values()])
        held = tuple((hook, at, named[hook]) for hook, at in places)
        return cls(model, read, output, program, as_tree and tree, held)

    def __call__(self, ids: Int[Tensor, "B S"]) -> Reading:
        """Run the prompts.

        Args:
            ids: tokens, shape [B, S]; a tree is the smaller, the more rows side by side begin alike.
        """
        with torch.no_grad():
            return self._tree(ids) if self.as_tree else self._list(ids)

    def _names(self) -> set[str]:
        values = {name for *_, name in self.sites}
        return {scores_name(layer) for layer, _ in self.rows} | ({OUTPUT} if self.output else set()) | values

    def _list(self, ids: Tensor) -> Reading:
        values = self.program.run(self.model.embed(ids), self._names())
        scores = {(layer, at): values[scores_name(layer)][:, :, at] for layer, at in self.rows}
        read = {(hook, at): values[name][:, at].flatten(1) for hook, at, name in self.sites}
        return Reading(scores, values[OUTPUT] if self.output else None, read)

    def _tree(self, ids: Tensor) -> Reading:
        if not self.output:  # nobody reads what stands behind the last position
            ids = ids[:, : 1 + max([at for _, at in self.rows] + [at for _, at, _ in self.sites])]
        tree = segments(ids)
        cached = {step.inputs[1] for step in self.program.steps if isinstance(step, Scores | Mix)}
        kept: list[Kept] = []
        scores: dict[tuple[int, int], Tensor] = {}
        read: dict[tuple[str, int], Tensor] = {}
        for part in tree:
            if part.parents is not None:
                for each in kept[:-1]:
                    each.ancestor = each.ancestor[part.parents]
                kept[-1].ancestor = part.parents
            values = self._segment(ids, part, kept, cached if part is not tree[-1] else set())
            for layer, at in self.rows:
                if part.start <= at < part.stop:
                    scores[layer, at] = values[scores_name(layer)][:, :, at - part.start][part.node_of]
            for hook, at, name in self.sites:
                if part.start <= at < part.stop:
                    read[hook, at] = values[name][:, at - part.start][part.node_of].flatten(1)
            kept.append(Kept({name: values[name] for name in cached if name in values}, part.node_of))
        return Reading(scores, values[OUTPUT][part.node_of] if self.output else None, read)

    def _segment(
        self, ids: Tensor, part: Segment, kept: Sequence[Kept], cached: set[str]
    ) -> dict[str, Tensor]:
        """The values of one segment; what nobody reads any more is dropped."""
        steps, held = self.program.steps, cached | self._names()
        last_use = {name: i for i, step in enumerate(steps) for name in step.inputs}
        values = {INPUT: self.model.embed(ids[part.rows, : part.stop])[:, part.start :]}
        for i, step in enumerate(steps):
            inputs = [values[name] for name in step.inputs]
            if isinstance(step, Scores | Mix) and kept:
                before = [each.values[step.inputs[1]][each.ancestor] for each in kept]
                inputs[1] = torch.cat([*before, inputs[1]], dim=1)
            values[step.out] = restricted(step, part.start, part.stop)(*inputs)
            for name in step.inputs:
                if last_use[name] == i and name not in held:
                    values.pop(name, None)
        return values


def row_bytes(model: Transformer, n_tokens: int, layers: int) -> int:
    """Return about how many bytes one prompt takes while it runs: values of a layer, and the keys and values kept.

    Args:
        model: the model.
        n_tokens: the length of the prompt.
        layers: how many layers are run.
    """
    architecture = model.architecture
    heads = architecture.n_heads * architecture.head_dim
    kept = 2 * layers * architecture.kv_heads * architecture.head_dim
    passing = 8 * architecture.d_model + 4 * architecture.d_ff + 8 * heads
    return 8 * n_tokens * (kept + passing + 4 * architecture.n_heads * n_tokens)
