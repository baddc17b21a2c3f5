"""The command `family`: how many members of a family of prompts satisfy claims, and which do not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import app, print_json, print_table, renamed, say
from prooflens.cli.groups import grouped
from prooflens.cli.keep import configuration, tell_written
from prooflens.cli.options import (
    Deployed,
    Device,
    KeepOptions,
    Memory,
    Model,
    VectorFiles,
    prompts_of,
    read_vectors,
)
from prooflens.cli.sweep import CrewOptions
from prooflens.errors import PromptError, QueryError, RunError
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.families import Prompts, Swaps, Template
    from prooflens.results.families import FamilyRow

SHOWN = 10
"""Failures of a claim that are printed."""


@dataclass(frozen=True)
class TemplateOptions:
    """Which prompts: those of a template, or of a list."""

    template: Annotated[
        str | None, typer.Option(help='A text with slots, as in "When{A} and{B} met,{B} spoke".')
    ] = None
    slot: Annotated[
        list[str] | None,
        typer.Option(
            "--slot", help='A=names (places, objects, colours, numbers), A=ALL, A=@FILE, "A= x, y".'
        ),
    ] = None
    differ: Annotated[
        list[str] | None, typer.Option("--differ", help="Slots with different fillers, as in A,B.")
    ] = None
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt per line.")] = None

    def given(self) -> Template | Prompts | None:
        """The prompts that options give; None if they give none."""
        from prooflens.families import Prompts, Template
        from prooflens.families.read import parse_slot

        if self.template is not None and self.prompts is not None:
            raise PromptError("give --template or --prompts, not both")
        if self.template is None and (self.slot or self.differ):
            raise PromptError("--slot and --differ are for --template")
        if self.prompts is not None:
            return Prompts(prompts_of(self.prompts))
        if self.template is None:
            return None
        pairs = [parse_slot(text) for text in self.slot or ()]
        if len(dict(pairs)) < len(pairs):
            raise PromptError("a slot is given twice: give it once")
        groups = [[name.strip() for name in text.split(",")] for text in self.differ or ()]
        return Template(self.template, differ=groups, **dict(pairs))


@dataclass(frozen=True)
class FamilyOptions(TemplateOptions):
    """Which prompts, and what is claimed of them."""

    file: Annotated[
        Path | None,
        typer.Argument(help="A YAML file with template and slots, prompts or swaps, and queries."),
    ] = None
    query: Annotated[
        list[str] | None,
        typer.Option("--query", help="18.6:top1={B.1}@-1, logit{A}>logit{B}, … (may be repeated)."),
    ] = None
    vector: VectorFiles = None

    def family(self) -> tuple[Template | Swaps | Prompts, list[str]]:
        """The family and the claims that were asked for."""
        from prooflens.families.read import read_family

        sources = [source for source in (self.file, self.template, self.prompts) if source is not None]
        if len(sources) != 1:
            raise PromptError("give one family: a YAML file, --template with --slot, or --prompts")
        made: Template | Swaps | Prompts | None = self.given()
        queries = list(self.query or [])
        if self.file is not None:
            made, written = read_family(self.file)
            queries = queries or written
        assert made is not None
        if not queries:
            raise QueryError("no claim is asked: give --query, as in --query '18.6:top1={B.1}@-1'")
        return made, queries


@app.command(cls=renamed(sample="samples"))
@grouped
def family(
    model: Model,
    given: FamilyOptions,
    keep: KeepOptions,
    work: CrewOptions,
    sample: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, help="Run so many members drawn by chance: shares are then estimated."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    early: Annotated[bool, typer.Option("--early", help="Stop when every claim has failed once.")] = False,
    nearest: Annotated[
        int, typer.Option(min=1, help="Members nearest to zero that are confirmed in ball arithmetic.")
    ] = 8,
    confirm: Annotated[
        float, typer.Option(help="Seconds that ball arithmetic may take per claim (0: none).")
    ] = 30.0,
    failures: Annotated[int, typer.Option(min=0, help="Failures that are listed; all are counted.")] = 1000,
    part: Annotated[
        str | None,
        typer.Option(help="Only one part of several, as in 2/8; the last one to end writes the run."),
    ] = None,
    deployed: Deployed = None,
    device: Device = None,
    memory: Memory = None,
) -> None:
    """How many prompts of a family satisfy claims, exactly, and which do not.

    Exit code: 0 all hold on every member, 1 error, 2 none failed but not all were run, 3 some fail.
    """
    from prooflens.enumeration import family as run
    from prooflens.models import load
    from prooflens.sweep.families import Asked, spread

    made, queries = given.family()
    options: dict[str, Any] = {
        "nearest": nearest,
        "confirm": confirm,
        "keep": failures,
        "memory": memory,
        "deployed": deployed,
        "device": device,
        "configuration": configuration(device=device),
        "vectors": read_vectors(given.vector),
    }
    with shown(not keep.as_json) as tell:
        if work.workers is None and work.executor == "local":
            chosen: dict[str, Any] = {"sample": sample, "seed": seed, "early": early, "part": _part(part)}
            held = load(model, tell)
            found = run(held, made, queries, out=keep.out, progress=tell, **chosen, **options)
        elif keep.out is None or sample is not None or early or part is not None:
            raise RunError(
                "workers need a run directory (-o RUN/), and neither --samples, --early nor --part"
            )
        else:
            found = spread(Asked(model, made, queries, keep.out, options), work.crew(), tell)
    if keep.as_json:
        print_json(found.to_dict())
    else:
        say(f"{found.family.label}: {found.family.size:,} members, {found.seconds:.1f} s")
        print_table(
            ("claim", "word", "held", "of", "share", "smallest margin", "nearest to 0"), map(_line, found)
        )
        for row in found:
            _print_failures(row)
        if keep.out is not None and not (keep.out / "run.json").is_file():
            say(
                f"the counts of part {part} are kept beside {keep.out}; the run is written when all parts are there"
            )
        else:
            tell_written(keep)
    words = [row.verdict for row in found]
    raise typer.Exit(3 if "fails" in words else 2 if set(words) != {"holds"} else 0)


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None:
        raise RunError(f"--part takes the number of a part and how many there are, as in 2/8, not {text!r}")
    return int(match[1]), int(match[2])


def _line(row: FamilyRow) -> tuple[object, ...]:
    share = "–" if row.stopped else f"{100 * row.share:.6g} %"
    if row.interval is not None:
        share += f" [{100 * row.interval[0]:.4g}, {100 * row.interval[1]:.4g}]"
    return row.query, row.word, row.held, row.asked, share, row.least, row.smallest


def _print_failures(row: FamilyRow) -> None:
    if row.failed:
        say(f"{row.query} fails on {row.failed:,}:")
    for judged in row.failures[:SHOWN]:
        say(f"  {judged.margin:.4g}  {judged.text}")
    if row.failed > SHOWN:
        say(f"  … {row.failed - min(SHOWN, len(row.failures)):,} more")
    say(f"{row.query}: {row.note}")
