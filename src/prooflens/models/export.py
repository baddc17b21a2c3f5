"""Write a model in prooflens' own layout: canonical names, float64, a fingerprint that any reader gets again."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from prooflens.models.files import atomic_folder, write_model
from prooflens.models.prompt import FileTokenizer
from prooflens.models.transformer import Transformer


def export(model: Transformer, folder: Path | str) -> Path:
    """Write a model as a folder that `load` and the checker read; tokenizer and example inputs go with it.

    Args:
        model: the model.
        folder: where to write; it must be new, empty, or an earlier export.

    Returns:
        The folder.

    Raises:
        ModelError: if the folder holds something else.

    Example:
        >>> import tempfile
        >>> import prooflens as pl
        >>> toy = pl.load("toy")
        >>> with tempfile.TemporaryDirectory() as place:
        ...     again = pl.load(export(toy, f"{place}/toy"))
        >>> again.sha256 == toy.sha256
        True
    """
    folder = Path(folder)
    with atomic_folder(folder) as staging:
        write_model(staging, model.architecture, model.weights)
        if isinstance(model.tokenizer, FileTokenizer):
            (staging / "tokenizer.json").write_bytes(model.tokenizer.path.read_bytes())
        if model.examples is not None:
            save_file({"x": model.examples.contiguous()}, staging / "examples.safetensors")
    return folder
