"""Commands that look at what was found: check, report, demo."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prooflens.cli.checked import check_document, claims_of, print_check
from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.options import Json
from prooflens.durations import parse_time
from prooflens.errors import RunError
from prooflens.json_files import read_json
from prooflens.memory import parse_memory
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.checker import CheckReport


@app.command()
def check(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run directory, as `certify -o` writes it, what `discover -o` wrote, or a .json file of "
            "`vocabulary -o`."
        ),
    ],
    weights: Annotated[
        Path | None, typer.Option(help="Folder of the model's weights (default: where the run found them).")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Judge these rows alone, by number: 3, 0-7, or both with commas.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Begin no proof after this time: 60s, 2m (default: no limit).")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory by which proofs of depth are planned: 8GB (default: what is free)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a run without trusting the engines: fingerprints, own proofs, witnesses. Exit code 3 if a row is WRONG."""
    from prooflens.checker import check as examine
    from prooflens.checker.circuits import check_circuit, is_circuit

    if run.is_file():
        _recount(run, weights, as_json)
        return
    if (run / "sweep.json").is_file():
        raise RunError(
            f"{run} is a sweep, which keeps no evidence: `certify -o RUN/` writes what can be checked"
        )
    whole = is_circuit(run)
    folder = weights or _weights_of(_some_run(run) if whole else run)
    seconds, rows = parse_time(time), None if only is None else _row_numbers(only)
    size = parse_memory(memory)
    with shown(not as_json) as tell:

        def judge(one: Path) -> CheckReport:
            return examine(one, folder, torch_tables, torch_powers, rows, seconds or math.inf, tell, size)

        if whole and rows is not None:
            raise RunError("--only is for runs: a circuit is checked whole")
        found = check_circuit(run, judge) if whole else judge(run)
    judged = {finding.row for finding in found.findings}
    if rows is not None and not found.problems and (missing := sorted(rows - judged)):
        raise RunError(f"the run has no row {missing[0]}: --only takes numbers of its rows, counted from 0")
    if not found.problems and not whole:
        with suppress(OSError, ValueError):  # a report has no badges then; the check stands
            found.save(run)
    if as_json:
        print_json(check_document(found, folder))
    else:
        print_check(found, folder, {} if whole else claims_of(run))
    if not found.ok:
        raise typer.Exit(3)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run directories about one model and prompt, a sweep, or what discover wrote."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the pictures as SVG, and PNG where chromium is installed.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the file in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """One self-contained HTML file with pictures of what runs proved and broke."""
    _write_report(runs, out, figures, as_json)
    if open_it:
        _open(out)


def _open(page: Path) -> None:
    """Open a page in the browser; where there is none, say so: the file is written all the same."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        say(f"no browser was found here: open {page} with yours", error=True)


def _write_report(runs: list[Path], out: Path, figures: Path | None, as_json: bool) -> None:
    if any((run / "sweep.json").is_file() for run in runs):
        from prooflens.report.sweep import report_sweep

        _report_alone(report_sweep, runs, out, figures, as_json)
        return
    from prooflens.report import collect, kind_of, render, unfolded, write_figures, write_page

    every = unfolded(runs)
    kinds = {kind_of(run) for run in every}
    if "family" in kinds:
        from prooflens.report.families import report_family

        _report_alone(report_family, runs, out, figures, as_json)
        return
    if "vocabulary" in kinds:
        from prooflens.report.vocabulary import report_vocabulary

        _report_alone(report_vocabulary, runs, out, figures, as_json)
        return
    if "family effects" in kinds:
        from prooflens.report.family_effects import report_family_effects

        _tell_pictures(out, report_family_effects(every, out, figures), as_json)
        return
    data = collect(*every)
    write_page(out, render(data))
    pictures = write_figures(data, figures) if figures is not None else []
    if as_json:
        print_json({"report": str(out), "figures": [str(path) for path in pictures], "counts": data.counts})
    else:
        say(str(out))


def _report_alone(
    write: Callable[[Path, Path, Path | None], list[Path]],
    runs: list[Path],
    out: Path,
    figures: Path | None,
    as_json: bool,
) -> None:
    if len(runs) > 1:
        raise RunError(
            "a sweep, a family or counts over all prompts have a report of their own: give the folder alone"
        )
    _tell_pictures(out, write(runs[0], out, figures), as_json)


def _tell_pictures(out: Path, pictures: list[Path], as_json: bool) -> None:
    if as_json:
        print_json({"report": str(out), "figures": [str(path) for path in pictures]})
    else:
        say(str(out))


def _some_run(circuit: Path) -> Path:
    """One of the runs of a circuit: they are all about one model."""
    for run in (circuit / "certificate", *sorted((circuit / "needed").glob("*"))):
        if (run / "run.json").is_file():
            return run
    raise RunError(f"{circuit} has no run that shows its circuit: `prooflens discover -o` writes them")


def _row_numbers(text: str) -> set[int]:
    """The rows of `0-7,12`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdigit() and (not last or last.isdigit())):
            raise RunError(f"--only takes numbers of rows, as in 3, 0-7 or 0-7,12; not {text!r}")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def torch_tables(n_tokens: int, d_head: int, theta: float) -> Any:
    """RoPE's float32 constants as torch makes them: asked for only where a model has them."""
    import torch

    from prooflens.models.sites import rotary_tables

    tables = rotary_tables(n_tokens, d_head, theta, torch.zeros(1, dtype=torch.float64))
    return tuple(table.numpy() for table in tables)


def torch_powers(theta: float, width: int) -> Any:
    """The powers of RoPE's base as torch makes them, in float32."""
    import torch

    return (theta ** (torch.arange(0, width, 2).float() / width)).numpy()


def _recount(document: Path, weights: Path | None, as_json: bool) -> None:
    """Check the file of `vocabulary -o`: count the query tokens that it names again."""
    from prooflens.checker.vocabulary import recount

    if weights is None:
        try:
            name = str(read_json(document)["model"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{document} is no file of `vocabulary -o`: {error}") from error
        weights = _folder_of(name, None)
    found = recount(document, weights, torch_tables, torch_powers)
    if as_json:
        rows = [asdict(finding) for finding in found.findings]
        print_json({"rows": rows, "ok": found.ok, "problems": found.problems, "weights": str(weights)})
    else:
        print_table(
            ("head", "query token", "check", "what was found"),
            [(finding.head, finding.token, finding.status, finding.detail) for finding in found.findings],
        )
        for problem in found.problems:
            say(problem)
    if not found.ok:
        raise typer.Exit(3)


def _weights_of(run: Path) -> Path:
    """The folder that the run's model was read from: stated, embedded, or in the cache."""
    from prooflens.certificate.folders import not_a_run

    if not (run / "run.json").is_file():
        raise not_a_run(run)
    try:
        info = read_json(run / "run.json")
        if not isinstance(info, dict):
            raise ValueError("it must hold one JSON object")
        model = info["model"]
        name, source = re.split(r", (?:first|from layer|read at) ", str(model["name"]))[0], model["source"]
    except KeyError as error:
        raise RunError(f"{run} is not a run: its run.json lacks {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{run} is not a run: its run.json cannot be read ({error})") from error
    return _folder_of(name, source)


def _folder_of(name: str, source: object) -> Path:
    """The folder of a model's weights: stated, embedded, or in the cache."""
    from importlib import resources

    from prooflens.models.cache import model_folder

    embedded = Path(str(resources.files("prooflens"))) / "models" / "embedded" / name
    for folder in (Path(str(source)) if source else None, embedded, model_folder(name)):
        if folder is not None and (folder / "config.json").is_file():
            return folder
    raise RunError(f"the weights of {name} are not here: give their folder with --weights")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the run and the report.")] = Path(
        "demo"
    ),
    as_json: Json = False,
) -> None:
    """Certify an embedded model, check the certificate, break a claim, map radii, write a report; no download."""
    import torch

    from prooflens.demo import SHOWN, run_demo

    # Threads cannot help a model this small, and on a busy machine they wait for each other.
    torch.set_num_threads(1)
    made = run_demo(out)
    results = made.results[SHOWN]
    if as_json:
        print_json(
            {
                "model_sha256": made.model.sha256,
                "rows": [row for found in made.results.values() for row in found.rows],
                "radii": made.radii.rows,
                "checked": made.checked.counts,
                "run": str(made.run),
                "report": str(made.page),
            }
        )
        return
    console = Console()
    table = Table(title=f"{made.model.name}: is the same token attended most on the whole ball ε={SHOWN:g}?")
    for column in ("row", "clean margin", "proved margin", "verdict", "why"):
        table.add_column(column)
    for row in results.rows:
        numbers = (f"{row[name]:.3f}" if row[name] is not None else "–" for name in ("clean", "lower"))
        table.add_row(
            f"{row['layer']}.{row['head']}@{row['position']}", *numbers, row["verdict"], row["reason"]
        )
    console.print(table)
    for eps, found in made.results.items():
        say(f"ε={eps:g}: " + ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items() if n))
    _print_witness(made)
    console.print(_radius_table(made.radii.rows))
    say(f"checked without the engines: {', '.join(f'{n} {word}' for word, n in made.checked.counts.items())}")
    say(f"certificate: {made.run}")
    say(str(made.page))


def _print_witness(made: Any) -> None:
    for found in made.results.values():
        for outcome in found.outcomes:
            if outcome.witness is not None:
                far = float((outcome.witness.x - found.subject.region.center).abs().max())
                worst = float(outcome.witness.values.min())
                say(
                    f"witness for {outcome.claim}: moves no coordinate by more than {far:.4g}, margin {worst:.4g}"
                )
                return


def _radius_table(rows: list[dict[str, Any]]) -> Table:
    """Layer × head: the proved and the broken radius of the weakest row."""
    heads = sorted({row["head"] for row in rows})
    table = Table(
        "layer", *(f"head {head}" for head in heads), title="proved radius < true radius < broken radius"
    )
    for layer in sorted({row["layer"] for row in rows}):
        cells = []
        for head in heads:
            here = [row for row in rows if (row["layer"], row["head"]) == (layer, head)]
            proved = min(
                (row["certified"] for row in here if row["certified"] is not None), default=float("inf")
            )
            broken = min((row["attack"] for row in here if row["attack"] is not None), default=float("inf"))
            cells.append(f"{proved:.3g} … {broken:.3g}")
        table.add_row(str(layer), *cells)
    return table
