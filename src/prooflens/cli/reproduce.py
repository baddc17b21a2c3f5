"""The command `reproduce`: the paper's tables and figures, one by one or all, and the pages made of them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.options import Device, Json, Seed
from prooflens.errors import ModelError, PromptError
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.evaluation.studies import Result, StudySettings


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Labels of the paper, or all.")
    ] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Show what can be reproduced.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few inputs and short attacks.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Another model, such as gpt2 where a hub is at hand.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Another engine, where a study has a choice.")] = None,
    layer: Annotated[int | None, typer.Option(help="Another layer, where a study has a choice.")] = None,
    samples: Annotated[int | None, typer.Option(help="So many inputs.")] = None,
    device: Device = None,
    jobs: Annotated[int, typer.Option(help="Processes, of the probes of pretrained models.")] = 1,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder for data/NAME.json, and pages made of all that is there."),
    ] = None,
    pages: Annotated[
        Path | None, typer.Option(help="Write the pages of a folder from the results in its data/.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a table or figure of the paper: its figure, ours proved, ours estimated, what an attack leaves.

    Exit code 2: some studies were left out because a model or a text is not at hand.
    """
    from prooflens.evaluation.studies import StudyError, StudySettings, get_study, study_names
    from prooflens.verdicts.settings import checked_device
    from prooflens.verdicts.stages import stages_of

    if list_them:
        _show_list(as_json)
        return
    if pages is not None:
        from prooflens.evaluation.studies.pages import write_pages

        written = [str(path) for path in write_pages(pages)]
        print_json({"written": written}) if as_json else say(f"written: {', '.join(written)}")
        return
    if not names:
        raise StudyError("name a study, or all; `prooflens reproduce --list` shows them")
    chosen = study_names() if names == ["all"] else names
    studies = [get_study(name) for name in chosen]
    if engine is not None:
        stages_of(engine)
    if device is not None:
        checked_device(device)
    results: list[Result] = []
    missing: dict[str, str] = {}
    with shown(True) as tell:
        settings = StudySettings(quick, model, engine, layer, samples, device, seed, tell, out, jobs)
        for number, one in enumerate(studies):
            tell(one.name, number / len(studies))
            try:
                results.append(_kept(one(settings), out, as_json))
                _tell_unused(settings, results[-1])
            except (ModelError, PromptError) as error:
                if len(studies) == 1:
                    raise
                missing[one.name] = str(error)
                say(f"{one.name} is left out: {error}", error=True)
    if out is not None and results:
        from prooflens.evaluation.studies.pages import write_pages

        write_pages(out)
    if as_json:
        print_json({"results": [result.to_dict() for result in results], "missing": missing})
    elif len(results) > 1:
        from prooflens.evaluation.studies.render import summary

        sys.stdout.write("\n" + summary(results))
    if missing:
        raise typer.Exit(2)


def _tell_unused(settings: StudySettings, result: Result) -> None:
    """Which options had no say in a result; its command does not name them either."""
    from prooflens.evaluation.studies.base import CHOICES

    used = shlex.split(result.command)
    if unused := [
        f"--{name}" for name in CHOICES if getattr(settings, name) is not None and f"--{name}" not in used
    ]:
        say(f"{result.name} has no choice of {', '.join(unused)}: it was passed over", error=True)


def _kept(result: Result, out: Path | None, as_json: bool) -> Result:
    """Write a result at once, so that what is done is not lost, and show it."""
    from prooflens.evaluation.studies.render import markdown, save

    if out is not None:
        save(result, out)
    if not as_json:
        sys.stdout.write(markdown(result) + "\n")
        sys.stdout.flush()
    return result


def _show_list(as_json: bool) -> None:
    from prooflens.evaluation.studies import get_study, study_names

    rows: list[dict[str, Any]] = []
    for name in study_names():
        one = get_study(name)
        rows.append(
            {
                "name": one.name,
                "group": one.group,
                "model": one.model,
                "stands in for": one.paper_model,
                "title": one.title,
            }
        )
    if as_json:
        print_json({"studies": rows})
    else:
        print_table(list(rows[0]), [row.values() for row in rows])
