"""What is added to scores before they are weighed: biases by relative position (MPNet) and by place (BLOOM)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def alibi(heads: int, n: int) -> Array:
    """BLOOM's bias [H, n, n]: a float32 slope per head times the place of the key."""
    near = 2 ** math.floor(math.log2(heads))
    base, between = (np.float32(2 ** (-(2 ** -(math.log2(m) - 3)))) for m in (near, 2 * near))
    slopes = [base ** np.float32(k) for k in range(1, near + 1)]
    slopes += [between ** np.float32(k) for k in range(1, 2 * min(near, heads - near) + 1, 2)]
    places = np.array(slopes, dtype=np.float32)[:, None] * np.arange(n, dtype=np.float32)
    return np.repeat(places.astype(np.float64)[:, None, :], n, axis=1)


def score_bias(arch: Mapping[str, Any], weights: Mapping[str, Array], n: int) -> Array:
    """The bias of scores [H, n, n]: MPNet's by relative position, BLOOM's by place, 0 for other models."""
    if arch.get("alibi"):
        return alibi(int(arch["n_heads"]), n)
    if arch["relative_buckets"] is None:
        return np.zeros((arch["n_heads"], n, n))
    half = arch["relative_buckets"] // 2
    exact = half // 2
    relative = np.arange(n)[None, :] - np.arange(n)[:, None]
    distance = np.abs(relative)
    reach = np.float32(math.log(arch["relative_max_distance"] / exact))
    far = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / reach
    far = far * np.float32(half - exact)
    bucket = np.where(distance < exact, distance, np.minimum(exact + far.astype(int), half - 1))
    return np.moveaxis(weights["relative_bias"][bucket + half * (relative > 0)], 2, 0)
