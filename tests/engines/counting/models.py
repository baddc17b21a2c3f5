"""Tiny random models with a vocabulary of 8, one for each thing that changes the first scores."""

from __future__ import annotations

from typing import Any

import torch

from prooflens.models import Transformer
from prooflens.models.architecture import Architecture
from prooflens.models.weights import optional_shapes, required_shapes

VOCABULARY = 8

KINDS: dict[str, dict[str, Any]] = {
    "learned": {"causal": True, "norm_place": "pre"},
    "bert": {"norm_place": "post", "types": True},
    "rotary": {"causal": True, "norm_kind": "rms", "norm_place": "pre", "rope_theta": 50.0, "n_kv_heads": 1},
    "relative": {"norm_place": "post", "relative_buckets": 32},
    "alibi": {"causal": True, "norm_place": "pre", "alibi": True},
    "softcap": {"causal": True, "norm_place": "sandwich", "rope_theta": 50.0, "score_cap": 2.0},
    "head norms": {"causal": True, "norm_place": "pre", "rope_theta": 50.0, "qk_norm": "head"},
    "whole norms": {"causal": True, "norm_place": "output", "rope_theta": 50.0, "qk_norm": "whole"},
    "head positions": {"causal": True, "norm_place": "pre", "head_positions": True},
    "window": {"causal": True, "norm_place": "pre", "rope_theta": 50.0, "window": 2, "window_layers": (0,)},
    "parallel": {"causal": True, "norm_place": "pre", "parallel": True, "rope_theta": 50.0},
    "attention only": {"causal": True, "norm_place": "none", "has_network": False},
}
"""Fields of the architecture, by what they are there for."""

OWN_PLACES = {"rotary", "relative", "alibi", "softcap", "head norms", "whole norms", "window", "parallel"}
"""Kinds whose streams have no learned positions."""


def model_of(kind: str, seed: int = 0, vocabulary: int = VOCABULARY, spread: float = 0.8) -> Transformer:
    """A model of a kind, with weights large enough for scores to differ."""
    fields = {**KINDS[kind]}
    has_types = fields.pop("types", False)
    architecture = Architecture(
        "test",
        n_layers=1,
        n_heads=2,
        d_model=8,
        d_ff=8,
        activation="relu",
        d_vocab=vocabulary,
        context=6,
        **fields,
    )
    shapes = dict(required_shapes(architecture))
    wanted = ["norm1", "q_norm", "k_norm", ".q.bias", ".k.bias", "final_norm"]
    wanted += [] if kind in OWN_PLACES or architecture.head_positions else ["embed.positions"]
    wanted += ["embed.types", "embed.norm"] if has_types else []
    optional = optional_shapes(architecture)
    shapes |= {name: shape for name, shape in optional.items() if any(part in name for part in wanted)}
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        for name, shape in sorted(shapes.items())
    }
    return Transformer(architecture, weights, name=f"{kind} model")
