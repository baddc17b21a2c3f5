"""Recipes of the models that prooflens trains itself: the paper's synthetic encoders, BERT-tiny, GPT-2, token tasks.

Each recipe is deterministic for a seed (one thread, float32) and takes minutes at most on a CPU, but for `gpt2-sst2`.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.cache import model_folder
from prooflens.models.files import atomic_folder, check_replaceable, write_model
from prooflens.models.prompt import FileTokenizer
from prooflens.models.pull import Progress, pull
from prooflens.models.syntax import ARCHITECTURE, STEPS, domain, fit_syntax
from prooflens.models.syntax import NAME as SYNTAX_NAME
from prooflens.models.tasks import TASKS, TokenTask, fit
from prooflens.models.train_text import train_gpt2
from prooflens.models.transformer import Transformer
from prooflens.models.weights import optional_shapes, required_shapes

N_EXAMPLES = 20
"""How many example inputs are kept with a synthetic model; training has seen none of them."""


LABEL_MARGIN = 0.2
"""How far mean(x[:, 0]) is from 0, at least, in the synthetic task's inputs."""


@dataclass(frozen=True)
class Trained:
    """What a training run leaves: the model's folder and its accuracy on held-out data."""

    folder: Path
    accuracy: float


@dataclass(frozen=True)
class Recipe:
    """A synthetic encoder of the paper: its architecture, its task and how long it is trained."""

    architecture: Architecture
    n_tokens: int
    task: Callable[[int, int, int, torch.Generator], tuple[Tensor, Tensor]]
    n_samples: int = 5000
    epochs: int = 80
    batch: int = 64
    lr: float = 3e-3


def sign_of_mean(
    n: int, n_tokens: int, d: int, generator: torch.Generator
) -> tuple[Float[Tensor, "n S d"], Int[Tensor, " n"]]:
    """Draw Gaussian tokens with label 1[mean(x[:, 0]) > 0], the paper's default task.

    Inputs whose label hangs on less than `LABEL_MARGIN` are left out: the paper's 100 % needs such a gap.

    Args:
        n: how many inputs.
        n_tokens: S.
        d: the width.
        generator: the source of randomness.
    """
    x = torch.randn(3 * n, n_tokens, d, generator=generator)
    mean = x[:, :, 0].mean(-1)
    clear = mean.abs() >= LABEL_MARGIN
    if int(clear.sum()) < n:
        raise ModelError(f"too few clear inputs among {3 * n}: ask for more samples")
    return x[clear][:n], (mean[clear][:n] > 0).long()


def marked_token(
    n: int, n_tokens: int, d: int, generator: torch.Generator
) -> tuple[Float[Tensor, "n S d"], Int[Tensor, " n"]]:
    """Draw inputs of the paper's induction task.

    One token at a random position carries a marker (its last coordinate is 3) and a boosted signal (its first is ±2,
    plus noise); the label is the sign of that signal.

    Args:
        n: how many inputs.
        n_tokens: S.
        d: the width.
        generator: the source of randomness.
    """
    x = torch.randn(n, n_tokens, d, generator=generator)
    x[:, :, -1] = 0.0
    key = torch.randint(n_tokens, (n,), generator=generator)
    label = torch.randint(2, (n,), generator=generator)
    rows = torch.arange(n)
    x[rows, key, -1] = 3.0
    x[rows, key, 0] = 2.0 * (2.0 * label - 1.0) + 0.2 * torch.randn(n, generator=generator)
    return x, label


def _encoder(d: int, heads: int, d_ff: int, layers: int = 2) -> Architecture:
    return Architecture("encoder", layers, heads, d, d_ff, "relu", norm_eps=1e-5, pool="mean", d_out=2)


RECIPES: dict[str, Recipe] = {
    "toy": Recipe(_encoder(8, 2, 16), 4, sign_of_mean),
    "toy-4layer": Recipe(_encoder(8, 2, 16, layers=4), 4, sign_of_mean),
    "toy-induction": Recipe(_encoder(8, 2, 16), 6, marked_token),
    "toy-d16": Recipe(_encoder(16, 2, 32), 8, sign_of_mean),
    "toy-d32": Recipe(_encoder(32, 4, 64), 8, sign_of_mean, n_samples=10_000, epochs=30),
    "toy-d64": Recipe(_encoder(64, 4, 128), 8, sign_of_mean, n_samples=20_000, epochs=20),
    "toy-d128": Recipe(_encoder(128, 4, 256), 8, sign_of_mean, n_samples=20_000, epochs=15),
}
"""The synthetic models by name; d = 16 … 128 are the paper's scaled ones."""


TEXTS = ("bert-tiny-sst2", "gpt2-sst2")
"""The models that are trained on SST-2's sentences."""


def train(
    name: str,
    seed: int = 0,
    data: Path | None = None,
    progress: Progress | None = None,
    target: Path | None = None,
    epochs: int | None = None,
    device: str | None = None,
) -> Trained:
    """Train a model by its recipe and keep it in the cache, or in `target`.

    Args:
        name: one of `RECIPES`, one of `TASKS`, `quotes-and-brackets`, or one of `TEXTS`.
        seed: seed of weights and data.
        data: the folder with SST-2; None to look for it.
        progress: called with a stage and a share from 0 to 1; None for silence.
        target: the folder to write; None for the cache.
        epochs: how many epochs, of 100 steps for `TASKS` and `quotes-and-brackets`; None for the recipe's.
        device: where `gpt2-sst2` is trained; None for the CPU. The other recipes are small and stay there.

    Raises:
        ModelError: if there is no such recipe, its data is missing, or the folder cannot be written.
    """
    folder = target or model_folder(name)
    check_replaceable(folder)
    report = progress or (lambda stage, share: None)
    if name == "gpt2-sst2":
        parts = [
            [text for text, _ in read_sst2(sst2_folder(data) / f"{part}.tsv")] for part in ("train", "test")
        ]
        return Trained(folder, train_gpt2(parts[0], parts[1], seed, folder, report, epochs, device))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if name in RECIPES:
            return _train_synthetic(RECIPES[name], seed, folder, report, epochs)
        if name in TASKS:
            return _train_tokens(TASKS[name], seed, folder, report, epochs)
        if name == SYNTAX_NAME:
            return _train_syntax(seed, folder, report, epochs)
        if name == "bert-tiny-sst2":
            return _train_sst2(seed, data, folder, report, epochs or 4)
    finally:
        torch.set_num_threads(threads)
    raise ModelError(
        f"there is no recipe {name!r}; recipes: {', '.join([*RECIPES, *TASKS, SYNTAX_NAME, *TEXTS])}"
    )


def initial_weights(
    architecture: Architecture, generator: torch.Generator, std: float | None = None
) -> dict[str, Tensor]:
    """Return fresh float32 weights: uniform ±1/√fan_in (or normal with `std`), unit norms, zero biases.

    Args:
        architecture: what the model looks like.
        generator: the source of randomness.
        std: the standard deviation of normal weights; None for uniform ones, as in nn.Linear.
    """
    shapes = optional_shapes(architecture) | required_shapes(architecture)
    weights: dict[str, Tensor] = {}
    for name, shape in sorted(shapes.items()):
        if "norm" in name or name.endswith("bias"):
            weights[name] = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
        elif std is not None:
            weights[name] = torch.randn(shape, generator=generator) * std
        else:
            weights[name] = (torch.rand(shape, generator=generator) * 2 - 1) * shape[-1] ** -0.5
    return {name: tensor.requires_grad_() for name, tensor in weights.items()}


def _train_synthetic(
    recipe: Recipe, seed: int, folder: Path, report: Progress, epochs: int | None
) -> Trained:
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(recipe.architecture, initial_weights(recipe.architecture, generator))
    d = recipe.architecture.d_model
    x, y = recipe.task(recipe.n_samples, recipe.n_tokens, d, generator)
    x_test, y_test = recipe.task(2000, recipe.n_tokens, d, generator)
    optimizer = torch.optim.Adam(list(model.weights.values()), lr=recipe.lr)
    n_epochs = epochs or recipe.epochs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=n_epochs)
    for epoch in range(n_epochs):
        report(f"epoch {epoch + 1} of {n_epochs}", epoch / n_epochs)
        for rows in torch.randperm(len(x), generator=generator).split(recipe.batch):
            _step(model(x[rows]), y[rows], optimizer)
        schedule.step()
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(-1) == y_test).double().mean())
    from safetensors.torch import save_file

    with atomic_folder(folder) as staging:
        write_model(staging, recipe.architecture, model.weights)
        save_file({"x": x_test[:N_EXAMPLES].contiguous()}, staging / "examples.safetensors")
    return Trained(folder, accuracy)


def _train_tokens(task: TokenTask, seed: int, folder: Path, report: Progress, epochs: int | None) -> Trained:
    """Train on random inputs; what is written down is the accuracy on 50,000 fresh ones."""
    generator = torch.Generator().manual_seed(seed)
    steps = task.steps if epochs is None else 100 * epochs
    model = fit(task, seed, steps, generator, lambda step: report(f"step {step} of {steps}", step / steps))
    ids = task.draw(50_000, generator)
    with torch.no_grad():
        accuracy = float((model(ids).argmax(-1) == task.answers(ids)).double().mean())
    with atomic_folder(folder) as staging:
        write_model(staging, task.architecture, model.weights)
    return Trained(folder, accuracy)


def _train_syntax(seed: int, folder: Path, report: Progress, epochs: int | None) -> Trained:
    """Train on all inputs of both tasks; what is written down is the accuracy on these, which are all there are."""
    weights = initial_weights(ARCHITECTURE, torch.Generator().manual_seed(seed))
    steps = STEPS if epochs is None else 100 * epochs
    model = fit_syntax(weights, steps, lambda step: report(f"step {step} of {steps}", step / steps))
    ids, answers = domain()
    with torch.no_grad():
        accuracy = float((model(ids).argmax(-1) == answers).double().mean())
    with atomic_folder(folder) as staging:
        write_model(staging, ARCHITECTURE, model.weights)
    return Trained(folder, accuracy)


def _step(logits: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss = torch.nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sst2_folder(data: Path | None = None) -> Path:
    """Return the folder with SST-2's train.tsv and test.tsv: `data`, `PROOFLENS_DATA`, or shared/data near the
    checkout."""
    folder = data or Path(os.environ.get("PROOFLENS_DATA") or Path("..") / "shared" / "data")
    for found in (folder, folder / "sst2"):
        if (found / "train.tsv").is_file() and (found / "test.tsv").is_file():
            return found
    raise ModelError(
        f"SST-2 was not found in {folder}: give --data FOLDER, or set PROOFLENS_DATA to one, with train.tsv and "
        "test.tsv (text, tab, label)"
    )


def read_sst2(path: Path) -> list[tuple[str, int]]:
    """Return sentences and labels of a tab-separated file with a header."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    try:
        return [(text, int(label)) for text, label in rows]
    except ValueError as error:
        raise ModelError(f"{path} must hold a sentence and a label 0 or 1 per line: {error}") from error


MAX_SST2_TOKENS = 64


def _train_sst2(seed: int, data: Path | None, folder: Path, report: Progress, epochs: int) -> Trained:
    """Train BERT-tiny's size with MiniLM's tokenizer, from scratch, in batches of one length without padding."""
    source = sst2_folder(data)
    tokenizer_path = pull("minilm", report) / "tokenizer.json"
    tokenizer = FileTokenizer(tokenizer_path)
    rows = {
        part: [
            (tokenizer.encode(text)[:MAX_SST2_TOKENS], label)
            for text, label in read_sst2(source / f"{part}.tsv")
        ]
        for part in ("train", "test")
    }
    architecture = Architecture(
        "bert",
        n_layers=2,
        n_heads=2,
        d_model=128,
        d_ff=512,
        activation="gelu",
        norm_eps=1e-12,
        pool="first",
        pooler=True,
        d_out=2,
        d_vocab=30522,
        context=MAX_SST2_TOKENS,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(architecture, initial_weights(architecture, generator, std=0.05))
    optimizer = torch.optim.AdamW(list(model.weights.values()), lr=5e-4, weight_decay=0.05)
    total = epochs * sum(1 for _ in _batches(rows["train"], generator))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=total, pct_start=0.2)
    step = 0
    for epoch in range(epochs):
        for ids, labels in _batches(rows["train"], generator):
            dropped = torch.rand(ids.shape, generator=generator) < _WORD_DROPOUT
            dropped[:, 0] = False
            ids = torch.where(dropped, torch.tensor(_UNKNOWN), ids)
            _step(model(model.embed(ids)), labels, optimizer)
            if step < total - 1:
                schedule.step()
            step += 1
            report(f"epoch {epoch + 1} of {epochs}", min(step / total, 1.0))
    with torch.no_grad():
        right = sum(
            int((model(model.embed(ids)).argmax(-1) == labels).sum())
            for ids, labels in _batches(rows["test"], generator)
        )
    with atomic_folder(folder) as staging:
        write_model(staging, architecture, model.weights)
        (staging / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    return Trained(folder, right / len(rows["test"]))


_WORD_DROPOUT = 0.15
_UNKNOWN = 100
"""[UNK] in MiniLM's vocabulary."""


def _batches(
    rows: list[tuple[list[int], int]], generator: torch.Generator, size: int = 64
) -> Iterator[tuple[Int[Tensor, "B S"], Int[Tensor, " B"]]]:
    """Return batches of sentences of equal length, in random order."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index in torch.randperm(len(rows), generator=generator).tolist():
        by_length[len(rows[index][0])].append(index)
    groups = [held[i : i + size] for held in by_length.values() for i in range(0, len(held), size)]
    for position in torch.randperm(len(groups), generator=generator).tolist():
        chosen = [rows[index] for index in groups[position]]
        yield torch.tensor([ids for ids, _ in chosen]), torch.tensor([label for _, label in chosen])
