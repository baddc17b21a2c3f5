"""Decoders in the manner of GPT-2: LayerNorm, a plain network; GPT-Neo, GPT-J, GPT-NeoX, Phi, OPT, BLOOM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.huggingface.common import (
    Config,
    Converted,
    State,
    activation_of,
    add_token_head,
    per_head_rows,
    predicts_tokens,
    refuse,
    rename,
    rename_blocks,
    split_rows,
    strip,
)
from prooflens.models.huggingface.rope import (
    frequencies,
    is_plain,
    parameters_of,
    reordered_rows,
    whole_head,
)

NEO = {
    "norm1": "ln_1",
    "q": "attn.attention.q_proj",
    "k": "attn.attention.k_proj",
    "v": "attn.attention.v_proj",
    "o": "attn.attention.out_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
GPTJ = {
    "norm1": "ln_1",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "o": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}
PHI = {
    "norm1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.dense",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
NEOX = {
    "norm1": "input_layernorm",
    "qkv": "attention.query_key_value",
    "o": "attention.dense",
    "norm2": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
BLOOM = NEOX | {"qkv": "self_attention.query_key_value", "o": "self_attention.dense"}
OPT = {
    "norm1": "self_attn_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "norm2": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


def _described(
    config: Config, weights: dict[str, Tensor], state: State, has_head: bool, tied: bool, **fields: Any
) -> Architecture:
    """The architecture of a decoder; its unembedding joins the weights where it is not the embedding.

    Args:
        config: the configuration.
        weights: canonical weights, changed in place.
        state: the state.
        has_head: whether it predicts tokens.
        tied: whether the configuration says that embedding and unembedding are one.
        fields: fields of the architecture.
    """
    vocabulary = len(weights["embed.tokens"])
    if has_head:
        add_token_head(weights, state, tied)
    known: dict[str, Any] = {
        "family": str(config["model_type"]),
        "norm_place": "pre",
        "causal": True,
        "d_ff": weights["blocks.0.up.weight"].shape[0],
        "d_out": vocabulary if has_head else None,
        "d_vocab": vocabulary,
    }
    return Architecture(**(known | fields))


def gpt2(config: Config, state: State, pool: str | None) -> Converted:
    """GPT-2: transposed matrices; queries, keys and values in one."""
    del pool
    refuse(config, add_cross_attention=False, reorder_and_upcast_attn=False)
    has_head = predicts_tokens(state, "transformer.")
    held = strip(state, "transformer.")
    d_model, layers = int(config["n_embd"]), int(config["n_layer"])
    heads = int(config["n_head"])
    weights: dict[str, Tensor] = {}
    for layer in range(layers):
        source, block = f"h.{layer}", f"blocks.{layer}"
        weights |= rename(held, {f"{block}.norm1": f"{source}.ln_1", f"{block}.norm2": f"{source}.ln_2"})
        joint = torch.split(held[f"{source}.attn.c_attn.weight"], d_model, dim=1)
        joint_bias = torch.split(held[f"{source}.attn.c_attn.bias"], d_model)
        for name, weight, bias in zip("qkv", joint, joint_bias, strict=True):
            weights[f"{block}.{name}.weight"], weights[f"{block}.{name}.bias"] = weight.T, bias
        for name, theirs in (("o", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            weights[f"{block}.{name}.weight"] = held[f"{source}.{theirs}.weight"].T
            weights[f"{block}.{name}.bias"] = held[f"{source}.{theirs}.bias"]
    weights |= rename(held, {"final_norm": "ln_f"})
    weights["embed.tokens"], weights["embed.positions"] = held["wte.weight"], held["wpe.weight"]
    extra: dict[str, Any] = {}
    if config.get("scale_attn_weights") is False:
        extra["attention_scale"] = 1.0
    if config.get("scale_attn_by_inverse_layer_idx"):
        extra["scale_by_layer"] = True
    architecture = _described(
        config,
        weights,
        state,
        has_head,
        bool(config.get("tie_word_embeddings", True)),
        n_layers=layers,
        n_heads=heads,
        d_model=d_model,
        activation=activation_of(config["activation_function"]),
        norm_eps=float(config["layer_norm_epsilon"]),
        context=int(config["n_positions"]),
        **extra,
    )
    return architecture, weights


def gpt_neo(config: Config, state: State, pool: str | None) -> Converted:
    """GPT-Neo (TinyStories): scores are not scaled; every other layer looks back a window."""
    del pool
    has_head = predicts_tokens(state, "transformer.")
    held = strip(state, "transformer.")
    layers = int(config["num_layers"])
    weights = rename_blocks(held, layers, "h.{}", NEO) | rename(held, {"final_norm": "ln_f"})
    weights["embed.tokens"], weights["embed.positions"] = held["wte.weight"], held["wpe.weight"]
    kinds = config.get("attention_layers") or [
        kind for kinds, times in config["attention_types"] for _ in range(times) for kind in kinds
    ]
    local = tuple(i for i, kind in enumerate(kinds[:layers]) if kind == "local")
    windows: dict[str, Any] = (
        {"window": int(config["window_size"]) - 1, "window_layers": local} if local else {}
    )
    architecture = _described(
        config,
        weights,
        state,
        has_head,
        bool(config.get("tie_word_embeddings", True)),
        n_layers=layers,
        n_heads=int(config["num_heads"]),
        d_model=int(config["hidden_size"]),
        activation=activation_of(config["activation_function"]),
        norm_eps=float(config["layer_norm_epsilon"]),
        context=int(config["max_position_embeddings"]),
        attention_scale=1.0,
        **windows,
    )
    return architecture, weights


def gptj(config: Config, state: State, pool: str | None) -> Converted:
    """GPT-J: attention and network side by side behind one norm; neighbours turn together."""
    del pool
    has_head = predicts_tokens(state, "transformer.")
    held = strip(state, "transformer.")
    layers, heads, d_model = int(config["n_layer"]), int(config["n_head"]), int(config["n_embd"])
    d_head, context = d_model // heads, int(config["n_positions"])
    turning = int(config.get("rotary_dim") or d_head)
    weights = rename_blocks(held, layers, "h.{}", GPTJ) | rename(held, {"final_norm": "ln_f"})
    weights["embed.tokens"] = held["wte.weight"]
    turns = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    weights["rope.frequencies"] = whole_head(frequencies(turns, turning, context)[0], d_head)
    _reorder(weights, layers, reordered_rows(heads, d_head, turning, neighbours=True))
    architecture = _described(
        config,
        weights,
        state,
        has_head,
        bool(config.get("tie_word_embeddings")),
        n_layers=layers,
        n_heads=heads,
        d_model=d_model,
        activation=activation_of(config["activation_function"]),
        norm_eps=float(config["layer_norm_epsilon"]),
        context=context,
        parallel=True,
        shared_norm=True,
        rope_given=True,
    )
    return architecture, weights


def _reorder(weights: dict[str, Tensor], layers: int, rows: Tensor) -> None:
    """Bring the rows of queries and keys into the order in which we turn them."""
    for layer in range(layers):
        for name in ("q", "k"):
            for part in (f"blocks.{layer}.{name}.weight", f"blocks.{layer}.{name}.bias"):
                if part in weights:
                    weights[part] = weights[part][rows]


def _turning(
    config: Config, weights: dict[str, Tensor], layers: int, heads: int, d_head: int
) -> dict[str, Any]:
    """Fields and weights of rotary positions on a part of each head."""
    given, context = parameters_of(config), int(config["max_position_embeddings"])
    if is_plain(given):
        return {"rope_theta": float(given["rope_theta"])}
    found, scale = frequencies(given, d_head, context)
    weights["rope.frequencies"] = whole_head(found, d_head)
    turning = int(d_head * float(given["partial_rotary_factor"]))
    if turning < d_head:
        _reorder(weights, layers, reordered_rows(heads, d_head, turning))
    return {"rope_given": True} | ({"rope_scale": scale} if scale != 1.0 else {})


def gpt_neox(config: Config, state: State, pool: str | None) -> Converted:
    """GPT-NeoX (Pythia): attention and network side by side, each behind its norm; a part of each head turns."""
    del pool
    has_head = predicts_tokens(state, "gpt_neox.") or "embed_out.weight" in state
    held = strip(state, "gpt_neox.")
    if "embed_out.weight" in state:
        state = dict(state) | {"lm_head.weight": state["embed_out.weight"]}
    layers, heads, d_model = (
        int(config[name]) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    weights = rename_blocks(held, layers, "layers.{}", NEOX) | rename(
        held, {"final_norm": "final_layer_norm"}
    )
    weights["embed.tokens"] = held["embed_in.weight"]
    _split_heads(weights, layers, heads, d_model // heads)
    architecture = _described(
        config,
        weights,
        state,
        has_head,
        bool(config.get("tie_word_embeddings")),
        n_layers=layers,
        n_heads=heads,
        d_model=d_model,
        activation=activation_of(config["hidden_act"]),
        norm_eps=float(config["layer_norm_eps"]),
        context=int(config["max_position_embeddings"]),
        **({"parallel": True} if config.get("use_parallel_residual", True) else {}),
        **_turning(config, weights, layers, heads, d_model // heads),
    )
    return architecture, weights


def _split_heads(weights: dict[str, Tensor], layers: int, heads: int, d_head: int) -> None:
    """Queries, keys and values out of projections that have them head by head."""
    rows = per_head_rows(heads, d_head)
    for layer in range(layers):
        block = f"blocks.{layer}"
        split_rows(weights, f"{block}.qkv", {f"{block}.{name}": part for name, part in rows.items()})


def phi(config: Config, state: State, pool: str | None) -> Converted:
    """Phi 1 to 2: attention and network side by side behind one norm; a part of each head turns."""
    del pool
    refuse(config, qk_layernorm=False)
    has_head = predicts_tokens(state, "model.")
    held = strip(state, "model.")
    layers, heads, d_model = (
        int(config[name]) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    groups = int(config.get("num_key_value_heads") or heads)
    if groups != heads:
        raise ModelError(f"num_key_value_heads = {groups} is not supported for phi (supported: {heads})")
    weights = rename_blocks(held, layers, "layers.{}", PHI) | rename(held, {"final_norm": "final_layernorm"})
    weights["embed.tokens"] = held["embed_tokens.weight"]
    architecture = _described(
        config,
        weights,
        state,
        has_head,
        bool(config.get("tie_word_embeddings")),
        n_layers=layers,
        n_heads=heads,
        d_model=d_model,
        activation=activation_of(config["hidden_act"]),
        norm_eps=float(config["layer_norm_eps"]),
        context=int(config["max_position_embeddings"]),
        parallel=True,
        shared_norm=True,
        **_turning(config, weights, layers, heads, d_model // heads),
    )
    return architecture, weights


def opt(config: Config, state: State, pool: str | None) -> Converted:
    """OPT: learned positions from 2 on, ReLU; norms before each part, or behind it (350M)."""
    del pool
    refuse(config, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True)
    d_model = int(config["hidden_size"])
    refuse(config, word_embed_proj_dim=d_model)
    has_head = predicts_tokens(state, "model.")
    held = strip(strip(state, "model."), "decoder.")
    layers, before = int(config["num_hidden_layers"]), bool(config.get("do_layer_norm_before", True))
    weights = rename_blocks(held, layers, "layers.{}", OPT)
    weights |= rename(held, {"final_norm": "final_layer_norm"}) if before else {}
    weights["embed.tokens"], weights["embed.positions"] = (
        held["embed_tokens.weight"],
        held["embed_positions.weight"],
    )
    architecture = _described(
        config,
        weights,
        state,
        has_head,
        bool(config.get("tie_word_embeddings", True)),
        n_layers=layers,
        n_heads=int(config["num_attention_heads"]),
        d_model=d_model,
        activation=activation_of(config["activation_function"]),
        norm_eps=1e-5,
        norm_place="pre" if before else "post",
        context=int(config["max_position_embeddings"]),
        position_offset=2,
    )
    return architecture, weights


def bloom(config: Config, state: State, pool: str | None) -> Converted:
    """BLOOM: no positions but a bias that grows with the key's place (ALiBi); embeddings have a norm."""
    del pool
    refuse(config, apply_residual_connection_post_layernorm=False)
    has_head = predicts_tokens(state, "transformer.")
    held = strip(state, "transformer.")
    layers = int(config.get("n_layer") or config["num_hidden_layers"])
    heads = int(config.get("n_head") or config["num_attention_heads"])
    d_model = int(config.get("hidden_size") or config["n_embed"])
    weights = rename_blocks(held, layers, "h.{}", BLOOM)
    weights |= rename(held, {"final_norm": "ln_f", "embed.norm": "word_embeddings_layernorm"})
    weights["embed.tokens"] = held["word_embeddings.weight"]
    _split_heads(weights, layers, heads, d_model // heads)
    architecture = _described(
        config,
        weights,
        state,
        has_head,
        bool(config.get("tie_word_embeddings", True)),
        n_layers=layers,
        n_heads=heads,
        d_model=d_model,
        activation="gelu_tanh",
        norm_eps=float(config["layer_norm_epsilon"]),
        alibi=True,
    )
    return architecture, weights
