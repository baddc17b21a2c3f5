"""Commands that try prooflens itself: soundness, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prooflens.cli.common import Json, app, print_json
from prooflens.progress import shown


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

    with shown(not as_json) as report:
        found = run(cases, seed, engine, seconds=3600.0 * hours, progress=report)
    if as_json:
        print_json(found.to_dict())
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
        print_json({"model_sha256": made.model.sha256, "rows": rows, "picture": str(made.picture)})
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
