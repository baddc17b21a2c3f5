"""Decoders in the manner of Llama: RMSNorm or LayerNorm before each part, rotary positions, a gated network.

What a family has beside is a few lines here: biases, norms of queries and keys, norms behind each part, caps,
windows, 1 + w.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.huggingface.common import (
    Config,
    Converted,
    State,
    activation_of,
    add_token_head,
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

PARTS = {
    "norm1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
SANDWICH = PARTS | {
    "norm1_out": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_out": "post_feedforward_layernorm",
}
SLIDING = "sliding_attention"


def _decoder(
    config: Config, state: State, parts: dict[str, str], final: str | None = "norm", **extra: Any
) -> Converted:
    """What the family shares.

    Args:
        config: the configuration.
        state: the state.
        parts: our and their names of a block's parts.
        final: their name of the last norm; None where norms have no weights.
        extra: fields of the architecture that are the family's own.
    """
    has_head = predicts_tokens(state, "model.")
    held = strip(state, "model.")
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    weights = rename_blocks(held, layers, "layers.{}", parts)
    weights |= {} if final is None else rename(held, {"final_norm": final})
    weights["embed.tokens"] = held["embed_tokens.weight"]
    vocabulary = len(weights["embed.tokens"])
    if has_head:
        add_token_head(weights, state, bool(config.get("tie_word_embeddings")))
    described: dict[str, Any] = {
        "family": str(config["model_type"]),
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": int(config.get("num_key_value_heads") or heads),
        "d_head": config.get("head_dim"),
        "d_model": int(config["hidden_size"]),
        "d_ff": int(config["intermediate_size"]),
        "activation": activation_of(config.get("hidden_act") or config.get("hidden_activation")),
        "gated": True,
        "norm_kind": "rms",
        "norm_place": "pre",
        "norm_eps": float(config.get("rms_norm_eps", config.get("layer_norm_eps", 1e-5))),
        "causal": True,
        "d_out": vocabulary if has_head else None,
        "d_vocab": vocabulary,
        "context": int(config["max_position_embeddings"]),
    }
    described |= _rotary(config, weights, described | extra) | _windows(config, layers) | extra
    return Architecture(**described), weights


def _rotary(config: Config, weights: dict[str, Tensor], known: dict[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions; frequencies that no base says become weights, rows are reordered."""
    given = parameters_of(config)
    d_head = int(known["d_head"] or known["d_model"] // known["n_heads"])
    local = isinstance((config.get("rope_parameters") or {}).get(SLIDING), dict)
    if not local and is_plain(given):
        return {"rope_theta": float(str(given["rope_theta"]))}
    kinds = (
        {"frequencies": "full_attention", "local_frequencies": SLIDING} if local else {"frequencies": None}
    )
    scale = 1.0
    for name, kind in kinds.items():
        found, factor = frequencies(parameters_of(config, kind), d_head, known["context"])
        weights[f"rope.{name}"] = whole_head(found, d_head)
        if name == "frequencies":
            scale = factor
        elif factor != 1.0:
            raise ModelError(
                f"rope_parameters: a rope_type that widens the tables of {kind} is not supported"
            )
    turning = int(d_head * float(parameters_of(config, next(iter(kinds.values())))["partial_rotary_factor"]))
    if turning < d_head:
        for layer in range(known["n_layers"]):
            for name, heads in (("q", known["n_heads"]), ("k", known["n_kv_heads"])):
                rows = reordered_rows(heads, d_head, turning)
                for part in (f"blocks.{layer}.{name}.weight", f"blocks.{layer}.{name}.bias"):
                    if part in weights:
                        weights[part] = weights[part][rows]
    fields: dict[str, Any] = {"rope_given": True, "rope_local": local}
    return fields | ({"rope_scale": scale} if scale != 1.0 else {})


def _windows(config: Config, layers: int) -> dict[str, Any]:
    """Which layers look back only so many tokens, each query with itself counted."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        return {}
    if kinds is None:
        chosen = tuple(layer for layer in range(layers) if _looks_near(config, layer))
    else:
        chosen = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    return {"window": int(window) - 1, "window_layers": chosen} if chosen else {}


def _looks_near(config: Config, layer: int) -> bool:
    """Whether a layer has a window, where a configuration of before `layer_types` leaves that to its family."""
    match str(config["model_type"]):
        case "gemma2":
            return layer % 2 == 0
        case "gemma3_text":
            return (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0
        case "qwen2" | "qwen3":
            return config.get("use_sliding_window") is True and layer >= int(
                config.get("max_window_layers", 28)
            )
    return True


def _one_plus(weights: dict[str, Tensor]) -> None:
    """Norms that multiply by 1 + w: the canonical model holds 1 + w, exactly where float64 has it."""
    for name in weights:
        if "norm" in name:
            weights[name] = 1.0 + weights[name].double()


def llama(config: Config, state: State, pool: str | None) -> Converted:
    """Llama, and Mistral and Qwen 2 with their windows and biases."""
    del pool
    refuse(config, mlp_bias=False, pretraining_tp=1)
    return _decoder(config, state, PARTS)


def qwen3(config: Config, state: State, pool: str | None) -> Converted:
    """Qwen 3: queries and keys are normed head by head before they turn."""
    del pool
    return _decoder(config, state, PARTS | HEAD_NORMS, qk_norm="head")


def gemma(config: Config, state: State, pool: str | None) -> Converted:
    """Gemma: norms by 1 + w, embeddings times √d, GeGLU."""
    del pool
    architecture, weights = _decoder(
        config, state, PARTS, embed_scale=float(int(config["hidden_size"]) ** 0.5)
    )
    _one_plus(weights)
    return architecture, weights


def gemma2(config: Config, state: State, pool: str | None) -> Converted:
    """Gemma 2 and 3: norms before and behind each part, caps of scores and logits, norms of queries and keys."""
    del pool
    refuse(config, use_bidirectional_attention=False)
    third = str(config["model_type"]) != "gemma2"
    if third and config.get("rope_parameters") is None:
        config = dict(config) | {"rope_parameters": _turns_by_kind(config)}
    extra: dict[str, Any] = {
        "embed_scale": float(int(config["hidden_size"]) ** 0.5),
        "norm_place": "sandwich",
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
    }
    for ours, theirs in (("score_cap", "attn_logit_softcapping"), ("logit_cap", "final_logit_softcapping")):
        if config.get(theirs) is not None:
            extra[ours] = float(config[theirs])
    if third:
        extra["qk_norm"] = "head"
    architecture, weights = _decoder(config, state, SANDWICH | (HEAD_NORMS if third else {}), **extra)
    _one_plus(weights)
    return architecture, weights


def _turns_by_kind(config: Config) -> dict[str, dict[str, Any]]:
    """The rotary parameters of Gemma 3's two kinds of layers, where they are spelled as they were at first."""
    whole = {"rope_type": "default", "rope_theta": 1e6}
    whole |= {name: config[name] for name in ("rope_theta",) if config.get(name) is not None}
    whole |= config.get("rope_scaling") or {}
    near = float(config.get("rope_local_base_freq") or 1e4)
    return {"full_attention": whole, SLIDING: {"rope_type": "default", "rope_theta": near}}


def phi3(config: Config, state: State, pool: str | None) -> Converted:
    """Phi 3: queries, keys and values in one matrix, gate and up in another."""
    del pool
    parts = {name: theirs for name, theirs in PARTS.items() if name not in ("q", "k", "v", "gate", "up")}
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    d_head = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    d_ff = int(config["intermediate_size"])
    cuts = [0, heads * d_head, (heads + groups) * d_head, (heads + 2 * groups) * d_head]
    split: dict[str, Tensor] = dict(state)
    for layer in range(int(config["num_hidden_layers"])):
        source = next(
            p for p in (f"model.layers.{layer}", f"layers.{layer}") if f"{p}.mlp.down_proj.weight" in state
        )
        rows = {
            f"{source}.self_attn.{name}_proj": slice(cuts[i], cuts[i + 1]) for i, name in enumerate("qkv")
        }
        split_rows(split, f"{source}.self_attn.qkv_proj", rows)
        both = {f"{source}.mlp.gate_proj": slice(0, d_ff), f"{source}.mlp.up_proj": slice(d_ff, None)}
        split_rows(split, f"{source}.mlp.gate_up_proj", both)
    return _decoder(config, split, parts | {name: PARTS[name] for name in ("q", "k", "v", "gate", "up")})


def olmo(config: Config, state: State, pool: str | None) -> Converted:
    """OLMo: LayerNorm without weights."""
    del pool
    refuse(config, clip_qkv=None)
    parts = {name: theirs for name, theirs in PARTS.items() if "norm" not in name}
    return _decoder(config, state, parts, None, norm_kind="layer", norm_eps=1e-5)


def olmo2(config: Config, state: State, pool: str | None) -> Converted:
    """OLMo 2: norms behind each part instead of before it; whole queries and keys are normed."""
    del pool
    parts = {name: theirs for name, theirs in PARTS.items() if "norm" not in name} | HEAD_NORMS
    parts |= {"norm1_out": "post_attention_layernorm", "norm2_out": "post_feedforward_layernorm"}
    return _decoder(config, state, parts, norm_place="output", qk_norm="whole")


def stablelm(config: Config, state: State, pool: str | None) -> Converted:
    """StableLM: LayerNorm, a part of each head turns, perhaps attention and network side by side."""
    del pool
    refuse(config, qk_layernorm=False)
    parallel = bool(config.get("use_parallel_residual"))
    parts = {name: theirs for name, theirs in PARTS.items() if not (parallel and name == "norm2")}
    extra: dict[str, Any] = {"parallel": True, "shared_norm": True} if parallel else {}
    eps = float(config["layer_norm_eps"])
    return _decoder(config, state, parts, norm_kind="layer", norm_eps=eps, **extra)
