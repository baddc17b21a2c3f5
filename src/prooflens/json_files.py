"""JSON and YAML that strangers wrote: every way in which it cannot be read is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_json(text: str) -> Any:
    """What a JSON text says; brackets nested beyond what Python follows are a ValueError too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """What a JSON file says; OSError or ValueError if it cannot be read."""
    return parse_json(path.read_text(encoding="utf-8"))


def read_yaml(path: Path) -> Any:
    """What a YAML file says; a ValueError, whose text names the file, if it cannot be read."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
