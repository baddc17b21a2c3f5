"""Load a model from a name, a folder, a file or an object in memory, as one canonical transformer."""

from __future__ import annotations

import difflib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.json_files import read_json
from prooflens.models import huggingface, onnx
from prooflens.models import transformer_lens as lens
from prooflens.models.architecture import Architecture
from prooflens.models.cache import model_folder
from prooflens.models.files import (
    OWN_TYPE,
    read_config,
    read_gguf,
    read_gguf_tokenizer,
    read_safetensors,
    read_state,
)
from prooflens.models.prompt import FileTokenizer, GivenTokenizer
from prooflens.models.pull import SOURCES, Progress, pull
from prooflens.models.transformer import Transformer

EMBEDDED = ("toy", "toy-4layer", "toy-induction", "toy-d16")
"""Models whose weights are part of the package: no download, no tokenizer, example inputs in place of texts."""

TRAINED = ("bert-tiny-sst2", "gpt2-sst2", "toy-d32", "toy-d64", "toy-d128")
"""Models that `prooflens train` makes."""


def load(x: Any, progress: Progress | None = None, tokenizer: Any = None) -> Transformer:
    """Load a transformer, whatever form it has, as the canonical model that prooflens proves things about.

    Weights are converted to float64 and are otherwise taken as they are: nothing is folded, centred or dropped.

    Args:
        x: a short name (`toy`, `minilm`, `mpnet`, `smollm2`, …), a local folder with config.json and safetensors, a
            .gguf or .onnx file, a name on the Hugging Face hub, a `transformers` module, an object of TransformerLens,
            nnsight or sentence-transformers, or a `Transformer`, which comes back as it is.
        progress: called with a stage and a share from 0 to 1 while a model is downloaded; None for silence.
        tokenizer: a tokenizer of `transformers` or `tokenizers`, for a module that has to read texts. The tokenizer
            of a folder, of a .gguf file or of such an object is found without it, and one beside an .onnx file too.

    Returns:
        The model, on the CPU and in float64.

    Raises:
        ModelError: if there is no such model, its files are damaged, or its architecture is not supported.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> print(model.architecture)
        encoder: 2 layers, 2 heads, d=8, d_ff=16, relu, post-LayerNorm ε=1e-05
        >>> model.dtype
        torch.float64
    """
    model = _load(x, progress)
    if tokenizer is None:
        return model
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise ModelError(f"a {type(tokenizer).__name__} is no tokenizer: it has no encode and decode")
    return replace(model, tokenizer=GivenTokenizer(tokenizer))


def _load(x: Any, progress: Progress | None) -> Transformer:
    if isinstance(x, Transformer):
        return x
    if isinstance(x, str) and not x.strip():
        raise ModelError("the name of the model is empty: give a short name such as toy, or a folder")
    if isinstance(x, str | Path):
        return _load_named(str(x), progress)
    if lens.is_bridge(x):
        return lens.from_bridge(x)
    if lens.is_hooked_transformer(x):
        return lens.from_hooked_transformer(x)
    if (wrapped := _inside(x)) is not None:
        module, pool, held = wrapped
        return _load_module(module, pool, held)
    if hasattr(x, "config") and hasattr(x, "state_dict"):
        return _load_module(x)
    raise ModelError(f"cannot load a {type(x).__name__}: give a name, a folder, or a transformers module")


def _load_named(name: str, progress: Progress | None) -> Transformer:
    if name in EMBEDDED:
        with resources.as_file(resources.files("prooflens.models") / "embedded" / name) as folder:
            return load_folder(folder, name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        config, state = read_gguf(path)
        reader = read_gguf_tokenizer(path)
        held = None if reader is None else GivenTokenizer(reader)
        return _build(*huggingface.convert(config, state), name=path.stem, tokenizer=held)
    if path.suffix == ".onnx":
        beside = path.parent / "tokenizer.json"
        file = FileTokenizer(beside) if beside.is_file() else None
        return _build(*onnx.convert(path), name=path.stem, tokenizer=file)
    if path.is_dir():
        return load_folder(path, path.name)
    if name in SOURCES:
        return load_folder(pull(name, progress), name)
    cached = model_folder(name)
    if (cached / "config.json").is_file():
        return load_folder(cached, name)
    if name in TRAINED:
        raise ModelError(f"{name} is not trained yet: run `prooflens train {name}`")
    known = [*EMBEDDED, *SOURCES, *TRAINED]
    if path.exists():
        raise ModelError(f"{name} is a file: give its folder, or a .gguf or .onnx file")
    if "/" not in name and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.7)):
        raise ModelError(f"there is no model {name!r}; did you mean {close[0]!r}?")
    try:
        return load_folder(pull(name, progress), name)
    except ModelError as error:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ModelError(
            f"{name!r} is neither a folder nor one of {', '.join(known)}, and {error}{hint}"
        ) from error


def load_folder(folder: Path, name: str) -> Transformer:
    """Load a model folder in prooflens' own layout or in Hugging Face's.

    Args:
        folder: holds config.json and safetensors; tokenizer.json and example inputs are read if they are there.
        name: the name that results and messages use for the model.

    Raises:
        ModelError: if a file is missing or damaged, or the architecture is not supported.
    """
    config = read_config(folder)
    tokenizer = FileTokenizer(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None
    if config.get("model_type") == OWN_TYPE:
        architecture = Architecture.from_dict(config.get("architecture", {}))
        weights = read_state(folder)
        examples = None
        if (folder / "examples.safetensors").is_file():
            examples = read_safetensors(folder / "examples.safetensors")["x"].double()
    else:
        architecture, weights = huggingface.convert(config, read_state(folder), _pooling(folder))
        examples = None
    return _build(architecture, weights, name=name, tokenizer=tokenizer, examples=examples)


def architecture_of(folder: Path) -> Architecture:
    """Return the architecture of a model folder; its weights are read if the configuration alone does not give it.

    Args:
        folder: the model folder.
    """
    config = read_config(folder)
    if config.get("model_type") == OWN_TYPE:
        return Architecture.from_dict(config.get("architecture", {}))
    return huggingface.convert(config, read_state(folder), _pooling(folder))[0]


def _pooling(folder: Path) -> str | None:
    """Return how a sentence encoder pools its tokens, if the folder says so (the layout of sentence-transformers)."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    try:
        modes = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(modes, dict):
        raise ModelError(f"{path} must hold one JSON object")
    return "mean" if modes.get("pooling_mode_mean_tokens") else "first"


def _inside(x: Any) -> tuple[Any, str | None, Any] | None:
    """Return the transformers module inside x, how its tokens are pooled, and its tokenizer; None if none is inside.

    nnsight's `LanguageModel` has it as `_model`; sentence-transformers' object is a sequence of modules, the first of
    which has it as `auto_model`, the second of which pools.
    """
    inner = getattr(x, "_model", None)
    if hasattr(inner, "config") and hasattr(inner, "state_dict"):
        return inner, None, getattr(x, "tokenizer", None)
    parts = list(x) if hasattr(x, "state_dict") and hasattr(x, "__iter__") else []
    inner = getattr(parts[0], "auto_model", None) if parts else None
    if inner is None:
        return None
    if late := next((part for part in parts[2:] if type(part).__name__ != "Normalize"), None):
        raise ModelError(f"a {type(late).__name__} behind the pooling of a sentence encoder is not supported")
    held = getattr(x, "tokenizer", None) or getattr(parts[0], "tokenizer", None)
    return inner, _pooling_mode(parts[1]) if len(parts) > 1 else None, held


def _pooling_mode(pooling: Any) -> str:
    """Return how a pooling module of sentence-transformers pools: `mean` or `first`."""
    if hasattr(pooling, "get_pooling_mode_str"):
        mode = str(pooling.get_pooling_mode_str())
    else:
        flags = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
        mode = "+".join(name for name, flag in flags.items() if getattr(pooling, flag, False))
    modes = {"mean": "mean", "cls": "first"}
    if mode not in modes:
        raise ModelError(f"pooling_mode = {mode!r} is not supported (supported: mean, cls)")
    return modes[mode]


def _load_module(module: Any, pool: str | None = None, tokenizer: Any = None) -> Transformer:
    config = module.config.to_dict() if hasattr(module.config, "to_dict") else dict(module.config)
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    name = str(getattr(module.config, "_name_or_path", "") or config.get("model_type", "model"))
    held = None if tokenizer is None else GivenTokenizer(tokenizer)
    architecture, weights = huggingface.convert(config, state, pool)
    if pool is not None and architecture.pool != pool:
        raise ModelError(f"a {architecture.family} model whose tokens are pooled ({pool}) is not supported")
    return _build(architecture, weights, name=name, tokenizer=held)


def _build(architecture: Architecture, weights: dict[str, Tensor], **extra: Any) -> Transformer:
    """Build a model with contiguous float64 weights on the CPU: the one place where weights change their type."""
    held = {
        key: tensor.detach().to(device="cpu", dtype=torch.float64).contiguous()
        for key, tensor in weights.items()
    }
    return Transformer(architecture, held, **extra)
