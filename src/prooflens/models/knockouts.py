"""Knocked-out keys: tokens that queries of one head may not attend to. The mask of a head, as part of a model.

| name | what |
|---|---|
| `a9.h6.k3` | no other token attends to token 3 in head 6 of layer 9 |
| `a9.h6.q5.k3` | token 5 does not |

The keys that are left share the whole weight, as where a mask hides a token. Tokens are counted from 0. A model keeps a
layer's knocked-out keys among its weights, as rows (head, query, key) of whole numbers, with query −1 for all others
than the key: so its fingerprint covers them, and they travel with it. Where a prompt has no such token, nothing is
hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.edges import ROWS
from prooflens.models.frozen import HEADS
from prooflens.models.held import AT, check_held_tokens

if TYPE_CHECKING:
    from prooflens.models.architecture import Architecture

NAME = re.compile(r"a(?P<layer>\d{1,6})\.h(?P<head>\d{1,9})(?:\.q(?P<query>\d{1,6}))?\.k(?P<key>\d{1,6})")
OTHERS = -1
"""The query that stands for all tokens but the key."""

TABLE = "knocked_out"
"""The last part of a table's name."""


@dataclass(frozen=True, order=True)
class Knockout:
    """A key that is hidden from queries of one head.

    Attributes:
        layer: the layer.
        head: the head.
        query: the token that may not attend to it; `OTHERS` for all others.
        key: the token that is hidden.
    """

    layer: int
    head: int
    query: int
    key: int


def table_name(layer: int) -> str:
    """Return the name under which a model keeps the knocked-out keys of a layer."""
    return f"blocks.{layer}.{TABLE}"


def find_knockout(architecture: Architecture, name: str) -> Knockout | None:
    """Return the knocked-out key that a name stands for; None if it is the name of something else.

    Args:
        architecture: what the model looks like.
        name: as in `a9.h6.k3` or `a9.h6.q5.k3`.

    Raises:
        ModelError: if there is no such head, or the mask hides the key already.
    """
    match = NAME.fullmatch(name)
    if match is None:
        return None
    layer, head, key = (int(match[part]) for part in ("layer", "head", "key"))
    if layer >= architecture.n_layers or head >= architecture.n_heads or not architecture.has_attention:
        raise ModelError(
            f"there is no {name!r}: layers are 0 … {architecture.n_layers - 1}, "
            f"heads 0 … {architecture.n_heads - 1}"
        )
    query = OTHERS if match["query"] is None else int(match["query"])
    if architecture.causal and 0 <= query < key:
        raise ModelError(
            f"{name!r} changes nothing: token {query} does not see token {key}, which comes later"
        )
    return Knockout(layer, head, query, key)


def with_knockouts(weights: Mapping[str, Tensor], knockouts: Iterable[Knockout]) -> dict[str, Tensor]:
    """Return weights with more knocked-out keys: every layer's table in order, each row once.

    Args:
        weights: a model's weights.
        knockouts: the keys.
    """
    found = dict(weights)
    like = next(iter(weights.values()))
    by_layer: dict[int, set[tuple[int, ...]]] = {}
    for one in knockouts:
        by_layer.setdefault(one.layer, set()).add((one.head, one.query, one.key))
    for layer, rows in by_layer.items():
        name = table_name(layer)
        before = found[name].long().tolist() if name in found else []
        every = sorted(rows | {tuple(row) for row in before})
        found[name] = torch.tensor(every, dtype=torch.float64, device=like.device)
    return found


def knockouts_of(weights: Mapping[str, Tensor], layer: int) -> list[Knockout]:
    """Return the knocked-out keys of a layer.

    Args:
        weights: a model's weights.
        layer: counted from 0.
    """
    table = weights.get(table_name(layer))
    return [] if table is None else [Knockout(layer, *row) for row in table.long().tolist()]


def mask_by_head(
    mask: Bool[Tensor, "S S"], knockouts: list[Knockout], n_heads: int
) -> Bool[Tensor, "S S"] | Bool[Tensor, "H S S"]:
    """Return which keys take part for each query: of every head by itself where keys are knocked out.

    Args:
        mask: the mask of all heads.
        knockouts: the knocked-out keys of the layer.
        n_heads: H.

    Raises:
        ModelError: if a query would be left without keys.
    """
    if not knockouts:
        return mask
    size = len(mask)
    kept = mask.expand(n_heads, size, size).clone()
    places = torch.arange(size, device=mask.device)
    for one in knockouts:
        if one.key < size:
            rows = places != one.key if one.query == OTHERS else places == one.query
            kept[one.head, rows, one.key] = False
    empty = (~kept.any(-1)).nonzero().tolist()
    if empty:
        head, query = empty[0]
        raise ModelError(
            f"head {knockouts[0].layer}.{head} has no key left at token {query}: leave it one, or take the head out"
        )
    return kept


def check_table(name: str, table: Float[Tensor, "n 3"], n_heads: int) -> None:
    """Raise a `ModelError` unless a table of knocked-out keys holds what it should.

    Args:
        name: its name.
        table: its rows.
        n_heads: how many heads the model has.
    """
    rows = table.ndim == 2 and table.shape[1] == 3 and len(table) > 0
    if not rows or not bool(((table == table.round()) & (table >= OTHERS) & (table < 2**24)).all()):
        raise ModelError(f"{name} holds rows (head, query, key) of whole numbers: these are none")
    if not bool(((table[:, 0] >= 0) & (table[:, 0] < n_heads) & (table[:, 2] >= 0)).all()):
        raise ModelError(f"{name} names a head or a token that there is not")


def check_rows(weights: Mapping[str, Tensor], layers: Iterable[int]) -> None:
    """Raise a `ModelError` if heads of a layer have keys of their own, or frozen patterns, which rows do not know.

    Args:
        weights: a model's weights.
        layers: the layers whose attention is asked about.
    """
    for layer in layers:
        for name, what in (
            (table_name(layer), "keys are knocked out"),
            (f"blocks.{layer}{HEADS}", "patterns are frozen"),
        ):
            if name in weights:
                raise ModelError(
                    f"{what} in layer {layer}: ask about attention in other layers, outputs or readouts"
                )


def check_tokens(weights: Mapping[str, Tensor], n_layers: int, n_tokens: int) -> None:
    """Raise a `ModelError` if a token that an edit names is none of a prompt: the edit would do less than it says.

    Args:
        weights: a model's weights.
        n_layers: how many layers it has.
        n_tokens: how many tokens the prompt has.
    """
    check_held_tokens(weights, n_tokens)
    for one in (found for layer in range(n_layers) for found in knockouts_of(weights, layer)):
        if max(one.query, one.key) >= n_tokens:
            raise ModelError(
                f"a key of head {one.layer}.{one.head} is knocked out at token {max(one.query, one.key)}: "
                f"the prompt has tokens 0 … {n_tokens - 1}"
            )


def moved_weights(
    weights: Mapping[str, Tensor], device: torch.device | str | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return weights on another device or in another precision; whole numbers of tables keep theirs.

    Args:
        weights: a model's weights.
        device: where they go; None for where they are.
        dtype: their precision; None for the same.
    """
    return {
        name: tensor.to(device=device, dtype=None if name.endswith((TABLE, HEADS, ROWS, *AT)) else dtype)
        for name, tensor in weights.items()
    }
