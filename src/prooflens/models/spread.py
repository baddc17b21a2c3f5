"""Parts that are held at any value of a set: c + Σ_k β_k g_k for all β in [−1, 1]^K, whatever the input is.

Such a model reads more than its input: behind the d coordinates of a token stand K *free* ones, u_k = r_k β_k
(`Architecture.free`). Its stream starts with the first d (`STREAM`), and where the part is held, Σ_k u_k g_k / r_k of
the last K (`FREE`) is added to c. A region of it is X times the box of all u, in which one β belongs to all tokens that
a generator moves (`regions.product`). The model that was edited reads nothing of them, and both run side by side there.

The r_k are the powers of two below the largest number of their generators, so that dividing rounds nothing, and u is as
large as what it adds: ellipsoids of engines hold it beside the stream.

| table | shape | what |
|---|---|---|
| `….spread` of the part | [m, k, K] | g / r, by its rows of tokens, its coordinates, and the β |
| `free.radii` | [K] | r |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.edges import find_edge
from prooflens.models.frozen import find_frozen
from prooflens.models.held import EVERY, token_of
from prooflens.models.knockouts import find_knockout
from prooflens.models.parts import Edit, Place, split_tokens

if TYPE_CHECKING:
    from prooflens.models.architecture import Architecture
    from prooflens.models.transformer import Transformer

STREAM = "blocks.0.hook_stream"
"""The stream in front of the first block, of a model with free coordinates."""

FREE = "blocks.0.hook_free"
"""The free coordinates of every token."""

RADII = "free.radii"
"""The table of how far each free coordinate moves."""

ENDS = (".held.spread", ".directions.spread")
"""How the names of tables of generators end."""


def check_spread(architecture: Architecture, one: Edit) -> None:
    """Raise a `ModelError` if something is to be held at any value of a set that can only have one value.

    Args:
        architecture: what the model looks like.
        one: the edit.
    """
    part = split_tokens(one.place)[0]
    alone = one.feature or find_knockout(architecture, one.place) or find_frozen(architecture, one.place)
    if one.spread is not None and (alone or find_edge(architecture, part)):
        raise ModelError(
            f"{one.place} cannot be held at any value of a set: heads, attentions, networks, neurons and directions "
            "can; edges, keys, frozen patterns and features have one value"
        )


def spreads_of(
    model: Transformer, weights: dict[str, Tensor], held: Sequence[Edit], places: Sequence[Place]
) -> tuple[list[Float[Tensor, "m n K"] | None], int]:
    """Return the generators of every edit's values as tables, and how many free coordinates the model has with them.

    Args:
        model: the model that is edited.
        weights: the weights of the edited one, which are changed.
        held: the edits of parts and directions.
        places: the part of each.
    """
    found, like = [], next(iter(model.weights.values()))
    for one, place in zip(held, places, strict=True):
        whole = place.columns is None or place.written
        size = model.architecture.d_model if whole or place.columns is None else len(place.columns)
        found.append(generators_of(one, 1 if one.direction is not None else size, like, place))
    return _tables(weights, model.architecture.free, found)


def generators_of(one: Edit, size: int, like: Tensor, place: Place) -> Float[Tensor, "m n k"]:
    """Return the generators of the values that a part may have, those that are not 0.

    Args:
        one: the edit.
        size: how many numbers a value has.
        like: a tensor of the wanted precision and device.
        place: the part that is held.

    Raises:
        ModelError: if they do not fit the value, are not finite, or a number is negative.
    """
    by_row = isinstance(one.value, Tensor) and one.value.ndim == 2
    rows, several = max(1, len(one.tokens)), (len(one.tokens), size) if by_row else (size,)
    if one.spread is None:
        return like.new_zeros(rows, size, 0)
    given = torch.as_tensor(one.spread, dtype=like.dtype, device=like.device)
    if given.ndim == 0:
        if not bool(given.isfinite() & (given >= 0.0)):
            raise ModelError(
                f"the spread of {place.name} cannot be {one.spread}: give a number of at least 0"
            )
        count = rows * size if by_row else size
        given = torch.eye(count, dtype=like.dtype, device=like.device).reshape(count, *several) * given
    if tuple(given.shape[1:]) != several or not bool(given.isfinite().all()):
        wanted = ", ".join(map(str, ("k", *several)))
        raise ModelError(
            f"the spread of {one.place} must be a number or finite generators of shape [{wanted}], "
            f"got shape {list(given.shape)}"
        )
    given = given[(given != 0.0).flatten(1).any(1)]
    return (given if by_row else given[:, None].expand(-1, rows, -1)).movedim(0, -1)


def _tables(
    weights: dict[str, Tensor], free: int, made: list[Float[Tensor, "m n k"]]
) -> tuple[list[Float[Tensor, "m n K"] | None], int]:
    """Give every generator a free coordinate of its own, behind `free` that tables among the weights have."""
    count = free + sum(one.shape[-1] for one in made)
    if count == free:
        return [None for _ in made], free
    sizes = torch.cat([one.abs().amax((0, 1)) for one in made if one.shape[-1]])
    radii = torch.ldexp(torch.ones_like(sizes), torch.frexp(sizes).exponent - 1)
    weights[RADII] = torch.cat((weights[RADII], radii)) if free else radii
    for name in [name for name in weights if name.endswith(ENDS)]:
        weights[name] = torch.nn.functional.pad(weights[name], (0, count - free)).contiguous()
    tables: list[Tensor | None] = []
    start = free
    for one in made:
        k = one.shape[-1]
        own = one / weights[RADII][start : start + k]
        tables.append(torch.nn.functional.pad(own, (start, count - start - k)) if k else None)
        start += k
    return tables, count


def last_block(weights: Mapping[str, Tensor]) -> int:
    """Return the last block whose parts read free coordinates; 0 if none does.

    Args:
        weights: a model's weights.
    """
    return max((int(name.split(".")[1]) for name in weights if name.endswith(ENDS)), default=0)


def moved_tokens(edited: Transformer, n_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return for every free coordinate of an edited model the tokens at which something is added by it.

    Args:
        edited: the edited model.
        n_tokens: how many tokens the prompt has, without padding.
    """
    weights = edited.weights
    found: list[set[int]] = [set() for _ in range(edited.architecture.free)]
    for name in [name for name in weights if name.endswith(ENDS)]:
        at = weights[f"{name.removesuffix('.spread')}.at"].long().tolist()
        for (token, *_), row in zip(at, weights[name], strict=True):
            place = token_of(token, n_tokens)
            own = range(n_tokens) if token == EVERY else [] if place is None else [place]
            for number in row.any(0).nonzero()[:, 0].tolist():
                found[number].update(own)
    return tuple(tuple(sorted(tokens)) for tokens in found)


def beside(model: Transformer, edited: Transformer) -> Transformer:
    """Return a model with the free coordinates of an edit of it, of which it reads nothing: it computes what it did.

    Args:
        model: the model.
        edited: the edited one.
    """
    a = edited.architecture
    return replace(model, architecture=replace(model.architecture, free=a.free, free_until=a.free_until))
