"""Tiny random models of every family, made by transformers, for tests."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
)

VOCABULARY = 60


def _spread(module: Any, seed: int) -> Any:
    """Weights large enough for attention to be far from uniform, norms and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter * (0.5 if parameter.ndim == 1 else 0.0) + 0.3 * noise)
    return module.double().eval()


def bert(seed: int = 0, heads: bool = True) -> Any:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=20,
        num_labels=3,
        layer_norm_eps=1e-6,
        attn_implementation="eager",
    )
    return _spread(BertForSequenceClassification(config) if heads else BertModel(config), seed)


def mpnet(seed: int = 0) -> Any:
    config = MPNetConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=40,
        relative_attention_num_buckets=32,
    )
    return _spread(MPNetModel(config), seed)


def gpt2(seed: int = 0) -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=20,
        attn_implementation="eager",
    )
    return _spread(GPT2LMHeadModel(config), seed)


def llama(seed: int = 0, tied: bool = False) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        attn_implementation="eager",
    )
    return _spread(LlamaForCausalLM(config), seed)


FAMILIES: dict[str, Callable[[], Any]] = {"bert": bert, "mpnet": mpnet, "gpt2": gpt2, "llama": llama}
