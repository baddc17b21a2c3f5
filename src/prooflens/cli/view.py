"""Commands that look at runs: check, report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prooflens.cli.common import Json, app, print_json
from prooflens.errors import RunError

CLAIMED = (
    (
        "the files are those of the run, the weights those of the model",
        "that the text gives the stored centre",
    ),
    ("every verdict follows from the stored bounds", "that the query's short form was read as you meant it"),
    ("`re-proved`: holds for all points of the region, over the reals", "anything about points outside it"),
    ("`witness confirmed`: this point of the region breaks the claim", "that no nearer point does"),
    ("`not checkable`: nothing contradicts the row", "that the row is true: its engine is trusted"),
)
SHOWN = 20


@app.command()
def check(
    run: Annotated[Path, typer.Argument(help="A run directory, as `certify -o` writes it.")],
    weights: Annotated[
        Path | None, typer.Option(help="Folder of the model's weights (default: where the run found them).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a run without trusting the engines: fingerprints, own proofs, witnesses. Exit code 3 if a row is WRONG."""
    from prooflens.checker import check as examine

    found = examine(run, weights or _weights_of(run))
    if as_json:
        print_json(
            {
                "rows": [asdict(finding) for finding in found.findings],
                "summary": found.counts,
                "problems": found.problems,
                "claimed": [{"claimed": yes, "not_claimed": no} for yes, no in CLAIMED],
            }
        )
    else:
        _print_check(found.problems, found.counts, [(f.row, f.status, f.note) for f in found.findings])
    if not found.ok:
        raise typer.Exit(3)


def _print_check(problems: list[str], counts: dict[str, int], findings: list[tuple[int, str, str]]) -> None:
    console = Console()
    for problem in problems:
        console.print(Text(problem))
    order = {"WRONG": 0, "not checkable": 1}
    table = Table("row", "finding", "note")
    for row, status, note in sorted(findings, key=lambda f: order.get(f[1], 2))[:SHOWN]:
        table.add_row(str(row), status, Text(note))
    if findings:
        console.print(table)
    if len(findings) > SHOWN:
        console.print(f"… {len(findings) - SHOWN} more rows; --json lists them all", highlight=False)
    claims = Table("claimed", "not claimed")
    for yes, no in CLAIMED:
        claims.add_row(Text(yes), Text(no))
    console.print(claims)
    console.print(", ".join(f"{n} {word}" for word, n in counts.items()), highlight=False)


def _weights_of(run: Path) -> Path:
    """The folder that the run's model was read from: stated, embedded, or in the cache."""
    from importlib import resources

    from prooflens.models.cache import model_folder

    try:
        model = json.loads((run / "run.json").read_text(encoding="utf-8"))["model"]
        name, source = str(model["name"]), model["source"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{run} is not a run: its run.json cannot be read ({error})") from error
    embedded = Path(str(resources.files("prooflens"))) / "models" / "embedded" / name
    for folder in (Path(source) if source else None, embedded, model_folder(name)):
        if folder is not None and (folder / "config.json").is_file():
            return folder
    raise RunError(f"the weights of {name} are not here: give their folder with --weights")
