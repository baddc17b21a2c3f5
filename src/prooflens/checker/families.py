"""Hugging Face folders, read by the checker itself: which tensor is which, and what its configuration says.

`layouts` has the names; here is what families need beside, and `frequencies` how fast pairs turn. What is not read
here (mixtures, other families) is checked from a folder in prooflens' own layout (`prooflens export`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prooflens.checker.frequencies import scaled
from prooflens.checker.layouts import ACTIVATIONS, ALIASES, FAMILIES, GROUPED, KEYS, OLD_IMAGE, TABLES, TIED

Array = NDArray[Any]
Tensors = dict[str, Array]
Config = dict[str, Any]
Powers = Callable[[float, int], NDArray[np.float32]]
"""θ^(2c/d) in float32 for c = 0, …, d/2 − 1, as a library makes them."""


def own_powers(theta: float, width: int) -> NDArray[np.float32]:
    """θ^(2c/d), each rounded to float32 once."""
    share = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.power(theta, share.astype(np.float64)).astype(np.float32)


class Folder:
    """One folder while it is read: its configuration and tensors, and what is found in them."""

    def __init__(self, config: Config, state: Tensors, pool: str | None, powers: Powers | None) -> None:
        self.config, self.pool, self.powers = config, pool, powers
        self.family = str(config.get("model_type"))
        known = {text.split()[0]: text.split("|") for text in FAMILIES.strip().split("\n\n")}
        row = known.get(ALIASES.get(self.family, self.family))
        if row is None or config.get("num_local_experts") or config.get("num_experts"):
            raise ValueError(f"model type {self.family!r} is not known to the checker")
        keys, trunk, self.blocks, self.parts, self.others = (part.strip() for part in row[1:6])
        self.has_trunk = any(name.startswith(trunk) for name in state)
        self.whole = state
        bare = {name.removeprefix(trunk.split(".")[0] + "."): t for name, t in state.items()}
        self.state = {name.removeprefix("decoder."): t for name, t in bare.items()}
        values = [
            next((config[k] for k in key.split("/") if config.get(k) is not None), None)
            for key in keys.split()
        ]
        self.arch: Config = {
            "family": self.family,
            **dict(zip(KEYS, values, strict=True)),
            **json.loads(row[6]),
        }
        act = str(self.arch["activation"])
        self.arch["activation"] = ACTIVATIONS.get(act, act)
        self.held: Tensors = {}

    def read(self) -> tuple[Config, Tensors]:
        """Architecture and canonical weights."""
        arch, state = self.arch, self.state
        if self.family in ("vit", "dinov2"):
            self._image_names()
        names, others = self.parts.split(), self.others.split()
        where = dict(zip(others[::2], others[1::2], strict=True))
        for layer in range(arch["n_layers"]):
            for ours, theirs in zip(names[::2], names[1::2], strict=True):
                where[f"blocks.{layer}.{ours}"] = f"{self.blocks}.{layer}.{theirs}"
        both = [(f"{a}.{kind}", f"{b}.{kind}") for a, b in where.items() for kind in ("weight", "bias")]
        self.held = {ours: state[theirs] for ours, theirs in both if theirs in state}
        for ours, choices in TABLES.items():
            found = next((f"{name}.weight" for name in choices if f"{name}.weight" in state), None)
            if found is not None:
                self.held[f"embed.{ours}"] = state[found]
        self._cut_joint()
        if self.family in ("vit", "dinov2"):
            self._image()
        elif self.family == "modernbert":
            self._modernbert()
        elif arch.get("causal"):
            self._decoder()
        else:
            self._encoder()
        arch["d_ff"] = int(self.held["blocks.0.up.weight"].shape[0])
        return arch, self.held

    def _rows(self, layer: int, name: str, rows: Any) -> None:
        for kind in ("weight", "bias"):
            part = f"blocks.{layer}.{name}.{kind}"
            if part in self.held:
                self.held[part] = self.held[part][rows]

    def _cut_joint(self) -> None:
        """Projections out of joint ones: side by side and transposed (GPT-2), head by head, or one below another."""
        arch, config, held = self.arch, self.config, self.held
        if self.family == "gpt2":
            for name in [name for name in held if name.startswith("blocks.")]:
                part = "qkv".find(name.split(".")[2])
                held[name] = (held[name] if part < 0 else np.split(held[name], 3, axis=-1)[part]).T
        heads, width = arch["n_heads"], config.get("head_dim") or arch["d_model"] // arch["n_heads"]
        for layer in range(arch["n_layers"]):
            if self.family in ("gpt_neox", "bloom"):
                rows = np.arange(3 * heads * width).reshape(heads, 3, width)
                for i, name in enumerate("qkv"):
                    self._rows(layer, name, rows[:, i].ravel())
            if self.family == "modernbert":
                for i, name in enumerate("qkv"):
                    self._rows(layer, name, slice(i * heads * width, (i + 1) * heads * width))
            if self.family == "phi3":
                groups = config.get("num_key_value_heads") or heads
                cuts = np.cumsum([0, heads * width, groups * width, groups * width])
                for i, name in enumerate("qkv"):
                    self._rows(layer, name, slice(cuts[i], cuts[i + 1]))
            if self.family in ("phi3", "modernbert"):
                self._rows(layer, "gate", slice(0, config["intermediate_size"]))
                self._rows(layer, "up", slice(config["intermediate_size"], None))

    def _encoder(self) -> None:
        """Positions, pooler and classifier of an encoder."""
        arch, held, state = self.arch, self.held, self.state
        if self.family in ("roberta", "xlm-roberta", "camembert"):
            arch["position_offset"] = int(self.config.get("pad_token_id") or 1) + 1
            for ours, theirs in (("pooler", "classifier.dense"), ("head", "classifier.out_proj")):
                for kind in ("weight", "bias"):
                    if "classifier.dense.weight" in state:
                        held[f"{ours}.{kind}"] = state[f"{theirs}.{kind}"]
        if self.family == "mpnet":
            arch["position_offset"] = 2
            held["relative_bias"] = state["encoder.relative_attention_bias.weight"]
        head, dense = "head.weight" in held, "pooler.weight" in held
        if head and not dense:
            raise ValueError("heads that classify every token are not known to the checker")
        pooler = dense and (head or self.pool is None)
        if not pooler:
            self.held = held = {name: t for name, t in held.items() if not name.startswith("pooler.")}
        arch |= {"pooler": pooler, "pool": "first" if pooler or head else (self.pool or "none")}
        if pooler and self.family in ("electra", "distilbert"):
            arch["pooler_activation"] = {"electra": "gelu", "distilbert": "relu"}[self.family]
        arch["context"] -= arch.get("position_offset", 0)
        arch |= {"d_vocab": len(held["embed.tokens"]), "d_out": len(held["head.weight"]) if head else None}
        if held["embed.tokens"].shape[1] != arch["d_model"]:
            arch["d_embed"] = int(held["embed.tokens"].shape[1])

    def _decoder(self) -> None:
        """Rotary positions, windows, caps and the unembedding of a decoder."""
        arch, config, held, family = self.arch, self.config, self.held, self.family
        grouped = ALIASES.get(family, family) in GROUPED
        if grouped:
            arch["n_kv_heads"] = config.get("num_key_value_heads") or arch["n_heads"]
            arch["d_head"] = config.get("head_dim")
            self._windows()
        if family == "gptj":
            width = arch["d_model"] // arch["n_heads"]
            self._turn(width, config.get("rotary_dim") or width, True, {"rope_theta": 10000.0})
        elif grouped or family in ("gpt_neox", "phi"):
            self._rotary()
        if family == "gpt_neox" and config.get("use_parallel_residual", True):
            arch["parallel"] = True
        if family == "stablelm" and config.get("use_parallel_residual"):
            arch |= {"parallel": True, "shared_norm": True}
            self.held = held = {name: t for name, t in held.items() if ".norm2." not in name}
        if family == "opt" and not config.get("do_layer_norm_before", True):
            arch["norm_place"] = "post"
        if family == "gpt_neo":
            kinds = config.get("attention_layers") or [
                kind for kinds, times in config["attention_types"] for _ in range(times) for kind in kinds
            ]
            local = [i for i, kind in enumerate(kinds[: arch["n_layers"]]) if kind == "local"]
            arch |= {"window": config["window_size"] - 1, "window_layers": local} if local else {}
        if family == "gpt2":
            arch |= {"attention_scale": 1.0} if config.get("scale_attn_weights") is False else {}
            arch |= {"scale_by_layer": True} if config.get("scale_attn_by_inverse_layer_idx") else {}
        if family.startswith("gemma"):
            arch["embed_scale"] = float(arch["d_model"] ** 0.5)
            for name in [name for name in held if "norm" in name]:
                held[name] = 1.0 + held[name].astype(np.float64)
        if family in ("gemma2", "gemma3_text"):
            arch["attention_scale"] = float(config["query_pre_attn_scalar"]) ** -0.5
            for ours, theirs in (
                ("score_cap", "attn_logit_softcapping"),
                ("logit_cap", "final_logit_softcapping"),
            ):
                arch |= {ours: float(config[theirs])} if config.get(theirs) is not None else {}
        self._unembedding()

    def _unembedding(self) -> None:
        held, whole = self.held, self.whole
        own = whole.get("lm_head.weight", whole.get("embed_out.weight"))
        tied = self.config.get("tie_word_embeddings", self.family in TIED)
        predicts = self.has_trunk or own is not None
        if predicts and not (tied and (own is None or np.array_equal(own, held["embed.tokens"]))):
            if own is None:
                raise ValueError("the weights lack an unembedding")
            held["head.weight"] = own
        if predicts and "lm_head.bias" in whole and whole["lm_head.bias"].any():
            held["head.bias"] = whole["lm_head.bias"]
        vocabulary = len(held["embed.tokens"])
        self.arch |= {"d_vocab": vocabulary, "d_out": vocabulary if predicts else None}

    def _windows(self) -> None:
        """Layers that look back only so far: as listed or, in configurations of before, as the family has them."""
        config = self.config
        window, kinds, sliding = config.get("sliding_window"), config.get("layer_types"), "sliding_attention"
        if window is None or config.get("use_sliding_window") is False:
            return
        every = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern") or 6}.get(self.family)
        first = (
            config.get("max_window_layers", 28) if config.get("use_sliding_window") else self.arch["n_layers"]
        )
        for layer in range(0 if kinds else self.arch["n_layers"]):
            near = layer >= first if self.family in ("qwen2", "qwen3") else not every or (layer + 1) % every
            kinds = [*(kinds or []), sliding if near else "full_attention"]
        local = [i for i, kind in enumerate(kinds or []) if kind == sliding]
        self.arch |= {"window": window - 1, "window_layers": local} if local else {}

    def _parameters(self, kind: str | None, base: float) -> Config:
        """What the configuration says of turning, in layers of a kind; base and share are always there."""
        config = self.config
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if kind is not None and isinstance(given.get(kind), dict):
            given = dict(given[kind])
        elif kind == "sliding_attention" and self.family == "gemma3_text":
            given = {}
        part: Any = config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
        return {"rope_theta": base, "partial_rotary_factor": part, **given}

    def _rotary(self) -> None:
        """A base where that says it all; else frequencies, which are weights, and the order of turning pairs."""
        arch, config = self.arch, self.config
        old: Any = config.get("rope_theta", config.get("rotary_emb_base", 10000.0))
        given = self._parameters(None, old)
        plain = str(given.get("rope_type", given.get("type", "default"))) == "default"
        if any(isinstance(part, dict) for part in given.values()) or self.family == "gemma3_text":
            self._rotary_by_kind(config.get("rope_theta") or 1e6, config.get("rope_local_base_freq") or 1e4)
        elif plain and float(given["partial_rotary_factor"]) == 1.0:
            arch["rope_theta"] = float(given["rope_theta"])
        else:
            arch["rope_given"] = True
            width = arch.get("d_head") or arch["d_model"] // arch["n_heads"]
            scale = self._turn(width, int(width * float(given["partial_rotary_factor"])), False, given)
            arch |= {"rope_scale": scale} if scale != 1.0 else {}

    def _rotary_by_kind(self, base: float, near: float) -> None:
        """Frequencies of layers that see everything and of layers with a window; no pair stands still."""
        arch = self.arch
        width = arch.get("d_head") or arch["d_model"] // arch["n_heads"]
        arch |= {"rope_given": True, "rope_local": True}
        for kind, theta, name in (
            ("full_attention", base, "frequencies"),
            ("sliding_attention", near, "local_frequencies"),
        ):
            given = self._parameters(kind, theta)
            scale = self._turn(width, width, False, given, f"rope.{name}")
            if float(given["partial_rotary_factor"]) != 1.0 or (scale != 1.0 and kind != "full_attention"):
                raise ValueError("partial and widened rotary positions by kinds are not known to the checker")
            arch |= {"rope_scale": scale} if scale != 1.0 else {}

    def _turn(
        self, width: int, turning: int, neighbours: bool, given: Config, name: str = "rope.frequencies"
    ) -> float:
        """Frequencies of a head's pairs, and rows of queries and keys in the order in which c turns with c + d_h/2.

        The factor of cosines and sines comes back.
        """
        base = float(given["rope_theta"])
        ours = own_powers(base, turning)
        powers = ours if self.powers is None else self.powers(base, turning)
        if not (np.abs(powers - ours) <= 2.0**-22 * ours).all():
            raise ValueError("the powers of RoPE's base are not those of the model")
        turns, scale = scaled(powers, given, base, int(self.arch["context"]))
        self.held[name] = np.concatenate((turns, np.zeros(width // 2 - len(turns), dtype=np.float32)))
        if turning == width and not neighbours:
            return scale
        first = np.arange(0, turning, 2) if neighbours else np.arange(turning // 2)
        second = first + (1 if neighbours else turning // 2)
        still = np.arange(turning, width)
        order = np.concatenate((first, still[: len(still) // 2], second, still[len(still) // 2 :]))
        for layer in range(self.arch["n_layers"]):
            for part, heads in (
                ("q", self.arch["n_heads"]),
                ("k", self.arch.get("n_kv_heads") or self.arch["n_heads"]),
            ):
                self._rows(layer, part, (np.arange(heads)[:, None] * width + order).ravel())
        return scale

    def _modernbert(self) -> None:
        """ModernBERT: windows around each token, two bases of rotary positions, no norm before the first attention."""
        arch, config, layers = self.arch, self.config, self.arch["n_layers"]
        if any(name.startswith(("classifier.", "decoder.", "head.")) for name in self.whole):
            raise ValueError("heads of ModernBERT are not known to the checker")
        every = int(config.get("global_attn_every_n_layers", 3))
        kinds = config.get("layer_types") or ["sliding_attention" if i % every else "" for i in range(layers)]
        arch["window"] = int(config.get("local_attention", 128)) // 2
        arch["window_layers"] = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        self._rotary_by_kind(
            float(config.get("global_rope_theta") or 160_000.0), float(config.get("local_rope_theta") or 1e4)
        )
        arch |= {"pool": self.pool or "none", "d_vocab": len(self.held["embed.tokens"])}

    def _image_names(self) -> None:
        """The names of blocks and their parts before and since transformers renamed them."""
        if "encoder.layer.0.attention.output.dense.weight" in self.state:
            self.parts = " ".join(OLD_IMAGE.get(name, name) for name in self.parts.split())
        if self.family == "dinov2":  # its networks have kept their names
            self.parts = self.parts.replace("intermediate.dense", "mlp.fc1").replace(
                " output.dense", " mlp.fc2"
            )
        if any(name.startswith("encoder.layer.") for name in self.state):
            self.blocks = "encoder.layer"

    def _image(self) -> None:
        """Patches, the token in front, positions."""
        arch, held, state = self.arch, self.held, self.state
        patches = state["embeddings.patch_embeddings.projection.weight"]
        held["embed.patches.weight"] = patches.reshape(len(patches), -1)
        held["embed.patches.bias"] = state["embeddings.patch_embeddings.projection.bias"]
        held["embed.front"] = state["embeddings.cls_token"].reshape(1, -1)
        held["embed.positions"] = state["embeddings.position_embeddings"].reshape(-1, len(patches))
        if self.family == "dinov2":
            self._scales()
        head = "head.weight" in held
        arch |= {"context": len(held["embed.positions"]), "patch": self.config["patch_size"]}
        arch |= {"pool": "first" if head else (self.pool or "none")}
        arch |= {"d_out": len(held["head.weight"])} if head else {}
        if self.config.get("num_channels", 3) != 3:
            arch["channels"] = self.config["num_channels"]

    def _scales(self) -> None:
        """DINOv2's factors of what attention and network add: they join the projections."""
        if self.config.get("use_swiglu_ffn") or any(name.startswith("classifier.") for name in self.state):
            raise ValueError("DINOv2's classifier and gated networks are not known to the checker")
        for layer in range(self.arch["n_layers"]):
            for name, scale in (("o", "layer_scale1.lambda1"), ("down", "layer_scale2.lambda1")):
                factor = self.state[f"{self.blocks}.{layer}.{scale}"].astype(np.float64)
                for kind, shape in (("weight", (-1, 1)), ("bias", (-1,))):
                    part = f"blocks.{layer}.{name}.{kind}"
                    self.held[part] = factor.reshape(shape) * self.held[part].astype(np.float64)
