"""Blocks out of anchors: which norm, attention and network read which stream, in order, as one architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.onnx.attention import (
    Heads,
    reach,
    read_heads,
    read_weights,
    scale_fields,
    short,
    turning_fields,
)
from prooflens.models.onnx.forms import Anchor, Floats, Form, rows
from prooflens.models.onnx.graph import refuse
from prooflens.models.onnx.interpret import Reader

Stream = frozenset[Anchor]
"""The anchors whose sum a residual stream is."""


class Recogniser:
    """Turns what a `Reader` found into an architecture and canonical weights."""

    def __init__(self, reader: Reader, output: Form) -> None:
        self.output = output
        if reader.input is None or not output.terms:
            raise ModelError("the graph embeds neither token ids nor patches of pixels")
        self.input = reader.input
        self.n_tokens = self.input.sources[0].shape[1]
        reached, waiting = set[Anchor](), list(output.anchors)
        while waiting:
            anchor = waiting.pop()
            if anchor not in reached:
                reached.add(anchor)
                waiting += [*anchor.inputs, *(a for form in anchor.sources for a in form.anchors)]
        self.live = [anchor for anchor in reader.made if anchor in reached]
        self.weights: dict[str, Floats] = {}
        self.fields: dict[str, Any] = {}
        self.epsilons: set[float] = set()
        self.windows: dict[int, int] = {}
        self.scales: list[float] = []
        self.turns: list[Floats | None] = []
        self.mixes = [anchor for anchor in self.live if anchor.kind == "mix"]

    def run(self) -> tuple[Architecture, dict[str, Tensor]]:
        """Recognise everything.

        Raises:
            NodeError: where the graph is no transformer of the canonical kind.
        """
        if not self.mixes:
            raise ModelError("the graph has no attention")
        stream = self._embedding(self.mixes[0])
        d_model = next(iter(stream)).width
        for layer, mix in enumerate(self.mixes):
            stream = self._block(layer, mix, stream)
        stream = self._final_norm(stream)
        self._read_out(stream)
        self._conclude()
        architecture = Architecture(
            family="onnx", n_layers=len(self.mixes), d_model=d_model, context=self.n_tokens, **self.fields
        )
        return architecture, {name: torch.tensor(np.ascontiguousarray(w)) for name, w in self.weights.items()}

    def _conclude(self) -> None:
        """Fields that are said of all layers together."""
        if len(self.epsilons) > 1:
            raise ModelError(f"the norms of the graph have different ε: {sorted(self.epsilons)}")
        if self.epsilons:
            self.fields["norm_eps"] = self.epsilons.pop()
        sizes = set(self.windows.values())
        if len(sizes) > 1:
            raise ModelError(f"layers of the graph have windows of different sizes: {sorted(sizes)}")
        if sizes:
            self.fields |= {"window": sizes.pop(), "window_layers": tuple(self.windows)}
        self.fields.setdefault("d_ff", self.input.width)
        self.fields.setdefault("activation", "relu")
        if (scaling := scale_fields(self.scales, int(self.fields["d_head"]))) is None:
            self._fold_scales(int(self.fields["d_head"]))
        self.fields |= scaling or {}
        fields, tables = turning_fields(self.turns, set(self.windows))
        self.fields |= fields
        self.weights |= tables

    def _fold_scales(self, d_head: int) -> None:
        """Give all layers the usual scale: what is left joins their queries, behind their norm if they have one."""
        normed = self.fields["qk_norm"] != "none"
        for layer, scale in enumerate(self.scales):
            name, factor = f"blocks.{layer}.q" + ("_norm" if normed else ""), scale * d_head**0.5
            if f"{name}.weight" not in self.weights:
                whole = self.fields["qk_norm"] == "whole"
                self.weights[f"{name}.weight"] = np.ones(d_head * (self.fields["n_heads"] if whole else 1))
            for part in ("weight", "bias"):
                if f"{name}.{part}" in self.weights:
                    self.weights[f"{name}.{part}"] = self.weights[f"{name}.{part}"] * factor

    def _say(self, node: Any, **fields: Any) -> None:
        """Note fields of the architecture, which must be the same in every layer."""
        for name, value in fields.items():
            if self.fields.setdefault(name, value) != value:
                raise refuse(node, f"its block differs from the first one ({name})")

    def _find(self, kind: str, inputs: Stream) -> Anchor | None:
        """The first live anchor of a kind that reads just this sum."""
        return next((a for a in self.live if a.kind == kind and a.inputs == inputs), None)

    def _put(self, name: str, weight: Floats | None, bias: Floats | None) -> None:
        if weight is not None:
            self.weights[f"{name}.weight"] = weight
        if bias is not None:
            self.weights[f"{name}.bias"] = bias

    def _norm(self, name: str, norm: Anchor) -> Stream:
        """Take a norm of tokens as the model's."""
        if name != "embed.norm":
            self._say(norm.node, norm_kind=norm.word)
        elif norm.word != "layer":
            raise refuse(norm.node, "a norm of embeddings is a LayerNorm here")
        self.epsilons.add(short(norm.number))
        self._put(name, norm.weight, norm.bias)
        return frozenset({norm})

    def _embedding(self, mix: Anchor) -> Stream:
        """Tables, patches, positions; the stream that the first block reads."""
        form = self.input.sources[0]
        term, shift = form.only, form.constant[0]
        if term is None:
            raise refuse(self.input.node, "its embedding is a sum of several tables of the token ids")
        tokens, features = term.index[0] // term.anchor.width, term.index[0] % term.anchor.width
        held = term.anchor
        there = term.factor[0] != 0.0
        if not ((features == np.arange(held.width)) | ~there).all() or held.weight is None:
            raise refuse(self.input.node, "the features of its embedding are not in order")
        if held.kind == "tokens":
            factor = float(term.factor.flat[0])
            if not (term.factor == factor).all() or not (tokens == np.arange(self.n_tokens)[:, None]).all():
                raise refuse(self.input.node, "its embedding is not of each token alike")
            self.weights["embed.tokens"] = held.weight
            self.fields |= {"d_vocab": len(held.weight)} | ({} if factor == 1.0 else {"embed_scale": factor})
            if shift.any():
                alike = bool((shift == shift[0]).all())
                self.weights["embed.types" if alike else "embed.positions"] = shift[:1] if alike else shift
        else:
            self._patches(held, term.factor[0], tokens, shift)
        added = self._added(mix)
        stream: Stream = frozenset({self.input})
        normed = self._find("norm", stream)
        if normed is not None and not self._is_carried(normed, added):
            projected = self._find("linear", frozenset({normed}))
            normed = normed if projected is not None and self._is_carried(projected, added) else None
        if normed is not None:
            stream = self._norm("embed.norm", normed)
        projected = self._find("linear", stream)
        if projected is not None and self._is_carried(projected, added):
            self._put("embed.project", projected.weight, projected.bias)
            self.fields["d_embed"] = self.input.width
            return frozenset({projected})
        return stream

    def _is_carried(self, anchor: Anchor, added: set[Anchor]) -> bool:
        """Whether what attention adds is added to this."""
        sums = [a.inputs for a in self.live] + [frozenset(self.output.anchors)]
        return any(anchor in each and each & added for each in sums)

    def _added(self, mix: Anchor) -> set[Anchor]:
        """The projection that reads a layer's heads, and a norm on it."""
        out = self._find("linear", frozenset({mix}))
        if out is None:
            raise refuse(mix.node, "no projection reads its heads")
        return {out} | {a for a in self.live if a.kind == "norm" and a.inputs == frozenset({out})}

    def _norms_come_before(self) -> bool:
        """Whether the second block reads a norm of its stream; the first may read it as it is."""
        if len(self.mixes) < 2:
            return False
        read = next(iter(self.mixes[1].sources[1].anchors)).inputs
        inner = next(iter(read)) if len(read) == 1 else None
        return (
            inner is not None
            and inner.kind == "norm"
            and not self._is_carried(inner, self._added(self.mixes[1]))
        )

    def _patches(self, held: Anchor, factor: Floats, tokens: Any, shift: Floats) -> None:
        front = int((factor[:, 0] == 0.0).sum())
        rest = slice(front, None)
        inside = (factor[rest] == 1.0).all() and not factor[:front].any()
        if front > 1 or not inside or not (tokens[rest] == np.arange(len(tokens) - front)[:, None]).all():
            raise refuse(self.input.node, "tokens are not patches in order behind one token at most")
        assert held.weight is not None
        self._put("embed.patches", held.weight.reshape(len(held.weight), -1), held.bias)
        self.fields |= {"patch": held.weight.shape[-1], "channels": held.weight.shape[1]}
        places = shift.copy()
        if front:
            self.weights["embed.front"], places[0] = shift[:1], 0.0
        self.weights["embed.positions"] = places

    def _block(self, layer: int, mix: Anchor, stream: Stream) -> Stream:
        """One block; the stream behind it."""
        block = f"blocks.{layer}"
        read = self._attention(layer, mix)
        inner = next(iter(read)) if len(read) == 1 else None
        before = inner is not None and inner.kind == "norm" and inner.inputs == stream
        if not before and read != stream:
            raise refuse(mix.node, "its attention reads neither the stream nor a norm of it")
        if layer == 0 and not before and self._norms_come_before():
            self.fields["first_norm"], before, inner = False, True, None
        out = self._find("linear", frozenset({mix}))
        if out is None:
            raise refuse(mix.node, "no projection reads its heads")
        self._put(f"{block}.o", out.weight, out.bias)
        behind = self._find("norm", frozenset({out}))
        added: Stream = frozenset({out if behind is None else behind})
        post = None if before or behind is not None else self._find("norm", stream | added)
        place = {(True, True): "sandwich", (True, False): "pre", (False, True): "output"}.get(
            (before, behind is not None), "none" if post is None else "post"
        )
        self._say(mix.node, norm_place=place)
        if before and inner is not None:
            self._norm(f"{block}.norm1", inner)
        if behind is not None:
            self._norm(f"{block}.norm1_out", behind)
        middle = stream | added
        if post is not None:
            middle = self._norm(f"{block}.norm1", post)
        found = self._network(block, middle, before)
        if found is None and before:
            found = self._network(block, stream, before, shared=inner)
            self._say(mix.node, parallel=found is not None)
        self._say(mix.node, has_network=found is not None)
        if found is None:
            return middle
        middle = middle | found
        last = self._find("norm", middle) if place == "post" else None
        return middle if last is None else self._norm(f"{block}.norm2", last)

    def _network(
        self, block: str, stream: Stream, before: bool, shared: Anchor | None = None
    ) -> Stream | None:
        """The network that reads a stream, or a norm of it; what it adds, or None if there is none.

        Args:
            block: the name of the block.
            stream: the stream.
            before: whether a norm stands before it.
            shared: the norm that attention reads, for a network beside it.
        """
        norms = [a for a in self.live if a.kind == "norm" and a.inputs == stream] if before else []
        for norm in norms if before else [None]:
            read = stream if norm is None else frozenset({norm})
            ups = [a for a in self.live if a.kind == "linear" and a.inputs == read]
            acts = [a for a in self.live if a.kind == "act" and a.inputs & set(ups)]
            for act in acts:
                gate = next(iter(act.inputs))
                product = next((a for a in self.live if a.kind == "product" and act in a.inputs), None)
                down = self._find("linear", frozenset({act if product is None else product}))
                if down is None:
                    continue
                self._say(act.node, activation=act.word, gated=product is not None, d_ff=act.width)
                if shared is not None:
                    self._say(act.node, shared_norm=norm is shared)
                if norm is not None and norm is not shared:
                    self._norm(f"{block}.norm2", norm)
                if product is not None:
                    (up,) = product.inputs - {act}
                    self._put(f"{block}.up", up.weight, up.bias)
                self._put(f"{block}.{'up' if product is None else 'gate'}", gate.weight, gate.bias)
                self._put(f"{block}.down", down.weight, down.bias)
                behind = self._find("norm", frozenset({down}))
                if behind is not None:
                    self._norm(f"{block}.norm2_out", behind)
                return frozenset({down if behind is None else behind})
        return None

    def _attention(self, layer: int, mix: Anchor) -> Stream:
        """Queries, keys, values, masks of a layer; what their projections read."""
        (pattern,) = mix.sources[0].anchors
        weights = read_weights(pattern)
        q, k = (read_heads(weights.scores.node, form) for form in weights.scores.sources)
        v = read_heads(mix.node, mix.sources[1])
        if v.scale != 1.0 or v.norm is not None or v.order is not None:
            raise refuse(mix.node, "its values are scaled, normed or turned")
        if not q.linear.inputs == k.linear.inputs == v.linear.inputs:
            raise refuse(mix.node, "queries, keys and values read different streams")
        heads, d_head = q.features.shape
        groups = k.groups if k.groups == v.groups else heads
        self._say(mix.node, n_heads=heads, d_head=d_head, n_kv_heads=groups, alibi=weights.alibi)
        self._say(mix.node, score_cap=weights.cap, causal=not weights.seen[0, 1:].any())
        self.scales.append(q.scale * k.scale * weights.scale)
        window = reach(mix.node, weights.seen, self.fields["causal"])
        if window is not None:
            self.windows[layer] = window
        self._turning(weights.scores.node, q, k)
        for name, each, count in (("q", q, heads), ("k", k, groups), ("v", v, groups)):
            self._projection(f"blocks.{layer}.{name}", each, count)
        self._say(
            mix.node, qk_norm="none" if q.norm is None else "head" if "head" in q.norm.word else "whole"
        )
        return q.linear.inputs

    def _projection(self, name: str, heads: Heads, count: int) -> None:
        """The rows of a projection that so many heads read, and the norm on them."""
        chosen = heads.rows(count)
        weight, bias = heads.linear.weight, heads.linear.bias
        assert weight is not None
        self._put(name, weight[chosen.ravel()], None if bias is None else bias[chosen.ravel()])
        if heads.norm is None:
            return
        norm, each = heads.norm, chosen
        self._say(norm.node, norm_kind=norm.word.removeprefix("head "))
        self.epsilons.add(short(norm.number))
        if "head" in norm.word:
            for part in (norm.weight, norm.bias):
                if part is not None and not (part[each] == part[each[:1]]).all():
                    raise refuse(norm.node, "heads have norms of their own")
            each = each[:1]
        scales = (None if part is None else part[each.ravel()] for part in (norm.weight, norm.bias))
        self._put(f"{name}_norm", *scales)

    def _turning(self, node: Any, q: Heads, k: Heads) -> None:
        """Rotary positions of a layer."""
        if q.order is None or k.order is None or q.frequencies is None or k.frequencies is None:
            if q.order is not k.order:
                raise refuse(node, "queries turn and keys do not, or the other way round")
            self.turns.append(None)
            return
        if not (np.array_equal(q.order, k.order) and np.allclose(q.frequencies, k.frequencies, rtol=1e-6)):
            raise refuse(node, "queries and keys turn differently")
        self.turns.append(q.frequencies)

    def _final_norm(self, stream: Stream) -> Stream:
        if self.fields["norm_place"] in ("none", "post"):
            return stream
        norm = self._find("norm", stream)
        if norm is None:
            raise refuse(self.live[-1].node, "no norm stands behind the last block")
        return self._norm("final_norm", norm)

    def _read_out(self, stream: Stream) -> None:
        """Pooling, pooler, head and cap."""
        form, last = self.output, self.live[-1]
        term = form.only
        if term is not None and term.anchor.kind == "tanh":
            (factor,), inner = set(term.factor.ravel().tolist()), term.anchor.sources[0]
            if inner.uniform() is None or abs((inner.uniform() or 0.0) * factor - 1.0) > 1e-6:
                raise refuse(term.anchor.node, "it is no cap of logits")
            self.fields["logit_cap"] = short(factor)
            form = Form(
                tuple(type(t)(t.anchor, t.index, np.ones(t.factor.shape)) for t in inner.terms),
                inner.constant,
            )
        read = rows(form)
        if (
            read is None
            or not form.is_plain()
            or not np.array_equal(read.features, np.arange(form.shape[-1]))
        ):
            raise refuse(last.node, "the output is no plain value of tokens")
        inputs, pool = read.anchors, "none"
        head = next(iter(inputs)) if len(inputs) == 1 else None
        if head is not None and head.kind == "linear" and head not in stream:
            self._head(head)
            inputs = head.inputs
        dense = next(iter(inputs)) if len(inputs) == 1 else None
        if dense is not None and dense.kind == "act" and inputs != stream:
            (linear,) = dense.inputs
            self._put("pooler", linear.weight, linear.bias)
            self.fields |= {"pooler": True, "pooler_activation": dense.word}
            inputs = linear.inputs
        mean = next(iter(inputs)) if len(inputs) == 1 else None
        if mean is not None and mean.kind == "pool":
            inputs, pool = mean.inputs, "mean"
        if inputs != stream:
            raise refuse(last.node, "the output does not read the last stream")
        places = sorted(set(read.tokens.tolist()))
        if pool == "none" and places != list(range(self.n_tokens)):
            known = {(0,): "first", (self.n_tokens - 1,): "last"}
            if tuple(places) not in known:
                raise refuse(last.node, "the output is of neither all tokens, nor the first, nor the last")
            pool = known[tuple(places)]
        self.fields["pool"] = pool

    def _head(self, head: Anchor) -> None:
        weight, table = head.weight, self.weights.get("embed.tokens")
        assert weight is not None
        self.fields["d_out"] = len(weight)
        tied = table is not None and np.array_equal(weight, table)
        self._put("head", None if tied else weight, head.bias)
