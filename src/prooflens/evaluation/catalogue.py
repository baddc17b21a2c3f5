"""List what can be loaded: families, short names, what is in the cache, and what a proof needs."""

from __future__ import annotations

import inspect
from importlib import resources
from pathlib import Path
from typing import TypedDict

from prooflens.engines.taylor import needed_memory
from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.cache import cached_models, model_folder
from prooflens.models.huggingface import FAMILIES
from prooflens.models.load import EMBEDDED, TRAINED, architecture_of
from prooflens.models.pull import SOURCES

TOKENS = 8
"""The number of tokens of the input for which memory is estimated; all of them move."""

LARGEST_LOOK = 2**31
"""Folders with more bytes than this are not read for the sake of a table."""


class Family(TypedDict):
    """A family that can be read.

    Attributes:
        model_type: its name in config.json.
        special: one sentence about it.
    """

    model_type: str
    special: str


class Known(TypedDict):
    """A model that has a short name, or is in the cache.

    Attributes:
        name: the name that `load` takes.
        source: where it comes from.
        bytes: its size on disk; None if it is not there.
        memory: bytes that a proof about layer 1 needs; None if that is not known.
    """

    name: str
    source: str
    bytes: int | None
    memory: int | None


def families() -> list[Family]:
    """Return the families that can be read, each with the first sentence of its adapter's docstring."""
    return [
        {"model_type": name, "special": (inspect.getdoc(adapter) or "").split("\n")[0]}
        for name, adapter in FAMILIES.items()
    ]


def known_models() -> list[Known]:
    """Return short names and cached models, with their source, size on disk, and memory for a proof about layer 1."""
    named = dict.fromkeys(EMBEDDED, "package")
    named |= dict.fromkeys(SOURCES, "hub or package index")
    named |= {name: f"prooflens train {name}" for name in TRAINED}
    others = {name: "hub" for name in cached_models() if name not in named}
    return [_known(name, source) for name, source in {**named, **others}.items()]


def _known(name: str, source: str) -> Known:
    if name in EMBEDDED:
        with resources.as_file(resources.files("prooflens.models") / "embedded" / name) as folder:
            return _looked_at(name, source, folder)
    folder = model_folder(name)
    if not (folder / "config.json").is_file():
        return {"name": name, "source": source, "bytes": None, "memory": None}
    return _looked_at(name, source, folder)


def _looked_at(name: str, source: str, folder: Path) -> Known:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    memory = None
    if size <= LARGEST_LOOK:
        try:
            memory = layer1_memory(architecture_of(folder))
        except ModelError:  # a damaged folder is no reason to tell nothing of the others
            memory = None
    return {"name": name, "source": source, "bytes": size, "memory": memory}


def layer1_memory(architecture: Architecture, n_tokens: int = TOKENS) -> int | None:
    """Return the bytes that `taylor` needs for scores of layer 1 on a ball, or None if it has no bound for them.

    Args:
        architecture: what the model looks like.
        n_tokens: how many tokens the input has; all of them move.

    Example:
        >>> import prooflens as pl
        >>> layer1_memory(pl.load("toy").architecture) < 4 * 2**20
        True
    """
    if architecture.n_layers < 2 or not architecture.has_attention:
        return None
    return needed_memory(architecture, n_tokens, n_tokens * architecture.d_model, depth=1, kept=1)
