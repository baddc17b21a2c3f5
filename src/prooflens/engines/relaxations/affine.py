"""Affine steps as maps of coefficients, and the same steps with absolute values, for their rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prooflens.models.sites import Affine, Rotary


def through_affine(step: Affine, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the step's map without bias, for tensors with any leading dimensions.

    Args:
        step: the affine step.
        weight: its weight, or the weight's absolute values.
    """

    def f(t: Tensor) -> Tensor:
        y = torch.nn.functional.linear(t.flatten(-step.in_dims), weight)
        return y.reshape(*y.shape[:-1], *step.out_shape)

    return f


def through_rotary(step: Rotary) -> Callable[[Tensor], Tensor]:
    """Return the rotation with absolute values: the sizes of the terms of its sums."""

    def size(t: Tensor) -> Tensor:
        half = t.shape[-1] // 2
        turned = torch.cat((t[..., half:], t[..., :half]), -1)
        return t * step.cos.abs()[:, None, :] + turned * step.sin.abs()[:, None, :]

    return size
