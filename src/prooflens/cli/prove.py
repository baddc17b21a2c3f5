"""Commands that prove and break: certify, radius, circuit, attack."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import Json, app, print_json, print_table, say
from prooflens.errors import EngineError, PromptError, RunError
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.models import Prompt, Transformer
    from prooflens.queries.rows import Token
    from prooflens.results import Frame, Results

Model = Annotated[str, typer.Argument(help="A model: short name, folder, .gguf file or hub name.")]
TextOption = Annotated[str | None, typer.Option("--text", help="The prompt.")]
Sample = Annotated[int | None, typer.Option(help="Example input of a model without text (default: 0).")]
Layer = Annotated[int | None, typer.Option(help="All heads of one layer.")]
Heads = Annotated[str | None, typer.Option(help="Heads: 0.10,1.3, a layer 2, layers 0-2 (default: all).")]
Eps = Annotated[float, typer.Option(help="Radius of the ball around the embeddings.")]
Tokens = Annotated[str | None, typer.Option(help="Only these tokens move: 2,5 or their texts.")]
Positions = Annotated[str | None, typer.Option(help="Only these query positions: -1 or 2,5.")]
Queries = Annotated[
    list[str] | None, typer.Option("--query", help="top1, mass>=0.2, … (may be repeated; default: top1).")
]
EngineName = Annotated[str, typer.Option("--engine", help="auto, or one engine by name.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]
Memory = Annotated[str | None, typer.Option(help="Memory that engines may use: 8GB.")]
Seed = Annotated[int, typer.Option(help="Seed of the attack.")]
Effort = Annotated[
    str | None, typer.Option("--budget", help="Budget of the attack: a name or samples/restarts/steps.")
]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Run directory to write.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]

FEW = 40
"""So many rows are listed; of more, the counts per layer and query are."""


@app.command()
def certify(
    model: Model,
    eps: Eps,
    text: TextOption = None,
    sample: Sample = None,
    layer: Layer = None,
    heads: Heads = None,
    tokens: Tokens = None,
    positions: Positions = None,
    query: Queries = None,
    engine: EngineName = "auto",
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Prove that attention holds on a whole ball around a prompt, head by head, or find what breaks it.

    Exit code: 0 all hold, 1 error, 2 some unknown or only estimated, 3 some fail.
    """
    options = dict(locals())
    _verdicts(options, engine)


@app.command()
def attack(
    model: Model,
    eps: Eps,
    text: TextOption = None,
    sample: Sample = None,
    layer: Layer = None,
    heads: Heads = None,
    tokens: Tokens = None,
    positions: Positions = None,
    query: Queries = None,
    device: Device = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Only try to break claims: witnesses where it succeeds, `unknown` elsewhere. Nothing is proved."""
    options = dict(locals()) | {"memory": None}
    _verdicts(options, "attack")


def _verdicts(options: dict[str, Any], engine: str) -> None:
    from prooflens.certify import Interrupted, ask, certify_question, parse_budget, source_of
    from prooflens.portfolio import Settings, stages_of
    from prooflens.regions import Ball

    settings = Settings(
        stages_of(engine), parse_budget(options["budget"]), options["seed"], parse_memory(options["memory"])
    )
    with shown(not options["as_json"]) as tell:
        held, prompt = _input(options, tell)
        question = ask(
            held,
            prompt,
            Ball(options["eps"], _moving(options["tokens"], prompt)),
            options["heads"],
            layer=options["layer"],
            queries=options["query"] or ["top1"],
            device=options["device"],
            positions=_named(options["positions"]),
            source=source_of(options["model"]),
        )
        keeper = _Keeper(options, question.subject)
        question = keeper.remaining(question)
        try:
            results = certify_question(question, settings, tell)
        except Interrupted as stop:
            keeper.keep(stop.results, complete=False)
            say(f"interrupted: {len(stop.results)} of {len(question.claims)} claims were decided", error=True)
            say(keeper.advice(), error=True)
            raise typer.Exit(130) from None
    _finish(keeper.keep(results), options)


class _Keeper:
    """Writes a run where one was asked for, and knows what an earlier one holds."""

    def __init__(self, options: dict[str, Any], subject: Any) -> None:
        from prooflens.certificate.record import header
        from prooflens.certificate.store import RunWriter

        self.writer: RunWriter | None = None
        self.before: Any = None
        path = options["out"]
        if path is None:
            if options["resume"]:
                raise RunError("--resume needs the run to go on with: -o RUN/")
            return
        facts = header(subject, configuration(options))
        if options["resume"] and path.exists():
            self.writer, run = RunWriter.resume(path, facts)
            self.before = run.table if run.table.num_rows else None
        else:
            self.writer = RunWriter.create(path, facts)

    def remaining(self, question: Any) -> Any:
        """The question without what is done already."""
        from dataclasses import replace

        from prooflens.results import Results, claim_key

        if self.before is None:
            return question
        done = Results(self.before).keys
        return replace(question, claims=[c for c in question.claims if claim_key(c) not in done])

    def keep(self, results: Results, complete: bool = True) -> Results:
        """Write new results; all of the run comes back."""
        import pyarrow as pa

        from prooflens.certificate.record import append
        from prooflens.results import VERDICTS, Results

        whole = results
        if self.before is not None:
            whole = Results(pa.concat_tables([self.before.select(VERDICTS.names), results.table]))
        if self.writer is not None:
            if len(results):
                append(self.writer, results)
            if complete:
                self.writer.finish(counts=whole.counts)
        return whole

    def advice(self) -> str:
        """How to go on."""
        if self.writer is None:
            return "nothing was written: with -o RUN/ what is done is kept and --resume goes on with it"
        return f"to go on: {command_line(without='--resume')} --resume"


@app.command()
def radius(
    model: Model,
    text: TextOption = None,
    sample: Sample = None,
    layer: Layer = None,
    heads: Heads = None,
    tokens: Tokens = None,
    per_token: Annotated[bool, typer.Option("--per-token", help="Move one token at a time.")] = False,
    positions: Positions = None,
    query: Queries = None,
    tolerance: Annotated[float, typer.Option(help="Step of the grid of radii, relatively.")] = 0.1,
    engine: EngineName = "auto",
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The largest ε that is proved and the smallest that is broken, per head × position × query."""
    options = dict(locals())
    from prooflens.certificate.record import save_frame
    from prooflens.radius import radius as search

    with shown(not as_json) as tell:
        held, prompt = _input(options, tell)
        found = search(
            held,
            prompt,
            query or ["top1"],
            heads,
            layer=layer,
            tokens=_moving(tokens, prompt),
            per_token=per_token,
            engine=engine,
            tolerance=tolerance,
            memory=parse_memory(memory),
            device=device,
            progress=tell,
            seed=seed,
            budget=budget,
            positions=_named(positions),
        )
    if out is not None:
        save_frame(found, out, configuration(options), "radii")
    if as_json:
        print_json(found.to_dict())
    else:
        _list(found)
        if out is not None:
            say(f"written to {out}")


@app.command()
def circuit(
    model: Model,
    circuit: Annotated[
        str, typer.Argument(help="'0.3:top1@-1 & 1.4:top1@-1', heads 0.3,1.4 or a .json file of nodes.")
    ],
    eps: Eps,
    text: TextOption = None,
    sample: Sample = None,
    tokens: Tokens = None,
    query: Annotated[str, typer.Option(help="What the heads of a list are asked.")] = "top1@-1",
    engine: EngineName = "auto",
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Several heads at once: does the circuit hold on the whole ball, and which part is the weakest link?"""
    options = dict(locals())
    from prooflens.circuits import circuit as settle
    from prooflens.regions import Ball

    with shown(not as_json) as tell:
        held, prompt = _input(options, tell)
        found = settle(
            held,
            prompt,
            Ball(eps, _moving(tokens, prompt)),
            circuit,
            query=query,
            engine=engine,
            memory=parse_memory(memory),
            device=device,
            progress=tell,
            seed=seed,
            budget=budget,
        )
    if out is not None:
        found.save(out, **configuration(options))
    if as_json:
        print_json(found.to_dict())
    else:
        _list(found)
        say(f"circuit: {found.verdict}; weakest link: {found.summary['weakest']}")
    raise typer.Exit(exit_code({found.verdict: 1}))


def _finish(results: Results, options: dict[str, Any]) -> None:
    if options["as_json"]:
        print_json(results.to_dict())
    else:
        _list(results)
        if options["out"] is not None:
            say(f"written to {options['out']}")
    raise typer.Exit(exit_code(results.counts))


def exit_code(counts: dict[Any, int]) -> int:
    """0 all hold, 2 some are unknown or only estimated, 3 some fail."""
    if counts.get("fails"):
        return 3
    return 2 if counts.get("unknown") or counts.get("estimated") else 0


def _list(frame: Frame) -> None:
    """The rows, or counts of them if they are many, and a line that sums up."""
    names = [name for name in frame.shown if name not in ("layer", "head", "position", "reason")]
    if len(frame) <= FEW:
        rows = frame.table.to_pylist()
        print_table(("row", *names), ((_address(row), *(row[name] for name in names)) for row in rows))
    elif "verdict" in names:
        keys = ["layer", "query", "verdict"]
        counted = frame.table.group_by(keys).aggregate([([], "count_all")])
        ordered = counted.sort_by([(key, "ascending") for key in keys]).select([*keys, "count_all"])
        print_table((*keys, "rows"), (row.values() for row in ordered.to_pylist()))
    say(", ".join(f"{value} {name}" for name, value in frame.summary.items()))


def _address(row: dict[str, Any]) -> str:
    return "all parts" if row["layer"] is None else f"{row['layer']}.{row['head']}@{row['position']}"


def configuration(options: dict[str, Any]) -> dict[str, Any]:
    """The options as `run.json` keeps them, with the command that was given."""
    kept = {name: value for name, value in options.items() if name not in ("as_json", "out", "resume")}
    return {**kept, "command": command_line()}


def command_line(without: str = "") -> str:
    """The command as it was given."""
    return shlex.join(["prooflens", *(word for word in sys.argv[1:] if word != without)])


def _input(options: dict[str, Any], tell: Any) -> tuple[Transformer, Prompt]:
    """The model and the prompt that were asked for."""
    from prooflens.models import load

    text, sample = options["text"], options["sample"]
    held = load(options["model"], tell)
    if text is not None and sample is not None:
        raise PromptError("give --text or --sample, not both")
    if text is None and held.examples is None:
        raise PromptError(f'{held.name} needs a text: --text "…"')
    if text is not None and held.tokenizer is None and held.examples is not None:
        raise PromptError(f"{held.name} reads no text: choose one of its example inputs with --sample")
    return held, held.prompt(text) if text is not None else held.example(sample or 0)


def _named(text: str | None) -> list[Token] | None:
    """Tokens of a comma list: indices or texts."""
    if text is None:
        return None
    return [int(part) if re.fullmatch(r"[+-]?\d+", part.strip()) else part for part in text.split(",")]


def _moving(text: str | None, prompt: Prompt) -> list[int] | None:
    """The tokens that move, by index."""
    from prooflens.queries.rows import find_tokens

    named = _named(text)
    return None if named is None else find_tokens(named, len(prompt), prompt.tokens)


UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def parse_memory(text: str | None) -> int | None:
    """Bytes of `8GB`, `512MiB` or `1e9`."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS or not float(match[1]) > 0:
        raise EngineError(f"{text!r} is no amount of memory: write it as in 8GB or 512MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])
