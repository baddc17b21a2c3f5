"""A box of pixels around an image, as a region of a vision model's tokens.

The patch embedding is affine, so a box of pixels is a set with one generator per pixel: pixel (c, u, v) of a patch
moves the patch's token along the column of the projection that reads it. The region is that of its stored numbers; the
embedding of an image lies in it up to float64's rounding of that embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import RegionError
from prooflens.models.vision import embed_image, image_patches
from prooflens.regions.region import Region, positive

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Pixels:
    """All images whose pixels differ from a given one by at most ε, before normalisation.

    Attributes:
        image: pixels in [0, 1], shape [C, H, W].
        eps: how far each pixel may move.
        mean: subtracted from each colour before the model reads it.
        std: divides each colour after that.
        clip: whether pixels stay in [0, 1].

    Example:
        >>> image = torch.full((3, 8, 8), 0.5)
        >>> low, high = Pixels(image, 0.1).range
        >>> round(float(low.min()), 3), round(float(high.max()), 3)
        (0.4, 0.6)
    """

    image: Float[Tensor, "C H W"]
    eps: float
    mean: Sequence[float] = (0.0, 0.0, 0.0)
    std: Sequence[float] = (1.0, 1.0, 1.0)
    clip: bool = True

    def __post_init__(self) -> None:
        positive(self.eps, "ε")
        if self.image.ndim != 3:
            raise RegionError(f"an image has the shape [C, H, W], got {list(self.image.shape)}")
        if not (len(self.mean) == len(self.std) == len(self.image)) or not all(s > 0 for s in self.std):
            raise RegionError("give one mean and one positive standard deviation for each colour")
        if self.clip and not bool(((self.image >= 0) & (self.image <= 1)).all()):
            raise RegionError("pixels must lie in [0, 1]: divide bytes by 255, or set clip=False")

    @property
    def range(self) -> tuple[Float[Tensor, "C H W"], Float[Tensor, "C H W"]]:
        """The least and the largest value of every pixel."""
        image = self.image.double()
        low, high = image - self.eps, image + self.eps
        return (low.clamp(0.0, 1.0), high.clamp(0.0, 1.0)) if self.clip else (low, high)

    def normalised(self, pixels: Float[Tensor, "C H W"]) -> Float[Tensor, "C H W"]:
        """Pixels as the model reads them.

        Args:
            pixels: an image, shape [C, H, W].
        """
        mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (self.mean, self.std))
        return (pixels.double() - mean) / std

    def of(self, model: Transformer) -> Region:
        """Return the region of a model's tokens.

        Args:
            model: a vision model (`architecture.patch`).

        Returns:
            The tokens of the box's middle, with one generator per pixel that moves.

        Raises:
            RegionError: if the model reads no images.
        """
        if model.architecture.patch is None:
            raise RegionError(f"{model.name} reads no images: a box of pixels is for vision models")
        low, high = self.range
        center = embed_image(model, self.normalised(0.5 * low + 0.5 * high))
        std = torch.tensor(self.std, dtype=torch.float64)[:, None, None]
        half = 0.5 * (high - low) / std
        reach = image_patches(model, half)
        weight = model.weights["embed.patches.weight"]
        generators = center.new_zeros(reach.numel(), *center.shape)
        tokens, width = reach.shape
        first = len(center) - tokens
        for token in range(tokens):
            rows = slice(token * width, (token + 1) * width)
            generators[rows, first + token] = (weight * reach[token].to(weight)).T
        moving = generators.flatten(1).abs().sum(1) > 0
        label = f"pixels ε={self.eps:g}"
        return Region(center, generators=generators[moving], label=label, image=self.image)
