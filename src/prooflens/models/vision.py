"""From pixels to tokens: patches, their affine embedding, a token in front, positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import PromptError

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer


def image_patches(model: Transformer, pixels: Float[Tensor, "C H W"]) -> Float[Tensor, "P n"]:
    """Cut an image into patches, row by row.

    Args:
        model: a vision model.
        pixels: normalised pixels; height and width are multiples of the patch.

    Returns:
        One row per patch: its pixels, colour by colour.

    Raises:
        PromptError: if the model reads no images, or not of this shape.
    """
    side, channels = model.architecture.patch, model.architecture.channels
    if side is None:
        raise PromptError(f"{model.name} reads no images")
    if pixels.ndim != 3 or len(pixels) != channels or pixels.shape[1] % side or pixels.shape[2] % side:
        raise PromptError(
            f"{model.name} reads images of shape [{channels}, H, W] with H and W multiples of {side}, "
            f"got {list(pixels.shape)}"
        )
    cut = pixels.unfold(1, side, side).unfold(2, side, side)
    return cut.permute(1, 2, 0, 3, 4).reshape(-1, channels * side * side)


def embed_image(model: Transformer, pixels: Float[Tensor, "C H W"]) -> Float[Tensor, "S d"]:
    """Embed an image: project its patches, put the token in front, add positions.

    Args:
        model: a vision model.
        pixels: normalised pixels.

    Raises:
        PromptError: if the model reads no images, or not of this shape.
    """
    weights = model.weights
    patches = image_patches(model, pixels).to(weights["embed.patches.weight"])
    x = torch.nn.functional.linear(
        patches, weights["embed.patches.weight"], weights.get("embed.patches.bias")
    )
    if "embed.front" in weights:
        x = torch.cat((weights["embed.front"], x))
    if "embed.positions" in weights:
        if len(weights["embed.positions"]) != len(x):
            raise PromptError(
                f"the image gives {len(x)} tokens, {model.name} has positions for "
                f"{len(weights['embed.positions'])}: scale it"
            )
        x = x + weights["embed.positions"]
    return x
