"""Every input of a task through its model, in float64: each prefix once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.attention_only.tables import OneLayer, check_model
from prooflens.models import Transformer
from prooflens.models.tasks import TokenTask

TILE = 2**15
"""Inputs of the last level that are run together."""


@dataclass(frozen=True)
class Accuracy:
    """On how many inputs of a task a model answers rightly.

    Attributes:
        task: the name of the task.
        word: `enumerated`: every input was run in float64; `proved`: at least so many, rounding counted.
        right: how many inputs: exactly, or at least.
        most: how many at most; the same number where every input was run.
        inputs: of so many.
        nearest: the smallest |margin| of an input, or None where inputs were not run one by one.
        cells: how many cells of inputs, or single inputs, were looked at.
        seconds: how long it took.
    """

    task: str
    word: str
    right: int
    most: int
    inputs: int
    nearest: float | None
    cells: int
    seconds: float

    @property
    def share(self) -> Fraction:
        """The accuracy."""
        return Fraction(self.right, self.inputs)


def enumerate_task(model: Transformer, task: TokenTask) -> Accuracy:
    """Run every input of a task: the accuracy over all of them, in float64, and the smallest margin.

    An answer is right if its logit is above all others.

    Args:
        model: an attention-only model of the task.
        task: `TASKS["max-of-4"]` or `TASKS["induction-2l"]`, or one of other sizes.
    """
    check_model(model, task)
    started = time.perf_counter()
    with torch.no_grad():
        pairs = _one_layer(model, task) if task.layers == 1 else _two_layers(model, task)
        right, nearest = 0, float("inf")
        for margins in pairs:
            right += int((margins > 0.0).sum())
            nearest = min(nearest, float(margins.abs().min()))
    seconds = time.perf_counter() - started
    return Accuracy(task.name, "enumerated", right, right, task.inputs, nearest, task.inputs, seconds)


def _one_layer(model: Transformer, task: TokenTask) -> Iterator[Tensor]:
    """Margins of a one-layer model: logits times Σ e^a are sums of one vector per position."""
    tables = OneLayer.of(model, task.length)
    V, n = task.vocabulary, task.length
    answer_of = torch.arange(V)
    for last in range(V):
        e = (tables.scores[last] - tables.scores[last].max()).exp()
        parts = e[..., None] * (tables.written + tables.direct[last])  # [n, V, C]
        sums, best, weight = parts[n - 1, last][None], answer_of[last][None], e[n - 1, last][None]
        for j in range(n - 2):
            sums = (sums[:, None] + parts[j][None]).flatten(0, 1)
            best = torch.maximum(best[:, None], answer_of[None]).flatten()
            weight = (weight[:, None] + e[j][None]).flatten()
        for some, answer, z in zip(sums.split(256), best.split(256), weight.split(256), strict=True):
            if n == 1:
                yield _margin(some, answer) / z
                continue
            logits = (some[:, None] + parts[n - 2][None]).flatten(0, 1)
            answers = torch.maximum(answer[:, None], answer_of[None]).flatten()
            yield _margin(logits, answers) / (z[:, None] + e[n - 2][None]).flatten()


def _margin(logits: Float[Tensor, "N C"], answers: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return the logit of the answer less the largest other one; `logits` is used up."""
    right = logits.gather(-1, answers[:, None])
    return (right - logits.scatter_(-1, answers[:, None], -torch.inf).amax(-1, keepdim=True))[:, 0]


@dataclass(frozen=True, eq=False)
class _Level:
    """All prefixes of one length: what the next levels read of their last token.

    Attributes:
        ids: the tokens, shape [N, p].
        parent: the prefix without its last token, by number.
        k: keys of the second layer.
        v: values of the second layer.
    """

    ids: Int[Tensor, "N p"]
    parent: Int[Tensor, " N"]
    k: Float[Tensor, "N c"]
    v: Float[Tensor, "N c"]


class _Tree:
    """The prefixes of the induction task, level by level."""

    def __init__(self, model: Transformer, task: TokenTask) -> None:
        self.model, self.task, w = model, task, model.weights
        tokens = torch.arange(task.vocabulary)[:, None].expand(-1, task.length)
        self.x = model.embed(tokens).transpose(0, 1)  # [n, V, d]
        q, k, v = (self._project(0, name, self.x) for name in "qkv")
        self.scores = torch.einsum("ptc,juc->ptju", q, k) * model.architecture.scale(0)
        bias = w.get("blocks.0.o.bias")
        self.written = v @ w["blocks.0.o.weight"].T
        self.x = self.x if bias is None else self.x + bias
        self.levels: list[_Level] = []

    def _project(self, layer: int, name: str, x: Tensor) -> Tensor:
        bias = self.model.weights.get(f"blocks.{layer}.{name}.bias")
        return torch.nn.functional.linear(x, self.model.weights[f"blocks.{layer}.{name}.weight"], bias)

    def stream(self, ids: Int[Tensor, "N p"]) -> Float[Tensor, "N d"]:
        """Return what the second layer reads at the last token of prefixes."""
        p = ids.shape[1] - 1
        last = ids[:, p]
        a = torch.stack([self.scores[p, last, j, ids[:, j]] for j in range(p + 1)], -1)
        s = torch.softmax(a, -1)
        x = self.x[p, last]
        for j in range(p + 1):
            x = x + s[:, j : j + 1] * self.written[j, ids[:, j]]
        return x

    def grow(self) -> None:
        """Add the prefixes that are one token longer: tokens are all different."""
        if not self.levels:
            ids = torch.arange(self.task.vocabulary)[:, None]
            parent = torch.zeros(len(ids), dtype=torch.long)
        else:
            before = self.levels[-1].ids
            parent = torch.arange(len(before)).repeat_interleave(self.task.vocabulary)
            token = torch.arange(self.task.vocabulary).repeat(len(before))
            fresh = (before[parent] != token[:, None]).all(-1)
            parent = parent[fresh]
            ids = torch.cat((before[parent], token[fresh][:, None]), -1)
        parts = [self.stream(some) for some in ids.split(TILE)]
        k, v = (torch.cat([self._project(1, name, x) for x in parts]) for name in "kv")
        self.levels.append(_Level(ids, parent, k, v))

    def margins(self) -> Iterator[Tensor]:
        """Margins of all inputs: every prefix of different tokens, followed by one of all but its last."""
        model, n = self.model, self.task.length
        weight, bias = model.head
        scale, out = model.architecture.scale(1), model.weights["blocks.1.o.weight"]
        o_bias = model.weights.get("blocks.1.o.bias")
        deepest = self.levels[-1]
        for rows in torch.arange(len(deepest.ids)).split(TILE):
            place, keys, values = rows, [], []
            for level in reversed(self.levels):
                keys.append(level.k[place])
                values.append(level.v[place])
                place = level.parent[place]
            k, v = torch.stack(keys[::-1], 1), torch.stack(values[::-1], 1)
            for again in range(n - 2):
                ids = torch.cat((deepest.ids[rows], deepest.ids[rows, again][:, None]), -1)
                x = self.stream(ids)
                q, own_k, own_v = (self._project(1, name, x) for name in "qkv")
                a = torch.cat(((k @ q[..., None])[..., 0], (q * own_k).sum(-1, keepdim=True)), -1) * scale
                s = torch.softmax(a, -1)
                z = (s[:, None, :-1] @ v)[:, 0] + s[:, -1:] * own_v
                x = x + z @ out.T
                x = x if o_bias is None else x + o_bias
                yield _margin(torch.nn.functional.linear(x, weight, bias), deepest.ids[rows, again + 1])


def _two_layers(model: Transformer, task: TokenTask) -> Iterator[Tensor]:
    """Margins of a two-layer model on the induction task."""
    tree = _Tree(model, task)
    for _ in range(task.length - 1):
        tree.grow()
    yield from tree.margins()
