"""What `prooflens doctor` looks at: versions, devices, cached models, memory, and what is missing."""

from __future__ import annotations

import os
import platform
from importlib import metadata, util
from typing import Any

from prooflens.models.cache import cached_models, home
from prooflens.version import __version__

_CORE = ("torch", "numpy", "scipy", "einops", "safetensors", "typer", "rich")
_EXTRAS = {
    "hf": ("transformers", "tokenizers", "gguf"),
    "onnx": ("onnx",),
    "tl": ("transformer_lens",),
    "viz": ("plotly", "matplotlib"),
    "ray": ("ray",),
    "exact": ("flint",),
}
_DISTRIBUTIONS = {"flint": "python-flint", "transformer_lens": "transformer-lens"}


def examine() -> dict[str, Any]:
    """Everything a bug report needs, as JSON-ready data."""
    extras = [name for names in _EXTRAS.values() for name in names if util.find_spec(name)]
    versions = {"prooflens": __version__, "python": platform.python_version()}
    versions |= {name: metadata.version(_DISTRIBUTIONS.get(name, name)) for name in (*_CORE, *extras)}
    return {
        "versions": versions,
        "devices": _devices(),
        "memory": _memory(),
        "models": {"cache": str(home()), "cached": ", ".join(cached_models()) or "none"},
        "missing": {
            f"[{extra}]": f'{", ".join(lacking)} (pip install "prooflens[{extra}]")'
            for extra, names in _EXTRAS.items()
            if (lacking := [name for name in names if not util.find_spec(name)])
        },
    }


def _devices() -> dict[str, str]:
    import torch

    found = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return found


def _memory() -> dict[str, str]:
    try:
        pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return {"free": "unknown on this platform"}
    return {"free": f"{pages * size / 2**30:.1f} GiB", "total": f"{total * size / 2**30:.1f} GiB"}
