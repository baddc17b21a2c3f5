"""Convert the configuration and weights of a TransformerLens HookedTransformer.

Every field of its configuration that changes what is computed is read here, or refused by one line that names it.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture, NetworkActivation, NormPlace
from prooflens.models.huggingface.rope import frequencies, reordered_rows, whole_head

Weights = dict[str, Tensor]
Fields = dict[str, Any]

_ACTIVATIONS: dict[str, NetworkActivation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "solu": "solu",
    "solu_ln": "solu",
}

_REFUSED = (
    "use_attention_sinks",
    "use_dynamic_ntk_rope",
    "use_logn_attn",
    "clip_qkv",
    "num_experts",
    "load_in_4bit",
)

_NORMS = ("None", "LN", "LNPre", "RMS", "RMSPre")

_NORMED_BEHIND = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Values of `original_architecture` with norms on what attention and network add, and on whole queries and keys."""


def convert(cfg: Any, state: Weights) -> tuple[Architecture, Weights, str]:
    """Return architecture, canonical weights, and what TransformerLens did to the weights before.

    Args:
        cfg: the HookedTransformerConfig.
        state: the model's state dict.

    Raises:
        ModelError: for a field of the configuration that is not supported.
    """
    _refuse(cfg)
    kind, positions = str(cfg.normalization_type), str(cfg.positional_embedding_type)
    weights = {"embed.tokens": state["embed.W_E"], "head.weight": state["unembed.W_U"].T}
    weights["head.bias"] = state["unembed.b_U"]
    if positions == "standard":
        weights["embed.positions"] = state["pos_embed.W_pos"]
    for layer in range(cfg.n_layers):
        weights |= _attention(state, f"blocks.{layer}", positions == "shortformer")
        weights |= {} if cfg.attn_only else _network(state, f"blocks.{layer}", bool(cfg.gated_mlp))
    place = _norm_place(cfg)
    weights |= _norms(state, cfg.n_layers, place)
    fields = _windows(cfg) | _attention_fields(cfg) | _turns(cfg, weights)
    if positions == "alibi":
        fields["alibi"] = True
    if positions == "shortformer":
        fields["head_positions"] = True
    if cfg.attn_only:
        fields["has_network"] = False
    elif cfg.parallel_attn_mlp:
        fields["parallel"] = True
    if cfg.act_fn == "solu_ln" and not cfg.attn_only:
        fields["network_norm"] = True
    if _is_cap(cfg.output_logits_soft_cap):
        fields["logit_cap"] = float(cfg.output_logits_soft_cap)
    architecture = Architecture(
        family="llama" if positions == "rotary" else "gpt2",
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_key_value_heads or cfg.n_heads,
        d_head=cfg.d_head,
        d_model=cfg.d_model,
        d_ff=cfg.d_mlp or cfg.d_model,
        activation=_ACTIVATIONS.get(str(cfg.act_fn), "relu"),
        gated=bool(cfg.gated_mlp) and not cfg.attn_only,
        norm_kind="rms" if kind.startswith("RMS") or "qk_norm" in fields else "layer",
        norm_place=place,
        norm_eps=float(cfg.eps),
        causal=cfg.attention_dir == "causal",
        d_out=weights["head.weight"].shape[0],
        d_vocab=weights["embed.tokens"].shape[0],
        context=cfg.n_ctx,
        **fields,
    )
    processing = "norms folded into the next weights by TransformerLens" if kind.endswith("Pre") else "none"
    return architecture, weights, processing


def _refuse(cfg: Any) -> None:
    """Raise a `ModelError` for fields that prooflens has no step for."""
    for switch in _REFUSED:
        if getattr(cfg, switch, None):
            raise ModelError(f"TransformerLens models with {switch} are not supported")
    kind, positions = str(cfg.normalization_type), str(cfg.positional_embedding_type)
    if positions not in ("standard", "rotary", "alibi", "shortformer"):
        raise ModelError(f"positional_embedding_type = {positions!r} is not supported")
    if positions == "shortformer" and _qk_norm(cfg) != "none":
        raise ModelError(
            "positional_embedding_type = 'shortformer' is not supported with norms of queries and keys"
        )
    if not cfg.attn_only and cfg.act_fn not in _ACTIVATIONS:
        raise ModelError(f"act_fn = {cfg.act_fn!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    if not cfg.attn_only and str(cfg.act_fn).startswith("solu") and cfg.gated_mlp:
        raise ModelError(f"act_fn = {cfg.act_fn!r} is not supported with gated_mlp")
    if not cfg.attn_only and cfg.act_fn == "solu_ln" and (kind.startswith("RMS") or _qk_norm(cfg) != "none"):
        raise ModelError(
            "act_fn = 'solu_ln' is supported with LayerNorm only: all norms of a model are of one kind"
        )
    if kind not in _NORMS:
        raise ModelError(f"normalization_type = {kind!r} is not supported")
    if kind.startswith("LN") and cfg.final_rms:
        raise ModelError("final_rms is not supported: all norms of a model are of one kind")
    if kind.startswith("LN") and _qk_norm(cfg) != "none":
        raise ModelError("use_qk_norm is supported with RMS norms only: all norms of a model are of one kind")
    if cfg.post_embedding_ln and positions == "standard":
        raise ModelError("post_embedding_ln before learned positions is not supported")
    if positions == "alibi":
        if cfg.n_heads & (cfg.n_heads - 1):
            raise ModelError(f"positional_embedding_type = 'alibi' with {cfg.n_heads} heads is not supported")
        if cfg.attention_dir != "causal" or _is_cap(cfg.attn_scores_soft_cap):
            raise ModelError(
                "positional_embedding_type = 'alibi' is supported in causal models without a cap only"
            )


def _is_cap(value: float | None) -> bool:
    """Say whether a cap is on; TransformerLens writes −1 for none."""
    return value is not None and value > 0


def _norm_place(cfg: Any) -> NormPlace:
    if cfg.normalization_type is None:
        return "none"
    if cfg.original_architecture in _NORMED_BEHIND:
        return "output"
    return "sandwich" if cfg.use_normalization_before_and_after else "pre"


def _norms(state: Weights, layers: int, place: NormPlace) -> Weights:
    """Return the scales and shifts of all norms; folded norms have none."""
    names = {"final_norm": "ln_final", "embed.norm": "embed.ln"}
    for layer in range(layers):
        block = f"blocks.{layer}"
        names |= {f"{block}.{part}_norm": f"{block}.attn.{part}_norm" for part in "qk"}
        names[f"{block}.network_norm"] = f"{block}.mlp.ln"
        for i in (1, 2):
            behind = "_out" if place == "output" else ""
            names |= {
                f"{block}.norm{i}{behind}": f"{block}.ln{i}",
                f"{block}.norm{i}_out": f"{block}.ln{i}" + ("" if behind else "_post"),
            }
    return {
        f"{ours}.{ending}": state[f"{theirs}.{letter}"]
        for ours, theirs in names.items()
        for ending, letter in (("weight", "w"), ("bias", "b"))
        if f"{theirs}.{letter}" in state
    }


def _attention(state: Weights, block: str, placed: bool) -> Weights:
    """Return a block's projections, from [head, d, d_h] to the nn.Linear layout.

    If queries and keys alone know positions (shortformer), what those add to them is a weight of its own.
    """
    weights: Weights = {}
    for name in "QKV":
        source = f"{block}.attn.W_{name}" if f"{block}.attn.W_{name}" in state else f"{block}.attn._W_{name}"
        bias = source.replace("W_", "b_")
        weights[f"{block}.{name.lower()}.weight"] = state[source].transpose(1, 2).flatten(0, 1)
        weights[f"{block}.{name.lower()}.bias"] = state[bias].flatten()
    weights[f"{block}.o.weight"] = state[f"{block}.attn.W_O"].flatten(0, 1).T
    weights[f"{block}.o.bias"] = state[f"{block}.attn.b_O"]
    for name in "qk" if placed else "":
        projection = weights[f"{block}.{name}.weight"].double()
        weights[f"{block}.{name}.positions"] = state["pos_embed.W_pos"].double() @ projection.T
    return weights


def _network(state: Weights, block: str, gated: bool) -> Weights:
    """Return a block's network; a gated network's b_in, which is added after the gate, joins the last bias."""
    first, last = state[f"{block}.mlp.b_in"], state[f"{block}.mlp.b_out"]
    if gated and bool((first != 0).any()):
        first, last = first * 0, last + first @ state[f"{block}.mlp.W_out"]
    weights = {
        f"{block}.up.weight": state[f"{block}.mlp.W_in"].T,
        f"{block}.up.bias": first,
        f"{block}.down.weight": state[f"{block}.mlp.W_out"].T,
        f"{block}.down.bias": last,
    }
    return weights | ({f"{block}.gate.weight": state[f"{block}.mlp.W_gate"].T} if gated else {})


def _local_layers(cfg: Any) -> tuple[int, ...]:
    if not cfg.use_local_attn:
        return ()
    return tuple(i for i, kind in enumerate(cfg.attn_types[: cfg.n_layers]) if kind == "local")


def _windows(cfg: Any) -> Fields:
    """Return the fields of local layers; TransformerLens limits what they see in causal models only."""
    local = _local_layers(cfg)
    if not local or cfg.attention_dir != "causal":
        return {}
    return {"window": int(cfg.window_size) - 1, "window_layers": local}


def _qk_norm(cfg: Any) -> str:
    if cfg.use_qk_norm:
        return "head"
    return "whole" if cfg.original_architecture in _NORMED_BEHIND else "none"


def _attention_fields(cfg: Any) -> Fields:
    """Return the fields that say how scores are scaled, normed and capped."""
    fields: Fields = {}
    divisor = float(cfg.attn_scale) if cfg.use_attn_scale else 1.0
    if abs(divisor - cfg.d_head**0.5) > 1e-12 * divisor:
        fields["attention_scale"] = 1.0 / divisor
    if cfg.scale_attn_by_inverse_layer_idx:
        fields["scale_by_layer"] = True
    if _qk_norm(cfg) != "none":
        fields["qk_norm"] = _qk_norm(cfg)
    if _is_cap(cfg.attn_scores_soft_cap):
        fields["score_cap"] = float(cfg.attn_scores_soft_cap)
    return fields


def _turns(cfg: Any, weights: Weights) -> Fields:
    """Return the fields of rotary positions; frequencies join the weights, rows of queries and keys are reordered.

    Args:
        cfg: the configuration.
        weights: canonical weights, changed in place.
    """
    if cfg.positional_embedding_type != "rotary":
        return {}
    plain = {"rope_type": "default", "rope_theta": float(cfg.rotary_base), "partial_rotary_factor": 1.0}
    every, local = _turn_parameters(cfg, False), _turn_parameters(cfg, True)
    split = every != local and bool(_local_layers(cfg))
    if every == plain and not (split or cfg.rotary_adjacent_pairs):
        return {"rope_theta": float(cfg.rotary_base)}
    found, scale = frequencies(every, cfg.d_head, cfg.n_ctx)
    weights["rope.frequencies"] = whole_head(found, cfg.d_head)
    fields: Fields = {"rope_given": True} | ({"rope_scale": scale} if scale != 1.0 else {})
    if split:
        found, own = frequencies(local, cfg.d_head, cfg.n_ctx)
        if own != 1.0 or cfg.attention_dir != "causal":
            raise ModelError("rotary_base_local is not supported with YaRN, or without a causal mask")
        weights["rope.local_frequencies"] = whole_head(found, cfg.d_head)
        fields["rope_local"] = True
    if cfg.rotary_dim < cfg.d_head or cfg.rotary_adjacent_pairs:
        _reorder(cfg, weights)
    return fields


def _turn_parameters(cfg: Any, local: bool) -> Fields:
    """Return the parameters of RoPE as transformers names them, for local layers or for the others."""
    base = cfg.rotary_base_local if local and cfg.rotary_base_local is not None else cfg.rotary_base
    share = cfg.rotary_dim / cfg.d_head
    known: Fields = {
        "rope_type": "default",
        "rope_theta": float(base),
        # upwards, so that share · d_head is not cut below rotary_dim
        "partial_rotary_factor": 1.0 if share == 1.0 else math.nextafter(share, 1.0),
    }
    if cfg.use_NTK_by_parts_rope:
        return known | {
            "rope_type": "llama3",
            "factor": cfg.NTK_by_parts_factor,
            "low_freq_factor": cfg.NTK_by_parts_low_freq_factor,
            "high_freq_factor": cfg.NTK_by_parts_high_freq_factor,
            "original_max_position_embeddings": cfg.NTK_original_ctx_len,
        }
    if cfg.use_yarn_rope and not (cfg.yarn_global_attn_only and local):
        return known | {
            "rope_type": "yarn",
            "factor": cfg.yarn_factor,
            "attention_factor": cfg.yarn_attention_factor,
            "beta_fast": cfg.yarn_beta_fast,
            "beta_slow": cfg.yarn_beta_slow,
            "truncate": cfg.yarn_truncate,
            "original_max_position_embeddings": cfg.yarn_original_max_position_embeddings,
        }
    if cfg.rotary_scaling_factor != 1.0 and not local:
        return known | {"rope_type": "linear", "factor": cfg.rotary_scaling_factor}
    return known


def _reorder(cfg: Any, weights: Weights) -> None:
    """Bring the rows of queries and keys, and the scales of their norms, into the order in which we turn them."""
    for name, heads in (("q", cfg.n_heads), ("k", cfg.n_key_value_heads or cfg.n_heads)):
        every, one = (
            reordered_rows(count, cfg.d_head, cfg.rotary_dim, bool(cfg.rotary_adjacent_pairs))
            for count in (heads, 1)
        )
        for layer in range(cfg.n_layers):
            norm = f"blocks.{layer}.{name}_norm.weight"
            for part in (f"blocks.{layer}.{name}.weight", f"blocks.{layer}.{name}.bias", norm):
                if part in weights:
                    held = weights[part]
                    weights[part] = held[(one if len(held) == len(one) else every).to(held.device)]
