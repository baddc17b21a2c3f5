"""Tables of edits from their words: `without a1.h0@3, a9.h6->m10`, `with a1.h0@3 at any value within 0.1 of 0`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from prooflens.checker.edited import EVERY, RADII

_EDGE = re.compile(
    r"(?:(input)|a(\d+)(?:\.h(\d+))?|m(\d+)(?:\.n(\d+))?)->(?:(logits)|a(\d+)(?:\.h(\d+))?(?:[.<]([qkv])>?)?|m(\d+))((?:@-?\d+)*)"
)


def cut(weights: dict[str, Any], n_heads: int, d: int, name: str) -> bool:
    """Cut the edge that a name stands for, as `a0.h1->a1.h0.q@3`; False where it stands for none.

    Args:
        weights: all weights, which are changed.
        n_heads: how many heads a layer has.
        d: the width of the stream.
        name: the edge's name.
    """
    match = _EDGE.fullmatch(name)
    if match is None:
        return False
    start, a, h, m, neuron, end, to, reader, channel, network, tokens = match.groups()
    sender = (
        [0, -1, -1]
        if start
        else [3 if neuron is None else 4, int(m), int(neuron or -1)]
        if m
        else [2, int(a), -1]
        if h is None
        else [1, int(a), int(h)]
    )
    readers = [[4, -1]] if end else [[3, -1]]
    if to:
        heads = range(n_heads) if reader is None else [int(reader)]
        readers = [[c, i] for i in heads for c in (["qkv".index(channel)] if channel else range(3))]
    stem = "final_norm" if end else f"blocks.{to or network}"
    at = [int(token) for token in tokens.split("@")[1:]] or [EVERY]
    rows = [[*one, *sender, token] for one in readers for token in at]
    before = weights.get(f"{stem}.edges.rows", np.zeros((0, 6)))
    every = [*rows, *before.astype(int).tolist()]
    values = np.concatenate((np.zeros((len(rows), d)), weights.get(f"{stem}.edges.values", np.zeros((0, d)))))
    order = sorted(range(len(every)), key=every.__getitem__)
    weights[f"{stem}.edges.rows"] = np.array([every[i] for i in order], dtype=np.float64)
    weights[f"{stem}.edges.values"] = values[order]
    return True


def hold(
    weights: dict[str, Any], name: str, some: slice | None, tokens: list[int], written: bool = False
) -> None:
    """Hold columns that a map reads, or all that it writes, at 0 at tokens: what `without a1.h0@3` says.

    Args:
        weights: all weights, which are changed.
        name: the map.
        some: the columns; None for all that it writes.
        tokens: where.
        written: whether what the columns write is held, not what they read.
    """
    stem, whole = f"{name}.held", weights[f"{name}.weight"]
    d, width = whole.shape
    if some is None:
        read, write, bias = whole, np.eye(d), weights.pop(f"{name}.bias", np.zeros(d))
        rest = np.zeros_like(whole)
    else:
        read, write, rest = np.eye(width)[some], whole[:, some], whole.copy()
        if written:
            read, write = write @ read, np.eye(d)
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


def widen(weights: dict[str, Any], stem: str, k: int, by: float) -> None:
    """Let the k coordinates that are held at 0 be any numbers within `by`: `at any value within 0.1 of 0`.

    Args:
        weights: all weights, which are changed.
        stem: what the table's names start with; nothing else is held there, or anywhere at any value.
        k: how many they are.
        by: how far each may be from 0.
    """
    radius = float(np.ldexp(1.0, int(np.frexp(by)[1]) - 1))
    weights[RADII] = np.full(k, radius)
    if f"{stem}.at" in weights:
        weights[f"{stem}.spread"] = np.repeat(np.eye(k)[None] * (by / radius), len(weights[f"{stem}.at"]), 0)
