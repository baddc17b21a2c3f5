"""How fast pairs of coordinates turn, as configurations of Hugging Face say it: read by the checker itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
Floats = NDArray[np.float32]


def scaled(powers: Floats, given: Config, base: float, context: int) -> tuple[Floats, float]:
    """Frequencies 1/θ^(2c/d), slowed as a configuration says, and the factor of cosines and sines.

    Args:
        powers: θ^(2c/d) of the pairs that turn.
        given: the parameters of rotary positions.
        base: θ.
        context: the longest input; a formula that changes beyond it is taken as it is up to it.
    """
    kind, one = str(given.get("rope_type", given.get("type", "default"))), np.float32(1.0)
    plain: Floats = one / powers
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return np.asarray(plain / np.float32(given["factor"]), dtype=np.float32), 1.0
    if kind == "llama3":
        return _llama3(plain, given), 1.0
    if kind == "yarn":
        return _yarn(powers, given, base, context)
    if kind == "longrope":
        before = int(given["original_max_position_embeddings"])
        factor = float(given.get("factor") or context / before)
        wide = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(before))
        wide = float(wide if given.get("attention_factor") is None else given["attention_factor"])
        short = np.asarray(given["short_factor"], dtype=np.float32)
        return np.asarray(one / (short * powers), dtype=np.float32), wide
    raise ValueError(f"rope_type {kind!r} is not known to the checker")


def _llama3(plain: Floats, given: Config) -> Floats:
    """Slow pairs are slowed, fast ones kept, those between blended."""
    one, factor = np.float32(1.0), np.float32(given["factor"])
    low, high = np.float32(given["low_freq_factor"]), np.float32(given["high_freq_factor"])
    before = given["original_max_position_embeddings"]
    wave = np.float32(2 * np.pi) / plain
    slowed = np.where(wave > np.float32(before / low), plain / factor, plain)
    smooth = (np.float32(before) / wave - low) / (high - low)
    blended = (one - smooth) * slowed / factor + smooth * slowed
    between = ~(wave < np.float32(before / high)) & ~(wave > np.float32(before / low))
    return np.asarray(np.where(between, blended, slowed), dtype=np.float32)


def _yarn(powers: Floats, given: Config, base: float, context: int) -> tuple[Floats, float]:
    """YaRN: pairs that turn often in the original length are kept, slow ones stretched, with a ramp between."""
    before, width = float(given["original_max_position_embeddings"]), 2 * len(powers)
    factor = float(given.get("factor") or context / before)
    log = math.log(factor) if factor > 1 else 0.0
    of_scale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    wide = given.get("attention_factor")
    if wide is None and of_scale and of_all:
        wide = (0.1 * of_scale * log + 1.0) / (0.1 * of_all * log + 1.0)
    elif wide is None:
        wide = 0.1 * log + 1.0
    ends = [
        width * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (float(given.get("beta_fast") or 32), float(given.get("beta_slow") or 1))
    ]
    if given.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    high += 0.001 if low == high else 0.0
    one, places = np.float32(1.0), np.arange(len(powers), dtype=np.float32)
    kept = one - np.clip((places - np.float32(low)) / np.float32(high - low), np.float32(0.0), one)
    stretched = one / (np.float32(factor) * powers)
    return np.asarray(stretched * (one - kept) + one / powers * kept, dtype=np.float32), float(wide)
