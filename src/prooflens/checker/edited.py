"""Edits that are tables of a network: parts, directions and features held at tokens, frozen patterns, cut edges.

The same formulas serve balls and float64: `times` multiplies matrices of either. Values are [tokens, n], of several
points one after the other, or [points, tokens, n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flint import arb

from prooflens.checker.findings import need

EVERY = 2**24
"""The number that stands for every token."""

RADII = "free.radii"
"""The table of how far each free coordinate moves, of parts that are held at any value of a set."""

KINDS = ("directions", "features", "decoded")
TABLES = (*KINDS, "held", "frozen", "edges")
Values = Any
"""An array of balls or of float64 numbers."""
Times = Callable[[Values, Values], Values]


def tables_of(weights: Mapping[str, Any]) -> list[str]:
    """The names of all tables of edits that weights hold."""
    return [name for name in weights if name.split(".")[-2:-1] and name.split(".")[-2] in TABLES]


def before_scores(weights: Mapping[str, Any]) -> bool:
    """Whether an edit changes what the first scores read, or these themselves."""
    return any(
        name.startswith(("blocks.0.resid_pre.", "blocks.0.frozen.", "blocks.0.edges."))
        for name in tables_of(weights)
    )


def places(weights: Mapping[str, Any], stem: str, n: int) -> tuple[Values, Values]:
    """Where coordinates are held, 1 or 0, and at what, [n, k].

    Args:
        weights: all weights.
        stem: what the table's names start with.
        n: how many tokens there are.
    """
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


def spreads(weights: Mapping[str, Any], stem: str, n: int) -> Values | None:
    """What the K free coordinates add to the values of every token [n, k, K]; None where there is only one value.

    Args:
        weights: all weights.
        stem: what the table's names start with.
        n: how many tokens there are.
    """
    table = weights.get(f"{stem}.spread")
    if table is None:
        return None
    chosen, _ = places(weights, stem, n)
    at, k = weights[f"{stem}.at"].astype(int).tolist(), chosen.shape[1]
    need(table.shape == (len(at), k, len(weights[RADII])), "a table of values that parts may have is none")
    found = np.zeros((n, *table.shape[1:]))
    for (token, start, stop), row in zip(at, table, strict=True):
        place = token if token >= 0 else n + token
        for i in range(n) if token == EVERY else [place] if 0 <= place < n else []:
            found[i, start:stop] = row[start:stop]
    return found


def moved_by(weights: Mapping[str, Any], n: int) -> list[list[int]]:
    """The tokens at which each free coordinate adds something.

    Args:
        weights: all weights.
        n: how many tokens there are.
    """
    found: list[set[int]] = [set() for _ in weights.get(RADII, ())]
    for stem in [name.removesuffix(".spread") for name in weights if name.endswith(".spread")]:
        table = spreads(weights, stem, n)
        for token, number in zip(*np.nonzero(table.any(1)), strict=True) if table is not None else ():
            found[number].add(int(token))
    return [sorted(tokens) for tokens in found]


def _put(
    weights: Mapping[str, Any], stem: str, x: Values, n: int, free: Values | None
) -> tuple[Values, Values]:
    """Where coordinates are held, and at what, for every token of every point; `free` are the free coordinates."""
    chosen, put = (_spread(table, x) for table in places(weights, stem, n))
    table = spreads(weights, stem, n)
    if table is None:
        return chosen, put
    need(free is not None, "a part is held at any value of a set, and the points do not say at which")
    tiled = np.tile(table, (len(x) // n, 1, 1))
    return chosen, put + (tiled * np.asarray(free)[:, None, :]).sum(-1)


def jumps_of(weights: Mapping[str, Any], stem: str) -> Values | None:
    """By how much features jump as they become active, their thresholds [k]; None where none does.

    Args:
        weights: all weights.
        stem: what the table's names start with.
    """
    theta = weights.get(f"{stem}.jumps")
    need(theta is None or theta.shape == weights[f"{stem}.bias"].shape, "a table of thresholds is none")
    return theta


def _spread(table: Values, x: Values) -> Values:
    """A table of tokens, for every point that values stand for."""
    return table if x.ndim == 3 else np.tile(table, (len(x) // len(table), 1))


def written(
    weights: Mapping[str, Any],
    name: str,
    x: Values,
    y: Values,
    n: int,
    times: Times,
    free: Values | None = None,
) -> Values:
    """What a block adds, y without the parts that are held at some of n tokens, which are computed from x.

    Args:
        weights: all weights.
        name: the map that writes into the stream.
        x: what the map reads.
        y: what the map writes without the held parts.
        n: how many tokens a prompt has.
        times: the product of matrices, of balls or of floats.
        free: the free coordinates of every token, of points side by side; None if there are none.
    """
    stem = f"{name}.held"
    if f"{stem}.at" not in weights:
        return y
    chosen, put = _put(weights, stem, x, n, free)
    parts = times(x, weights[f"{stem}.read"].T) + weights[f"{stem}.bias"]
    return y + times(parts * (1.0 - chosen) + put, weights[f"{stem}.write"].T)


def held_at(
    weights: Mapping[str, Any],
    hook: str,
    x: Values,
    n: int,
    times: Times,
    relu: Any,
    jump: Any,
    free: Values | None = None,
) -> Values:
    """A value with its held directions and features.

    With y what a feature reads beyond its threshold θ, it is max(0, y) + θ·jump(y).

    Args:
        weights: all weights.
        hook: the value's name.
        x: the value.
        n: how many tokens a prompt has.
        times: the product of matrices, of balls or of floats.
        relu: the function max(0, ·), of balls or of floats.
        jump: the function that is 1 above 0 and 0 elsewhere, of balls or of floats.
        free: the free coordinates of every token, of points side by side; None if there are none.
    """
    for stem in (f"{hook.replace('.hook_', '.')}.{kind}" for kind in KINDS):
        if f"{stem}.at" not in weights:
            continue
        chosen, put = _put(weights, stem, x, n, free)
        parts = times(x, weights[f"{stem}.read"].T) + weights[f"{stem}.bias"]
        if not stem.endswith(".directions"):
            theta = jumps_of(weights, stem)
            parts = relu(parts) if theta is None else relu(parts) + jump(parts) * theta
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


Sender = tuple[int, int, int]
"""Kind (0 the input, 1 a head, 2 an attention, 3 a network, 4 a neuron), layer, and head or neuron."""


class Edge(NamedTuple):
    """A row of a table of edges.

    Attributes:
        channel: 0, 1, 2 for queries, keys and values, 3 for the network, 4 for the output.
        head: the head that reads, or −1.
        sender: who writes.
        token: where the receiver lacks it.
        value: what takes its place [d].
    """

    channel: int
    head: int
    sender: Sender
    token: int
    value: Values

    def places(self, n: int) -> Values:
        """1 at the tokens where the edge is cut, 0 elsewhere [n]."""
        place = self.token if self.token >= 0 else n + self.token
        return np.array([float(self.token == EVERY or place == i) for i in range(n)])


def edges_of(weights: Mapping[str, Any], stem: str) -> list[Edge]:
    """The edges of a receiver, in the order of its table.

    Args:
        weights: all weights.
        stem: what the table's names start with, as in `blocks.3`.
    """
    rows = weights.get(f"{stem}.edges.rows")
    if rows is None:
        return []
    need(rows.ndim == 2 and rows.shape[1] == 6 and bool(np.all(rows == np.rint(rows))), "no table of edges")
    values = weights.get(f"{stem}.edges.values", rows[:, :0])
    need(len(values) == len(rows), "edges lack their values")
    return [
        Edge(channel, head, (kind, layer, sender), token, value)
        for (channel, head, kind, layer, sender, token), value in zip(
            rows.astype(int).tolist(), values, strict=True
        )
    ]


def without_edges(
    weights: Mapping[str, Any],
    reader: tuple[str, int, int],
    x: Values,
    notes: Mapping[str, Values],
    times: Times,
) -> Values | None:
    """The stream x as one receiver reads it (what its tables' names start with, channel, head); None: as all do.

    Args:
        weights: all weights.
        reader: the receiver: what its tables' names start with, its channel and its head.
        x: the stream.
        notes: values by name that senders wrote.
        times: the product of matrices, of balls or of floats.
    """
    stem, channel, head = reader
    found = None
    for edge in edges_of(weights, stem):
        if (edge.channel, edge.head) != (channel, head):
            continue
        mask = edge.places(len(notes["tokens"]))[:, None]
        sent = _sent(weights, edge.sender, notes, times)
        found = (x if found is None else found) + (edge.value - sent) * _spread(mask, x)
    return found


def _sent(weights: Mapping[str, Any], sender: Sender, notes: Mapping[str, Values], times: Times) -> Values:
    """What a sender writes into the stream."""
    kind, layer, head = sender
    names = {0: "input", 1: f"blocks.{layer}.attn.hook_z", 2: f"blocks.{layer}.hook_attn_out"}
    names |= {3: f"blocks.{layer}.hook_mlp_out", 4: f"blocks.{layer}.mlp.hook_post"}
    name = names.get(kind, "")
    need(name in notes, "an edge starts where nothing is yet")
    if kind not in (1, 4):
        return notes[name]
    z, o = notes[name], weights[f"blocks.{layer}.{'o' if kind == 1 else 'down'}.weight"]
    c = int(notes["width"]) if kind == 1 else 1
    need(0 <= head < z.shape[-1] // c, "an edge starts at a head or a neuron that there is not")
    return times(z[..., head * c : (head + 1) * c], o[:, head * c : (head + 1) * c].T)


def by_heads(base: Values, others: Mapping[int, Values], n_heads: int, c: int) -> Values:
    """Queries, keys or values [..., G·c] of all heads, of some of them those that others hold: [..., H·c].

    Args:
        base: those of all heads.
        others: those of some heads, by head.
        n_heads: H.
        c: the width of a head.
    """

    def spread(y: Values) -> Values:
        apart = y.reshape(*y.shape[:-1], -1, c)
        return apart.repeat(n_heads // apart.shape[-2], axis=-2).reshape(*y.shape[:-1], n_heads * c)

    made = spread(base)
    for head, other in others.items():
        made[..., head * c : (head + 1) * c] = spread(other)[..., head * c : (head + 1) * c]
    return made
