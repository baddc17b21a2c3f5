"""Cut a model to its first layers and an embedded prompt: small enough to travel to another machine.

python benchmarks/slice_model.py MODEL LAYERS FOLDER --text "…" [--shard 54]

The folder is a prooflens model without vocabulary: `load(FOLDER).example()` is the prompt. Weights are kept in the
precision they were published in (float32), so that they are the same numbers. With `--shard` they are split into files
of so many MiB, which can travel one by one.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from prooflens import load
from prooflens.models.files import write_model

DROPPED = ("embed.", "head.", "pooler.")


def shard(folder: Path, tensors: dict[str, torch.Tensor], most: int) -> None:
    """Replace model.safetensors by files of at most so many bytes and an index of them."""
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(held.nbytes for held in files[-1].values()) + tensor.nbytes > most:
            files.append({})
        files[-1][name] = tensor.contiguous()
    (folder / "model.safetensors").unlink()
    index = {}
    for number, held in enumerate(files):
        save_file(held, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(held, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--shard", type=int, help="MiB of weights a file")
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
    if options.shard:
        shard(options.folder, kept, options.shard * 2**20)
    save_file({"x": prompt.x[None].contiguous()}, options.folder / "examples.safetensors")
    print(f"{options.folder}: {options.layers} layers, {len(prompt)} tokens: {' '.join(prompt.tokens)}")


if __name__ == "__main__":
    main()
