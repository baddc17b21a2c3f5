"""Commands that prove and break: certify, attack, radius."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.groups import grouped
from prooflens.cli.keep import command_line, configuration, make_room, tell_written
from prooflens.cli.maps import verdict_maps
from prooflens.cli.options import (
    QUERY_HELP,
    AttackOptions,
    ClaimOptions,
    Deployed,
    EffortOptions,
    Eps,
    Json,
    KeepOptions,
    Nearest,
    SlottedOptions,
    Tolerance,
    limit_memory,
    loaded,
    named_tokens,
    prompts_of,
)
from prooflens.errors import PromptError
from prooflens.progress import Progress, shown

if TYPE_CHECKING:
    from prooflens.results import Frame, Radii
    from prooflens.verdicts.question import Question

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]

FEW = 40
"""So many rows are listed; more are drawn as a map of letters."""

FEW_REASONS = 8
"""So many different reasons are printed in full; `--json` has them all."""


@app.command(epilog=QUERY_HELP)
@grouped
def certify(
    given: SlottedOptions,
    claims: ClaimOptions,
    effort: EffortOptions,
    keep: KeepOptions,
    eps: Eps = None,
    nearest: Nearest = None,
    deployed: Deployed = None,
    resume: Resume = False,
    texts: Annotated[
        Path | None,
        typer.Option(help="A file with a prompt per line: ask the same about a ball around each of them."),
    ] = None,
) -> None:
    """Prove that attention holds on a whole region, head by head, or find what breaks it.

    The region is a ball around the prompt (--eps), the way to another prompt (--to), or a hull of prompts (--hull).

    Exit code: 0 all hold, 1 error, 2 some unknown or only estimated, 3 some fail.
    """
    if texts is not None:
        alone = {"--resume": resume or None, "--nearest": nearest, "--deployed": deployed}
        _decide_each(given, eps, claims, effort, keep, texts, alone)
    _decide(given, eps, claims, effort, keep, resume, effort.memory, nearest, deployed)


@app.command(epilog=QUERY_HELP)
@grouped
def plan(
    given: SlottedOptions,
    claims: ClaimOptions,
    effort: EffortOptions,
    eps: Eps = None,
    as_json: Json = False,
) -> None:
    """Print what `certify` would ask with the same options, with predicted seconds and GiB; nothing is proved."""
    from prooflens.verdicts.plan import plan_question

    with shown(True) as tell:
        settings = effort.settings(tell)
        question = claims.ask(given, eps, settings.device, tell)
        found = plan_question(question, settings)
    if as_json:
        print_json(found.to_dict())
        return
    say(selection(question), error=True)
    columns = ("layer", "engine", "claims", "seconds", "GiB", "asked")
    print_table(
        columns,
        (
            (s.layer, s.engine, s.claims, s.seconds, s.gib, "yes" if s.fits else f"no: {s.why}")
            for s in found.stages
        ),
    )
    say(f"{found.line}; each stage is asked about what those before it leave open")


def selection(question: Question) -> str:
    """What was selected, in words: heads by layer, positions, queries."""
    heads: dict[int, set[int]] = {}
    for claim in question.claims:
        for row in claim.rows:
            heads.setdefault(row.layer, set()).add(row.head)
    named = [
        f"{len(found)} {'head' if len(found) == 1 else 'heads'} of layer {layer}"
        for layer, found in sorted(heads.items())
    ]
    architecture = question.problem.model.architecture
    if architecture.read_hook is not None:
        beside = architecture.beside_hook
        also = "" if beside is None else f" and {beside}@{architecture.beside_position}"
        where = f"{architecture.read_hook}@{architecture.read_position}{also}"
        named.append(
            f"{architecture.d_out} {'readout' if architecture.d_out == 1 else 'readouts'} of {where}"
        )
    elif any(f.logits for claim in question.claims for f in claim.functionals):
        named.append("the output")
    places = {row.position for claim in question.claims for row in claim.rows}
    at = f" at {len(places)} {'position' if len(places) == 1 else 'positions'}" if places else ""
    size = len(question.claims)
    return f"{', '.join(named) or 'nothing'}{at}: {size} {'claim' if size == 1 else 'claims'}"


@app.command(epilog=QUERY_HELP)
@grouped
def attack(
    given: SlottedOptions,
    claims: ClaimOptions,
    effort: AttackOptions,
    keep: KeepOptions,
    eps: Eps = None,
    nearest: Nearest = None,
    resume: Resume = False,
) -> None:
    """Only try to break claims: witnesses where it succeeds, `unknown` elsewhere. Nothing is proved."""
    _decide(given, eps, claims, effort, keep, resume, None, nearest)


def _decide(
    given: SlottedOptions,
    eps: float | None,
    claims: ClaimOptions,
    effort: EffortOptions | AttackOptions,
    keep: KeepOptions,
    resume: bool,
    memory: str | None,
    nearest: bool | None,
    deployed: str | None = None,
) -> None:
    from dataclasses import replace

    from prooflens.results.keeper import RunKeeper
    from prooflens.verdicts.certify import Interrupted, decide_question
    from prooflens.verdicts.deployed import Precision

    with shown(True) as tell:
        settings = effort.settings(tell)
        question = claims.ask(given, eps, settings.device, tell)
        words = question.eps_in_words(nearest)
        asked = configuration(given, claims, effort, eps=eps, eps_in_words=words, deployed=deployed)
        precision = Precision.of(question, deployed)
        keeper = RunKeeper(keep.out, question.subject, asked, resume)
        say(selection(question), error=True)
        question = replace(question, claims=keeper.remaining(question.claims))
        limit_memory(memory)
        try:
            results = decide_question(question, settings, keeper, precision)
        except Interrupted as stop:
            show_rows(stop.results, keep, words)
            say(f"interrupted: {len(stop.results)} of {len(question.claims)} claims were decided", error=True)
            say(_advice(keep), error=True)
            raise typer.Exit(130) from None
    show_rows(results, keep, words)
    tell_written(keep)
    raise typer.Exit(exit_code(results.counts))


def _decide_each(
    given: SlottedOptions,
    eps: float | None,
    claims: ClaimOptions,
    effort: EffortOptions,
    keep: KeepOptions,
    texts: Path,
    alone: Mapping[str, object],
) -> None:
    """Ask the same about every prompt of a file; the prompts share what `certify` shares in a list of them.

    Options in `alone` that were given are refused: they are for one prompt.
    """
    from dataclasses import replace

    from prooflens.results import Results
    from prooflens.verdicts.certify import decide_each

    named = {"--text": given.text, "--sample": given.sample, "--to": given.to, "--hull": given.hull}
    named |= {"--template": given.template, "--out": keep.out}
    if wrong := [name for name, value in named.items() if value is not None]:
        why = "a run is about one prompt: write a sweep" if wrong == ["--out"] else "it gives the prompts"
        raise PromptError(f"--texts does not go with {wrong[0]}: {why}")
    if wrong := [name for name, value in alone.items() if value is not None]:
        raise PromptError(f"--texts does not go with {wrong[0]}: ask one prompt at a time")
    parts = []
    with shown(True) as tell:
        settings = effort.settings(tell)
        held = loaded(given.model, settings.device, tell)
        limit_memory(effort.memory)

        def about(text: str) -> Question:
            return claims.ask(replace(given, text=text), eps, None, tell, held)

        prompts = prompts_of(texts)
        for text, part in zip(prompts, decide_each(prompts, about, settings), strict=True):
            parts.append(part)
            if not keep.as_json:
                say(f"{text}: {part.line}")
    joined = Results.joined(parts)
    if keep.as_json:
        print_json(document(joined))
    else:
        say(joined.line)
        tell_open(joined)
    raise typer.Exit(exit_code(joined.counts))


def _advice(keep: KeepOptions) -> str:
    """How to go on after an interruption."""
    if keep.out is None:
        return "nothing was written: with -o RUN/ what is done is kept and --resume goes on with it"
    return f"to go on: {command_line(without='--resume')} --resume"


@app.command(epilog=QUERY_HELP)
@grouped
def radius(
    given: SlottedOptions,
    claims: ClaimOptions,
    effort: EffortOptions,
    keep: KeepOptions,
    per_token: Annotated[bool, typer.Option("--per-token", help="Move one token at a time.")] = False,
    tolerance: Tolerance = 0.1,
    nearest: Nearest = None,
    deployed: Deployed = None,
) -> None:
    """The largest ε that is proved and the smallest that is broken, per head × position × query."""
    from prooflens.verdicts.radius import radius as search

    def look(tell: Progress) -> Radii:
        held, prompt = given.load(tell)
        limit_memory(effort.memory)
        return search(
            held,
            prompt,
            claims.queries,
            claims.heads,
            layer=claims.layer,
            positions=named_tokens(claims.positions),
            tokens=given.moving(prompt),
            per_token=per_token,
            tolerance=tolerance,
            nearest=nearest,
            vectors=claims.vectors,
            deployed=deployed,
            **effort.options(tell),
        )

    asked = configuration(given, claims, effort, per_token=per_token, tolerance=tolerance, deployed=deployed)
    show_radii(look, keep, asked)


def show_radii(look: Callable[[Progress], Radii], keep: KeepOptions, asked: dict[str, Any]) -> None:
    """Search radii, print them, and keep them where that was asked for; after Ctrl-C those so far.

    Args:
        look: searches, and tells how far it is.
        keep: where the radii go.
        asked: what `run.json` says was asked for.
    """
    from prooflens.results.record import save_radii
    from prooflens.verdicts.radius import SearchInterrupted

    complete = True
    make_room(keep.out)
    try:
        with shown(True) as tell:
            found = look(tell)
    except SearchInterrupted as stop:
        found, complete = stop.radii, False
    show_rows(found, keep)
    if found.unfinished and not keep.as_json:
        say(
            f"{found.unfinished} of {len(found)} searches had not ended when the time did: "
            "what is proved by then is shown; with a longer --time it may be more"
        )
    if found.ways_on and not keep.as_json:
        say(f"radii may be larger; not asked at some ε: {found.ways_on[0]}")
    if keep.out is not None:  # last: what was found is seen even where it cannot be written
        save_radii(found, keep.out, asked, complete)
        tell_written(keep)
    if not complete:
        again = "give the command again" + (", with another folder" if keep.out is not None else "")
        say(f"interrupted: these radii are sound, but the search was not at its end; {again}", error=True)
        raise typer.Exit(130)


def exit_code(counts: dict[Any, int]) -> int:
    """0 all hold, 2 some are unknown or only estimated, 3 some fail."""
    if counts.get("fails"):
        return 3
    return 2 if counts.get("unknown") or counts.get("estimated") else 0


def show_rows(frame: Frame, keep: KeepOptions, words: str | None = None) -> None:
    """The rows as a document or as a table, and what ε is worth in words."""
    if keep.as_json:
        print_json(document(frame, words))
    else:
        _list(frame)
        if words is not None:
            say(words)


def document(frame: Frame, words: str | None = None) -> dict[str, Any]:
    """The document of `--json`: rows and summary; of verdicts also who was asked, how to ask on, and ε in words."""
    from prooflens.results import Radii, Results

    told = {} if words is None else {"eps_in_words": words}
    return {**frame.to_dict(), **(frame.effort if isinstance(frame, Results | Radii) else {}), **told}


def _list(frame: Frame) -> None:
    """The rows, or a map of them if they are many, and a line that sums up."""
    from prooflens.results import Results

    names = [name for name in frame.shown_names if name not in ("layer", "head", "position", "reason")]
    if len(frame) <= FEW:
        rows = frame.shown_rows(FEW)
        print_table(("row", *names), ((_address(row), *(row[name] for name in names)) for row in rows))
        tell_reasons(rows, isinstance(frame, Results) and frame.advice is not None)
    elif "verdict" in names:
        table = frame.table.select(["layer", "head", "position", "query", "verdict"])
        for line in verdict_maps(table.to_pylist()):
            say(line)
        tokens = enumerate(frame.table.column("tokens")[0].as_py())
        say(f"positions: {', '.join(f'{i} {token.strip()}' for i, token in tokens)}")
        elsewhere = Counter((r["query"], r["verdict"]) for r in table.to_pylist() if r["layer"] is None)
        if elsewhere:
            print_table(("query", "verdict", "rows"), ((*key, n) for key, n in sorted(elsewhere.items())))
    say(frame.line)
    tell_precision(frame)
    tell_open(frame)


def tell_precision(frame: Frame) -> None:
    """Say how proved margins compare with what the deployed precision changes, if that was measured.

    Args:
        frame: what was found.
    """
    from prooflens.results import Radii, Results

    if isinstance(frame, Results | Radii) and frame.precision is not None:
        say(frame.precision)


def tell_reasons(rows: Sequence[Mapping[str, Any]], advised: bool) -> None:
    """Say why rows do not hold, each reason once.

    Args:
        rows: the rows that are shown.
        advised: whether advice for all of them follows: then of several reasons only how far engines came is said.
    """
    from prooflens.results.asked import how_far

    weak = [row for row in rows if row.get("verdict") not in (None, "holds")]
    short = advised and len({row["reason"] for row in weak}) > 1
    reasons: dict[str, list[str]] = {}
    for row in weak:
        reasons.setdefault(how_far(row["reason"]) if short else row["reason"], []).append(_address(row))
    for reason, named in list(reasons.items())[:FEW_REASONS]:
        say(f"{', '.join(named)}: {reason}")
    if len(reasons) > FEW_REASONS:
        say(f"… {len(reasons) - FEW_REASONS} more reasons: --json prints them all")


def tell_open(frame: Frame) -> None:
    """Why rows are open, once for all, and the commands that ask on."""
    from prooflens.results import Results

    if not isinstance(frame, Results) or frame.advice is None:
        return
    say(frame.advice)
    for options in frame.ways_on:
        say(f"to ask on: {command_line(options)}")


def _address(row: Mapping[str, Any]) -> str:
    if row["layer"] is not None:
        return f"{row['layer']}.{row['head']}@{row['position']}"
    if row["query"].startswith(("neuron", "feature", "read(", "dla", "lens")):
        return "inside"
    return "output" if row["query"].startswith(("argmax", "logit")) else "all parts"
