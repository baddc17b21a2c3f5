"""The canonical transformer: an architecture, float64 weights, and one forward pass as a program of steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.errors import ModelError, PromptError
from prooflens.models.architecture import Architecture
from prooflens.models.program import (
    OUTPUT,
    Program,
    attention_mask,
    build_program,
    pattern_name,
    scores_name,
    some_weight,
)
from prooflens.models.prompt import Prompt, Tokenizer, example_prompt, make_prompt
from prooflens.models.weights import check_weights

Input = Float[Tensor, "... S d"] | Int[Tensor, "... S"] | Prompt | str
"""What a forward pass takes: the post-embedding input, or what has one."""


@dataclass(frozen=True, eq=False)
class Transformer:
    """A transformer that one can print, run, differentiate and certify.

    `weights` maps canonical names (`blocks.0.q.weight`, …: see `weights.expected_shapes`) to float64 tensors,
    exactly as they were given: nothing is folded, centred or otherwise processed. `processing` says what an
    adapter knows of processing that was done before (TransformerLens' folded norms).
    """

    architecture: Architecture
    weights: Mapping[str, Tensor]
    name: str = "model"
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    examples: Float[Tensor, "n S d"] | None = field(default=None, repr=False)
    processing: str = "none"

    def __post_init__(self) -> None:
        check_weights(self.architecture, self.weights)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return some_weight(self.weights).device

    @property
    def dtype(self) -> torch.dtype:
        """float64, unless `to` made a copy for search and training."""
        return some_weight(self.weights).dtype

    @property
    def n_parameters(self) -> int:
        """Number of scalars held."""
        return sum(tensor.numel() for tensor in self.weights.values())

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of the architecture and of every weight as float64, little-endian, by sorted name."""
        digest = hashlib.sha256(json.dumps(self.architecture.to_dict(), sort_keys=True).encode())
        for name in sorted(self.weights):
            tensor = self.weights[name]
            digest.update(f"\0{name}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().double().contiguous().numpy().astype("<f8", copy=False).data)
        return digest.hexdigest()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Transformer:
        """A copy on another device, or in another precision (proofs need float64)."""
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.weights.items()}
        examples = None if self.examples is None else self.examples.to(device=device, dtype=dtype)
        return replace(self, weights=moved, examples=examples)

    def cut(self, layers: int) -> Transformer:
        """The model after its first `layers` blocks: final norm, pooling and head read the stream there (logit lens).

        It is a model of its own: its name says where it was cut, and its fingerprint is that of what is left.
        """
        if not 1 <= layers <= self.architecture.n_layers:
            raise ModelError(
                f"{self.name} can be cut after 1 … {self.architecture.n_layers} layers, not {layers}"
            )
        if layers == self.architecture.n_layers:
            return self
        dropped = tuple(f"blocks.{layer}." for layer in range(layers, self.architecture.n_layers))
        kept = {name: tensor for name, tensor in self.weights.items() if not name.startswith(dropped)}
        architecture = replace(self.architecture, n_layers=layers)
        return replace(
            self, architecture=architecture, weights=kept, name=f"{self.name}, first {layers} layers"
        )

    @cached_property
    def headless(self) -> Transformer:
        """The same model without its head: its output is the one vector [d] that the logits of `argmax` are read from.

        Where the head reads every token that is the last one, as in `Problem.read_output`.
        """
        pool = "last" if self.architecture.pool == "none" else self.architecture.pool
        architecture = replace(
            self.architecture,
            d_out=None,
            d_vocab=None,
            context=None,
            d_embed=None,
            patch=None,
            logit_cap=None,
            pool=pool,
        )
        kept = {
            name: tensor for name, tensor in self.weights.items() if not name.startswith(("head.", "embed."))
        }
        return replace(self, architecture=architecture, weights=kept, tokenizer=None)

    @cached_property
    def uncapped(self) -> Transformer:
        """The model whose logits do not go through a cap. A cap is increasing: the order of logits is the same."""
        if self.architecture.logit_cap is None:
            return self
        return replace(self, architecture=replace(self.architecture, logit_cap=None))

    @property
    def head(self) -> tuple[Float[Tensor, "C d"], Float[Tensor, " C"]]:
        """Weight and bias that make logits of the vector of `headless`; tied to the embedding where there is no own."""
        if self.architecture.d_out is None:
            raise ModelError(f"{self.name} has no head: it predicts neither classes nor tokens")
        weight = self.weights["head.weight" if "head.weight" in self.weights else "embed.tokens"]
        return weight, self.weights.get("head.bias", weight.new_zeros(len(weight)))

    def with_head(self, weight: Float[Tensor, "F d"], bias: Float[Tensor, " F"]) -> Transformer:
        """The same model with other linear forms of the vector of `headless` as its outputs."""
        bare = self.headless
        weights = {**bare.weights, "head.weight": weight, "head.bias": bias}
        return replace(bare, architecture=replace(bare.architecture, d_out=len(weight)), weights=weights)

    def program(
        self,
        n_tokens: int,
        until: str | Iterable[str] = OUTPUT,
        padding: Bool[Tensor, " S"] | None = None,
    ) -> Program:
        """The steps from the post-embedding input to the values named `until`, and no step more.

        `padding` is True at real tokens. Masked tokens take no part: no query attends to them and mean pooling
        leaves them out.
        """
        wanted = (until,) if isinstance(until, str) else tuple(until)
        padding = None if padding is None else padding.bool()
        return build_program(self.architecture, self.weights, n_tokens, padding).slice(wanted)

    def input(self, x: Input) -> Float[Tensor, "... S d"]:
        """The post-embedding input of a text, a prompt or token ids; an input as it is."""
        if isinstance(x, str):
            return self.prompt(x).x
        held = x.x if isinstance(x, Prompt) else x
        if isinstance(held, Tensor) and held.dtype in (torch.int32, torch.int64):
            held = self.embed(held)
        self.check_input(held)
        return held

    def __call__(self, x: Input, padding: Bool[Tensor, " S"] | None = None) -> Float[Tensor, "... out"]:
        """The output at the post-embedding input x; batched, differentiable, works under `torch.func`."""
        return self.run(x, OUTPUT, padding)[OUTPUT]

    def run(
        self,
        x: Input,
        until: str | Iterable[str] = OUTPUT,
        padding: Bool[Tensor, " S"] | None = None,
    ) -> dict[str, Tensor]:
        """The values named `until` at x: an input [..., S, d], a text, a prompt, or token ids."""
        x = self.input(x)
        wanted = (until,) if isinstance(until, str) else tuple(until)
        return self.program(x.shape[-2], wanted, padding).run(x, wanted)

    def run_with_cache(
        self, x: Input, padding: Bool[Tensor, " S"] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output and every value on the way, by TransformerLens name (`blocks.0.attn.hook_pattern`, …)."""
        x = self.input(x)
        cache = self.program(x.shape[-2], OUTPUT, padding).run(x)
        return cache[OUTPUT], cache

    def scores(self, x: Input, layer: int) -> Float[Tensor, "... H S S"]:
        """Pre-softmax attention scores of a layer."""
        name = scores_name(self.check_layer(layer))
        return self.run(x, name)[name]

    def pattern(self, x: Input, layer: int) -> Float[Tensor, "... H S S"]:
        """Attention weights of a layer."""
        name = pattern_name(self.check_layer(layer))
        return self.run(x, name)[name]

    def mask(
        self, n_tokens: int, padding: Bool[Tensor, " S"] | None = None, layer: int | None = None
    ) -> Bool[Tensor, "S S"]:
        """Which keys (columns) each query (row) may attend to, in a layer; without one, in a layer without a window."""
        padding = None if padding is None else padding.bool()
        return attention_mask(self.architecture, n_tokens, padding, self.device, layer)

    def embed(self, ids: Int[Tensor, "... S"]) -> Float[Tensor, "... S d"]:
        """The post-embedding input of a sequence of token ids: where every region is centred."""
        ids = torch.as_tensor(ids)
        if ids.is_floating_point() and ids.numel():
            raise PromptError("token ids are whole numbers; an input [S, d] is embedded already")
        ids = ids.long()
        n_tokens = ids.shape[-1]
        architecture, weights = self.architecture, self.weights
        if architecture.d_vocab is None:
            raise ModelError(
                f"{self.name} has no vocabulary: give an input of shape [S, {architecture.d_model}]"
            )
        if n_tokens == 0:
            raise PromptError("the text has no tokens: give at least one")
        if architecture.context is not None and n_tokens > architecture.context:
            raise PromptError(
                f"the text has {n_tokens} tokens, {self.name} reads at most {architecture.context}: shorten it"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= architecture.d_vocab:
            raise PromptError(f"token ids must lie in 0 … {architecture.d_vocab - 1}")
        ids = ids.to(self.device)
        x = weights["embed.tokens"][ids]
        if architecture.embed_scale is not None:
            x = x * architecture.embed_scale
        if "embed.positions" in weights:
            x = x + weights["embed.positions"][torch.arange(n_tokens) + architecture.position_offset]
        if "embed.types" in weights:
            x = x + weights["embed.types"][0]
        if "embed.norm.weight" in weights:
            x = torch.nn.functional.layer_norm(
                x,
                x.shape[-1:],
                weights["embed.norm.weight"],
                weights.get("embed.norm.bias"),
                architecture.norm_eps,
            )
        if "embed.project.weight" in weights:
            x = torch.nn.functional.linear(
                x, weights["embed.project.weight"], weights.get("embed.project.bias")
            )
        return x

    def prompt(self, text: str | Sequence[int] | Int[Tensor, " S"]) -> Prompt:
        """Tokenise a text and embed it; token ids are embedded as they are."""
        return make_prompt(self, text)

    def example(self, index: int = 0) -> Prompt:
        """An embedded example input of a model without text (`toy`, …)."""
        return example_prompt(self, index)

    def check_layer(self, layer: int) -> int:
        """The layer's index, or an error that names the layers there are."""
        if not 0 <= layer < self.architecture.n_layers:
            raise ModelError(f"{self.name} has layers 0 … {self.architecture.n_layers - 1}, not {layer}")
        return layer

    def check_input(self, x: Tensor) -> None:
        """Raise unless x has shape [..., S, d] and the weights' dtype."""
        if not isinstance(x, Tensor):
            raise ModelError(
                f"a {type(x).__name__} is no input: give a text, a prompt, token ids, or a tensor of shape "
                f"[..., S, {self.architecture.d_model}]"
            )
        if x.ndim < 2 or x.shape[-1] != self.architecture.d_model or x.shape[-2] == 0:
            raise ModelError(
                f"the input must have shape [..., S, {self.architecture.d_model}], got {list(x.shape)}"
            )
        if x.dtype != self.dtype:
            raise ModelError(
                f"the input is {x.dtype}, the model {self.dtype}: convert one of them with .to()"
            )

    def __str__(self) -> str:
        lines = [
            f"{self.name}  ({self.n_parameters:,} parameters, sha256 {self.sha256[:12]}…)",
            f"  {self.architecture}",
        ]
        if self.processing != "none":
            lines.append(f"  processing: {self.processing}")
        return "\n".join(lines)
