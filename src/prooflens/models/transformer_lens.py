"""TransformerLens models, duck-typed: `HookedTransformer` (3.x) and `TransformerBridge` (3.x, 4.x).

TransformerLens may have folded or centred weights. prooflens certifies what the object holds, says so in
`Transformer.processing`, and refuses an object whose own forward pass disagrees with what was read from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models import huggingface
from prooflens.models.architecture import Activation, Architecture
from prooflens.models.prompt import GivenTokenizer
from prooflens.models.transformer import Transformer

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}

_REFUSED = (
    "attn_only",
    "parallel_attn_mlp",
    "use_local_attn",
    "use_qk_norm",
    "use_attention_sinks",
    "use_normalization_before_and_after",
    "scale_attn_by_inverse_layer_idx",
    "post_embedding_ln",
    "use_NTK_by_parts_rope",
    "use_yarn_rope",
    "use_dynamic_ntk_rope",
    "num_experts",
)

_AGREEMENT = 1e-4
"""The largest relative difference of logits between the given object (often float32) and what was read from it."""


def is_hooked_transformer(x: object) -> bool:
    """Say whether x looks like the HookedTransformer of TransformerLens 3.x."""
    return (
        all(hasattr(x, name) for name in ("cfg", "unembed", "ln_final", "blocks", "state_dict"))
        and hasattr(getattr(x, "unembed", None), "W_U")
        and not is_bridge(x)
    )


def is_bridge(x: object) -> bool:
    """Say whether x looks like the TransformerBridge of TransformerLens."""
    return all(hasattr(x, name) for name in ("cfg", "original_model", "state_dict"))


def from_hooked_transformer(hooked: Any) -> Transformer:
    """Convert a HookedTransformer to the canonical transformer."""
    cfg = hooked.cfg
    for switch in _REFUSED:
        if getattr(cfg, switch, None):
            raise ModelError(f"TransformerLens models with {switch} are not supported")
    if cfg.positional_embedding_type not in ("standard", "rotary"):
        raise ModelError(f"positional embedding {cfg.positional_embedding_type!r} is not supported")
    if cfg.act_fn not in _ACTIVATIONS:
        raise ModelError(f"activation {cfg.act_fn!r} is not supported")
    rotary = cfg.positional_embedding_type == "rotary"
    if rotary and (cfg.rotary_dim != cfg.d_head or cfg.rotary_adjacent_pairs):
        raise ModelError("only RoPE over the whole head, in the halves convention, is supported")
    kind = str(cfg.normalization_type)
    if kind not in ("LN", "LNPre", "RMS", "RMSPre"):
        raise ModelError(f"normalization_type {kind!r} is not supported")
    state = {name: tensor.detach() for name, tensor in hooked.state_dict().items()}
    weights = {"embed.tokens": state["embed.W_E"], "head.weight": state["unembed.W_U"].T}
    weights["head.bias"] = state["unembed.b_U"]
    if not rotary:
        weights["embed.positions"] = state["pos_embed.W_pos"]
    for layer in range(cfg.n_layers):
        weights |= _hooked_block(state, f"blocks.{layer}", bool(cfg.gated_mlp))
    for ours, theirs in _norm_names(cfg.n_layers).items():
        for suffix, letter in (("weight", "w"), ("bias", "b")):
            if f"{theirs}.{letter}" in state:
                weights[f"{ours}.{suffix}"] = state[f"{theirs}.{letter}"]
    architecture = Architecture(
        family="llama" if rotary else "gpt2",
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_key_value_heads or cfg.n_heads,
        d_head=cfg.d_head,
        d_model=cfg.d_model,
        d_ff=cfg.d_mlp,
        activation=_ACTIVATIONS[cfg.act_fn],
        gated=bool(cfg.gated_mlp),
        norm_kind="rms" if kind.startswith("RMS") else "layer",
        norm_place="pre",
        norm_eps=float(cfg.eps),
        causal=cfg.attention_dir == "causal",
        rope_theta=float(cfg.rotary_base) if rotary else None,
        d_out=weights["head.weight"].shape[0],
        d_vocab=weights["embed.tokens"].shape[0],
        context=cfg.n_ctx,
    )
    processing = "norms folded into the next weights by TransformerLens" if kind.endswith("Pre") else "none"
    return _checked(hooked, architecture, weights, str(cfg.model_name), processing)


def _hooked_block(state: dict[str, Tensor], block: str, gated: bool) -> dict[str, Tensor]:
    """Return one block's matrices, from [head, d, d_h] to the nn.Linear layout."""
    weights: dict[str, Tensor] = {}
    for name in "QKV":
        source = f"{block}.attn.W_{name}" if f"{block}.attn.W_{name}" in state else f"{block}.attn._W_{name}"
        bias = source.replace("W_", "b_")
        weights[f"{block}.{name.lower()}.weight"] = state[source].transpose(1, 2).flatten(0, 1)
        weights[f"{block}.{name.lower()}.bias"] = state[bias].flatten()
    weights[f"{block}.o.weight"] = state[f"{block}.attn.W_O"].flatten(0, 1).T
    weights[f"{block}.o.bias"] = state[f"{block}.attn.b_O"]
    weights[f"{block}.up.weight"], weights[f"{block}.up.bias"] = (
        state[f"{block}.mlp.W_in"].T,
        state[f"{block}.mlp.b_in"],
    )
    weights[f"{block}.down.weight"], weights[f"{block}.down.bias"] = (
        state[f"{block}.mlp.W_out"].T,
        state[f"{block}.mlp.b_out"],
    )
    if gated:
        weights[f"{block}.gate.weight"] = state[f"{block}.mlp.W_gate"].T
    return weights


def _norm_names(n_layers: int) -> dict[str, str]:
    names = {f"blocks.{layer}.norm{i}": f"blocks.{layer}.ln{i}" for layer in range(n_layers) for i in (1, 2)}
    return names | {"final_norm": "ln_final"}


def from_bridge(bridge: Any) -> Transformer:
    """Convert a TransformerBridge to the canonical transformer, read from the transformers module inside it."""
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
