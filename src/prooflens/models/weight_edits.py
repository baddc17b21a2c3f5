"""Edits of all tokens: columns that are taken out of the map that reads a part, and what they leave in its bias."""

from __future__ import annotations

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.parts import Edit, Place, fitting, unit


def apply_edit(weights: dict[str, Tensor], one: Edit, place: Place) -> None:
    """Change the map that reads a part, or that writes it.

    Args:
        weights: the weights, which are changed.
        one: the edit, at all tokens.
        place: the part that is held.
    """
    weight, bias = weights[f"{place.reader}.weight"].clone(), weights.get(f"{place.reader}.bias")
    if one.direction is not None:
        added = _without_direction(weight, bias, one, place)
    elif place.columns is None:
        added = None if one.value is None else fitting(one.value, len(weight), weight, place)
        weight.zero_()
    else:
        chosen = slice(place.columns.start, place.columns.stop)
        added = bias
        if one.value is not None:
            size = len(weight) if place.written else len(place.columns)
            given = fitting(one.value, size, weight, place)
            moved = given if place.written else weight[:, chosen] @ given
            added = moved if bias is None else bias + moved
        weight[:, chosen] = 0.0
    weights[f"{place.reader}.weight"] = weight
    weights.pop(f"{place.reader}.bias", None)
    if added is not None:
        weights[f"{place.reader}.bias"] = added


def _without_direction(weight: Tensor, bias: Tensor | None, one: Edit, place: Place) -> Tensor | None:
    """Take a direction out of what a block writes, and put its constant there; the new bias."""
    assert one.direction is not None
    if place.columns is not None:
        raise ModelError(f"{place.name} writes no stream of its own: give a direction of {place.block}")
    v = unit(one.direction, len(weight), weight, place)
    weight -= torch.outer(v, v @ weight)
    added = None if bias is None else bias - v * (v @ bias)
    if one.value is None:
        return added
    moved: Tensor = v * fitting(one.value, 1, weight, place)
    return moved if added is None else added + moved
