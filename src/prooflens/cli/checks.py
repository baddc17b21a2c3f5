"""The command that tries prooflens itself: soundness."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.keep import command_line
from prooflens.cli.options import Json
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.evaluation.soundness import SoundnessReport


@app.command()
def soundness(
    cases: Annotated[
        int | None, typer.Option(help="How many random cases (default: 200, or as many as fit into --hours).")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Stop after this many hours.")] = None,
    seed: Annotated[int, typer.Option(help="Number of the first case.")] = 0,
    engine: Annotated[
        list[str] | None, typer.Option(help="Only these engines (default: all that prove).")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only cases of these kinds: claims, forms, planted, counts, effects, reads."),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="Only models of these families, as the dashboard names them (solu, qwen3, gemma2, mixed, …)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for the dashboard, renewed every minute.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Random models, regions and queries: attack every proved bound. Exit code 3 if one is broken."""
    from prooflens.evaluation.soundness import KINDS, OWN_MODELS, run
    from prooflens.report.soundness import write_soundness

    def keep(report: SoundnessReport) -> None:
        if out is not None:
            write_soundness(report.to_dict(), out, command_line())

    most = cases if cases is not None else 200 if hours is None else 10**9
    seconds = float("inf") if hours is None else 3600.0 * hours
    kinds = kind or [name for name in KINDS if family is None or name not in OWN_MODELS]
    with shown(True) as tell:
        found = run(most, seed, engine, None, seconds, tell, kinds, keep, family)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    if found.violations:
        raise typer.Exit(3)


def _print(found: SoundnessReport) -> None:
    totals = Counter[tuple[str, str]]()
    for (_, engine, query), count in found.attacked.items():
        totals[engine, query] += count
    print_table(
        ("engine", "query", "bounds attacked"), [(*key, count) for key, count in sorted(totals.items())]
    )
    for violation in found.violations:
        say(f"VIOLATION {violation}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.cases.items())
    say(
        f"cases: {kinds}; {found.bounds} proved bounds and {found.proved} proved claims attacked, "
        f"{found.planted.total()} planted counterexamples asked about, {len(found.violations)} broken, "
        f"{found.seconds:.0f} s"
    )
