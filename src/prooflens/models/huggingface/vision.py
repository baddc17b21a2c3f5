"""Vision encoders: ViT and DINOv2. Tokens are patches of an image and one token in front of them."""

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
    refuse,
    rename,
    rename_blocks,
    strip,
)

VIT = {
    "norm1": "layernorm_before",
    "q": "attention.attention.query",
    "k": "attention.attention.key",
    "v": "attention.attention.value",
    "o": "attention.output.dense",
    "norm2": "layernorm_after",
    "up": "intermediate.dense",
    "down": "output.dense",
}
VIT_NEW = VIT | {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.o_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
DINO = VIT | {"norm1": "norm1", "norm2": "norm2", "up": "mlp.fc1", "down": "mlp.fc2"}
DINO_NEW = VIT_NEW | {"norm1": "norm1", "norm2": "norm2"}


def _vision(config: Config, held: State, parts: dict[str, str], where: str, **extra: Any) -> Converted:
    """What both share: a patch projection, a token in front, positions, pre-norm blocks, a last norm."""
    layers = int(config["num_hidden_layers"])
    weights = rename_blocks(held, layers, where, parts)
    weights |= rename(held, {"final_norm": "layernorm"})
    patch = held["embeddings.patch_embeddings.projection.weight"]
    weights["embed.patches.weight"] = patch.flatten(1)
    weights["embed.patches.bias"] = held["embeddings.patch_embeddings.projection.bias"]
    weights["embed.front"] = held["embeddings.cls_token"].reshape(1, -1)
    weights["embed.positions"] = held["embeddings.position_embeddings"].reshape(-1, patch.shape[0])
    described: dict[str, Any] = {
        "family": str(config["model_type"]),
        "n_layers": layers,
        "n_heads": int(config["num_attention_heads"]),
        "d_model": int(config["hidden_size"]),
        "d_ff": weights["blocks.0.up.weight"].shape[0],
        "activation": activation_of(config["hidden_act"]),
        "norm_place": "pre",
        "norm_eps": float(config["layer_norm_eps"]),
        "context": len(weights["embed.positions"]),
        "patch": int(config["patch_size"]),
        "channels": int(config.get("num_channels", 3)),
    }
    return Architecture(**(described | extra)), weights


def vit(config: Config, state: State, pool: str | None) -> Converted:
    """ViT: the class is read from the token in front, behind the last norm."""
    held = strip(state, "vit.")
    has_head = "classifier.weight" in held
    new = "layers.0.attention.q_proj.weight" in held
    parts, where = (VIT_NEW, "layers.{}") if new else (VIT, "encoder.layer.{}")
    head = has_head and {"d_out": len(held["classifier.weight"])}
    architecture, weights = _vision(
        config, held, parts, where, pool="first" if has_head else (pool or "none"), **(head or {})
    )
    if has_head:
        weights |= rename(held, {"head": "classifier"})
    return architecture, weights


def dinov2(config: Config, state: State, pool: str | None) -> Converted:
    """DINOv2: what attention and network add is scaled coordinate by coordinate; the scales join the projections."""
    refuse(config, use_swiglu_ffn=False)
    held = strip(state, "dinov2.")
    if any(name.startswith("classifier.") for name in held):
        raise ModelError(
            "DINOv2's classifier, which reads the token in front beside the mean of the others, is not supported: load "
            "the encoder (Dinov2Model)"
        )
    where = "encoder.layer.{}" if "encoder.layer.0.norm1.weight" in held else "layer.{}"
    new = f"{where.format(0)}.attention.q_proj.weight" in held
    architecture, weights = _vision(config, held, DINO_NEW if new else DINO, where, pool=pool or "none")
    for layer in range(architecture.n_layers):
        source = where.format(layer)
        for name, scale in (("o", "layer_scale1.lambda1"), ("down", "layer_scale2.lambda1")):
            factor: Tensor = held[f"{source}.{scale}"].double()
            part = f"blocks.{layer}.{name}"
            weights[f"{part}.weight"] = factor[:, None] * weights[f"{part}.weight"].double()
            weights[f"{part}.bias"] = factor * weights[f"{part}.bias"].double()
    return architecture, weights
