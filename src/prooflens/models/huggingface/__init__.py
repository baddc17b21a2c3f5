"""Hugging Face layouts: a `config.json` dictionary and a state dict become the canonical transformer.

Works on dictionaries alone, so that a folder can be read without transformers. One function per family; what a
configuration asks that is not supported is refused by one line that names the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.huggingface import encoders, gpt_like, llama_like, vision
from prooflens.models.huggingface.common import Config, Converted, State

__all__ = ["FAMILIES", "convert"]

Adapter = Callable[[Config, State, str | None], Converted]

FAMILIES: dict[str, Adapter] = {
    "bert": encoders.bert,
    "mpnet": encoders.mpnet,
    "roberta": encoders.roberta,
    "xlm-roberta": encoders.roberta,
    "camembert": encoders.roberta,
    "distilbert": encoders.distilbert,
    "electra": encoders.electra,
    "modernbert": encoders.modernbert,
    "gpt2": gpt_like.gpt2,
    "gpt_neo": gpt_like.gpt_neo,
    "gptj": gpt_like.gptj,
    "gpt_neox": gpt_like.gpt_neox,
    "phi": gpt_like.phi,
    "opt": gpt_like.opt,
    "bloom": gpt_like.bloom,
    "llama": llama_like.llama,
    "mistral": llama_like.llama,
    "qwen2": llama_like.llama,
    "qwen3": llama_like.qwen3,
    "gemma": llama_like.gemma,
    "gemma2": llama_like.gemma2,
    "gemma3_text": llama_like.gemma2,
    "phi3": llama_like.phi3,
    "olmo": llama_like.olmo,
    "olmo2": llama_like.olmo2,
    "stablelm": llama_like.stablelm,
    "vit": vision.vit,
    "dinov2": vision.dinov2,
}
"""The families that can be read, by `model_type`."""


def convert(config: Config, state: State, pool: str | None = None) -> tuple[Architecture, dict[str, Tensor]]:
    """Return the architecture and canonical weights of a Hugging Face model.

    Tensors are renamed, cut and reordered; the only numbers that change are Gemma's 1 + w and DINOv2's scales.

    Args:
        config: the content of `config.json`.
        state: the state dict.
        pool: how an encoder without a classification head is read out (`"mean"` for sentence encoders).

    Raises:
        ModelError: for a family, or a field of its configuration, that is not supported.
    """
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise ModelError(_unsupported(family))
    if any(config.get(name) for name in ("num_local_experts", "num_experts")):
        raise ModelError("num_local_experts: mixtures of experts are not supported")
    if bare := next((name for name, tensor in state.items() if tensor.is_meta), None):
        raise ModelError(f"{bare} holds no numbers (it is on the meta device): load the weights first")
    try:
        return FAMILIES[family](config, state, pool)
    except KeyError as error:
        raise ModelError(f"the {family} model lacks {error.args[0]!r} in its config or weights") from error
    except (TypeError, ValueError, OverflowError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelError(f"config and weights of the {family} model do not fit: {error}") from error


def _unsupported(family: str) -> str:
    close = difflib.get_close_matches(family, FAMILIES, n=1, cutoff=0.3)
    nearest = close[0] if close else "bert"
    known = ", ".join(sorted(FAMILIES))
    return f"architecture {family!r} is not supported; the nearest supported one is {nearest!r} (supported: {known})"
