"""Encoders: BERT, MPNet, RoBERTa, DistilBERT, ELECTRA and ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.huggingface.common import (
    Config,
    Converted,
    State,
    activation_of,
    refuse,
    rename,
    rename_blocks,
    split_rows,
    strip,
)
from prooflens.models.huggingface.rope import frequencies, parameters_of, whole_head

BERT = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
}
MPNET = BERT | {
    "q": "attention.attn.q",
    "k": "attention.attn.k",
    "v": "attention.attn.v",
    "o": "attention.attn.o",
    "norm1": "attention.LayerNorm",
}
DISTILBERT = {
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "o": "attention.out_lin",
    "norm1": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm2": "output_layer_norm",
}
MODERNBERT = {"qkv": "attn.Wqkv", "o": "attn.Wo", "norm2": "mlp_norm", "joint": "mlp.Wi", "down": "mlp.Wo"}


def _encoder(
    config: Config,
    state: State,
    pool: str | None,
    blocks: tuple[str, Mapping[str, str]],
    heads: tuple[str, str] = ("pooler.dense", "classifier"),
    **extra: Any,
) -> Converted:
    """What the BERT family shares: post-LayerNorm blocks, embeddings with a norm, optional pooler and head.

    Args:
        config: the configuration.
        state: the state without the trunk's prefix.
        pool: how an encoder without a head is read out; None for the family's own way.
        blocks: where blocks are, and our and their names of a block's parts.
        heads: their names of the dense layer on the first token and of the classifier.
        extra: fields of the architecture that are the family's own.
    """
    if config.get("is_decoder"):
        raise ModelError("a BERT decoder with cross attention is not supported")
    layers = int(config["num_hidden_layers"])
    weights = rename_blocks(state, layers, *blocks)
    dense, classifier = heads
    has_head = f"{classifier}.weight" in state
    if has_head and f"{dense}.weight" not in state:
        raise ModelError("heads that classify every token are not supported: load the encoder alone")
    pooler = f"{dense}.weight" in state and (has_head or pool is None)
    names = {"embed.norm": "embeddings.LayerNorm"}
    names |= {"pooler": dense} if pooler else {}
    names |= {"head": classifier} if has_head else {}
    if "embeddings_project.weight" in state:
        names["embed.project"] = "embeddings_project"
    weights |= rename(state, names)
    weights["embed.tokens"] = state["embeddings.word_embeddings.weight"]
    weights["embed.positions"] = state["embeddings.position_embeddings.weight"]
    if "embeddings.token_type_embeddings.weight" in state:
        weights["embed.types"] = state["embeddings.token_type_embeddings.weight"]
    offset = int(extra.get("position_offset", 0))
    described: dict[str, Any] = {
        "family": str(config["model_type"]),
        "n_layers": layers,
        "n_heads": int(config["num_attention_heads"]),
        "d_model": int(config["hidden_size"]),
        "d_ff": int(config["intermediate_size"]),
        "activation": activation_of(config["hidden_act"]),
        "norm_eps": float(config["layer_norm_eps"]),
        "pool": "first" if pooler or has_head else (pool or "none"),
        "pooler": pooler,
        "d_out": weights["head.weight"].shape[0] if has_head else None,
        "d_vocab": weights["embed.tokens"].shape[0],
        "context": int(config["max_position_embeddings"]) - offset,
    }
    width = weights["embed.tokens"].shape[1]
    if width != described["d_model"]:
        described["d_embed"] = width
    return Architecture(**(described | extra)), weights


def bert(config: Config, state: State, pool: str | None) -> Converted:
    """BERT."""
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("BERT with relative position embeddings is not supported")
    return _encoder(config, strip(state, "bert."), pool, ("encoder.layer.{}", BERT))


def roberta(config: Config, state: State, pool: str | None) -> Converted:
    """RoBERTa: positions start behind the padding token's id; the classifier has a dense layer of its own."""
    refuse(config, position_embedding_type="absolute")
    offset = int(config.get("pad_token_id") or 1) + 1
    heads = ("classifier.dense", "classifier.out_proj")
    if "classifier.dense.weight" not in state:
        heads = ("pooler.dense", "classifier")
    held = strip(state, "roberta.")
    return _encoder(config, held, pool, ("encoder.layer.{}", BERT), heads, position_offset=offset)


def electra(config: Config, state: State, pool: str | None) -> Converted:
    """ELECTRA: embeddings may be narrower than the stream; the classifier's dense layer ends in a GELU."""
    refuse(config, position_embedding_type="absolute")
    heads = ("classifier.dense", "classifier.out_proj")
    extra = {"pooler_activation": "gelu"} if "classifier.dense.weight" in state else {}
    return _encoder(config, strip(state, "electra."), pool, ("encoder.layer.{}", BERT), heads, **extra)


def distilbert(config: Config, state: State, pool: str | None) -> Converted:
    """DistilBERT: BERT's blocks under other names; the classifier's dense layer ends in a ReLU."""
    refuse(config, sinusoidal_pos_embds=False)
    renamed = dict(config) | {
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "hidden_size": config["dim"],
        "intermediate_size": config["hidden_dim"],
        "hidden_act": config["activation"],
        "layer_norm_eps": 1e-12,
    }
    heads = ("pre_classifier", "classifier")
    extra = {"pooler_activation": "relu"} if "pre_classifier.weight" in state else {}
    held = strip(state, "distilbert.")
    return _encoder(renamed, held, pool, ("transformer.layer.{}", DISTILBERT), heads, **extra)


def mpnet(config: Config, state: State, pool: str | None) -> Converted:
    """MPNet: BERT with a bias by relative position."""
    if "classifier.dense.weight" in state:
        raise ModelError("MPNet classification heads are not supported: load the encoder (MPNetModel)")
    buckets = int(config["relative_attention_num_buckets"])
    if buckets != 32:
        raise ModelError(
            f"MPNet with {buckets} relative position buckets is not supported: transformers uses 32"
        )
    held = strip(state, "mpnet.")
    # Positions start at 2 whatever the config calls its padding token: transformers has it as a constant.
    architecture, weights = _encoder(
        config, held, pool, ("encoder.layer.{}", MPNET), relative_buckets=buckets, position_offset=2
    )
    weights["relative_bias"] = held["encoder.relative_attention_bias.weight"]
    return architecture, weights


def modernbert(config: Config, state: State, pool: str | None) -> Converted:
    """ModernBERT: pre-norm, gated, rotary; most layers look at a window around each token only."""
    if any(name.startswith(("classifier.", "decoder.", "head.")) for name in state):
        raise ModelError("heads of ModernBERT are not supported: load the encoder (ModernBertModel)")
    held = strip(state, "model.")
    layers, d_model = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads, d_ff = int(config["num_attention_heads"]), int(config["intermediate_size"])
    weights = rename_blocks(held, layers, "layers.{}", MODERNBERT)
    for layer in range(layers):
        block = f"blocks.{layer}"
        rows = _thirds(weights[f"{block}.qkv.weight"])
        split_rows(weights, f"{block}.qkv", {f"{block}.{name}": part for name, part in rows.items()})
        both = slice(0, d_ff), slice(d_ff, None)
        split_rows(weights, f"{block}.joint", dict(zip((f"{block}.gate", f"{block}.up"), both, strict=True)))
        if layer:
            weights |= rename(held, {f"{block}.norm1": f"layers.{layer}.attn_norm"})
    weights |= rename(held, {"final_norm": "final_norm", "embed.norm": "embeddings.norm"})
    weights["embed.tokens"] = held["embeddings.tok_embeddings.weight"]
    context, d_head = int(config["max_position_embeddings"]), d_model // heads
    every = int(config.get("global_attn_every_n_layers", 3))
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    for kind, name, old, usual in (
        ("full_attention", "frequencies", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_frequencies", "local_rope_theta", 10_000.0),
    ):
        given = parameters_of(dict(config) | {"rope_theta": config.get(old) or usual}, kind)
        weights[f"rope.{name}"] = whole_head(frequencies(given, d_head, context)[0], d_head)
    architecture = Architecture(
        family="modernbert",
        n_layers=layers,
        n_heads=heads,
        d_model=d_model,
        d_ff=d_ff,
        activation=activation_of(config.get("hidden_activation", "gelu")),
        gated=True,
        norm_place="pre",
        norm_eps=float(config.get("norm_eps", 1e-5)),
        pool=pool or "none",  # type: ignore[arg-type]
        d_vocab=len(weights["embed.tokens"]),
        context=context,
        rope_given=True,
        rope_local=True,
        window=int(config.get("local_attention", 128)) // 2,
        window_layers=tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention"),
        first_norm=False,
    )
    return architecture, weights


def _thirds(joint: Tensor) -> dict[str, slice]:
    """Rows of queries, keys and values in a projection that has them one after the other."""
    size = len(joint) // 3
    return {name: slice(i * size, (i + 1) * size) for i, name in enumerate("qkv")}
