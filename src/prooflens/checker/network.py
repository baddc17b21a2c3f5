"""A model from its weight folder, without torch: config.json and safetensors, its fingerprint, and its forward pass.

The forward pass is in Arb balls, with more bits the deeper it goes, so its values contain those of the network over
the reals. The Hugging Face layouts of `families` and prooflens' own are read. Models of other families are checked from
a folder in prooflens' own layout (`prooflens export`), whose fingerprint is that of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flint import arb, arb_mat, ctx
from numpy.typing import NDArray
from safetensors.numpy import load_file

from prooflens.checker import edited
from prooflens.checker.description import Array, Balls, Description, Tables
from prooflens.checker.families import Folder, Powers

__all__ = ["SOLU", "Array", "Balls", "Network", "Tables"]

_DEFAULTS: dict[str, Any] = json.loads(
    '{"norm_kind": "layer", "norm_place": "post", "norm_eps": 1e-5, "n_kv_heads": null, "d_head": null, "d_out": null,'
    '"gated": false, "causal": false, "rope_theta": null, "relative_buckets": null, "relative_max_distance": 128,'
    '"pool": "none", "pooler": false, "d_vocab": null, "context": null, "position_offset": 0}'
)

_ACTIVATIONS: dict[str, Callable[[arb], arb]] = {
    "relu": lambda v: v.max(arb(0)),
    "gelu": lambda v: v / 2 * (1 + (v / arb(2).sqrt()).erf()),
    "gelu_tanh": lambda v: v / 2 * (1 + ((2 / arb.pi()).sqrt() * (v + arb("0.044715") * v**3)).tanh()),
    "silu": lambda v: v / (1 + (-v).exp()),
    "tanh": arb.tanh,
    "relu2": lambda v: v.max(arb(0)) ** 2,
}


def _jump(v: arb) -> arb:
    """1 above 0, and 0 at 0 and below; of a ball that reaches both, or is not finite, all between."""
    return arb(1) if v > 0 else arb(0) if v <= 0 else arb(0.5, 0.5)


SOLU = "solu"
"""The activation of all neurons of a token together: x·softmax(x)."""


def _each(function: Callable[[arb], arb], x: Balls) -> Balls:
    return np.asarray(np.frompyfunc(function, 1, 1)(x), dtype=object)


def _product(x: Balls, y: Balls) -> Balls:
    a, b = (arb_mat(*z.shape, [arb(v) for v in z.ravel().tolist()]) for z in (x, y))
    return np.array((a * b).entries(), dtype=object).reshape(x.shape[0], y.shape[1])


def _weights(a: Balls, seen: NDArray[np.bool_] | None = None) -> Balls:
    """Softmax over the last dimension, of what is seen; every row is shifted by its largest middle."""
    shift = _each(lambda s: arb(float(s.mid())), a).max(-1, keepdims=True)
    e = _each(arb.exp, a - shift)
    e = e if seen is None else e * seen
    return np.asarray(e / e.sum(-1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Network(Description):
    """A network that runs in balls; of one that ends at a hook, also the one that goes on."""

    goes_on: Network | None = None

    @classmethod
    def read(cls, folder: Path, tables: Tables | None = None, powers: Powers | None = None) -> Network:
        """The model of a folder; `tables` and `powers` are the RoPE constants of the library that runs it."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        paths = sorted(folder.glob("model*.safetensors"))
        state = {name: t for path in paths for name, t in load_file(path).items()}
        if config.get("model_type") == "prooflens":
            arch, held = config["architecture"], state
        else:
            pooling, pool = folder / "1_Pooling" / "config.json", None
            if pooling.is_file():
                pool = "mean" if json.loads(pooling.read_text()).get("pooling_mode_mean_tokens") else "first"
            arch, held = Folder(config, state, pool, powers).read()
        weights = {name: np.ascontiguousarray(t, dtype=np.float64) for name, t in held.items()}
        return cls.made(arch, weights, tables)

    @classmethod
    def made(cls, arch: dict[str, Any], weights: dict[str, Array], tables: Tables | None = None) -> Network:
        """A network of an architecture, as a folder in prooflens' own layout states it, and canonical weights."""
        return cls(_DEFAULTS | arch, weights, tables)

    def cut(self, layers: int | None) -> Network:
        """The network after its first blocks (None: all): what follows the last one follows there."""
        layers = layers or self.arch["n_layers"]
        gone = tuple(f"blocks.{layer}." for layer in range(layers, self.arch["n_layers"])) or "nothing."
        kept = {name: t for name, t in self.weights.items() if not name.startswith(gone)}
        return Network(self.arch | {"n_layers": layers}, kept, self.tables)

    def read_at(
        self,
        hook: str,
        position: int,
        weight: Array,
        bias: Array | None,
        beside: tuple[str, int] | None = None,
    ) -> Network:
        """The network that ends at a hook: its outputs are weight · value + bias at one token.

        Args:
            hook: the value.
            position: the token.
            weight: one row for each output; the columns of the value beside it stand behind.
            bias: what is added; None for 0.
            beside: the hook and token of another value; None for none.
        """
        gone = ("head.", "pooler.", "final_norm.", "read.")
        kept = {name: t for name, t in self.weights.items() if not name.startswith(gone)}
        kept["read.weight"] = np.ascontiguousarray(weight, dtype=np.float64)
        if bias is not None:
            kept["read.bias"] = np.ascontiguousarray(bias, dtype=np.float64)
        arch = {name: value for name, value in self.arch.items() if name != "logit_cap"}
        arch |= {"d_out": len(weight), "pool": "first", "pooler": False}
        arch |= {"read_hook": hook, "read_position": position}
        arch |= {} if beside is None else {"beside_hook": beside[0], "beside_position": beside[1]}
        return Network(arch, kept, self.tables, self)

    def embed(self, ids: Iterable[int]) -> Balls:
        """The input [S, d] of a prompt's tokens: positions and types are added, normed and projected as models do."""
        held, weights = list(ids), self.weights
        with ctx.workprec(256):
            x = _each(arb, weights["embed.tokens"][held].astype(object))
            x = x if self.arch.get("embed_scale") is None else x * arb(self.arch["embed_scale"])
            if "embed.positions" in weights:
                x = x + weights["embed.positions"][self.arch["position_offset"] :][: len(held)]
            if "embed.types" in weights:
                x = x + weights["embed.types"][0]
            if "embed.norm.weight" in weights:
                if self.arch["norm_kind"] != "layer":
                    raise ValueError("a norm of embeddings in a model of another norm is not known here")
                x = self._norm("embed.norm", x)
            return self._affine("embed.project", x) if "embed.project.weight" in weights else np.asarray(x)

    def run(
        self, points: list[Balls], layers: Iterable[int], output: bool = False
    ) -> list[dict[int | str, Balls]]:
        """At points [S, d]: the scores [H, S, S] of some layers and, if asked for, the "logits" that claims read.

        Points may have free coordinates behind these, which say at which value of a set parts are held.
        """
        wanted, n = set(layers), points[0].shape[0]
        last = self.arch["n_layers"] - 1 if output else max(wanted, default=-1)
        found: list[dict[int | str, Balls]] = [{} for _ in points]
        with ctx.workprec(128 + 40 * last):
            whole, d = np.concatenate(points), self.arch["d_model"]
            x, notes = whole[:, :d], {"free": whole[:, d:]}
            notes |= {"input": x, "tokens": np.arange(n), "width": np.asarray(self.head_dim)}
            for layer in range(last + 1):
                x = self._block(layer, x, found, notes, stop=layer == last and not output)
            if output and (hook := self.arch.get("read_hook")) is not None:
                here = self._read(hook, notes)[self.arch["read_position"] :: n]
                if (beside := self.arch.get("beside_hook")) is not None:
                    there = self._read(beside, notes)[self.arch["beside_position"] :: n]
                    here = np.concatenate((here, there), -1)
                x = self._affine("read", here)
            if output and "read.weight" not in self.weights:
                cut = edited.without_edges(self.weights, ("final_norm", 4, -1), x, notes, _product)
                x = x if cut is None else np.asarray(cut)
            for b, values in enumerate(found if output else []):
                read = "read.weight" in self.weights
                values["logits"] = x[b] if read else self._read_out(x[b * n : (b + 1) * n])
        return found

    def before(self, x: Balls, layer: int) -> Balls:
        """The residual stream in front of a block, from an input [S, d].

        Args:
            x: the input.
            layer: the block.
        """
        found: list[dict[int | str, Balls]] = [{}]
        notes: dict[str, Balls] = {
            "input": x,
            "tokens": np.arange(len(x)),
            "width": np.asarray(self.head_dim),
        }
        for number in range(layer):
            x = self._block(number, x, found, notes, stop=False)
        return x

    @staticmethod
    def _read(hook: str, notes: dict[str, Balls]) -> Balls:
        """The value of a hook at every token of every point."""
        if hook not in notes:
            raise ValueError(f"the checker does not compute {hook}")
        return notes[hook]

    def _block(
        self, layer: int, x: Balls, found: list[dict[int | str, Balls]], notes: dict[str, Balls], stop: bool
    ) -> Balls:
        """One block; its scores and its values are noted, and with `stop` nothing more is computed."""
        block, place, n = f"blocks.{layer}", self.arch["norm_place"], len(x) // len(found)
        attends, feeds = (self.arch.get(name, True) for name in ("has_attention", "has_network"))
        x = self._held(f"{block}.hook_resid_pre", x, n, notes)
        inner = self._before(layer, x, 1)
        notes[f"{block}.hook_resid_pre"] = x
        if inner is not x:
            notes[f"{block}.ln1.hook_normalized"] = inner
        attended: Balls | float = 0.0
        if attends:
            self._note_scores(layer, (inner, x), found, notes)
            if stop:
                return x
            v = self._heads(self._projected(layer, "v", (inner, x), notes), len(found), layer, turn=False)
            mixed = [self._attend(values[layer], v[b], layer) for b, values in enumerate(found)]
            notes[f"{block}.attn.hook_z"] = np.concatenate(mixed)
            notes[f"{block}.hook_attn_out"] = self._written(
                f"{block}.o", notes[f"{block}.attn.hook_z"], n, notes
            )
            attended = self._behind(block, notes[f"{block}.hook_attn_out"], 1)
        if self.arch.get("parallel"):
            second = inner if self.arch.get("shared_norm") else self._before(layer, x, 2)
            notes |= {} if second is x or second is inner else {f"{block}.ln2.hook_normalized": second}
            second = self._cut(layer, (second, x), (3, -1), notes)
            x = np.asarray(x + self._behind(block, self._network(block, second, notes, n), 2) + attended)
            notes[f"{block}.hook_resid_post"] = x = self._held(f"{block}.hook_resid_post", x, n, notes)
            return x
        x = x + attended
        if attends:
            last = "mid" if feeds or place == "post" else "post"
            x = self._held(f"{block}.hook_resid_{last}", x, n, notes)
            notes[f"{block}.hook_resid_mid"] = x
            x = self._norm(f"{block}.norm1", x) if place == "post" else x
            notes |= {f"{block}.ln1.hook_normalized": x} if place == "post" else {}
        if feeds:
            second = self._before(layer, x, 2)
            notes |= {f"{block}.ln2.hook_normalized": second} if second is not x else {}
            second = self._cut(layer, (second, x), (3, -1), notes)
            x = x + self._behind(block, self._network(block, second, notes, n), 2)
            x = self._held(f"{block}.hook_resid_post", x, n, notes)
        notes[f"{block}.hook_resid_post"] = x
        x = self._norm(f"{block}.norm2", x) if feeds and place == "post" else x
        notes[f"{block}.hook_normalized_resid_post"] = x
        return np.asarray(x)

    def _cut(
        self, layer: int, read: tuple[Balls, Balls], reader: tuple[int, int], notes: dict[str, Balls]
    ) -> Balls:
        """What a receiver reads, `read` without its edges: the stream's norm and the stream itself."""
        cut = edited.without_edges(self.weights, (f"blocks.{layer}", *reader), read[1], notes, _product)
        if cut is None:
            return read[0]
        return self._before(
            layer, np.asarray(cut), 2 if reader[0] == 3 and not self.arch.get("shared_norm") else 1
        )

    def _projected(self, layer: int, name: str, read: tuple[Balls, Balls], notes: dict[str, Balls]) -> Balls:
        """Queries, keys or values, of heads with edges those of the stream without them."""
        block = f"blocks.{layer}"
        base = self._affine(f"{block}.{name}", read[0])
        inner = {
            h: self._cut(layer, read, ("qkv".index(name), h), notes) for h in range(self.arch["n_heads"])
        }
        others = {h: self._affine(f"{block}.{name}", y) for h, y in inner.items() if y is not read[0]}
        made = edited.by_heads(base, others, self.arch["n_heads"], self.head_dim) if others else base
        notes[f"{block}.attn.hook_{name}"] = made if made.shape == base.shape else base
        return made

    def _note_scores(
        self,
        layer: int,
        read: tuple[Balls, Balls],
        found: list[dict[int | str, Balls]],
        notes: dict[str, Balls],
    ) -> None:
        """The scores of a layer at every point, capped where the model caps them."""
        block, cap = f"blocks.{layer}", self.arch.get("score_cap")
        q, k = (self._queries(block, name, read, len(found), layer, notes) for name in "qk")
        for b, values in enumerate(found):
            products = [_product(q[b, h], k[b, h].T) for h in range(q.shape[1])]
            scores = np.array(products) * self.scale(layer) + self.score_bias(q.shape[2])
            scores = edited.frozen(self.weights, layer, scores)
            values[layer] = scores if cap is None else _each(arb.tanh, scores / arb(cap)) * arb(cap)

    def _queries(
        self,
        block: str,
        name: str,
        read: tuple[Balls, Balls],
        batch: int,
        layer: int,
        notes: dict[str, Balls],
    ) -> Balls:
        """Queries or keys as scores read them: normed, where the model norms them, and turned."""
        projected, kind = self._projected(layer, name, read, notes), self.arch.get("qk_norm", "none")
        if self.arch.get("head_positions"):
            places = self.weights[f"{block}.{name}.positions"][: len(read[0]) // batch]
            projected = projected + np.tile(places, (batch, 1))
            notes[f"{block}.attn.hook_{name}"] = projected
        if kind == "whole":
            projected = self._norm(f"{block}.{name}_norm", projected)
        if kind == "head":
            rows = projected.reshape(-1, self.head_dim)
            projected = self._norm(f"{block}.{name}_norm", rows).reshape(projected.shape)
        turned = self._heads(projected, batch, layer)
        alone = turned[:, :: turned.shape[1] * self.head_dim // projected.shape[1]]
        notes[f"{block}.attn.hook_rot_{name}"] = alone.swapaxes(1, 2).reshape(projected.shape)
        return turned

    def _before(self, layer: int, x: Balls, part: int) -> Balls:
        """What a part of a block reads: the stream, or its norm."""
        bare = part == 1 and layer == 0 and not self.arch.get("first_norm", True)
        if bare or self.arch["norm_place"] not in ("pre", "sandwich"):
            return x
        return self._norm(f"blocks.{layer}.norm{part}", x)

    def _behind(self, block: str, added: Balls, part: int) -> Balls:
        """What a part of a block adds: its output, or the norm of that."""
        normed = self.arch["norm_place"] in ("sandwich", "output")
        return self._norm(f"{block}.norm{part}_out", added) if normed else added

    def _network(self, block: str, z: Balls, notes: dict[str, Balls], n: int) -> Balls:
        """The feed-forward network."""
        gated = self.arch["gated"]
        pre = self._affine(f"{block}.{'gate' if gated else 'up'}", z)
        linear = self._affine(f"{block}.up", z) if gated else 1.0
        if self.arch["activation"] == SOLU:
            post = pre * _weights(pre)
        else:
            post = _each(_ACTIVATIONS[self.arch["activation"]], pre) * linear
        if self.arch.get("network_norm"):
            notes[f"{block}.mlp.hook_mid"], post = post, self._norm(f"{block}.network_norm", post)
        out = self._written(f"{block}.down", post, n, notes)
        notes |= {f"{block}.mlp.hook_pre": pre, f"{block}.mlp.hook_post": post, f"{block}.hook_mlp_out": out}
        notes |= {f"{block}.mlp.hook_pre_linear": np.asarray(linear)} if gated else {}
        return out

    def _written(self, name: str, x: Balls, n: int, notes: dict[str, Balls]) -> Balls:
        """What a block adds, its parts held where the network holds them."""
        y = edited.written(self.weights, name, x, self._affine(name, x), n, _product, notes.get("free"))
        block, _, map_name = name.rpartition(".")
        return self._held(f"{block}.hook_{'attn' if map_name == 'o' else 'mlp'}_out", y, n, notes)

    def _held(self, hook: str, x: Balls, n: int, notes: dict[str, Balls]) -> Balls:
        """A value of every point, with its directions and features held where the network holds them."""
        relu, jump = (partial(_each, function) for function in (_ACTIVATIONS["relu"], _jump))
        free = notes.get("free")
        return np.asarray(edited.held_at(self.weights, hook, x, n, _product, relu, jump, free))

    def _affine(self, name: str, x: Balls) -> Balls:
        return _product(x, self.weights[f"{name}.weight"].T) + self.weights.get(f"{name}.bias", 0.0)

    def _norm(self, name: str, x: Balls) -> Balls:
        m = x - x.sum(-1, keepdims=True) / x.shape[-1] if self.arch["norm_kind"] == "layer" else x
        n = _each(arb.rsqrt, (m * m).sum(-1, keepdims=True) / x.shape[-1] + self.arch["norm_eps"])
        return m * n * self.weights.get(f"{name}.weight", 1.0) + self.weights.get(f"{name}.bias", 0.0)

    def _heads(self, x: Balls, batch: int, layer: int = 0, turn: bool = True) -> Balls:
        """[B·S, G·d_h] to [B, H, S, d_h], with RoPE."""
        x = x.reshape(batch, len(x) // batch, -1, self.head_dim).swapaxes(1, 2)
        tables = self.rotary(x.shape[2], layer) if turn else None
        if tables is not None:
            cos, sin = (_each(lambda v: arb(v, tables[2]), table) for table in tables[:2])
            half = self.head_dim // 2
            x = x * cos + np.concatenate((-x[..., half:], x[..., :half]), -1) * sin
        return x.repeat(self.arch["n_heads"] // x.shape[1], axis=1)

    def _attend(self, a: Balls, v: Balls, layer: int = -1) -> Balls:
        s = _weights(a, self.masks(a.shape[-1], layer))
        return np.concatenate([_product(s[h], v[h]) for h in range(len(s))], axis=-1)

    def _read_out(self, x: Balls) -> Balls:
        if self.arch["norm_place"] in ("pre", "sandwich", "output"):
            x = self._norm("final_norm", x)
        pool, n = self.arch["pool"], len(x)
        x = x.sum(0, keepdims=True) * (1.0 / n) if pool == "mean" else x[:1] if pool == "first" else x[-1:]
        if self.arch["pooler"]:
            act = _ACTIVATIONS[self.arch.get("pooler_activation", "tanh")]
            x = _each(act, self._affine("pooler", x))
        if self.arch["d_out"] is not None:
            tied = "head.weight" not in self.weights
            x = _product(x, self.weights["embed.tokens"].T) if tied else self._affine("head", x)
        return np.asarray(x[0])
