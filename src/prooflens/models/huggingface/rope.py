"""Rotary positions as every family has them: how fast each pair of coordinates turns, and which pairs turn at all.

Our rotation turns coordinate c with coordinate c + d_h/2. Models that turn only a part of a head, or neighbours, are
brought to that form by reordering the rows of their query and key projections, which changes no score.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.huggingface.common import Config


def parameters_of(config: Config, kind: str | None = None) -> dict[str, Any]:
    """The parameters of RoPE, in the old or the new spelling of transformers.

    Args:
        config: the configuration.
        kind: the kind of layer, where kinds have parameters of their own (`"sliding_attention"`).
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if kind is not None and isinstance(found.get(kind), dict):
        found = dict(found[kind])
    found.setdefault("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    found.setdefault("rope_type", found.get("type", "default"))
    share = config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    found.setdefault("partial_rotary_factor", share)
    return found


def is_plain(parameters: dict[str, Any]) -> bool:
    """Whether a base frequency says it all."""
    return parameters["rope_type"] == "default" and float(parameters["partial_rotary_factor"]) == 1.0


def frequencies(
    parameters: dict[str, Any], d_head: int, context: int
) -> tuple[Float[Tensor, " half"], float]:
    """Angles per position of the pairs that turn, in float32 as transformers makes them, and the tables' factor.

    Args:
        parameters: as `parameters_of` returns them.
        d_head: width of a head.
        context: the longest input; formulas that change beyond it are those up to it.
    """
    kind, base = str(parameters["rope_type"]), float(parameters["rope_theta"])
    dim = int(d_head * float(parameters["partial_rotary_factor"]))
    powers = base ** (torch.arange(0, dim, 2).float() / dim)
    plain, factor = 1.0 / powers, parameters.get("factor")
    match kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / float(_given(factor, "factor")), 1.0
        case "llama3":
            return _llama3(parameters, plain), 1.0
        case "yarn":
            return _yarn(parameters, powers, dim, base, context)
        case "longrope":
            return _longrope(parameters, powers, context)
    raise ModelError(
        f"rope_type = {kind!r} is not supported (default, linear, dynamic, llama3, yarn, longrope)"
    )


def _given(value: Any, name: str) -> Any:
    if value is None:
        raise ModelError(f"rope_parameters lacks {name!r}")
    return value


def _llama3(parameters: dict[str, Any], plain: Tensor) -> Tensor:
    """Low frequencies are slowed by a factor, high ones kept, those between blended."""
    factor, low, high, before = (
        float(_given(parameters.get(name), name))
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wave = 2 * math.pi / plain
    slowed = torch.where(wave > before / low, plain / factor, plain)
    smooth = (before / wave - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = ~(wave < before / high) * ~(wave > before / low)
    return torch.where(between, blended, slowed)


def _yarn(
    parameters: dict[str, Any], powers: Tensor, dim: int, base: float, context: int
) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow pairs, keep fast ones, and widen the tables."""
    before = float(
        _given(parameters.get("original_max_position_embeddings"), "original_max_position_embeddings")
    )
    factor = float(parameters.get("factor") or context / before)
    scale, every = parameters.get("mscale"), parameters.get("mscale_all_dim")

    def widened(m: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        attention = widened(scale) / widened(every) if scale and every else widened()

    def place(turns: float) -> float:
        return dim * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = place(float(parameters.get("beta_fast") or 32))
    high = place(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(attention)


def _longrope(parameters: dict[str, Any], powers: Tensor, context: int) -> tuple[Tensor, float]:
    """LongRoPE up to the original length: every pair has a factor of its own."""
    before = int(
        _given(parameters.get("original_max_position_embeddings"), "original_max_position_embeddings")
    )
    factor = float(parameters.get("factor") or context / before)
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(before))
    short = torch.tensor(_given(parameters.get("short_factor"), "short_factor"), dtype=torch.float32)
    return 1.0 / (short * powers), float(attention)


def whole_head(found: Float[Tensor, " half"], d_head: int) -> Float[Tensor, " whole"]:
    """The frequencies of all pairs of a head: those that do not turn have frequency 0."""
    return torch.cat((found, found.new_zeros(d_head // 2 - len(found))))


def reordered_rows(heads: int, d_head: int, turning: int, neighbours: bool = False) -> Tensor:
    """Rows of a query or key projection in the order in which coordinate c turns with c + d_h/2.

    Args:
        heads: how many heads the projection has.
        d_head: width of a head.
        turning: how many coordinates of each head turn.
        neighbours: whether 2c turns with 2c + 1 (GPT-J), not c with c + turning/2.
    """
    if d_head % 2 or turning % 2:
        raise ModelError(f"heads of width {d_head} of which {turning} coordinates turn cannot be halved")
    own = torch.arange(turning)
    first, second = (own[0::2], own[1::2]) if neighbours else (own[: turning // 2], own[turning // 2 :])
    rest = torch.arange(turning, d_head)
    still = len(rest) // 2
    order = torch.cat((first, rest[:still], second, rest[still:]))
    return (torch.arange(heads)[:, None] * d_head + order).flatten()
