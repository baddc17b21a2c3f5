"""Edits of some tokens, written into the tables of a model (`models.held`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.held import EVERY, Held
from prooflens.models.parts import Edit, Feature, Place, fitting, unit

if TYPE_CHECKING:
    from prooflens.models.dictionaries import Dictionary


def check_once(weights: dict[str, Tensor], edits: Sequence[Edit], places: Sequence[Place]) -> None:
    """Raise a `ModelError` if a part, or its block, is edited twice: now, or in the model that is edited.

    Args:
        weights: the weights of the model that is edited.
        edits: the edits.
        places: the part of each edit.
    """
    names = [place.name for place in places]
    for one, place in zip(edits, places, strict=True):
        twice = names.count(place.name) > 1 or (place.written and place.name.removesuffix(".result") in names)
        if twice or (place.columns is not None and place.block in names):
            raise ModelError(
                f"{place.name} is edited twice: give one edit of it, with all its tokens, as in 'a9.h6@3@-1'"
            )
        before = None if place.reader is None else Held.of(weights, f"{place.reader}.held")
        some = slice(None) if place.columns is None else slice(place.columns.start, place.columns.stop)
        if before is not None and bool(before.read[:, some].any()):
            raise ModelError(
                f"{one.place}: a part of this is held at some tokens already: give all edits at once"
            )


def rows_of(one: Edit, size: int, like: Tensor, place: Place) -> Float[Tensor, "tokens n"]:
    """The values of an edit, a row for each of its tokens.

    Args:
        one: the edit.
        size: how many numbers a row has.
        like: a tensor of the wanted precision and device.
        place: the part that is held.
    """
    count = max(1, len(one.tokens))
    if one.value is None:
        return like.new_zeros(count, size)
    given = torch.as_tensor(one.value)
    if given.ndim == 2 and len(given) != count:
        raise ModelError(f"an edit of {one.place} needs a row for each token, got shape {list(given.shape)}")
    rows = given if given.ndim == 2 else given[None].expand(count, *given.shape)
    return torch.stack([fitting(row, size, like, place) for row in rows])


def hold_part(
    weights: dict[str, Tensor], one: Edit, place: Place, spread: Float[Tensor, "m k K"] | None = None
) -> None:
    """Open the map that reads a part, and hold the part at tokens, or at every token.

    Args:
        weights: the weights, which are changed.
        one: the edit.
        place: the part that is held.
        spread: the generators of its values; None for one value.
    """
    weight, bias = weights[f"{place.reader}.weight"], weights.get(f"{place.reader}.bias")
    if place.columns is None:
        read, write = weight, torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        rest = torch.zeros_like(weight)
        offset = weight.new_zeros(len(weight)) if bias is None else bias
        weights.pop(f"{place.reader}.bias", None)
    else:
        some = slice(place.columns.start, place.columns.stop)
        read = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)[some]
        write, rest = weight[:, some].clone(), weight.clone()
        if place.written:
            read, write = write @ read, torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        offset = weight.new_zeros(len(read))
        rest[:, some] = 0.0
    weights[f"{place.reader}.weight"] = rest
    k = len(read)
    rows = [[token, 0, k] for token in one.tokens or (EVERY,)]
    at = torch.tensor(rows, dtype=torch.float64, device=weight.device)
    values = rows_of(one, k, weight, place)
    Held(read, offset, write, at, values, spread=spread).put(weights, f"{place.reader}.held")


def hold_direction(
    weights: dict[str, Tensor], one: Edit, place: Place, spread: Float[Tensor, "m 1 K"] | None = None
) -> None:
    """Hold a value's coordinate along a direction at tokens, or at every token.

    Args:
        weights: the weights, which are changed.
        one: the edit.
        place: the value whose direction is held.
        spread: the generators of the coordinate; None for one value.
    """
    assert one.direction is not None
    if place.columns is not None:
        raise ModelError(f"{place.name} writes no stream of its own: give a direction of {place.block}")
    block, _, site = place.hook.rpartition(".hook_")
    stem, like = f"{block}.{site}.directions", _some(weights)
    if Held.of(weights, stem) is not None:
        raise ModelError(f"a direction of {place.name} is held already: the coordinates of two are not apart")
    v = unit(one.direction, like.shape[1], like, place)
    at = torch.tensor([[token, 0, 1] for token in one.tokens or (EVERY,)], dtype=torch.float64).to(v.device)
    Held(v[None], v.new_zeros(1), v[:, None], at, rows_of(one, 1, v, place), spread=spread).put(weights, stem)


def _some(weights: dict[str, Tensor]) -> Tensor:
    """A matrix that reads the stream."""
    return weights["blocks.0.q.weight" if "blocks.0.q.weight" in weights else "blocks.0.up.weight"]


REFUSED = {
    "gated": "a gate says whether one is active and another map how large it is, and Dictionary keeps the gate alone",
    "topk": "whether one is active depends on all features at once, and no engine has a rule for that",
}
"""Kinds of dictionaries whose features are not held, and why."""


def feature(
    dictionary: Dictionary,
    index: int,
    value: float | None = None,
    tokens: Sequence[int] = (),
    error: bool = True,
) -> Edit:
    """Return the edit that holds a feature of a dictionary at zero or at a constant.

    With the error term the value h becomes h + (c − f)·d, f the feature and d its decoder direction. Without it h
    becomes what the dictionary decodes with f = c, so all that the dictionary does not explain is gone, too. With
    z = w·(h − center) + bias the feature is max(0, z) where z is above its threshold, and 0 where it is not, so that a
    threshold below 0 is the same as one of 0.

    Args:
        dictionary: a `standard` (ReLU), `jumprelu` or `batchtopk` dictionary with a decoder.
        index: the number of the feature.
        value: c; None for zero.
        tokens: the tokens at which it is held, negative from the end; none for all.
        error: whether the error term stays.

    Raises:
        ModelError: if the dictionary has no decoder, no such feature, or is `gated` or `topk`.
    """
    if dictionary.kind in REFUSED:
        raise ModelError(
            f"features of a {dictionary.kind} dictionary cannot be held: {REFUSED[dictionary.kind]}. Hold a direction "
            f"of {dictionary.hook} instead, Edit(hook, direction=…)"
        )
    if dictionary.decoder is None:
        raise ModelError("the dictionary has no decoder: give W_dec, or Dictionary.of(…, decoder=…)")
    if not 0 <= index < dictionary.size:
        raise ModelError(f"there is no feature {index}: the dictionary has 0 … {dictionary.size - 1}")
    place = dictionary.hook + "".join(f"@{token}" for token in tokens)
    put = None if value is None else torch.tensor([value], dtype=torch.float64)
    return Edit(
        place, put, f"{value}" if value is not None else "", feature=Feature(dictionary, index, error)
    )


def hold_feature(weights: dict[str, Tensor], one: Edit, place: Place) -> None:
    """Hold a feature of the value that a hook names, at tokens or at every token.

    Args:
        weights: the weights, which are changed.
        one: the edit.
        place: the value that the dictionary reads.
    """
    assert one.feature is not None
    held, index = one.feature.dictionary, one.feature.index
    block, _, site = place.hook.rpartition(".hook_")
    stem, like = f"{block}.{site}.{'features' if one.feature.error else 'decoded'}", _some(weights)
    if held.weight.shape[1] != like.shape[1]:
        raise ModelError(
            f"the dictionary reads {held.weight.shape[1]} coordinates: it belongs to another model"
        )
    assert held.decoder is not None
    some = slice(index, index + 1) if one.feature.error else slice(None)
    start = 0 if one.feature.error else index
    if not one.feature.error and Held.of(weights, stem) is not None:
        raise ModelError(f"{place.hook} is decoded already: hold one feature of it without the error term")
    read, write = held.weight[some].to(like), held.decoder[:, some].to(like)
    threshold = held.threshold.clamp(min=0.0)
    bias = (held.bias - held.weight @ held.center - threshold)[some].to(like)
    jumps = threshold[some].to(like) if bool(threshold[some].any()) else None
    at = torch.tensor(
        [[token, start, start + 1] for token in one.tokens or (EVERY,)],
        dtype=torch.float64,
        device=like.device,
    )
    values = like.new_zeros(len(at), len(read))
    values[:, start : start + 1] = rows_of(one, 1, like, place)
    Held(read, bias, write, at, values, jumps).put(weights, stem)
    if not one.feature.error:
        given = held.decoder_bias
        weights[f"{stem}.offset"] = (like.new_zeros(len(write)) if given is None else given.to(like)).clone()
