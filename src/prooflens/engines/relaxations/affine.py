"""Affine steps as maps of coefficients: the step itself, and the step with absolute values for its rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prooflens.models.sites import Affine, Rotary


def through_affine(step: Affine, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The step's map without bias, for its weight or the weight's absolute values, with any leading dimensions."""

    def f(t: Tensor) -> Tensor:
        y = torch.nn.functional.linear(t.flatten(-step.in_dims), weight)
        return y.reshape(*y.shape[:-1], *step.out_shape)

    return f


def through_rotary(step: Rotary) -> Callable[[Tensor], Tensor]:
    """The rotation with absolute values: what its sums are made of."""

    def size(t: Tensor) -> Tensor:
        half = t.shape[-1] // 2
        turned = torch.cat((t[..., half:], t[..., :half]), -1)
        return t * step.cos.abs()[:, None, :] + turned * step.sin.abs()[:, None, :]

    return size
