"""TransformerLens models, duck-typed: `HookedTransformer` (3.x) and `TransformerBridge` (3.x, 4.x).

TransformerLens may have folded or centred weights. prooflens certifies what the object holds, says so in
`Transformer.processing`, and refuses an object whose own forward pass disagrees with what was read from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models import hooked as hooked_layout
from prooflens.models import huggingface
from prooflens.models.architecture import Architecture
from prooflens.models.prompt import GivenTokenizer
from prooflens.models.transformer import Transformer

_AGREEMENT = 1e-4
"""The largest relative difference of logits between the given object (often float32) and what was read from it."""


def is_hooked_transformer(x: object) -> bool:
    """Say whether x looks like the HookedTransformer of TransformerLens 3.x.

    Args:
        x: any object.
    """
    return (
        all(hasattr(x, name) for name in ("cfg", "embed", "unembed", "blocks", "state_dict"))
        and hasattr(getattr(x, "unembed", None), "W_U")
        and not is_bridge(x)
    )


def is_bridge(x: object) -> bool:
    """Say whether x looks like the TransformerBridge of TransformerLens.

    Args:
        x: any object.
    """
    return all(hasattr(x, name) for name in ("cfg", "original_model", "state_dict"))


def from_hooked_transformer(hooked: Any) -> Transformer:
    """Convert a HookedTransformer to the canonical transformer.

    Args:
        hooked: the HookedTransformer.
    """
    state = {name: tensor.detach() for name, tensor in hooked.state_dict().items()}
    architecture, weights, processing = hooked_layout.convert(hooked.cfg, state)
    return _checked(hooked, architecture, weights, str(hooked.cfg.model_name), processing)


def from_bridge(bridge: Any) -> Transformer:
    """Convert a TransformerBridge to the canonical transformer, read from the transformers module inside it.

    Args:
        bridge: the TransformerBridge.
    """
    module = bridge.original_model
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        state.setdefault(name.replace("._original_component", ""), tensor.detach())
    architecture, weights = huggingface.convert(module.config.to_dict(), state)
    name = str(getattr(module.config, "_name_or_path", "") or architecture.family)
    return _checked(bridge, architecture, weights, name, "none")


def _tokenizer(given: Any) -> GivenTokenizer | None:
    """Return the object's own tokenizer, with the first token that `to_tokens` puts before a text."""
    held = getattr(given, "tokenizer", None)
    return None if held is None else GivenTokenizer(held, lambda text: given.to_tokens(text)[0].tolist())


def _checked(
    given: Any, architecture: Architecture, weights: dict[str, Tensor], name: str, processing: str
) -> Transformer:
    """Build the model, then run both on a few tokens: what we certify is what the object computes."""
    held = {key: tensor.detach().double().cpu().contiguous() for key, tensor in weights.items()}
    model = Transformer(architecture, held, name=name, processing=processing, tokenizer=_tokenizer(given))
    assert architecture.d_vocab is not None
    ids = torch.arange(min(8, architecture.context or 8)) * 7919 % architecture.d_vocab
    with torch.no_grad():
        theirs = given(ids[None].to(next(given.parameters()).device))
        theirs = getattr(theirs, "logits", theirs)[0].double().cpu()
        ours = model(model.embed(ids))
    # A shift common to all logits of a token is invisible to softmax; TransformerLens' centring makes one.
    gap = (ours - theirs) - (ours - theirs).mean(-1, keepdim=True)
    scale = float(theirs.std()) or 1.0
    if float(gap.abs().max()) > _AGREEMENT * scale:
        raise ModelError(
            f"{name} computes something else than its weights say (logits differ by {float(gap.abs().max()):.2g}): "
            "its weights were processed or edited in place; pass the unprocessed model"
        )
    return model
