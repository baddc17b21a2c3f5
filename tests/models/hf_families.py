"""Tiny random models of transformers: one for each family, and for each field that changes what is computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

VOCABULARY = 40
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 8}
GEMMA = WIDE | {"sliding_window": 3, "query_pre_attn_scalar": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": 3,
}
GPTJ = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 32}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 24,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 16,
}
DISTIL = {
    "vocab_size": VOCABULARY,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 24,
    "max_position_embeddings": 32,
}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


def _rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **more}}


LLAMA3 = _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LONG = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0], "rope_theta": 500.0, "rope_type": "longrope"}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 scaled by layer": (
        "gpt2",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        | {"scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt2 without scale": (
        "gpt2",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        | {"scale_attn_weights": False},
    ),
    "gpt_neox": ("gpt_neox", COMMON | {"rotary_pct": 0.5}),
    "gpt_neox in sequence": ("gpt_neox", COMMON | {"rotary_pct": 1.0, "use_parallel_residual": False}),
    "gpt_neox with ReLU²": ("gpt_neox", COMMON | {"rotary_pct": 0.5, "hidden_act": "relu2"}),
    "gpt_neo": ("gpt_neo", NEO),
    "gptj": ("gptj", GPTJ | {"rotary_dim": 4}),
    "gptj thirty of 44": ("gptj", GPTJ | {"n_embd": 88, "rotary_dim": 30}),
    "gptj whole head": ("gptj", GPTJ | {"rotary_dim": 8}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2 with windows": (
        "qwen2",
        GROUPED | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", WIDE),
    "mistral": ("mistral", GROUPED | {"sliding_window": 3}),
    "llama": ("llama", GROUPED | {"attention_bias": True, "tie_word_embeddings": True}),
    "llama gated by ReLU²": ("llama", GROUPED | {"hidden_act": "relu2"}),
    "llama3 scaling": ("llama", GROUPED | LLAMA3),
    "linear scaling": ("llama", GROUPED | _rope("linear")),
    "dynamic scaling": ("llama", GROUPED | _rope("dynamic")),
    "yarn scaling": ("llama", GROUPED | _rope("yarn", original_max_position_embeddings=8)),
    "gemma": ("gemma", WIDE),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text yarn": (
        "gemma3_text",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _rope("yarn", original_max_position_embeddings=8)["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi": ("phi", COMMON),
    "phi3": ("phi3", GROUPED | TOKENS | {"sliding_window": 3}),
    "phi3 longrope": (
        "phi3",
        GROUPED | TOKENS | {"original_max_position_embeddings": 16, "rope_parameters": LONG},
    ),
    "opt": ("opt", OPT),
    "opt post-norm": ("opt", OPT | {"do_layer_norm_before": False}),
    "olmo": ("olmo", COMMON),
    "olmo2": ("olmo2", GROUPED),
    "stablelm": ("stablelm", GROUPED | {"partial_rotary_factor": 0.5}),
    "stablelm side by side": (
        "stablelm",
        GROUPED | {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "bloom": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "bloom with six heads": (
        "bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 6},
    ),
}
"""Name, `model_type` and configuration."""

ENCODERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "roberta": ("roberta", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}, False),
    "roberta classifier": ("roberta", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}, True),
    "distilbert": ("distilbert", DISTIL, False),
    "distilbert classifier": ("distilbert", DISTIL, True),
    "electra": ("electra", COMMON | {"embedding_size": 8}, False),
    "electra classifier": ("electra", COMMON | {"embedding_size": 16}, True),
    "modernbert": (
        "modernbert",
        COMMON
        | TOKENS
        | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        False,
    ),
}
"""The same, and whether it has a classifier."""


def randomised(module: Any, seed: int = 0) -> Any:
    """The module in float64 with random weights, norms and biases away from 1 and 0; RoPE's constants stay float32."""
    module = module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    plus_one = "gemma" in module.config.model_type
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name.lower() or "ln_" in name
            around = 1.0 if norm and name.endswith("weight") and not plus_one else 0.0
            parameter.copy_(around + (0.2 if norm else 0.3) * noise)
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if "inv_freq" in name:
                setattr(part, name, buffer.float())
    return module


def decoder(name: str) -> Any:
    """A language model of a family."""
    kind, fields = DECODERS[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    return randomised(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


OLD_SPELLING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"rope_theta": 300.0}),
    "gemma3, whole layers by default": ("gemma3_text", {}),
    "gemma3": (
        "gemma3_text",
        {"rope_theta": 900.0, "rope_local_base_freq": 50.0, "sliding_window_pattern": 2}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1},
    ),
    "qwen2 without": ("qwen2", {"use_sliding_window": False, "sliding_window": 2}),
    "qwen3 silent": ("qwen3", {"sliding_window": 2}),
}
"""Fields of config.json as they were before `layer_types` and `rope_parameters`; the family says what is left out."""


def spelled_as_before(name: str, folder: Path) -> None:
    """Write a language model whose config.json has the fields of `OLD_SPELLING`, and not those that replaced them."""
    kind, fields = OLD_SPELLING[name]
    decoder(kind).float().save_pretrained(folder)
    held = json.loads((folder / "config.json").read_text())
    for gone in ("layer_types", "rope_parameters", "use_sliding_window", "sliding_window_pattern"):
        held.pop(gone, None)
    (folder / "config.json").write_text(json.dumps(held | fields))


def encoder(name: str) -> Any:
    """An encoder, with a classifier where it has one."""
    kind, fields, classifies = ENCODERS[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    made = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    return randomised(made.from_config(config, attn_implementation="eager"))


@contextmanager
def true_double() -> Iterator[None]:
    """transformers drops to float32 inside norms and softmax whatever the model's precision: here it does not."""
    to, to_float = Tensor.to, Tensor.float
    functional, plain = torch.nn.functional.softmax, torch.softmax

    def kept(self: Tensor, *given: Any, **named: Any) -> Tensor:
        wanted = named.get("dtype", given[0] if given and isinstance(given[0], torch.dtype) else None)
        return self if self.dtype == torch.float64 and wanted == torch.float32 else to(self, *given, **named)

    def softmax(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, dim=None, dtype=None, **named: of(x, dim=dim)

    def stays(self: Tensor, **named: Any) -> Tensor:
        return self if self.dtype == torch.float64 else to_float(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", kept)
        patch.setattr(Tensor, "float", stays)
        patch.setattr(torch.nn.functional, "softmax", softmax(functional))
        patch.setattr(torch, "softmax", softmax(plain))
        yield
