"""Reading and writing model folders: config.json, safetensors, GGUF; nothing that could run code."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.json_files import read_json
from prooflens.models.architecture import Architecture

OWN_TYPE = "prooflens"
"""The `model_type` of folders that prooflens writes: canonical names, architecture in the config."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} holds no config.json: is it a model folder?")
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold one JSON object")
    return config


def read_state(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's safetensors files (one file, or shards with an index)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not a readable index: {error}") from error
        if any(Path(str(name)).name != name for name in names):
            raise ModelError(f"{index} points outside its folder")
        paths = [folder / name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    if not paths[0].is_file() and any(found for kind in _PICKLES for found in folder.glob(kind)):
        raise ModelError(
            f"{folder} holds pickled weights only, which can run code when read. Convert them where you trust "
            "them: transformers' `model.save_pretrained(folder)` writes safetensors"
        )
    state: dict[str, Tensor] = {}
    for path in paths:
        state |= read_safetensors(path)
    return state


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file; a missing or broken file is a `ModelError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ModelError(f"{path} is missing")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and dequantised tensors of a GGUF file, read by transformers."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ModelError('GGUF files need transformers: pip install "prooflens[hf]"') from error
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file")
    try:
        module = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError, IndexError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    config = json.loads(module.config.to_json_string(use_diff=False))
    config.pop("quantization_config", None)
    state = dict(module.state_dict())
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    return config, state


def read_gguf_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of a GGUF file, read by transformers, or None if it cannot read one.

    The file is read in a folder where it is alone: a tokenizer.json beside it may belong to another model.
    """
    try:
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as alone:
            (Path(alone) / "model.gguf").symlink_to(path.resolve())
            return AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf", local_files_only=True)
    except Exception:  # transformers raises errors of many types; the model is usable without a tokenizer
        return None


def write_model(folder: Path, architecture: Architecture, tensors: Mapping[str, Tensor]) -> None:
    """Write a prooflens folder: config.json with the architecture, model.safetensors with canonical names."""
    write_folder(folder, {"model_type": OWN_TYPE, "architecture": architecture.to_dict()}, tensors)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors")


@contextmanager
def atomic_folder(target: Path, resumable: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place if the block ends without an error.

    What is there already is replaced only if it is a model's folder.

    Args:
        target: the folder to write.
        resumable: give the temporary folder a fixed name, and keep it after an error if there is something in it.
    """
    check_replaceable(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if resumable:
            staging = partial_folder(target)
            staging.mkdir(exist_ok=True)
        else:
            staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}") from error
    staging.chmod(0o755)  # mkdtemp's 0700 would follow the folder to its place
    try:
        yield staging
        if target.exists():
            shutil.rmtree(target)
        os.replace(staging, target)
    finally:
        if staging.is_dir() and not (resumable and _is_begun(staging)):
            shutil.rmtree(staging, ignore_errors=True)


def partial_folder(target: Path) -> Path:
    """Return where a download that was interrupted waits to be resumed."""
    return target.parent / f".{target.name}.partial"


def _is_begun(folder: Path) -> bool:
    """Say whether a download has brought something: a file, or a part of one in the hub client's own folder."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return any(path.parts[0] != ".cache" or path.suffix == ".incomplete" for path in files)


def check_replaceable(target: Path) -> None:
    """Raise a `ModelError` unless a model can be written there: only empty and model folders are replaced."""
    if not target.exists():
        parent = next(folder for folder in target.absolute().parents if folder.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise ModelError(f"cannot write {target}: {parent} is no folder that can be written to")
        return
    if not target.is_dir():
        raise ModelError(f"{target} is a file: name a folder to write the model to")
    held = sorted(path.name for path in target.iterdir())
    others = [name for name in held if not (name.endswith((".safetensors", ".json")) or name == "1_Pooling")]
    if others or (held and "config.json" not in held):
        raise ModelError(
            f"{target} holds {(others or held)[0]}, which is no part of a model: name a new or an empty folder"
        )
