"""Cut a model to its first layers and an embedded prompt: small enough to travel to another machine.

python benchmarks/slice_model.py MODEL LAYERS FOLDER --text "…"

The folder is a prooflens model without vocabulary: `load(FOLDER).example()` is the prompt. Weights are kept in the
precision they were published in (float32), so that they are the same numbers.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from prooflens import load
from prooflens.models.files import write_model

DROPPED = ("embed.", "head.", "pooler.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", required=True)
    options = parser.parse_args()
    model = load(options.model)
    prompt = model.prompt(options.text)
    architecture = replace(
        model.architecture,
        n_layers=options.layers,
        d_vocab=None,
        d_out=None,
        pooler=False,
        pool="none",
        context=None,
    )
    later = tuple(f"blocks.{layer}." for layer in range(options.layers, model.architecture.n_layers))
    kept = {
        name: tensor.float()
        for name, tensor in model.weights.items()
        if not name.startswith((*DROPPED, *later))
    }
    assert all(torch.equal(kept[name].double(), model.weights[name]) for name in kept)
    write_model(options.folder, architecture, kept)
    save_file({"x": prompt.x[None].contiguous()}, options.folder / "examples.safetensors")
    print(f"{options.folder}: {options.layers} layers, {len(prompt)} tokens: {' '.join(prompt.tokens)}")


if __name__ == "__main__":
    main()
