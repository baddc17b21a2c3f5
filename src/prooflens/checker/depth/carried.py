"""Values at two places in one form: what was read at an earlier hook is carried beside the stream to the later one.

Outputs are y = W h_t + W' h'_t': each part is a linear map of its value, 0 at all tokens but one, and both are added as
values of one chain. Behind a mixing the new root holds the stream and what is carried, one above the other:
(x + W_o z, y) = (x, y) + (W_o, 0) z.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prooflens.checker.depth.shapes import Array
from prooflens.checker.depth.values import Value


def placed(arch: dict[str, Any], weight: Array, hook: str, x: Value) -> Value | None:
    """What outputs read of a value: none if it is at neither hook.

    Args:
        arch: the architecture of a network that reads two places.
        weight: its directions, the columns of the second place behind those of the first.
        hook: the value's hook.
        x: the value.
    """
    n = x.c.shape[1]
    each = np.zeros((len(x.c), len(weight), n))
    if hook == arch["read_hook"]:
        each[int(arch["read_position"])] += weight[:, :n]
    if hook == arch["beside_hook"]:
        each[int(arch["beside_position"])] += weight[:, weight.shape[1] - n :]
    return x.mapped(each) if hook in (arch["read_hook"], arch["beside_hook"]) else None


def stacked(stream: Value, W: Array, bias: Array, carried: Value) -> tuple[Value, Array, Array]:
    """A stream with what is carried below it, and the map of what attention mixes into it.

    Args:
        stream: what a mixing is added to.
        W: how it is mapped there.
        bias: what is added.
        carried: what is carried on.
    """
    d, more = len(W), carried.c.shape[1]
    both = stream.mapped(np.eye(d + more, d)).plus(carried.mapped(np.eye(d + more, more, -d)))
    return both, np.concatenate((W, np.zeros((more, W.shape[1])))), np.concatenate((bias, np.zeros(more)))


def parted(root: Value, d: int) -> tuple[Value, Value]:
    """The stream and what is carried, off the root behind a mixing.

    Args:
        root: the root.
        d: the width of the stream there.
    """
    whole = root.c.shape[1]
    return root.mapped(np.eye(d, whole)), root.mapped(np.eye(whole - d, whole, d))
