"""The steps that a transformer is made of: affine maps between a few kinds of *site*.

Every step names its inputs and its output with TransformerLens' hook names and can evaluate itself on tensors with
any leading batch dimensions. Engines walk the same steps and give each kind their own meaning (an interval, a set, a
linear bound); nothing else describes the model.

Shapes without batch: residual stream [S, d]; queries, keys, values and head outputs [S, H, d_h]; scores and patterns
[H, S, S] (query, key).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from einops import repeat
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.models.architecture import Activation


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _jump(x: Tensor) -> Tensor:
    return (x > 0.0).to(x.dtype)


Function = Activation | Literal["jump"]
"""What is computed coordinate by coordinate: a model's activation, or `jump`: 1 above 0, and 0 at 0 and below."""

ACTIVATIONS: dict[Function, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "relu2": _relu2,
    "jump": _jump,
}


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a program: reads the values named `inputs`, writes the value named `out`."""

    out: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Affine(Step):
    """An affine map of every token: y_s = W x_s + b.

    Attributes:
        weight: W, shape [o, i].
        bias: b, shape [o]; None for 0.
        in_dims: how many trailing dimensions of x are read as one vector.
        out_shape: the shape of y per token.
    """

    weight: Float[Tensor, "o i"]
    bias: Float[Tensor, " o"] | None
    in_dims: int
    out_shape: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        y = torch.nn.functional.linear(x.flatten(-self.in_dims), self.weight, self.bias)
        return y.reshape(*y.shape[:-1], *self.out_shape)


@dataclass(frozen=True, eq=False)
class Rotary(Step):
    """RoPE, a fixed rotation per position: y = x ⊙ cos + rotate_half(x) ⊙ sin. Linear.

    With sines 0 it is a factor per position and coordinate, by which edits choose tokens.
    """

    cos: Float[Tensor, "S d_h"]
    sin: Float[Tensor, "S d_h"]

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos[:, None, :] + rotated * self.sin[:, None, :]


@dataclass(frozen=True, eq=False)
class Shift(Step):
    """A vector of its own for every position and head: y_s = x_s + b_s. Affine."""

    offset: Float[Tensor, "S h d_h"]

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        return x + self.offset


@dataclass(frozen=True, eq=False)
class Add(Step):
    """A residual connection: the sum of two values. Linear."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate the step."""
        return x + y


@dataclass(frozen=True, eq=False)
class Norm(Step):
    """LayerNorm (`centred`) or RMSNorm: γ ⊙ Px/√(‖Px‖²/d + ε) + β, with P the centring map or the identity.

    Of the last dimension: of a token's stream, or of each head of queries and keys.
    """

    weight: Float[Tensor, " d"] | None
    bias: Float[Tensor, " d"] | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        m = x - x.mean(-1, keepdim=True) if self.centred else x
        z = m * torch.rsqrt(m.square().mean(-1, keepdim=True) + self.eps)
        z = z if self.weight is None else z * self.weight
        return z if self.bias is None else z + self.bias


@dataclass(frozen=True, eq=False)
class Scores(Step):
    """Bilinear site: a_hij = scale · q_hi·k_hj + bias_hij. Entries outside `mask` take no part in anything."""

    scale: float
    bias: Float[Tensor, "H S S"] | None
    mask: Bool[Tensor, "S S"] | Bool[Tensor, "H S S"]

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the step; masked entries hold the plain product and are ignored by `Softmax`."""
        scores = torch.einsum("...ihc,...jhc->...hij", q, share_heads(k, q.shape[-2])) * self.scale
        return scores if self.bias is None else scores + self.bias


@dataclass(frozen=True, eq=False)
class Softmax(Step):
    """s_hij = exp(a_hij)/Σ_k exp(a_hik) over the keys of `mask`; masked weights are exactly 0."""

    mask: Bool[Tensor, "S S"] | Bool[Tensor, "H S S"]

    def __call__(self, scores: Tensor) -> Tensor:
        """Evaluate the step."""
        return torch.softmax(scores.masked_fill(~self.mask, -torch.inf), dim=-1)


@dataclass(frozen=True, eq=False)
class Mix(Step):
    """Softmax mixing: z_ih = Σ_j s_hij v_hj."""

    def __call__(self, pattern: Tensor, v: Tensor) -> Tensor:
        """Evaluate the step."""
        return torch.einsum("...hij,...jhc->...ihc", pattern, share_heads(v, pattern.shape[-3]))


@dataclass(frozen=True, eq=False)
class Elementwise(Step):
    """y = φ(x), coordinate by coordinate."""

    function: Function

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        return ACTIVATIONS[self.function](x)


@dataclass(frozen=True, eq=False)
class Solu(Step):
    """SoLU: y_k = x_k e^{x_k}/Σ_l e^{x_l}, over all neurons of a token (the last dimension)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        return x * torch.softmax(x, dim=-1)


@dataclass(frozen=True, eq=False)
class Softcap(Step):
    """y = c·tanh(x/c), coordinate by coordinate: odd, increasing, never steeper than 1, between −c and c."""

    cap: float

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        return torch.tanh(x / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class Product(Step):
    """Gated product y = g ⊙ u of a gated feed-forward network."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Evaluate the step."""
        return gate * up


@dataclass(frozen=True, eq=False)
class Pool(Step):
    """A fixed weighted sum over tokens, y = Σ_s w_s x_s: mean pooling, or the choice of one token. Linear."""

    weights: Float[Tensor, " S"]

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the step."""
        return torch.einsum("s,...sd->...d", self.weights, x)


AnyStep = (
    Affine
    | Rotary
    | Shift
    | Add
    | Norm
    | Scores
    | Softmax
    | Mix
    | Elementwise
    | Solu
    | Softcap
    | Product
    | Pool
)


def share_heads(x: Float[Tensor, "... S G d_h"], n_heads: int) -> Float[Tensor, "... S H d_h"]:
    """Give each key-value head to the `n_heads / G` query heads that read it.

    Args:
        x: keys or values, shape [..., S, G, d_h].
        n_heads: H.
    """
    groups = x.shape[-2]
    return x if groups == n_heads else repeat(x, "... g c -> ... (g r) c", r=n_heads // groups)


def rotary_tables(
    n_tokens: int, d_head: int, theta: float, like: Tensor
) -> tuple[Float[Tensor, "S d_h"], Float[Tensor, "S d_h"]]:
    """Return the cosines and sines of RoPE, with each frequency twice (the halves convention of Llama).

    Llama's own code makes these tables in float32, whatever precision the model runs in. They are constants of the
    network, so the network that we certify has the same ones: float32 values, made on the CPU, then cast.

    Args:
        n_tokens: S.
        d_head: the width of a head.
        theta: the base of the frequencies.
        like: a tensor with the wanted dtype and device.
    """
    inverse = 1.0 / theta ** (torch.arange(0, d_head, 2).float() / d_head)
    return turned_tables(n_tokens, inverse, like)


def turned_tables(
    n_tokens: int, frequencies: Float[Tensor, " half"], like: Tensor, scale: float = 1.0
) -> tuple[Float[Tensor, "S d_h"], Float[Tensor, "S d_h"]]:
    """The cosines and sines of given frequencies, each twice, times a factor; in float32 as in `rotary_tables`.

    Args:
        n_tokens: how many positions.
        frequencies: the angle per position of each pair of coordinates.
        like: a tensor whose precision and device the tables get.
        scale: their factor (YaRN).
    """
    angles = torch.outer(torch.arange(n_tokens).float(), frequencies.float().cpu())
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(like), (angles.sin() * scale).to(like)


def alibi_bias(n_heads: int, n_tokens: int, like: Tensor) -> Float[Tensor, "H S S"]:
    """BLOOM's bias of scores: a slope per head, a power of two, times the place of the key.

    Args:
        n_heads: how many heads; slopes are 2^(−8k/n) for the next power of two n below, then those between.
        n_tokens: how many positions.
        like: a tensor whose precision and device the bias gets.
    """
    closest = 2 ** math.floor(math.log2(n_heads))
    base = torch.tensor(2 ** (-(2 ** -(math.log2(closest) - 3))), dtype=torch.float32)
    slopes = torch.pow(base, torch.arange(1, 1 + closest, dtype=torch.int32))
    if closest != n_heads:
        extra = torch.tensor(2 ** (-(2 ** -(math.log2(2 * closest) - 3))), dtype=torch.float32)
        more = min(closest, n_heads - closest)
        slopes = torch.cat((slopes, torch.pow(extra, torch.arange(1, 1 + 2 * more, 2, dtype=torch.int32))))
    places = slopes[:, None] * torch.arange(n_tokens)
    return places[:, None, :].expand(-1, n_tokens, -1).to(like)


def relative_bias(
    table: Float[Tensor, "buckets H"], n_tokens: int, max_distance: int
) -> Float[Tensor, "H S S"]:
    """Return MPNet's relative position bias: half the buckets for each direction, exact near, logarithmic far.

    Args:
        table: one row per bucket, shape [buckets, H].
        n_tokens: S.
        max_distance: the distance from which on all tokens share a bucket.
    """
    half = table.shape[0] // 2
    exact = half // 2
    position = torch.arange(n_tokens, device=table.device)
    relative = position[None, :] - position[:, None]
    distance = relative.abs()
    # transformers evaluates this logarithm in float32; the bucket edges are where that matters.
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (half - exact)
    bucket = torch.where(distance < exact, distance, (exact + far.long()).clamp(max=half - 1))
    bucket = bucket + half * (relative > 0)
    return table[bucket].permute(2, 0, 1)
