"""Train a sparse autoencoder on the activations of a hook, and keep it as SAELens does.

    f = relu(W(h − c) + b),     ĥ = Vf + c,     loss = ‖h − ĥ‖² + λ Σ f_i ‖v_i‖,

on activations scaled to mean square 1; the scale is folded back into the weights. The first token of a text is left
out: in most language models its stream is larger by orders of magnitude and says nothing about the text.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.files import atomic_folder, check_replaceable
from prooflens.models.pull import Progress
from prooflens.models.reads import find_hook
from prooflens.models.transformer import Transformer

TEXTS_AT_ONCE = 64
"""How many texts of one length run together."""

MOST_TEXTS = 20_000
"""How many texts of a file are read."""


@dataclass(frozen=True)
class TrainedDictionary:
    """What training a dictionary leaves.

    Attributes:
        folder: where it was written.
        tokens: how many activations it was trained on.
        active: how many features are active at a token, on the mean.
        explained: the share of the variance that the reconstruction explains, on held-out activations.
        dead: how many features were never active there.
    """

    folder: Path
    tokens: int
    active: float
    explained: float
    dead: int


def read_texts(path: Path, most: int) -> list[str]:
    """Return lines of a text file, or the first column of a .tsv file, at most so many.

    Args:
        path: the file.
        most: how many.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if path.suffix == ".tsv" else None
            lines = [row[0] for row in rows if row][1:] if rows is not None else file.read().splitlines()
    except OSError as error:
        raise ModelError(f"{path} cannot be read as texts: {error}") from error
    found = [line.strip() for line in lines if line.strip()][:most]
    if not found:
        raise ModelError(f"{path} holds no texts: give one text in each line")
    return found


def activations(
    model: Transformer, hook: str, texts: Sequence[str], longest: int = 64, report: Progress | None = None
) -> Float[Tensor, "N n"]:
    """Return the values of a hook at every token but the first of many texts, in float32.

    Args:
        model: the model, on the device where it is to run.
        hook: the name of the value.
        texts: the texts.
        longest: tokens beyond so many are left out.
        report: who is told how far it is.
    """
    width, small = find_hook(model.architecture, hook).width, model.to(dtype=torch.float32)
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for text in texts:
        assert model.tokenizer is not None
        ids = model.tokenizer.encode(text)[:longest]
        if len(ids) > 1:
            by_length[len(ids)].append(list(ids))
    found, done = [], 0
    with torch.no_grad():
        for same in by_length.values():
            for start in range(0, len(same), TEXTS_AT_ONCE):
                some = same[start : start + TEXTS_AT_ONCE]
                value = small.run(small.embed(torch.tensor(some)), hook)[hook]
                found.append(value[:, 1:].reshape(-1, width).cpu())
                done += len(some)
                if report is not None:
                    report("activations", done / len(texts))
    if not found:
        raise ModelError("no text has two tokens: give longer ones")
    return torch.cat(found)


def train_dictionary(
    model: Transformer,
    hook: str,
    texts: Sequence[str],
    out: Path,
    *,
    features: int = 2048,
    sparsity: float = 0.02,
    steps: int = 4000,
    batch: int = 2048,
    seed: int = 0,
    report: Progress | None = None,
) -> TrainedDictionary:
    """Train a dictionary of a hook and write it.

    Args:
        model: the model, on the device where it is to run.
        hook: the value that the dictionary reads.
        texts: what the model reads.
        out: the folder to write.
        features: how many features.
        sparsity: λ.
        steps: how many steps of Adam.
        batch: how many activations in each.
        seed: of the first weights and the batches.
        report: who is told how far it is.
    """
    check_replaceable(out)
    held = activations(model, hook, texts, report=report).to(model.device)
    generator = torch.Generator().manual_seed(seed)
    held = held[torch.randperm(len(held), generator=generator).to(held.device)]
    test, data = held[: max(1, len(held) // 20)], held[max(1, len(held) // 20) :]
    center = data.mean(0)
    scale = (data - center).square().mean().sqrt()
    V = torch.nn.functional.normalize(torch.randn(features, held.shape[1], generator=generator), dim=-1)
    V = V.to(held).requires_grad_()
    W = V.detach().clone().requires_grad_()
    b = torch.zeros(features).to(held).requires_grad_()
    optimizer = torch.optim.Adam([W, V, b], lr=1e-3)
    for step in range(steps):
        chosen = torch.randint(len(data), (batch,), generator=generator).to(held.device)
        h = (data[chosen] - center) / scale
        f = torch.relu(h @ W.T + b)
        lost = (h - f @ V).square().sum(-1).mean()
        loss = lost + sparsity * h.shape[1] ** 0.5 * (f @ torch.linalg.vector_norm(V, dim=-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if report is not None and step % 100 == 99:
            report("training", (step + 1) / steps)
    with torch.no_grad():
        h = (test - center) / scale
        f = torch.relu(h @ W.T + b)
        explained = 1.0 - float((h - f @ V).square().sum() / (h - h.mean(0)).square().sum())
        on = f > 0
    tensors = {"W_enc": (W / scale).T, "b_enc": b, "W_dec": V * scale, "b_dec": center}
    config = {
        "architecture": "standard",
        "d_in": held.shape[1],
        "d_sae": features,
        "hook_name": hook,
        "model_name": model.name,
        "model_sha256": model.sha256,
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "dtype": "float32",
    }
    with atomic_folder(out) as folder:
        (folder / "cfg.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(kept, folder / "sae_weights.safetensors")
    return TrainedDictionary(
        out, len(data), float(on.float().sum(-1).mean()), explained, int((~on.any(0)).sum())
    )
