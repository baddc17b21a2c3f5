"""What a transformer looks like, as data that one can print: everything but the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from prooflens.errors import ModelError

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
NormKind = Literal["layer", "rms"]
NormPlace = Literal["pre", "post"]
PoolKind = Literal["none", "mean", "first", "last"]

LARGEST = 2**24
"""The largest width, context or vocabulary that a model can have; a file that says more is damaged."""


@dataclass(frozen=True)
class Architecture:
    """One description of every model family that prooflens knows.

    A block is attention and a feed-forward network, each with a residual connection and a norm that stands before
    (`norm_place="pre"`: GPT-2, Llama) or after (`"post"`: BERT, MPNet, the paper's encoder) it. The output is made
    of: final norm (pre-norm models), pooling over tokens, a dense tanh pooler (BERT), a linear head.

    Attributes:
        family: the family's name, for people.
        n_layers: the number of blocks.
        n_heads: the number of query heads.
        d_model: the width of the residual stream.
        d_ff: the width of the feed-forward network.
        activation: its activation.
        norm_kind: LayerNorm (`"layer"`) or RMSNorm (`"rms"`).
        norm_place: before (`"pre"`) or after (`"post"`) attention and feed-forward network.
        norm_eps: ε of the norms.
        n_kv_heads: the number of key-value heads; None for `n_heads`.
        d_head: the width of a head; None for `d_model / n_heads`.
        gated: whether the feed-forward network has a gate.
        causal: whether a token attends only to itself and those before it.
        rope_theta: the base of RoPE's frequencies; None without RoPE.
        relative_buckets: the number of relative position buckets (MPNet); None without them.
        relative_max_distance: the distance from which on all tokens share a bucket.
        pool: how tokens are pooled: not at all, mean, first or last.
        pooler: whether a dense tanh layer follows the pooling.
        d_out: the number of outputs of the head; None without a head.
        d_vocab: the size of the vocabulary; None for a model without token embeddings.
        context: the largest number of tokens; None for any.
        position_offset: the index of the first position embedding.
    """

    family: str
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    activation: Activation
    norm_kind: NormKind = "layer"
    norm_place: NormPlace = "post"
    norm_eps: float = 1e-5
    n_kv_heads: int | None = None
    d_head: int | None = None
    gated: bool = False
    causal: bool = False
    rope_theta: float | None = None
    relative_buckets: int | None = None
    relative_max_distance: int = 128
    pool: PoolKind = "none"
    pooler: bool = False
    d_out: int | None = None
    d_vocab: int | None = None
    context: int | None = None
    position_offset: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("n_layers", "n_heads", "d_model", "d_ff", "n_kv_heads", "d_head", "d_out", "d_vocab"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_head is None and self.d_model % self.n_heads:
            raise ModelError(
                f"d_model = {self.d_model} is not divisible by n_heads = {self.n_heads}; give d_head explicitly"
            )
        if self.n_heads % self.kv_heads:
            raise ModelError(f"{self.n_heads} heads cannot share {self.kv_heads} key-value heads evenly")
        for name, kind in (("activation", Activation), ("norm_kind", NormKind), ("norm_place", NormPlace)):
            if getattr(self, name) not in get_args(kind):
                raise ModelError(f"{name} {getattr(self, name)!r} is not one of {', '.join(get_args(kind))}")
        if self.pool not in get_args(PoolKind):
            raise ModelError(f"pool {self.pool!r} is not one of {', '.join(get_args(PoolKind))}")

    def _check_types(self) -> None:
        """Raise unless numbers are numbers, of a size that a model can have; a file may say anything."""
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if value is None and "None" in kind:
                continue
            if kind.startswith("int"):
                right = type(value) is int and 0 <= value <= LARGEST
            elif kind.startswith("float"):
                right = type(value) in (int, float) and 0 <= value <= 1e12
            else:
                right = isinstance(value, bool if kind == "bool" else str)
            if not right:
                raise ModelError(f"{field.name} cannot be {value!r}")

    @property
    def head_dim(self) -> int:
        """The width of one head, d_h."""
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads; each serves `n_heads / kv_heads` query heads."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary, ready for JSON, that `from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Architecture:
        """Read back what `to_dict` made; unknown keys are an error, since they would change what is computed."""
        if not isinstance(data, dict):
            raise ModelError("the architecture must be a JSON object")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ModelError(f"unknown entries in the architecture: {', '.join(unknown)}")
        try:
            return cls(**data)
        except TypeError as error:
            raise ModelError(f"the architecture is not complete: {error}") from error

    def __str__(self) -> str:
        norm = (
            f"{self.norm_place}-{'RMSNorm' if self.norm_kind == 'rms' else 'LayerNorm'} ε={self.norm_eps:g}"
        )
        heads = f"{self.n_heads} heads" + (
            f" in {self.kv_heads} groups" if self.kv_heads != self.n_heads else ""
        )
        parts = [
            f"{self.n_layers} layers",
            heads,
            f"d={self.d_model}",
            f"d_ff={self.d_ff}",
            f"{'gated ' if self.gated else ''}{self.activation}",
            norm,
        ]
        if self.causal:
            parts.append("causal")
        if self.rope_theta is not None:
            parts.append(f"RoPE θ={self.rope_theta:g}")
        if self.relative_buckets is not None:
            parts.append(f"{self.relative_buckets} relative position buckets")
        return f"{self.family}: " + ", ".join(parts)
