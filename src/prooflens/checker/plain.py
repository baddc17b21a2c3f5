"""The network in float64, many prompts of one length at a time: to run again what an enumeration lists.

It says what float64 says, no more: values are not enclosed. The order of the steps is that of `network`, in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prooflens.checker import edited
from prooflens.checker.network import SOLU, Array, Network

_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda v: np.maximum(v, 0.0),
    "gelu": lambda v: v / 2 * (1 + _erf(v / np.sqrt(2.0))),
    "gelu_tanh": lambda v: v / 2 * (1 + np.tanh(np.sqrt(2.0 / np.pi) * (v + 0.044715 * v**3))),
    "silu": lambda v: v / (1 + np.exp(-v)),
    "tanh": np.tanh,
    "relu2": lambda v: np.maximum(v, 0.0) ** 2,
}

UNNOTED = (".attn.hook_q", ".attn.hook_k", ".attn.hook_rot_q", ".attn.hook_rot_k")
"""Hooks whose values are not kept here."""


class PlainNetwork:
    """A `Network`, run in float64.

    Attributes:
        net: architecture, weights, masks and tables.
    """

    def __init__(self, net: Network) -> None:
        self.net, self.arch, self.weights = net, net.arch, net.weights
        self._hooks: set[str] = set()
        self._found: dict[int | str, Array] = {}
        self._sent: dict[str, NDArray[Any]] = {}

    def run(
        self, ids: NDArray[np.int64], layers: Iterable[int], output: bool, hooks: Iterable[str] = ()
    ) -> dict[int | str, Array]:
        """Of prompts [B, S]: the scores [B, H, S, S] of some layers and, if asked for, the outputs [B, C].

        Values of `hooks` come by their names, [B, S, n]; a ValueError names one that is not noted here.
        """
        wanted, found = set(layers), dict[int | str, Array]()
        self._hooks, self._found = set(hooks), found
        deepest = max([int(hook.split(".")[1]) for hook in self._hooks] + [*wanted], default=-1)
        last = self.arch["n_layers"] - 1 if output else deepest
        x = self._embed(ids)
        self._sent = {"input": x, "tokens": np.arange(ids.shape[1]), "width": np.asarray(self.net.head_dim)}
        for layer in range(last + 1):
            x, scores = self._block(layer, x)
            if layer in wanted and scores is not None:
                found[layer] = scores
        if missing := sorted(self._hooks - set(found)):
            raise ValueError(f"{missing[0]} is not run again")
        if output:
            cut = edited.without_edges(self.weights, ("final_norm", 4, -1), x, self._sent, np.matmul)
            found["logits"] = self.read_out(x if cut is None else cut)
        return found

    def _note(self, hook: str, x: Array) -> Array:
        """A value, kept if it is asked for, or may be sent over an edge."""
        if hook.endswith(("hook_z", "hook_post", "_out")):
            self._sent[hook] = x
        if hook in self._hooks:
            self._found[hook] = x
        return x

    def _embed(self, ids: NDArray[np.int64]) -> Array:
        weights, arch = self.weights, self.arch
        x = weights["embed.tokens"][ids]
        x = x if arch.get("embed_scale") is None else x * arch["embed_scale"]
        if "embed.positions" in weights:
            x = x + weights["embed.positions"][arch["position_offset"] :][: ids.shape[1]]
        if "embed.types" in weights:
            x = x + weights["embed.types"][0]
        if "embed.norm.weight" in weights:
            x = self._norm("embed.norm", x, centred=True)
        return self._affine("embed.project", x) if "embed.project.weight" in weights else x

    def _block(self, layer: int, x: Array) -> tuple[Array, Array | None]:
        block, place, scores = f"blocks.{layer}", self.arch["norm_place"], None
        attends, feeds = (self.arch.get(name, True) for name in ("has_attention", "has_network"))
        x = self._held(f"{block}.hook_resid_pre", x)
        inner, attended = self._before(layer, x, 1), np.zeros(1)
        if inner is not x:
            self._note(f"{block}.ln1.hook_normalized", inner)
        if attends:
            scores = self._scores(layer, (inner, x))
            v = self._heads(self._projected(layer, "v", (inner, x)))
            masked = np.where(self.net.masks(x.shape[1], layer), scores, -np.inf)
            e = np.exp(masked - masked.max(-1, keepdims=True))
            mixed = (e / e.sum(-1, keepdims=True)) @ v
            flat = self._note(f"{block}.attn.hook_z", mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1))
            out = self._held(f"{block}.hook_attn_out", self._written(f"{block}.o", flat))
            attended = self._behind(block, out, 1)
        if self.arch.get("parallel"):
            second = inner if self.arch.get("shared_norm") else self._before(layer, x, 2)
            second = self._cut(layer, (second, x), (3, -1))
            x = x + self._behind(block, self._network(block, second), 2) + attended
            return self._held(f"{block}.hook_resid_post", x), scores
        x = x + attended
        if attends:
            x = self._held(f"{block}.hook_resid_{'mid' if feeds or place == 'post' else 'post'}", x)
        if attends and place == "post":
            x = self._note(f"{block}.ln1.hook_normalized", self._norm(f"{block}.norm1", x))
        if feeds:
            second = self._before(layer, x, 2)
            if second is not x:
                self._note(f"{block}.ln2.hook_normalized", second)
            second = self._cut(layer, (second, x), (3, -1))
            x = self._held(
                f"{block}.hook_resid_post", x + self._behind(block, self._network(block, second), 2)
            )
            x = self._norm(f"{block}.norm2", x) if place == "post" else x
        else:
            self._note(f"{block}.hook_resid_post", x)
        return self._note(f"{block}.hook_normalized_resid_post", x), scores

    def _cut(self, layer: int, read: tuple[Array, Array], reader: tuple[int, int]) -> Array:
        """What a receiver reads, `read` without its edges: the stream's norm and the stream itself."""
        cut = edited.without_edges(self.weights, (f"blocks.{layer}", *reader), read[1], self._sent, np.matmul)
        if cut is None:
            return read[0]
        return self._before(layer, cut, 2 if reader[0] == 3 and not self.arch.get("shared_norm") else 1)

    def _projected(self, layer: int, name: str, read: tuple[Array, Array]) -> Array:
        """Queries, keys or values, of heads with edges those of the stream without them."""
        base, heads = self._affine(f"blocks.{layer}.{name}", read[0]), self.arch["n_heads"]
        inner = {h: self._cut(layer, read, ("qkv".index(name), h)) for h in range(heads)}
        others = {h: self._affine(f"blocks.{layer}.{name}", y) for h, y in inner.items() if y is not read[0]}
        made: Array = edited.by_heads(base, others, heads, self.net.head_dim) if others else base
        if name == "v":
            self._note(f"blocks.{layer}.attn.hook_v", made if made.shape == base.shape else base)
        return made

    def _scores(self, layer: int, read: tuple[Array, Array]) -> Array:
        cap, n = self.arch.get("score_cap"), read[0].shape[1]
        q, k = (self._heads(self._queries(layer, name, read), layer) for name in "qk")
        scores: Array = q @ k.swapaxes(-1, -2) * self.net.scale(layer) + self.net.score_bias(n)
        scores = edited.frozen(self.weights, layer, scores)
        return scores if cap is None else np.tanh(scores / cap) * cap

    def _queries(self, layer: int, name: str, read: tuple[Array, Array]) -> Array:
        block, x = f"blocks.{layer}", read[0]
        projected, kind = self._projected(layer, name, read), self.arch.get("qk_norm", "none")
        if self.arch.get("head_positions"):
            projected = projected + self.weights[f"{block}.{name}.positions"][: x.shape[1]]
        if kind == "whole":
            return self._norm(f"{block}.{name}_norm", projected)
        if kind == "head":
            heads = projected.reshape(*x.shape[:2], -1, self.net.head_dim)
            return self._norm(f"{block}.{name}_norm", heads).reshape(projected.shape)
        return projected

    def _heads(self, x: Array, layer: int | None = None) -> Array:
        """[B, S, G·d_h] to [B, H, S, d_h]; queries and keys, which name their layer, are turned."""
        x = x.reshape(*x.shape[:2], -1, self.net.head_dim).swapaxes(1, 2)
        tables = None if layer is None else self.net.rotary(x.shape[2], layer)
        if tables is not None:
            half = self.net.head_dim // 2
            x = x * tables[0] + np.concatenate((-x[..., half:], x[..., :half]), -1) * tables[1]
        return x.repeat(self.arch["n_heads"] // x.shape[1], axis=1)

    def _before(self, layer: int, x: Array, part: int) -> Array:
        bare = part == 1 and layer == 0 and not self.arch.get("first_norm", True)
        if bare or self.arch["norm_place"] not in ("pre", "sandwich"):
            return x
        return self._norm(f"blocks.{layer}.norm{part}", x)

    def _behind(self, block: str, added: Array, part: int) -> Array:
        normed = self.arch["norm_place"] in ("sandwich", "output")
        return self._norm(f"{block}.norm{part}_out", added) if normed else added

    def _network(self, block: str, z: Array) -> Array:
        gated = self.arch["gated"]
        pre = self._note(f"{block}.mlp.hook_pre", self._affine(f"{block}.{'gate' if gated else 'up'}", z))
        if self.arch["activation"] == SOLU:
            e = np.exp(pre - pre.max(-1, keepdims=True))
            hidden = pre * (e / e.sum(-1, keepdims=True))
        else:
            hidden = _ACTIVATIONS[self.arch["activation"]](pre)
        if self.arch.get("network_norm"):
            hidden = self._norm(f"{block}.network_norm", self._note(f"{block}.mlp.hook_mid", hidden))
        if gated:
            hidden = hidden * self._note(f"{block}.mlp.hook_pre_linear", self._affine(f"{block}.up", z))
        post = self._note(f"{block}.mlp.hook_post", hidden)
        return self._held(f"{block}.hook_mlp_out", self._written(f"{block}.down", post))

    def _written(self, name: str, x: Array) -> Array:
        found: Array = edited.written(self.weights, name, x, self._affine(name, x), x.shape[1], np.matmul)
        return found

    def _held(self, hook: str, x: Array) -> Array:
        """A value with its directions and features held, kept if it is asked for."""
        relu, jump = _ACTIVATIONS["relu"], lambda v: (v > 0.0).astype(np.float64)
        return self._note(hook, edited.held_at(self.weights, hook, x, x.shape[1], np.matmul, relu, jump))

    def _affine(self, name: str, x: Array) -> Array:
        found: Array = x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)
        return found

    def _norm(self, name: str, x: Array, centred: bool | None = None) -> Array:
        centred = self.arch["norm_kind"] == "layer" if centred is None else centred
        m = x - x.mean(-1, keepdims=True) if centred else x
        z = m / np.sqrt((m * m).mean(-1, keepdims=True) + self.arch["norm_eps"])
        found: Array = z * self.weights.get(f"{name}.weight", 1.0) + self.weights.get(f"{name}.bias", 0.0)
        return found

    def read_out(self, x: Array) -> Array:
        """Final norm, pooling and head of a stream [B, S, d]."""
        if self.arch["norm_place"] in ("pre", "sandwich", "output"):
            x = self._norm("final_norm", x)
        pool = self.arch["pool"]
        y: Any = x.mean(1) if pool == "mean" else x[:, 0] if pool == "first" else x[:, -1]
        if self.arch["pooler"]:
            y = _ACTIVATIONS[self.arch.get("pooler_activation", "tanh")](self._affine("pooler", y))
        if self.arch["d_out"] is not None:
            tied = "head.weight" not in self.weights
            y = y @ self.weights["embed.tokens"].T if tied else self._affine("head", y)
        return np.asarray(y)
