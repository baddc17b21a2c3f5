"""The end of a model, from a block on: its inputs are residual streams, so regions may lie inside a model.

A ball, a segment or a hull around the activations at `blocks.L.hook_resid_pre` is a region of the model's tail. Layer
l of the tail is layer l + L of the whole model.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from prooflens.errors import ModelError
from prooflens.models.edges import ROWS
from prooflens.models.prompt import Origin, Prompt
from prooflens.models.reads import stream_name
from prooflens.models.transformer import Transformer


def start_at(
    model: Transformer, layer: int, prompt: Prompt | str | None = None
) -> tuple[Transformer, Prompt | None]:
    """Return the model from a block on, and the residual stream that a prompt brings there.

    Args:
        model: the whole model.
        layer: the first block to keep, from 0.
        prompt: a text or a prompt of the model; None for none.

    Returns:
        The tail, a model of its own with a name and a fingerprint, and the stream in front of it as its prompt.

    Raises:
        ModelError: if there is no such block, or blocks of the model depend on their number.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> tail, stream = pl.start_at(model, 1, model.example())
        >>> bool(torch.allclose(tail(stream), model(model.example())))
        True
    """
    a = model.architecture
    model.check_layer(layer)
    if a.scale_by_layer or a.head_positions:
        field = "scale_by_layer" if a.scale_by_layer else "head_positions"
        raise ModelError(f"blocks of {model.name} depend on where they stand ({field}): it has no tail")
    if layer and any(name.endswith(ROWS) for name in model.weights):
        raise ModelError(
            f"edges of {model.name} are cut, which may start before layer {layer}: it has no tail"
        )
    weights = {}
    for name, tensor in model.weights.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
        if match is not None and int(match[1]) >= layer:
            weights[f"blocks.{int(match[1]) - layer}.{match[2]}"] = tensor
        elif match is None and not name.startswith("embed."):
            weights[name] = tensor
    if a.d_out is not None and a.read_hook is None and "head.weight" not in weights:
        weights["head.weight"] = model.weights["embed.tokens"]
    architecture = replace(
        a,
        n_layers=a.n_layers - layer,
        window_layers=tuple(local - layer for local in a.window_layers if local >= layer),
        first_norm=a.first_norm or layer > 0,
        read_hook=_moved(a.read_hook, layer),
        beside_hook=_moved(a.beside_hook, layer),
        d_vocab=None,
        context=None,
        d_embed=None,
        embed_scale=None,
        position_offset=0,
        patch=None,
    )
    name = f"{model.name}, from layer {layer}"
    tail = replace(
        model, architecture=architecture, weights=weights, name=name, tokenizer=None, examples=None
    )
    if prompt is None:
        return tail, None
    held = model.prompt(prompt) if isinstance(prompt, str) else prompt
    stream = _stream(model, held, layer)
    origin = (
        None if held.origin is not None else Origin(layer, held.x, held.ids)
    )  # a tail's tail names neither
    return tail, Prompt(stream, held.tokens, origin=origin)


def _moved(hook: str | None, layer: int) -> str | None:
    """The name that a hook has in the tail."""
    if hook is None:
        return None
    match = re.fullmatch(r"blocks\.(\d+)\.(.*)", hook)
    if match is None or int(match[1]) < layer:
        raise ModelError(f"{hook} lies before layer {layer}: a tail that starts there does not reach it")
    return f"blocks.{int(match[1]) - layer}.{match[2]}"


def _stream(model: Transformer, prompt: Prompt, layer: int) -> torch.Tensor:
    """The residual stream in front of a block."""
    if layer == 0:
        return prompt.x
    name = stream_name({step.out for step in model.program(len(prompt)).steps}, layer)
    with torch.no_grad():
        return model.run(prompt, name)[name]
