"""Hugging Face layouts: a `config.json` dictionary and a state dict become the canonical transformer.

Works on dictionaries alone, so that a folder can be read without transformers. One function per family.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Activation, Architecture

Config = Mapping[str, Any]
State = Mapping[str, Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

_RELATIVES = {
    "roberta": "bert",
    "distilbert": "bert",
    "electra": "bert",
    "albert": "bert",
    "camembert": "bert",
    "xlm-roberta": "bert",
    "mistral": "llama",
    "qwen2": "llama",
    "gemma": "llama",
    "phi3": "llama",
    "gpt_neo": "gpt2",
    "gpt_neox": "gpt2",
    "gptj": "gpt2",
    "opt": "gpt2",
}


def convert(config: Config, state: State, pool: str | None = None) -> tuple[Architecture, dict[str, Tensor]]:
    """Return architecture and canonical weights of a Hugging Face model; tensors are renamed, never changed.

    Args:
        config: the dictionary of config.json.
        state: the state dict.
        pool: how to read out an encoder without a classification head (`"mean"` for sentence encoders).

    Raises:
        ModelError: if the family or one of its options is not supported, or a tensor is missing.
    """
    family = str(config.get("model_type", ""))
    if family not in _FAMILIES:
        raise ModelError(_unsupported(family))
    if bare := next((name for name, tensor in state.items() if tensor.is_meta), None):
        raise ModelError(f"{bare} holds no numbers (it is on the meta device): load the weights first")
    try:
        architecture, weights = _FAMILIES[family](config, state, pool)
    except KeyError as error:
        raise ModelError(f"the {family} model lacks {error.args[0]!r} in its config or weights") from error
    except (TypeError, ValueError, OverflowError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelError(f"config and weights of the {family} model do not fit: {error}") from error
    return architecture, weights


def _unsupported(family: str) -> str:
    close = difflib.get_close_matches(family, _FAMILIES, n=1, cutoff=0.3)
    nearest = _RELATIVES.get(family) or (close[0] if close else "bert")
    known = ", ".join(sorted(_FAMILIES))
    return f"architecture {family!r} is not supported; the nearest supported one is {nearest!r} (supported: {known})"


def _activation(name: object) -> Activation:
    if str(name) not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[str(name)]


def _strip(state: State, prefix: str) -> dict[str, Tensor]:
    """Return the state without the prefix that a model with a head puts before its trunk."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _rename(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Pick `source.{weight,bias}` pairs under canonical names; a weight must be there, a bias may be missing."""
    weights: dict[str, Tensor] = {}
    for canonical, source in names.items():
        weights[f"{canonical}.weight"] = state[f"{source}.weight"]
        if f"{source}.bias" in state:
            weights[f"{canonical}.bias"] = state[f"{source}.bias"]
    return weights


def _predicts_tokens(state: State, trunk: str) -> bool:
    """Say whether a decoder's output is over the vocabulary; a trunk alone has no prefix, other heads are refused."""
    for name in state:
        if name.startswith(("score.", "classifier.", "qa_outputs.")):
            raise ModelError(
                f"the head {name!r} of a decoder is not supported: load the language model, or its trunk alone"
            )
    return "lm_head.weight" in state or any(name.startswith(trunk) for name in state)


def _has_own_head(state: State, embedding: Tensor, tied: bool) -> bool:
    """Say whether the unembedding is not the embedding; a module may have been given another after it was tied."""
    return not tied or ("lm_head.weight" in state and not torch.equal(state["lm_head.weight"], embedding))


def _encoder(
    config: Config, state: State, pool: str | None, trunk: str, block_names: Mapping[str, str], **extra: Any
) -> tuple[Architecture, dict[str, Tensor]]:
    """Convert what BERT and MPNet share: post-LayerNorm blocks, embeddings with a norm, optional pooler and head."""
    if config.get("is_decoder"):
        raise ModelError("a BERT decoder with cross attention is not supported")
    state = _strip(state, trunk)
    n_layers = int(config["num_hidden_layers"])
    names = {
        f"blocks.{layer}.{ours}": f"encoder.layer.{layer}.{theirs}"
        for layer in range(n_layers)
        for ours, theirs in block_names.items()
    }
    names["embed.norm"] = "embeddings.LayerNorm"
    has_head = "classifier.weight" in state
    if has_head and "pooler.dense.weight" not in state:
        raise ModelError("heads that classify every token are not supported: load the encoder alone")
    pooler = "pooler.dense.weight" in state and (has_head or pool is None)
    if pooler:
        names["pooler"] = "pooler.dense"
    if has_head:
        names["head"] = "classifier"
    weights = _rename(state, names)
    weights["embed.tokens"] = state["embeddings.word_embeddings.weight"]
    weights["embed.positions"] = state["embeddings.position_embeddings.weight"]
    if "embeddings.token_type_embeddings.weight" in state:
        weights["embed.types"] = state["embeddings.token_type_embeddings.weight"]
    offset = int(extra.get("position_offset", 0))
    architecture = Architecture(
        family=str(config["model_type"]),
        n_layers=n_layers,
        n_heads=int(config["num_attention_heads"]),
        d_model=int(config["hidden_size"]),
        d_ff=int(config["intermediate_size"]),
        activation=_activation(config["hidden_act"]),
        norm_eps=float(config["layer_norm_eps"]),
        pool="first" if pooler or has_head else (pool or "none"),  # type: ignore[arg-type]
        pooler=pooler,
        d_out=weights["head.weight"].shape[0] if has_head else None,
        d_vocab=weights["embed.tokens"].shape[0],
        context=int(config["max_position_embeddings"]) - offset,
        **extra,
    )
    return architecture, weights


def _bert(config: Config, state: State, pool: str | None) -> tuple[Architecture, dict[str, Tensor]]:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("BERT with relative position embeddings is not supported")
    block = {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm2": "output.LayerNorm",
    }
    return _encoder(config, state, pool, "bert.", block)


def _mpnet(config: Config, state: State, pool: str | None) -> tuple[Architecture, dict[str, Tensor]]:
    block = {
        "q": "attention.attn.q",
        "k": "attention.attn.k",
        "v": "attention.attn.v",
        "o": "attention.attn.o",
        "norm1": "attention.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm2": "output.LayerNorm",
    }
    if "classifier.dense.weight" in state:
        raise ModelError("MPNet classification heads are not supported: load the encoder (MPNetModel)")
    buckets = int(config["relative_attention_num_buckets"])
    if buckets != 32:
        raise ModelError(
            f"MPNet with {buckets} relative position buckets is not supported: transformers uses 32"
        )
    # Positions start at 2 whatever the config calls its padding token: transformers has it as a constant.
    architecture, weights = _encoder(
        config, state, pool, "mpnet.", block, relative_buckets=buckets, position_offset=2
    )
    weights["relative_bias"] = _strip(state, "mpnet.")["encoder.relative_attention_bias.weight"]
    return architecture, weights


def _gpt2(config: Config, state: State, pool: str | None) -> tuple[Architecture, dict[str, Tensor]]:
    del pool
    for switch in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(switch):
            raise ModelError(f"GPT-2 with {switch} is not supported")
    if config.get("scale_attn_weights") is False:
        raise ModelError("GPT-2 without scaled attention weights is not supported")
    has_head = _predicts_tokens(state, "transformer.")
    state = _strip(state, "transformer.")
    d_model, n_layers = int(config["n_embd"]), int(config["n_layer"])
    weights: dict[str, Tensor] = {}
    for layer in range(n_layers):
        source, block = f"h.{layer}", f"blocks.{layer}"
        weights |= _rename(state, {f"{block}.norm1": f"{source}.ln_1", f"{block}.norm2": f"{source}.ln_2"})
        joint = torch.split(state[f"{source}.attn.c_attn.weight"], d_model, dim=1)
        joint_bias = torch.split(state[f"{source}.attn.c_attn.bias"], d_model)
        for name, weight, bias in zip("qkv", joint, joint_bias, strict=True):
            weights[f"{block}.{name}.weight"], weights[f"{block}.{name}.bias"] = weight.T, bias
        for name, theirs in (("o", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            weights[f"{block}.{name}.weight"] = state[f"{source}.{theirs}.weight"].T
            weights[f"{block}.{name}.bias"] = state[f"{source}.{theirs}.bias"]
    weights |= _rename(state, {"final_norm": "ln_f"})
    weights["embed.tokens"], weights["embed.positions"] = state["wte.weight"], state["wpe.weight"]
    if has_head and _has_own_head(
        state, weights["embed.tokens"], bool(config.get("tie_word_embeddings", True))
    ):
        weights["head.weight"] = state["lm_head.weight"]
    vocabulary = weights["embed.tokens"].shape[0]
    architecture = Architecture(
        family="gpt2",
        n_layers=n_layers,
        n_heads=int(config["n_head"]),
        d_model=d_model,
        d_ff=int(config.get("n_inner") or 4 * d_model),
        activation=_activation(config["activation_function"]),
        norm_place="pre",
        norm_eps=float(config["layer_norm_epsilon"]),
        causal=True,
        d_out=vocabulary if has_head else None,
        d_vocab=vocabulary,
        context=int(config["n_positions"]),
    )
    return architecture, weights


def _llama(config: Config, state: State, pool: str | None) -> tuple[Architecture, dict[str, Tensor]]:
    del pool
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError(f"RoPE scaling {rope!r} is not supported: only plain RoPE")
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    has_head = _predicts_tokens(state, "model.")
    state = _strip(state, "model.")
    names = {
        f"blocks.{layer}.{ours}": f"layers.{layer}.{theirs}"
        for layer in range(int(config["num_hidden_layers"]))
        for ours, theirs in {
            "norm1": "input_layernorm",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "norm2": "post_attention_layernorm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        }.items()
    }
    weights = _rename(state, names | {"final_norm": "norm"})
    weights["embed.tokens"] = state["embed_tokens.weight"]
    if has_head and _has_own_head(state, weights["embed.tokens"], bool(config.get("tie_word_embeddings"))):
        weights["head.weight"] = state["lm_head.weight"]
    vocabulary = weights["embed.tokens"].shape[0]
    heads = int(config["num_attention_heads"])
    architecture = Architecture(
        family="llama",
        n_layers=int(config["num_hidden_layers"]),
        n_heads=heads,
        n_kv_heads=int(config.get("num_key_value_heads") or heads),
        d_head=config.get("head_dim"),
        d_model=int(config["hidden_size"]),
        d_ff=int(config["intermediate_size"]),
        activation=_activation(config["hidden_act"]),
        gated=True,
        norm_kind="rms",
        norm_place="pre",
        norm_eps=float(config["rms_norm_eps"]),
        causal=True,
        rope_theta=float(str(theta)),
        d_out=vocabulary if has_head else None,
        d_vocab=vocabulary,
        context=int(config["max_position_embeddings"]),
    )
    return architecture, weights


_FAMILIES = {"bert": _bert, "mpnet": _mpnet, "gpt2": _gpt2, "llama": _llama}
