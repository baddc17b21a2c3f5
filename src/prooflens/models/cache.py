"""The folder of models that were downloaded or trained."""

import os
from pathlib import Path


def home() -> Path:
    """Return `PROOFLENS_HOME`, or else the platform's cache directory."""
    if chosen := os.environ.get("PROOFLENS_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("prooflens")


def model_folder(name: str) -> Path:
    """Return the folder of a cached model; a hub name `owner/name` becomes `owner--name`."""
    return home() / "models" / name.replace("/", "--")


def cached_models() -> list[str]:
    """Return the names of the complete models in the cache."""
    folder = home() / "models"
    if not folder.is_dir():
        return []
    found = (p.name for p in folder.iterdir() if not p.name.startswith(".") and (p / "config.json").is_file())
    return sorted(name.replace("--", "/") for name in found)
