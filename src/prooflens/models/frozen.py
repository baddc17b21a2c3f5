"""Frozen attention patterns: heads whose weights are those of one prompt, whatever the input is.

Of a frozen head the scores are constants, those that it has at the prompt, so its pattern is their softmax and the
head is linear in its values. The table `blocks.L.frozen.heads` [F] names the heads and `blocks.L.frozen.scores`
[F, S, S] holds their scores (before a cap), so a model with frozen patterns reads prompts of S tokens alone. Queries
and keys are still what they were: only scores do not read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError

if TYPE_CHECKING:
    from prooflens.models.architecture import Architecture

NAME = re.compile(r"a(?P<layer>\d{1,6})(?:\.h(?P<head>\d{1,9}))?\.pattern")
"""A head whose pattern is frozen, `a9.h6.pattern`, or all heads of a layer, `a9.pattern`."""

HEADS = ".frozen.heads"
"""How the names of tables of frozen heads end."""


def find_frozen(architecture: Architecture, name: str) -> tuple[int, tuple[int, ...]] | None:
    """Return the layer and the heads whose pattern a name stands for; None if it is the name of something else.

    Args:
        architecture: what the model looks like.
        name: as in `a9.h6.pattern` or `a9.pattern`.

    Raises:
        ModelError: if there is no such head.
    """
    match = NAME.fullmatch(name)
    if match is None:
        return None
    layer, a = int(match["layer"]), architecture
    head = None if match["head"] is None else int(match["head"])
    if layer >= a.n_layers or (head or 0) >= a.n_heads or not a.has_attention:
        raise ModelError(
            f"there is no {name!r}: layers are 0 … {a.n_layers - 1}, heads 0 … {a.n_heads - 1}"
            if a.has_attention
            else f"there is no {name!r}: blocks have no attention"
        )
    return layer, tuple(range(a.n_heads)) if head is None else (head,)


def scores_hook(architecture: Architecture, layer: int) -> str:
    """Return the name of the scores that are kept: those before a cap.

    Args:
        architecture: what the model looks like.
        layer: the layer.
    """
    return f"blocks.{layer}.attn.hook_attn_scores" + ("" if architecture.score_cap is None else "_uncapped")


def put_frozen(
    weights: dict[str, Tensor], layer: int, heads: Sequence[int], scores: Float[Tensor, "n S S"]
) -> None:
    """Freeze the patterns of heads in a model's weights.

    Args:
        weights: they get the tables.
        layer: the layer.
        heads: the heads.
        scores: their scores at the prompt, one table for each.

    Raises:
        ModelError: if a head is frozen already, or others are frozen at a prompt of another length.
    """
    names = f"blocks.{layer}{HEADS}", f"blocks.{layer}.frozen.scores"
    like = next(iter(weights.values()))
    if scores.ndim != 3 or scores.shape[1] != scores.shape[2] or not bool(scores.isfinite().all()):
        raise ModelError("a frozen pattern is given by its scores, finite numbers of shape [S, S]")
    before = [int(head) for head in weights.get(names[0], ())]
    if again := set(before) & set(heads):
        raise ModelError(f"the pattern of a{layer}.h{min(again)} is frozen already")
    if before and weights[names[1]].shape[1:] != scores.shape[1:]:
        raise ModelError(f"patterns of layer {layer} are frozen at prompts of different lengths")
    every = torch.cat((weights[names[1]], scores.to(like))) if before else scores.to(like)
    order = sorted(range(len(before) + len(heads)), key=[*before, *heads].__getitem__)
    weights[names[0]] = torch.tensor(
        [[*before, *heads][i] for i in order], dtype=torch.float64, device=like.device
    )
    weights[names[1]] = every[order].contiguous()


def frozen_scores(
    weights: Mapping[str, Tensor], layer: int, n_tokens: int
) -> dict[int, Float[Tensor, "S S"]]:
    """Return the scores of a layer's frozen heads, by head.

    Args:
        weights: a model's weights.
        layer: the layer.
        n_tokens: how many tokens the input has.

    Raises:
        ModelError: if the patterns are those of a prompt of another length.
    """
    heads = weights.get(f"blocks.{layer}{HEADS}")
    if heads is None:
        return {}
    table = weights[f"blocks.{layer}.frozen.scores"]
    if table.shape[-1] != n_tokens:
        raise ModelError(
            f"patterns of layer {layer} are frozen at a prompt of {table.shape[-1]} tokens: "
            f"the input has {n_tokens}"
        )
    return dict(zip((int(head) for head in heads), table, strict=True))


def check_frozen(weights: Mapping[str, Tensor], layer: int, n_heads: int) -> None:
    """Raise a `ModelError` unless the tables of a layer's frozen heads hold what they should.

    Args:
        weights: a model's weights.
        layer: the layer.
        n_heads: how many heads there are.
    """
    names = f"blocks.{layer}{HEADS}", f"blocks.{layer}.frozen.scores"
    there = [name for name in names if name in weights]
    if not there:
        return
    if len(there) == 1:
        raise ModelError(f"the weights hold {there[0]!r} without its other table")
    heads, scores = (weights[name] for name in names)
    square = scores.ndim == 3 and scores.shape[1] == scores.shape[2] > 0 and heads.shape == scores.shape[:1]
    listed = heads.flatten().tolist()
    if not square or not listed or listed != sorted({int(head) for head in listed if 0 <= head < n_heads}):
        raise ModelError(f"{names[0]} names heads of the layer in order, with a table of scores for each")
