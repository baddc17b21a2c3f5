"""The same model in the precision in which it is deployed: transformers' own module, or our forward pass.

Regions lie behind the embeddings, so the module is run on dummy tokens and the input of its first block is replaced.
Its scores are what its own attention gives to softmax (`eager` attention: others do not show their scores).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from prooflens.errors import ModelError
from prooflens.models.files import OWN_TYPE
from prooflens.models.program import OUTPUT, scores_name
from prooflens.models.transformer import Transformer

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The precisions that models are deployed in."""

Values = tuple[dict[int, Float[Tensor, "n H S S"]], Float[Tensor, "n ..."] | None]
"""Scores by layer, and the output if it was asked for, as float64 numbers."""


@dataclass(frozen=True, eq=False)
class DeployedModel:
    """A model in another precision.

    Attributes:
        precision: `bfloat16` or `float32`.
        by: who runs it, in words.
        values: returns scores of some layers, and the output if asked for, at points [n, S, d].
    """

    precision: str
    by: str
    values: Callable[[Float[Tensor, "n S d"], Sequence[int], bool], Values]

    @property
    def name(self) -> str:
        """The precision and who runs it."""
        return f"{self.precision} by {self.by}"


def checked_precision(name: str) -> str:
    """Return the precision if models are deployed in it.

    Args:
        name: what was given.

    Raises:
        ModelError: if it is none.
    """
    if name not in PRECISIONS:
        raise ModelError(f"models are deployed in {' or '.join(PRECISIONS)}, not in {name!r}")
    return name


def own_forward(model: Transformer, precision: str, why: str) -> DeployedModel:
    """Return prooflens' own forward pass in another precision.

    Args:
        model: the float64 model.
        precision: `bfloat16` or `float32`.
        why: why transformers does not run it.
    """
    held = model.to(dtype=PRECISIONS[precision])

    def values(x: Tensor, layers: Sequence[int], output: bool) -> Values:
        names = {layer: scores_name(layer) for layer in layers}
        found = held.run(x.to(held.dtype), [*names.values(), *([OUTPUT] if output else [])])
        scores = {layer: found[name].double() for layer, name in names.items()}
        return scores, found[OUTPUT].double() if output else None

    return DeployedModel(precision, f"prooflens' own forward pass ({why})", values)


def transformers_module(folder: Path, model: Transformer, precision: str) -> DeployedModel:
    """Return transformers' module of a model folder in some precision.

    Args:
        folder: holds config.json and safetensors in the layout of Hugging Face.
        model: the same model as prooflens has it.
        precision: `bfloat16`, `float32`, or `float64` to compare it with ours.

    Raises:
        ModelError: if transformers is not installed, or does not know or read the folder.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") == OWN_TYPE:
        raise ModelError("it has no transformers module")
    try:
        import transformers
    except ImportError as error:
        raise ModelError("transformers is not installed: pip install 'prooflens[hf]'") from error
    named = (config.get("architectures") or [""])[0]
    default = transformers.AutoModelForCausalLM if model.architecture.causal else transformers.AutoModel
    chosen = getattr(transformers, named, default)
    dtype = PRECISIONS.get(precision, torch.float64)
    try:
        with _silent(transformers.utils.logging):
            module = chosen.from_pretrained(str(folder), dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"transformers cannot read {folder}: {str(error).splitlines()[0]}") from error
    run = _Module(module.eval().to(model.device), model)
    return DeployedModel(precision, f"transformers {transformers.__version__}", run.values)


@contextmanager
def _silent(logging: Any) -> Iterator[None]:
    """Keep transformers' bars and warnings off the terminal while it reads a folder."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True, eq=False)
class _Module:
    """A module of transformers whose first block reads the input that it is given."""

    module: Any
    model: Transformer

    def values(self, x: Tensor, layers: Sequence[int], output: bool) -> Values:
        """Return scores and output at points [n, S, d]."""
        seen = _SoftmaxInputs()
        with torch.no_grad(), self._fed(x.to(self.module.dtype)), self._uncapped() as logits, seen:
            found = self.module(**self._dummy(len(x), x.shape[-2]))
        architecture = self.model.architecture
        if architecture.has_attention and len(seen.scores) != len(self._blocks):
            raise ModelError("its attention does not show its scores")
        scores = {layer: seen.scores[layer].double() for layer in layers}
        if not output:
            return scores, None
        read = logits[-1] if logits else getattr(found, "logits", None)
        if read is None:
            raise ModelError("its module has no outputs")
        return scores, read.double()

    @property
    def _blocks(self) -> Any:
        lists = [part for part in self.module.modules() if isinstance(part, torch.nn.ModuleList)]
        found = [part for part in lists if len(part) == self.module.config.num_hidden_layers]
        if not found:
            raise ModelError("the blocks of its module are not found")
        return found[0]

    @contextmanager
    def _fed(self, x: Tensor) -> Iterator[None]:
        """Replace what the first block reads."""

        def replaced(_: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
            return ((x, *args[1:]), named) if args else (args, {**named, "hidden_states": x})

        handle = self._blocks[0].register_forward_pre_hook(replaced, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _uncapped(self) -> Iterator[list[Tensor]]:
        """Keep logits as they are before a cap, if the model has one: claims are about those."""
        kept: list[Tensor] = []
        capped = getattr(self.module.config, "final_logit_softcapping", None) is not None
        head = self.module.get_output_embeddings() if capped else None
        if head is None:
            yield kept
            return
        handle = head.register_forward_hook(lambda _, args, out: kept.append(out))
        try:
            yield kept
        finally:
            handle.remove()

    def _dummy(self, n: int, size: int) -> dict[str, Tensor]:
        """Tokens or pixels that only say how many points and tokens there are."""
        device = self.model.device
        if self.model.architecture.patch is None:
            ones = torch.ones(n, size, dtype=torch.int64, device=device)
            return {"input_ids": ones, "attention_mask": ones}
        side = self.module.config.image_size
        shape = (n, self.model.architecture.channels, side, side)
        return {"pixel_values": torch.zeros(shape, dtype=self.module.dtype, device=device)}


@dataclass(eq=False)
class _SoftmaxInputs(TorchFunctionMode):
    """Keeps what softmax is given, for tensors of attention: [n, H, S, S]."""

    scores: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        softmaxes = (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)
        if func in softmaxes and args and args[0].ndim == 4:
            self.scores.append(args[0])
        return func(*args, **(kwargs or {}))
