"""The blocks of a transformer as steps: attention, feed-forward network, and how norms and residual sums join them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.edges import CHANNELS, NETWORK, readers_of, sending_neurons
from prooflens.models.frozen import frozen_scores
from prooflens.models.held import Held
from prooflens.models.program_edits import Rows, add_values, hold_at, send_neurons, without_edges
from prooflens.models.sites import (
    Add,
    Affine,
    AnyStep,
    Elementwise,
    Mix,
    Norm,
    Product,
    Rotary,
    Scores,
    Shift,
    Softcap,
    Softmax,
    Solu,
    alibi_bias,
    relative_bias,
    rotary_tables,
    turned_tables,
)
from prooflens.models.spread import FREE, STREAM


@dataclass(eq=False)
class Builder:
    """Appends the steps of blocks to a list; every method returns the name of what it made.

    Attributes:
        architecture: what the model looks like.
        weights: its canonical weights.
        n_tokens: how many tokens there are.
        masks: which keys take part for each query, of every layer; of each head where keys are knocked out.
        n_real: how many tokens there are up to the last one that is no padding.
        steps: what was made so far.
    """

    architecture: Architecture
    weights: Mapping[str, Tensor]
    n_tokens: int
    masks: list[Bool[Tensor, "S S"] | Bool[Tensor, "H S S"]]
    n_real: int
    steps: list[AnyStep] = field(default_factory=list)

    def start(self, source: str) -> str:
        """The stream of the first block: the input, without its free coordinates if it has some (`models.spread`).

        Args:
            source: the name of the input.
        """
        d, free = self.architecture.d_model, self.architecture.free
        if not free:
            return source
        like = next(iter(self.weights.values()))
        eye = torch.eye(d + free, dtype=like.dtype, device=like.device)
        self.steps.append(Affine(STREAM, (source,), eye[:d].contiguous(), None, 1, (d,)))
        self.steps.append(Affine(FREE, (source,), eye[d:].contiguous(), None, 1, (free,)))
        return STREAM

    def block(self, layer: int, stream: str) -> str:
        """One block; the residual stream after it."""
        stream = hold_at(self, f"blocks.{layer}.hook_resid_pre", stream)
        return (
            self._parallel(layer, stream) if self.architecture.parallel else self._one_by_one(layer, stream)
        )

    def _one_by_one(self, layer: int, stream: str) -> str:
        """First attention, then the network, each added to the stream."""
        architecture, block = self.architecture, f"blocks.{layer}"
        behind = architecture.norm_place == "post"
        if architecture.has_attention:
            inner = self._before(layer, stream, 1)
            added = self._behind(block, self.attention(layer, inner, stream), 1)
            last = (
                f"{block}.hook_resid_mid"
                if architecture.has_network or behind
                else f"{block}.hook_resid_post"
            )
            stream = self._add(last, stream, added)
            stream = self.norm(f"{block}.norm1", stream, f"{block}.ln1.hook_normalized") if behind else stream
        if architecture.has_network:
            inner = self._before(layer, stream, 2)
            added = self._behind(block, self.network(block, self._without(layer, stream, inner)), 2)
            stream = self._add(f"{block}.hook_resid_post", stream, added)
            if behind:
                stream = self.norm(f"{block}.norm2", stream, f"{block}.hook_normalized_resid_post")
        return stream

    def _parallel(self, layer: int, stream: str) -> str:
        """Attention and network side by side. What the network adds is added first: tokens meet last."""
        block = f"blocks.{layer}"
        first = self._before(layer, stream, 1)
        second = first if self.architecture.shared_norm else self._before(layer, stream, 2)
        added = self._behind(block, self.network(block, self._without(layer, stream, second)), 2)
        middle = self._add(f"{block}.hook_resid_network", stream, added)
        attended = self._behind(block, self.attention(layer, first, stream), 1)
        return self._add(f"{block}.hook_resid_post", middle, attended)

    def _add(self, out: str, stream: str, added: str) -> str:
        self.steps.append(Add(out, (stream, added)))
        return hold_at(self, out)

    def _before(self, layer: int, stream: str, part: int) -> str:
        """What a part of a block reads: the stream, or its norm."""
        if self.architecture.norm_place not in ("pre", "sandwich"):
            return stream
        if part == 1 and layer == 0 and not self.architecture.first_norm:
            return stream
        block = f"blocks.{layer}"
        return self.norm(f"{block}.norm{part}", stream, f"{block}.ln{part}.hook_normalized")

    def _without(self, layer: int, stream: str, inner: str) -> str:
        """What the network reads: `inner`, or the same of the stream without its edges (`models.edges`)."""
        rows = readers_of(self.weights, f"blocks.{layer}").get((NETWORK, -1))
        return inner if rows is None else self._alternative(layer, stream, rows, "network", 2)

    def _alternative(self, layer: int, stream: str, rows: Rows, name: str, part: int) -> str:
        """What a receiver reads in place of the stream or its norm."""
        block = f"blocks.{layer}"
        changed = without_edges(self, rows, stream, f"{block}.edges.{name}")
        if self.architecture.norm_place != "pre" or (
            part == 1 and layer == 0 and not self.architecture.first_norm
        ):
            return changed
        shared = self.architecture.parallel and self.architecture.shared_norm
        return self.norm(f"{block}.norm{1 if shared else part}", changed, f"{block}.edges.{name}.normalized")

    def _projected(self, layer: int, name: str, source: str, stream: str, out: str) -> str:
        """Queries, keys or values: an affine map, of heads with edges that of the stream without these."""
        architecture, block = self.architecture, f"blocks.{layer}"
        weight, bias = self.weights[f"{block}.{name}.weight"], self.weights.get(f"{block}.{name}.bias")
        heads, c = architecture.n_heads if name == "q" else architecture.kv_heads, architecture.head_dim
        every = readers_of(self.weights, block)
        cut = {head: rows for (channel, head), rows in every.items() if channel == CHANNELS[name]}
        if not cut:
            self.steps.append(Affine(out, (source,), weight, bias, 1, (heads, c)))
            return out
        if heads < architecture.n_heads:  # heads that share keys and values may read other streams
            self.steps.append(Affine(out, (source,), weight, bias, 1, (heads, c)))
            shared, heads, out = architecture.n_heads // heads, architecture.n_heads, f"{out}_by_head"
            weight = weight.unflatten(0, (-1, c)).repeat_interleave(shared, 0).flatten(0, 1)
            bias = None if bias is None else bias.unflatten(0, (-1, c)).repeat_interleave(shared, 0).flatten()
        reads = {
            head: self._alternative(layer, stream, rows, f"{name}{head}", 1) for head, rows in cut.items()
        }
        reads = {-1: source, **reads}
        total = ""
        for head, read in reads.items():
            kept = weight.new_zeros(heads, 1)
            kept[list(set(range(heads)) - set(cut)) if head < 0 else head] = 1.0
            rows = kept.expand(-1, c).reshape(-1)
            own = None if bias is None else bias * rows
            last = head == [*reads][-1]
            part = f"{out}_{'rest' if head < 0 else head}"
            self.steps.append(Affine(part, (read,), weight * rows[:, None], own, 1, (heads, c)))
            if total:
                self.steps.append(Add(out if last else f"{part}_sum", (total, part)))
            total = (out if last else f"{part}_sum") if total else part
        return total

    def _behind(self, block: str, added: str, part: int) -> str:
        """What a part of a block adds: its output, or the norm of that."""
        if self.architecture.norm_place not in ("sandwich", "output"):
            return added
        return self.norm(f"{block}.norm{part}_out", added, f"{block}.ln{part}_post.hook_normalized")

    def norm(self, name: str, source: str, out: str) -> str:
        """A norm of the model's kind."""
        weight, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        centred = self.architecture.norm_kind == "layer"
        self.steps.append(Norm(out, (source,), weight, bias, self.architecture.norm_eps, centred))
        return out

    def attention(self, layer: int, source: str, stream: str) -> str:
        """Queries, keys and values, scores, weights, and what attention adds."""
        architecture, block = self.architecture, f"blocks.{layer}"
        attn = f"{block}.attn"
        made = {}
        for name in "qkv":
            placed = architecture.head_positions and name != "v"
            out = f"{attn}.hook_{name}" + ("_unplaced" if placed else "")
            made[name] = self._projected(layer, name, source, stream, out)
            if placed:
                made[name] = f"{attn}.hook_{name}"
                self.steps.append(Shift(made[name], (out,), self._offset(layer, name)))
        q, k = (self._turned(layer, name, source, made[name]) for name in "qk")
        raw = f"{attn}.hook_attn_scores" + ("_uncapped" if architecture.score_cap is not None else "")
        bias, q = self._frozen(layer, self._bias(), q)
        self.steps.append(Scores(raw, (q, k), architecture.scale(layer), bias, self.masks[layer]))
        if architecture.score_cap is not None:
            self.steps.append(Softcap(f"{attn}.hook_attn_scores", (raw,), architecture.score_cap))
        self.steps.append(Softmax(f"{attn}.hook_pattern", (f"{attn}.hook_attn_scores",), self.masks[layer]))
        self.steps.append(Mix(f"{attn}.hook_z", (f"{attn}.hook_pattern", made["v"])))
        return self._written(f"{block}.o", f"{attn}.hook_z", f"{block}.hook_attn_out", 2)

    def _written(self, name: str, source: str, out: str, dims: int) -> str:
        """What a block adds: a map of its heads or neurons, parts of which may be held at tokens (`models.held`)."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        held, d = Held.of(self.weights, f"{name}.held"), len(weight)
        if held is None and name.endswith(".down") and sending_neurons(self.weights, int(name.split(".")[1])):
            send_neurons(self, name, source, out)
            return hold_at(self, out)
        if held is None:
            self.steps.append(Affine(out, (source,), weight, bias, dims, (d,)))
            return hold_at(self, out)
        chosen, values = held.places(self.n_tokens, self.n_real)
        rest = weight.new_zeros(d) if bias is None else bias
        width = d + len(held.read)
        opened = torch.cat((weight, held.read)), torch.cat((rest, held.bias))
        self.steps.append(Affine(f"{out}_parts", (source,), *opened, dims, (1, width)))
        factors = torch.cat((weight.new_ones(self.n_tokens, d), 1.0 - chosen), 1)
        self.steps.append(Rotary(f"{out}_kept", (f"{out}_parts",), factors, torch.zeros_like(factors)))
        offset = torch.cat((weight.new_zeros(self.n_tokens, d), values), 1)[:, None]
        self.steps.append(Shift(f"{out}_held", (f"{out}_kept",), offset))
        valued = add_values(self, held, f"{out}_held", d)
        joined = torch.cat((torch.eye(d, dtype=weight.dtype, device=weight.device), held.write), 1)
        self.steps.append(Affine(out, (valued,), joined, None, 2, (d,)))
        return hold_at(self, out)

    def _normed_whole(self, layer: int, name: str, read: str) -> str:
        """Queries or keys of all heads, normed together: projected as one vector, normed, and cut into heads."""
        architecture, attn = self.architecture, f"blocks.{layer}.attn"
        flat = self.affine(f"blocks.{layer}.{name}", read, f"{attn}.hook_{name}_flat")
        normed = self.norm(f"blocks.{layer}.{name}_norm", flat, f"{attn}.hook_{name}_flat_normalized")
        weight = self.weights[f"blocks.{layer}.{name}.weight"]
        same = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        shape = (len(weight) // architecture.head_dim, architecture.head_dim)
        self.steps.append(Affine(f"{attn}.hook_{name}_normalized", (normed,), same, None, 1, shape))
        return f"{attn}.hook_{name}_normalized"

    def _turned(self, layer: int, name: str, read: str, source: str) -> str:
        """Queries or keys as scores read them: normed and turned where the model does so."""
        architecture, attn = self.architecture, f"blocks.{layer}.attn"
        if architecture.qk_norm == "head":
            source = self.norm(f"blocks.{layer}.{name}_norm", source, f"{attn}.hook_{name}_normalized")
        elif architecture.qk_norm == "whole":
            source = self._normed_whole(layer, name, read)
        if architecture.is_rotary:
            cos, sin = self._tables(layer)
            self.steps.append(Rotary(f"{attn}.hook_rot_{name}", (source,), cos, sin))
            source = f"{attn}.hook_rot_{name}"
        return source

    def _offset(self, layer: int, name: str) -> Tensor:
        """The vectors of positions that queries or keys get, for as many tokens as there are."""
        offset, n_tokens = self.weights[f"blocks.{layer}.{name}.positions"], self.n_tokens
        if n_tokens > len(offset):
            raise ModelError(f"the input has {n_tokens} tokens and the model positions for {len(offset)}")
        return offset[:n_tokens].reshape(n_tokens, -1, self.architecture.head_dim)

    def _tables(self, layer: int) -> tuple[Tensor, Tensor]:
        architecture, n_tokens = self.architecture, self.n_tokens
        like = self.weights["blocks.0.q.weight"]
        if not architecture.rope_given:
            assert architecture.rope_theta is not None
            return rotary_tables(n_tokens, architecture.head_dim, architecture.rope_theta, like)
        local = architecture.rope_local and architecture.is_local(layer)
        frequencies = self.weights["rope.local_frequencies" if local else "rope.frequencies"]
        return turned_tables(n_tokens, frequencies, like, 1.0 if local else architecture.rope_scale)

    def _bias(self) -> Tensor | None:
        architecture, n_tokens = self.architecture, self.n_tokens
        if architecture.relative_buckets is not None:
            table = self.weights["relative_bias"]
            return relative_bias(table, n_tokens, architecture.relative_max_distance)
        if architecture.alibi:
            return alibi_bias(architecture.n_heads, n_tokens, self.weights["blocks.0.q.weight"])
        return None

    def _frozen(self, layer: int, bias: Tensor | None, q: str) -> tuple[Tensor | None, str]:
        """The bias of scores and the queries that they read: of frozen heads constants, and 0 (`models.frozen`)."""
        frozen = frozen_scores(self.weights, layer, self.n_tokens)
        if not frozen:
            return bias, q
        H, c, S = self.architecture.n_heads, self.architecture.head_dim, self.n_tokens
        like = next(iter(frozen.values()))
        kept = like.new_ones(H, c)
        bias = like.new_zeros(H, S, S) if bias is None else bias.clone()
        for head, scores in frozen.items():
            bias[head], kept[head] = scores, 0.0
        out = f"blocks.{layer}.attn.hook_q_live"
        self.steps.append(Affine(out, (q,), torch.diag(kept.flatten()), None, 2, (H, c)))
        return bias, out

    def network(self, block: str, source: str) -> str:
        """The feed-forward network and what it adds."""
        mlp, function = f"{block}.mlp", self.architecture.activation
        if self.architecture.gated and function != "solu":
            pre = self.affine(f"{block}.gate", source, f"{mlp}.hook_pre")
            linear = self.affine(f"{block}.up", source, f"{mlp}.hook_pre_linear")
            self.steps.append(Elementwise(f"{mlp}.hook_gate", (pre,), function))
            self.steps.append(Product(f"{mlp}.hook_post", (f"{mlp}.hook_gate", linear)))
        else:
            pre = self.affine(f"{block}.up", source, f"{mlp}.hook_pre")
            normed = self.architecture.network_norm
            out = f"{mlp}.hook_mid" if normed else f"{mlp}.hook_post"
            self.steps.append(Solu(out, (pre,)) if function == "solu" else Elementwise(out, (pre,), function))
            if normed:
                self.norm(f"{block}.network_norm", out, f"{mlp}.hook_post")
        return self._written(f"{block}.down", f"{mlp}.hook_post", f"{block}.hook_mlp_out", 1)

    def affine(self, name: str, source: str, out: str) -> str:
        """An affine map of every token."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        self.steps.append(Affine(out, (source,), weight, bias, 1, (weight.shape[0],)))
        return out
