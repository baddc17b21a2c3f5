"""What a transformer looks like, as data that one can print: everything but the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from prooflens.errors import ModelError

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "relu2"]
NetworkActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "relu2", "solu"]
"""What a network may bend its neurons by: a function of each, or SoLU, x·softmax(x) over all of a token's neurons."""
NormKind = Literal["layer", "rms"]
NormPlace = Literal["pre", "post", "none", "sandwich", "output"]
PoolKind = Literal["none", "mean", "first", "last"]
HeadNorm = Literal["none", "head", "whole"]

LARGEST = 2**24
"""The largest width, context or vocabulary that a model can have; a file that says more is damaged."""


@dataclass(frozen=True)
class Architecture:
    """One description for every family that prooflens knows.

    A block is attention and a feed-forward network, each with a residual connection and a norm that stands
    before (`norm_place="pre"`: GPT-2, Llama) or after (`"post"`: BERT, MPNet, the paper's encoder) it; before it and
    on what it adds (`"sandwich"`: Gemma 2), on what it adds alone (`"output"`: OLMo 2), or nowhere (`"none"`). The
    output is: final norm (where norms do not stand after), pooling over tokens, a dense pooler (BERT), a linear head.

    Fields from `parallel` on came later than the first models: at their defaults they are not written, so that the
    fingerprints of those models stay.

    Attributes:
        parallel: attention and network read the same stream and are added together.
        shared_norm: in such a block both read one norm.
        has_attention: whether blocks have attention at all.
        has_network: whether blocks have a feed-forward network.
        first_norm: whether the first block has a norm before its attention.
        attention_scale: factor of q·k; None for 1/√d_h.
        scale_by_layer: divide it by the number of the layer, from 1.
        window: how many tokens away a local layer looks; None for all.
        window_layers: the layers that are local.
        alibi: scores get a bias that grows with the key's place (BLOOM).
        qk_norm: norms of queries and keys before they turn: none, head by head, or of all heads together.
        score_cap: c in c·tanh(a/c), through which scores go; None for none.
        logit_cap: the same of logits.
        embed_scale: factor of token embeddings.
        d_embed: width of token embeddings that are projected to the stream; None for its own width.
        rope_given: rotary frequencies are weights (`rope.frequencies`), not powers of `rope_theta`.
        rope_local: local layers have frequencies of their own (`rope.local_frequencies`).
        rope_scale: factor of cosines and sines.
        head_positions: queries and keys get a vector of their position, and the stream gets none (shortformer).
        network_norm: whether the network's neurons are normed behind their activation (SoLU models).
        pooler_activation: what follows the dense layer of the pooler.
        patch: side of an image's patches; None for models that read tokens.
        channels: colours of an image.
        read_hook: the value that a readout reads (`models.reads`); None for a whole model.
        read_position: the token at which it reads it.
        beside_hook: another value, of the same block or an earlier one, that a readout reads too; None for none.
        beside_position: the token at which it reads that.
        free: how many coordinates an input has behind the stream's: the factors of parts that are held at any value of
            a set (`models.spread`). Tables among the weights say them, so this and the next are in no fingerprint.
        free_until: the last block whose parts read them.
    """

    family: str
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    activation: NetworkActivation
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
    parallel: bool = False
    shared_norm: bool = False
    has_attention: bool = True
    has_network: bool = True
    first_norm: bool = True
    attention_scale: float | None = None
    scale_by_layer: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    alibi: bool = False
    qk_norm: HeadNorm = "none"
    score_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float | None = None
    d_embed: int | None = None
    rope_given: bool = False
    rope_local: bool = False
    rope_scale: float = 1.0
    head_positions: bool = False
    network_norm: bool = False
    pooler_activation: Activation = "tanh"
    patch: int | None = None
    channels: int = 3
    read_hook: str | None = None
    read_position: int | None = None
    beside_hook: str | None = None
    beside_position: int | None = None
    free: int = 0
    free_until: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_layers", tuple(self.window_layers))
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
        for name, kind in CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ModelError(f"{name} {getattr(self, name)!r} is not one of {', '.join(get_args(kind))}")
        for name in ("score_cap", "logit_cap"):
            if getattr(self, name) == 0:
                raise ModelError(f"{name} cannot be 0; leave it out for a model without one")
        if not (self.has_attention or self.has_network):
            raise ModelError("blocks without attention and without a network do nothing")
        if self.parallel and not (self.has_attention and self.has_network):
            raise ModelError("parallel blocks have attention and a network: one of them is missing")
        if self.gated and (self.activation == "solu" or self.network_norm):
            raise ModelError("gated networks have no SoLU and no norm of their neurons")
        if self.head_positions and (self.context is None or self.qk_norm != "none"):
            raise ModelError("head_positions needs a context, and queries and keys without norms")
        if (self.read_hook is None) != (self.read_position is None):
            raise ModelError("a readout has a hook and a position: one of them is missing")
        if (self.beside_hook is None) != (self.beside_position is None) or (
            self.beside_hook is not None and self.read_hook is None
        ):
            raise ModelError(
                "what is read beside a readout has a hook and a position: one of them is missing"
            )
        if self.parallel and self.norm_place == "post":
            raise ModelError("parallel blocks have no norm behind a sum: norm_place cannot be 'post'")

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
            elif kind.startswith("tuple"):
                right = all(type(part) is int and 0 <= part < LARGEST for part in value)
            else:
                right = isinstance(value, bool if kind == "bool" else str)
            if not right:
                raise ModelError(f"{field.name} cannot be {value!r}")

    @property
    def input_width(self) -> int:
        """How many coordinates each token of an input has: the stream's, and the free ones behind them."""
        return self.d_model + self.free

    @property
    def head_dim(self) -> int:
        """The width of one head, d_h."""
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys turn with their position."""
        return self.rope_theta is not None or self.rope_given

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm stands behind the last block."""
        return self.norm_place in ("pre", "sandwich", "output")

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a block, by the names of their weights."""
        parts = (["1"] if self.has_attention else []) + (["2"] if self.has_network else [])
        if self.parallel and self.shared_norm:
            parts = ["1"]
        before = [f"norm{i}" for i in parts] if self.norm_place in ("pre", "post", "sandwich") else []
        behind = [f"norm{i}_out" for i in parts] if self.norm_place in ("sandwich", "output") else []
        return (*before, *behind)

    def is_local(self, layer: int) -> bool:
        """Say whether a layer looks at a window only."""
        return self.window is not None and layer in self.window_layers

    def scale(self, layer: int) -> float:
        """Return the factor of q·k in a layer."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads; each serves `n_heads / kv_heads` query heads."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary, ready for JSON, that `from_dict` reads back; later fields are left out at defaults."""
        later = [field for field in fields(self) if field.name in LATER]
        plain = {field.name for field in later if getattr(self, field.name) == field.default}
        written = {name: value for name, value in asdict(self).items() if name not in plain}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in written.items()}

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
        kind = "RMSNorm" if self.norm_kind == "rms" else "LayerNorm"
        norm = "no norm" if self.norm_place == "none" else f"{self.norm_place}-{kind} ε={self.norm_eps:g}"
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
        parts += [
            name
            for name, there in {
                "parallel": self.parallel,
                "attention only": not self.has_network,
                f"window of {self.window} in {len(self.window_layers)} layers": bool(self.window_layers),
                "ALiBi": self.alibi,
                "RoPE by given frequencies": self.rope_given,
                "normed queries and keys": self.qk_norm != "none",
                "positions of queries and keys": self.head_positions,
                "normed neurons": self.network_norm,
                f"scores capped at {self.score_cap}": self.score_cap is not None,
                f"logits capped at {self.logit_cap}": self.logit_cap is not None,
                f"patches of {self.patch} × {self.patch}": self.patch is not None,
                f"read at {self.read_hook}@{self.read_position}": self.read_hook is not None,
                f"read at {self.beside_hook}@{self.beside_position}": self.beside_hook is not None,
            }.items()
            if there
        ]
        return f"{self.family}: " + ", ".join(parts)


LATER = frozenset(
    name
    for name in Architecture.__dataclass_fields__
    if list(Architecture.__dataclass_fields__).index(name)
    > list(Architecture.__dataclass_fields__).index("position_offset")
)
"""Fields that are not written at their defaults: the first models' fingerprints do not know them."""

CHOICES = {
    "activation": NetworkActivation,
    "norm_kind": NormKind,
    "norm_place": NormPlace,
    "pool": PoolKind,
    "qk_norm": HeadNorm,
    "pooler_activation": Activation,
}
"""Fields that are words, and which words they may be."""
