"""What is carried beside the stream: values at an earlier hook that a form reads, and what senders of cut edges wrote.

Outputs of two places are y = W h_t + W' h'_t': each part is a linear map of its value, 0 at all tokens but one, and
both are added as values of one chain. Behind a mixing the new root holds the stream and what is carried, one above the
other: (x + W_o z, y) = (x, y) + (W_o, 0) z.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def stacked(stream: Value, W: Array, bias: Array, carried: Sequence[Value]) -> tuple[Value, Array, Array]:
    """A stream with what is carried below it, and the map of what attention mixes into it.

    Args:
        stream: what a mixing is added to, of at most as many coordinates as W has rows; it stands at the top.
        W: how it is mapped there.
        bias: what is added.
        carried: what is carried on.
    """
    d, widths = len(W), [value.c.shape[1] for value in carried]
    whole = d + sum(widths)
    both, at = stream if stream.c.shape[1] == whole else stream.mapped(np.eye(whole, stream.c.shape[1])), d
    for value, width in zip(carried, widths, strict=True):
        both, at = both.plus(value.mapped(np.eye(whole, width, -at))), at + width
    return (
        both,
        np.concatenate((W, np.zeros((whole - d, W.shape[1])))),
        np.concatenate((bias, np.zeros(whole - d))),
    )


def parted(root: Value, widths: Sequence[int]) -> list[Value]:
    """The parts of a root behind a mixing, one above the other.

    Args:
        root: the root.
        widths: how wide each part is.
    """
    whole = root.c.shape[1]
    if list(widths) == [whole]:
        return [root]
    found, at = [], 0
    for width in widths:
        found.append(root.mapped(np.eye(width, whole, at)))
        at += width
    return found
