"""Cut a model to its first layers and some embedded prompts: small enough to travel to another machine.

python benchmarks/slice_model.py MODEL LAYERS FOLDER [--text "…" "…"] [--tokens] [--shard 54]

The folder is a prooflens model without vocabulary: `load(FOLDER).example(i)` is prompt i. All prompts must have equally
many tokens; without `--text` they are those of the studies. With `--tokens` the tokenizer is kept, and of the embedding
the rows that the prompts read: all others are zero and pack to nothing, so ask no other text. Weights are kept in the
precision they were published in (float32), so that they are the same numbers. With `--shard` they are split into files
of so many MiB, which can travel one by one.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from prooflens import load
from prooflens.evaluation.studies.prompts import FIRST, OPENINGS, OTHERS, SENTENCES, ioi_texts
from prooflens.models.cache import model_folder
from prooflens.models.files import write_model
from prooflens.models.transformer import Transformer

DROPPED = ("head.", "pooler.")


def shard(folder: Path, tensors: dict[str, torch.Tensor], most: int) -> None:
    """Replace model.safetensors by files of at most so many bytes and an index of them."""
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(held.nbytes for held in files[-1].values()) + tensor.nbytes > most:
            files.append({})
        files[-1][name] = tensor.contiguous()
    (folder / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for number, held in enumerate(files):
        save_file(held, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(held, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")


def embedding(model: Transformer, texts: Sequence[str]) -> torch.Tensor:
    """The rows of the token matrix that texts read; zero elsewhere."""
    read = sorted({i for text in texts for i in model.prompt(text).ids or ()})
    rows = model.weights["embed.tokens"]
    kept = torch.zeros_like(rows)
    kept[read] = rows[read]
    return kept.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", nargs="+")
    parser.add_argument("--tokens", action="store_true", help="keep the tokenizer, and the prompts' tokens")
    parser.add_argument("--shard", type=int, help="MiB of weights a file")
    options = parser.parse_args()
    model = load(options.model)
    texts = options.text or (OPENINGS if model.architecture.causal else SENTENCES)
    if options.tokens and not options.text:
        texts = (*texts, *(text for words in (FIRST, OTHERS) for text, _ in ioi_texts(60, words)))
    architecture = replace(
        model.architecture,
        n_layers=options.layers,
        d_vocab=model.architecture.d_vocab if options.tokens else None,
        d_out=None,
        pooler=False,
        pool="none",
        context=model.architecture.context if options.tokens else None,
    )
    dropped = DROPPED if options.tokens else (*DROPPED, "embed.")
    later = tuple(f"blocks.{layer}." for layer in range(options.layers, model.architecture.n_layers))
    kept = {
        name: tensor.float()
        for name, tensor in model.weights.items()
        if not name.startswith((*dropped, *later))
    }
    assert all(torch.equal(kept[name].double(), model.weights[name]) for name in kept)
    if options.tokens:
        kept["embed.tokens"] = embedding(model, texts)
    write_model(options.folder, architecture, kept)
    if options.shard:
        shard(options.folder, kept, options.shard * 2**20)
    if options.tokens:
        shutil.copy(model_folder(options.model) / "tokenizer.json", options.folder)
    else:
        prompts = [model.prompt(text) for text in texts]
        save_file(
            {"x": torch.stack([prompt.x for prompt in prompts])}, options.folder / "examples.safetensors"
        )
        for prompt in prompts:
            print(f"{len(prompt)} tokens: {' '.join(prompt.tokens)}")
    print(f"{options.folder}: {options.layers} layers")


if __name__ == "__main__":
    main()
