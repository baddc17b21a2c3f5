"""Edits that are tables of a network: parts, directions and features held at tokens, and frozen patterns.

The same formulas serve balls and float64: `times` multiplies matrices of either. Values are [tokens, n], of several
points one after the other, or [points, tokens, n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flint import arb

from prooflens.checker.findings import need

EVERY = 2**24
"""The number that stands for every token."""

KINDS = ("directions", "features", "decoded")
TABLES = (*KINDS, "held", "frozen")
Values = Any
"""An array of balls or of float64 numbers."""
Times = Callable[[Values, Values], Values]


def tables_of(weights: Mapping[str, Any]) -> list[str]:
    """The names of all tables of edits that weights hold."""
    return [name for name in weights if name.split(".")[-2:-1] and name.split(".")[-2] in TABLES]


def before_scores(weights: Mapping[str, Any]) -> bool:
    """Whether an edit changes what the first scores read, or these themselves."""
    return any(name.startswith(("blocks.0.resid_pre.", "blocks.0.frozen.")) for name in tables_of(weights))


def _places(weights: Mapping[str, Any], stem: str, n: int) -> tuple[Values, Values]:
    """Where coordinates are held, 1 or 0, and at what, [n, k]."""
    at, values = weights[f"{stem}.at"], weights[f"{stem}.values"]
    k = len(weights[f"{stem}.read"])
    whole = at.ndim == 2 and at.shape[1] == 3 and values.shape == (len(at), k)
    need(whole and bool(np.all(at == np.rint(at))), "a table of held parts is none")
    chosen, put = np.zeros((n, k)), np.zeros((n, k))
    for (token, start, stop), row in zip(at.astype(int).tolist(), values, strict=True):
        need(0 <= start < stop <= k, "a part is held that there is not")
        place = token if token >= 0 else n + token
        rows = range(n) if token == EVERY else [place] if 0 <= place < n else []
        for i in rows:
            chosen[i, start:stop], put[i, start:stop] = 1.0, row[start:stop]
    return chosen, put


def _spread(table: Values, x: Values) -> Values:
    """A table of tokens, for every point that values stand for."""
    return table if x.ndim == 3 else np.tile(table, (len(x) // len(table), 1))


def written(weights: Mapping[str, Any], name: str, x: Values, y: Values, n: int, times: Times) -> Values:
    """What a block adds, y without the parts that are held at some of n tokens, which are computed from x."""
    stem = f"{name}.held"
    if f"{stem}.at" not in weights:
        return y
    chosen, put = (_spread(table, x) for table in _places(weights, stem, n))
    parts = times(x, weights[f"{stem}.read"].T) + weights[f"{stem}.bias"]
    return y + times(parts * (1.0 - chosen) + put, weights[f"{stem}.write"].T)


def held_at(weights: Mapping[str, Any], hook: str, x: Values, n: int, times: Times, relu: Any) -> Values:
    """A value with its held directions and features."""
    for stem in (f"{hook.replace('.hook_', '.')}.{kind}" for kind in KINDS):
        if f"{stem}.at" not in weights:
            continue
        chosen, put = (_spread(table, x) for table in _places(weights, stem, n))
        parts = times(x, weights[f"{stem}.read"].T) + weights[f"{stem}.bias"]
        parts = parts if stem.endswith(".directions") else relu(parts)
        if stem.endswith(".decoded"):
            some = chosen.max(-1, keepdims=True)
            made = times(parts * (some - chosen) + put, weights[f"{stem}.write"].T)
            x = x * (1.0 - some) + made + weights[f"{stem}.offset"] * some
        else:
            x = x + times(put - parts * chosen, weights[f"{stem}.write"].T)
    return x


def frozen(weights: Mapping[str, Any], layer: int, scores: Values) -> Values:
    """Scores [..., H, n, n] with those of frozen heads in their place."""
    heads = weights.get(f"blocks.{layer}.frozen.heads")
    if heads is None:
        return scores
    table, scores = weights[f"blocks.{layer}.frozen.scores"], scores.copy()
    need(table.shape == (len(heads), *scores.shape[-2:]), "patterns are frozen at a prompt of another length")
    for head, own in zip(heads.astype(int).tolist(), table, strict=True):
        need(0 <= head < scores.shape[-3], "a head is frozen that there is not")
        exact = np.frompyfunc(arb, 1, 1)(own) if scores.dtype == object else own
        scores[..., head, :, :] = exact
    return scores


def hold(weights: dict[str, Any], name: str, some: slice | None, tokens: list[int]) -> None:
    """Hold columns that a map reads, or all that it writes, at 0 at tokens: what words such as `without a1.h0@3` say."""
    stem, whole = f"{name}.held", weights[f"{name}.weight"]
    d, width = whole.shape
    if some is None:
        read, write, bias = whole, np.eye(d), weights.pop(f"{name}.bias", np.zeros(d))
        rest = np.zeros_like(whole)
    else:
        read, write, rest = np.eye(width)[some], whole[:, some], whole.copy()
        rest[:, some], bias = 0.0, np.zeros(len(read))
    before = len(weights.get(f"{stem}.read", ()))
    k = before + len(read)
    rows = np.array([[token, before, k] for token in tokens], dtype=np.float64)
    values = np.zeros((len(weights.get(f"{stem}.at", ())) + len(rows), k))
    if before:
        values[: -len(rows), :before] = weights[f"{stem}.values"]
        read, bias, rows = (
            np.concatenate((weights[f"{stem}.{part}"], own))
            for part, own in (("read", read), ("bias", bias), ("at", rows))
        )
        write = np.concatenate((weights[f"{stem}.write"], write), 1)
    made = {"read": read, "bias": bias, "write": write, "at": rows, "values": values}
    weights |= {f"{stem}.{part}": np.ascontiguousarray(table) for part, table in made.items()}
    weights[f"{name}.weight"] = rest
