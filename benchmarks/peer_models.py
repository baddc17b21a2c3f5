"""The two small models on which auto_LiRPA's figures were measured, under our names."""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from prooflens.models import Architecture, Transformer

PEERS = Path(__file__).resolve().parents[2] / "shared" / "models"
"""Where they are looked for: beside the checkout."""

NAMES = {"ln1": "norm1", "ln2": "norm2", "f1": "up", "f2": "down", "cls": "head"}


def peer_model(folder: Path) -> tuple[Transformer, Tensor]:
    """A peer's weights as a canonical transformer, and its clean input."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    x = tensors.pop("example_input")
    weights = {".".join(NAMES.get(part, part) for part in name.split(".")): t for name, t in tensors.items()}
    architecture = Architecture(
        "encoder",
        config["layers"],
        config["heads"],
        config["d_model"],
        config["d_ff"],
        config["activation"].split()[0],
        norm_eps=config["layer_norm_eps"],
        pool="mean",
        d_out=2,
    )
    return Transformer(architecture, weights, folder.name), x.reshape(x.shape[-2:])
