"""Where models that were fetched or trained are kept."""

import os
from pathlib import Path


def home() -> Path:
    """`PROOFLENS_HOME`, else the platform's cache directory."""
    if chosen := os.environ.get("PROOFLENS_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("prooflens")


def model_folder(name: str) -> Path:
    """The folder of a cached model; hub names keep their owner as `owner--name`."""
    return home() / "models" / name.replace("/", "--")


def cached_models() -> list[str]:
    """Names of the models that are in the cache, whole."""
    folder = home() / "models"
    if not folder.is_dir():
        return []
    found = (p.name for p in folder.iterdir() if not p.name.startswith(".") and (p / "config.json").is_file())
    return sorted(name.replace("--", "/") for name in found)
