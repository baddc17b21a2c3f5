"""Prove that an attention mechanism holds on a whole neighbourhood of an input."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prooflens.models import Transformer, load, pull
    from prooflens.regions import Ball, Paraphrases, Region

__version__ = "0.1.0"

_HOMES = {
    "Transformer": "prooflens.models",
    "load": "prooflens.models",
    "pull": "prooflens.models",
    "Ball": "prooflens.regions",
    "Paraphrases": "prooflens.regions",
    "Region": "prooflens.regions",
}

__all__ = ["Ball", "Paraphrases", "Region", "Transformer", "__version__", "load", "pull"]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import prooflens` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'prooflens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
