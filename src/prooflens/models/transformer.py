"""The canonical transformer: an architecture, float64 weights, and one forward pass as a program of steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.embedding import checked_ids, embedded
from prooflens.models.knockouts import moved_weights
from prooflens.models.program import (
    OUTPUT,
    Program,
    attention_mask,
    blocks_to,
    build_program,
    pattern_name,
    scores_name,
    some_weight,
)
from prooflens.models.prompt import Prompt, Tokenizer, example_prompt, make_prompt
from prooflens.models.reads import READ, read_by
from prooflens.models.weights import check_weights

if TYPE_CHECKING:
    from prooflens.models.parts import Edit

Input = Float[Tensor, "... S d"] | Int[Tensor, "... S"] | Prompt | str
"""What a forward pass takes: a post-embedding input [..., S, d], token ids [..., S], a prompt, or a text."""


@dataclass(frozen=True, eq=False, repr=False)
class Transformer:
    """A transformer that one can print, run, differentiate and certify.

    Attributes:
        architecture: everything but the weights: layers, heads, widths, norms, activation.
        weights: float64 tensors by canonical name (`blocks.0.q.weight`, …), exactly as they were given; nothing is
            folded or centred.
        name: the name that results and messages use.
        tokenizer: reads texts; None for a model that has none.
        examples: inputs that an embedded model carries, shape [n, S, d]; None for others.
        processing: what an adapter knows of processing that was done before, such as TransformerLens' folded norms.
        outputs: what results call the outputs of a readout (`read_at`); None for classes and tokens.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> model(model.example()).argmax().item()
        0
    """

    architecture: Architecture
    weights: Mapping[str, Tensor]
    name: str = "model"
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    examples: Float[Tensor, "n S d"] | None = field(default=None, repr=False)
    processing: str = "none"
    outputs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_weights(self.architecture, self.weights)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return some_weight(self.weights).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights: float64, unless `to` made a copy for search and training."""
        return some_weight(self.weights).dtype

    @property
    def n_parameters(self) -> int:
        """The number of scalars in all weights."""
        return sum(tensor.numel() for tensor in self.weights.values())

    @cached_property
    def sha256(self) -> str:
        """A fingerprint of the architecture and of every weight (as float64, little-endian, sorted by name)."""
        narrow = replace(self.architecture, free=0, free_until=0)
        digest = hashlib.sha256(json.dumps(narrow.to_dict(), sort_keys=True).encode())
        for name in sorted(self.weights):
            tensor = self.weights[name]
            digest.update(f"\0{name}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().double().contiguous().numpy().astype("<f8", copy=False).data)
        return digest.hexdigest()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Transformer:
        """Return a copy on another device or in another precision, as `torch.Tensor.to`; proofs need float64.

        Args:
            device: where the copy is; None for where the model is.
            dtype: its precision; None for the model's.

        Example:
            >>> import prooflens as pl, torch
            >>> pl.load("toy").to(dtype=torch.float32).dtype
            torch.float32
        """
        moved = moved_weights(self.weights, device, dtype)
        examples = None if self.examples is None else self.examples.to(device=device, dtype=dtype)
        return replace(self, weights=moved, examples=examples)

    def cut(self, layers: int) -> Transformer:
        """Cut the model after its first blocks: final norm, pooling and head then read the stream there (logit lens).

        It is a model of its own: its name says where it was cut, and its fingerprint covers what is left.

        Args:
            layers: how many blocks to keep, from 1 to all; another number is a `ModelError`.

        Example:
            >>> import prooflens as pl
            >>> pl.load("toy").cut(1).name
            'toy, first 1 layers'
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

    def edit(self, edits: str | Edit | Sequence[str | Edit]) -> Transformer:
        """Return the model with parts held at constants, as `pl.edit(model, edits)` does: a model of its own.

        Args:
            edits: parts to take out by name (`"a9.h6"`), keys to knock out (`"a9.h6.k3"`), or `Edit`s; one or several.

        Example:
            >>> import prooflens as pl
            >>> pl.load("toy").edit("a1.h0").name
            'toy without a1.h0'
        """
        from prooflens.models.edits import edit

        return edit(self, edits)

    @cached_property
    def headless(self) -> Transformer:
        """The same model without its head: the output is the vector [d] from which the head computes the logits.

        Where the head reads every token, it is the vector of the last token, as in `Problem.read_output`.
        """
        if READ in self.weights:
            width = self.weights[READ].shape[1]
            return read_by(self, torch.eye(width, dtype=self.dtype, device=self.device), None)
        pool = "last" if self.architecture.pool == "none" else self.architecture.pool
        bare = replace(self.architecture, d_out=None, logit_cap=None, pool=pool)
        context = bare.context if bare.head_positions else None  # its tables are in the blocks
        architecture = replace(bare, d_vocab=None, context=context, d_embed=None, patch=None)
        kept = {
            name: tensor for name, tensor in self.weights.items() if not name.startswith(("head.", "embed."))
        }
        return replace(self, architecture=architecture, weights=kept, tokenizer=None)

    @cached_property
    def uncapped(self) -> Transformer:
        """The model whose logits do not go through a cap. A cap is increasing, so the order of logits is the same."""
        if self.architecture.logit_cap is None:
            return self
        return replace(self, architecture=replace(self.architecture, logit_cap=None))

    @property
    def head(self) -> tuple[Float[Tensor, "C d"], Float[Tensor, " C"]]:
        """Weight [C, d] and bias [C] that map the vector of `headless` to logits; tied models use the embedding."""
        self.check_head()
        name = next(name for name in (READ, "head.weight", "embed.tokens") if name in self.weights)
        bias = self.weights.get("read.bias" if name == READ else "head.bias")
        return self.weights[name], self.weights[name].new_zeros(
            len(self.weights[name])
        ) if bias is None else bias

    def check_head(self) -> None:
        """Refuse a model that predicts nothing, with what can be asked of it."""
        if self.architecture.d_out is None:
            raise ModelError(
                f"{self.name} has no head: it predicts neither classes nor tokens; ask about its attention, "
                "as in top1@-1, or about a value inside it, as in 'neuron 0.5>0@-1'"
            )

    def with_head(self, weight: Float[Tensor, "F d"], bias: Float[Tensor, " F"]) -> Transformer:
        """Return the model with another linear head, weight [F, d] and bias [F], on the vector of `headless`.

        Args:
            weight: shape [F, d].
            bias: shape [F].
        """
        if READ in self.weights:
            return read_by(self, weight, bias)
        bare = self.headless
        weights = {**bare.weights, "head.weight": weight, "head.bias": bias}
        return replace(bare, architecture=replace(bare.architecture, d_out=len(weight)), weights=weights)

    def program(
        self,
        n_tokens: int,
        until: str | Iterable[str] = OUTPUT,
        padding: Bool[Tensor, " S"] | None = None,
    ) -> Program:
        """Return the steps from the post-embedding input to the values named `until`, and no step more.

        Args:
            n_tokens: S, the length of the input.
            until: a name, or several, of the values that are wanted (`blocks.0.attn.hook_pattern`, `output`, …).
            padding: True at real tokens; None if all are. The others are not attended to, and mean pooling leaves
                them out.
        """
        wanted = (until,) if isinstance(until, str) else tuple(until)
        padding = None if padding is None else padding.bool()
        blocks = blocks_to(wanted, self.architecture.n_layers)
        return build_program(self.architecture, self.weights, n_tokens, padding, blocks).slice(wanted)

    def input(self, x: Input) -> Float[Tensor, "... S d"]:
        """Return the post-embedding input of a text, a prompt or token ids; a tensor [..., S, d] comes back as it is.

        Of parts that are held at any value of a set, texts, prompts and ids mean the value in the middle.

        Args:
            x: any of these.

        Raises:
            ModelError: if a tensor does not have the model's width and dtype.
            PromptError: if a text or token ids do not fit the model.
        """
        read = self.prompt(x) if isinstance(x, str) else x
        held = read.x if isinstance(read, Prompt) else read
        if isinstance(held, Tensor) and held.dtype in (torch.int32, torch.int64):
            held = self.embed(held)
        if held is not x and held.shape[-1] == self.architecture.d_model:
            held = torch.nn.functional.pad(held, (0, self.architecture.free))
        self.check_input(held)
        return held

    def __call__(self, x: Input, padding: Bool[Tensor, " S"] | None = None) -> Float[Tensor, "... out"]:
        """Return the output at an input: batched, differentiable, usable under `torch.func`.

        Args:
            x: an input [..., S, d], a text, a prompt, or token ids.
            padding: True at real tokens; None if all are real.
        """
        return self.run(x, OUTPUT, padding)[OUTPUT]

    def run(
        self,
        x: Input,
        until: str | Iterable[str] = OUTPUT,
        padding: Bool[Tensor, " S"] | None = None,
    ) -> dict[str, Tensor]:
        """Run the model up to the values named `until`, and no further.

        Args:
            x: an input [..., S, d], a text, a prompt, or token ids.
            until: a name, or several, of the values that are wanted.
            padding: True at real tokens; None if all are real.

        Returns:
            The wanted values by name.
        """
        x = self.input(x)
        wanted = (until,) if isinstance(until, str) else tuple(until)
        return self.program(x.shape[-2], wanted, padding).run(x, wanted)

    def run_with_cache(
        self, x: Input, padding: Bool[Tensor, " S"] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model and keep every intermediate value by its TransformerLens name.

        Args:
            x: an input [..., S, d], a text, a prompt, or token ids.
            padding: True at real tokens; None if all are real.

        Returns:
            The output, and a dictionary of all values on the way (`blocks.0.attn.hook_pattern`, …).

        Example:
            >>> import prooflens as pl
            >>> model = pl.load("toy")
            >>> logits, cache = model.run_with_cache(model.example())
            >>> cache["blocks.0.attn.hook_pattern"].shape
            torch.Size([2, 4, 4])
        """
        x = self.input(x)
        cache = self.program(x.shape[-2], OUTPUT, padding).run(x)
        return cache[OUTPUT], cache

    def scores(self, x: Input, layer: int) -> Float[Tensor, "... H S S"]:
        """Return the pre-softmax attention scores of a layer, counted from 0, shape [..., H, S, S].

        Args:
            x: a text, a prompt, token ids, or an input of shape [..., S, d].
            layer: the layer, from 0.
        """
        name = scores_name(self.check_layer(layer))
        return self.run(x, name)[name]

    def pattern(self, x: Input, layer: int) -> Float[Tensor, "... H S S"]:
        """Return the attention weights of a layer, shape [..., H, S, S]: every row sums to 1.

        Args:
            x: an input [..., S, d], a text, a prompt, or token ids.
            layer: counted from 0.

        Raises:
            ModelError: if there is no such layer.

        Example:
            >>> import prooflens as pl
            >>> model = pl.load("toy")
            >>> model.pattern(model.example(), layer=0)[1, -1].argmax().item()  # head 0.1 at the last token
            2
        """
        name = pattern_name(self.check_layer(layer))
        return self.run(x, name)[name]

    def mask(
        self, n_tokens: int, padding: Bool[Tensor, " S"] | None = None, layer: int | None = None
    ) -> Bool[Tensor, "S S"]:
        """Return which keys (columns) each query (row) may attend to in a layer; None: without a window.

        Args:
            n_tokens: S, the number of tokens.
            padding: True at real tokens, shape [S]; None if all are.
            layer: the layer, from 0; None for the mask without a window.
        """
        padding = None if padding is None else padding.bool()
        return attention_mask(self.architecture, n_tokens, padding, self.device, layer)

    def embed(self, ids: Int[Tensor, "... S"]) -> Float[Tensor, "... S d"]:
        """Embed token ids: the result is the post-embedding input, where every region is centred.

        Args:
            ids: whole numbers, shape [..., S].

        Raises:
            ModelError: if the model has no vocabulary.
            PromptError: if there are no ids, too many, or ids that the vocabulary does not have.
        """
        ids = checked_ids(self.name, self.architecture, torch.as_tensor(ids))
        return embedded(self.architecture, self.weights, ids.to(self.device))

    def prompt(self, text: str | Sequence[int] | Int[Tensor, " S"]) -> Prompt:
        """Tokenise and embed a text, or embed token ids as they are.

        Args:
            text: a text, or a sequence of token ids.

        Returns:
            The tokens and their post-embedding vectors `x` [S, d].

        Raises:
            PromptError: if the model has no tokenizer, or the text is empty or too long.

        Example:
            >>> import prooflens as pl
            >>> model = pl.load("minilm")  # doctest: +SKIP
            >>> model.prompt("the cat sat").tokens  # doctest: +SKIP
            ('[CLS]', 'the', 'cat', 'sat', '[SEP]')
        """
        return make_prompt(self, text)

    def example(self, index: int = 0) -> Prompt:
        """Return an example input of a model that reads no text (`toy`, …).

        Args:
            index: which of the examples, counted from 0.

        Raises:
            PromptError: if the model has no such example.

        Example:
            >>> import prooflens as pl
            >>> pl.load("toy").example().tokens
            ('x0', 'x1', 'x2', 'x3')
        """
        return example_prompt(self, index)

    def check_layer(self, layer: int) -> int:
        """Return the layer's index, or raise an error that names the layers there are.

        Args:
            layer: the layer, from 0.
        """
        if not 0 <= layer < self.architecture.n_layers:
            raise ModelError(f"{self.name} has layers 0 … {self.architecture.n_layers - 1}, not {layer}")
        return layer

    def check_input(self, x: Tensor) -> None:
        """Raise a `ModelError` unless x is a tensor of shape [..., S, d] with the dtype of the weights.

        Args:
            x: what was given.
        """
        if not isinstance(x, Tensor):
            raise ModelError(
                f"a {type(x).__name__} is no input: give a text, a prompt, token ids, or a tensor of shape "
                f"[..., S, {self.architecture.d_model}]"
            )
        if x.ndim < 2 or x.shape[-1] != self.architecture.input_width or x.shape[-2] == 0:
            free = self.architecture.free
            said = f", the last {free} of which say at which value of a set parts are held" if free else ""
            raise ModelError(
                f"the input must have shape [..., S, {self.architecture.input_width}]{said}, got {list(x.shape)}"
            )
        if x.dtype != self.dtype:
            raise ModelError(
                f"the input is {x.dtype}, the model {self.dtype}: convert the input with x.to({self.dtype})"
            )

    def __repr__(self) -> str:
        return f"<Transformer {self.name}: {self.architecture}, sha256 {self.sha256[:12]}…>"

    def __str__(self) -> str:
        size = f"{self.n_parameters:,} parameters, sha256 {self.sha256[:12]}…"
        lines = [f"{self.name}  ({size})", f"  {self.architecture}"]
        if self.processing != "none":
            lines.append(f"  processing: {self.processing}")
        return "\n".join(lines)
