"""What a network is: its architecture and weights, their fingerprint, and the constants that follow from them.

Masks, scales, biases of scores and the tables of rotary positions: all that its forward pass (`network`), its walk
(`depth`) and its plain runs (`plain`) share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prooflens.checker.findings import need
from prooflens.checker.score_bias import score_bias

Array = NDArray[np.float64]
Balls = NDArray[Any]
"""numpy arrays of Arb balls."""
Tables = Callable[[int, int, float], tuple[Array, Array]]
"""RoPE's cosines and sines for a number of tokens, a head's width and θ."""


@dataclass(frozen=True, eq=False)
class Description:
    """Architecture and canonical float64 weights.

    Attributes:
        arch: the architecture, as a folder in prooflens' own layout states it, with its defaults.
        weights: the weights by name.
        tables: RoPE's constants of the library that runs the model; None if these are not known.
    """

    arch: dict[str, Any]
    weights: dict[str, Array]
    tables: Tables | None = None

    @property
    def sha256(self) -> str:
        """Fingerprint of the architecture and of every weight as float64, little-endian, by sorted name.

        Free coordinates are no part of the architecture's: the tables of what they add are weights.
        """
        arch = {name: value for name, value in self.arch.items() if name not in ("free", "free_until")}
        digest = hashlib.sha256(json.dumps(arch, sort_keys=True).encode())
        for name, tensor in sorted(self.weights.items()):
            digest.update(f"\0{name}\0{tensor.shape}\0".encode() + tensor.astype("<f8", copy=False).tobytes())
        return digest.hexdigest()

    @property
    def head_dim(self) -> int:
        """d_h."""
        return int(self.arch["d_head"] or self.arch["d_model"] // self.arch["n_heads"])

    def mask(self, n: int, layer: int = -1) -> NDArray[np.bool_]:
        """[i, j]: whether query i of a layer may attend to key j."""
        need(
            f"blocks.{layer}.knocked_out" not in self.weights, "the heads of a layer have masks of their own"
        )
        return self._mask(n, layer)

    def masks(self, n: int, layer: int) -> NDArray[np.bool_]:
        """The same by head, [H, n, n]: without the keys that are knocked out, rows (head, query or −1 for all, key)."""
        seen = np.repeat(self._mask(n, layer)[None], self.arch["n_heads"], axis=0)
        table = self.weights.get(f"blocks.{layer}.knocked_out", np.zeros((0, 3)))
        need(table.ndim == 2 and table.shape[1] == 3 and np.all(table == np.rint(table)), "no table of keys")
        for head, query, key in table.astype(int).tolist():
            need(0 <= head < len(seen) and query >= -1 and key >= 0, "a key is knocked out that there is not")
            for i in range(n if key < n else 0):
                if i == query or (query < 0 and i != key):
                    seen[head, i, key] = False
        need(bool(seen.any(-1).all()), "a query of the edited model has no keys")
        return seen

    def _mask(self, n: int, layer: int) -> NDArray[np.bool_]:
        seen = np.tril(np.ones((n, n), bool)) if self.arch["causal"] else np.ones((n, n), bool)
        if not self.is_local(layer):
            return seen
        near: NDArray[np.bool_] = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :]) <= self.arch["window"]
        return seen & near

    def is_local(self, layer: int) -> bool:
        """Whether a layer looks at a window only."""
        return self.arch.get("window") is not None and layer in self.arch.get("window_layers", ())

    def rotary(self, n: int, layer: int = 0) -> tuple[Array, Array, float] | None:
        """RoPE's cosines and sines [n, d_h], each frequency twice, and their radius.

        They are constants that the network makes in float32, and libraries differ in their last place. Unless `tables`
        gives them, which are then compared, they are balls of one float32 unit.
        """
        if self.arch.get("rope_given"):
            return self._given_rotary(n, layer)
        if self.arch["rope_theta"] is None:
            return None
        share = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        power = np.power(self.arch["rope_theta"], share.astype(np.float64)).astype(np.float32)
        angles = np.outer(np.arange(n, dtype=np.float32), np.float32(1.0) / power).astype(np.float64)
        cos, sin, unit = np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2), 2.0**-23
        if self.tables is None:
            return cos, sin, unit
        given = self.tables(n, self.head_dim, self.arch["rope_theta"])
        if not max(np.abs(given[0] - cos).max(), np.abs(given[1] - sin).max()) <= unit:
            raise ValueError("the RoPE tables are not those of the model")
        return *given, 0.0

    def _given_rotary(self, n: int, layer: int) -> tuple[Array, Array, float]:
        """The tables of frequencies that are weights, as balls of two float32 units: libraries differ there."""
        local = bool(self.arch.get("rope_local")) and self.is_local(layer)
        turns = self.weights["rope.local_frequencies" if local else "rope.frequencies"].astype(np.float32)
        angles = np.outer(np.arange(n, dtype=np.float32), turns).astype(np.float64)
        scale = 1.0 if local else float(self.arch.get("rope_scale", 1.0))
        cos, sin = (np.tile(f(angles), 2) * scale for f in (np.cos, np.sin))
        return cos, sin, 2.0**-22 * max(1.0, scale)

    def scale(self, layer: int) -> float:
        """The factor of q·k in a layer."""
        given = self.arch.get("attention_scale")
        scale = float(self.head_dim**-0.5 if given is None else given)
        return scale / (layer + 1) if self.arch.get("scale_by_layer") else scale

    def score_bias(self, n: int) -> Array:
        """The bias of scores [H, n, n]: MPNet's by relative position, BLOOM's by place, 0 for other models."""
        return score_bias(self.arch, self.weights, n)
