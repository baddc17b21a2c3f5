"""The options that commands about claims share, and what they mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.errors import PromptError
from prooflens.memory import cap, keep_freed, parse_memory

if TYPE_CHECKING:
    from prooflens.certify import Question
    from prooflens.models import Prompt, Transformer
    from prooflens.portfolio import Settings
    from prooflens.progress import Progress
    from prooflens.queries.rows import Token

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


def settings_of(options: dict[str, Any], engine: str) -> Settings:
    """How claims are to be settled."""
    from prooflens.certify import parse_budget
    from prooflens.portfolio import Settings, stages_of

    memory = parse_memory(options["memory"])
    return Settings(stages_of(engine), parse_budget(options["budget"]), options["seed"], memory)


def capped(text: str | None) -> int | None:
    """The bytes of `--memory`; from here on, with the model loaded, this process cannot take more."""
    size = parse_memory(text)
    if size is None:
        keep_freed()
    else:
        import pyarrow as pa

        pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own pools reserve far more than they use
        cap(size)
    return size


def question_of(options: dict[str, Any], tell: Progress) -> Question:
    """What was asked, bound to the model and the prompt."""
    from prooflens.certify import ask, source_of
    from prooflens.regions import Ball

    held, prompt = input_of(options, tell)
    return ask(
        held,
        prompt,
        Ball(options["eps"], moving_tokens(options["tokens"], prompt)),
        options["heads"],
        layer=options["layer"],
        queries=options["query"] or ["top1"],
        device=options["device"],
        positions=named_tokens(options["positions"]),
        source=source_of(options["model"]),
    )


def input_of(options: dict[str, Any], tell: Progress) -> tuple[Transformer, Prompt]:
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


def named_tokens(text: str | None) -> list[Token] | None:
    """Tokens of a comma list: indices or texts."""
    if text is None:
        return None
    return [int(part) if re.fullmatch(r"[+-]?\d+", part.strip()) else part for part in text.split(",")]


def moving_tokens(text: str | None, prompt: Prompt) -> list[int] | None:
    """The tokens that move, by index."""
    from prooflens.queries.rows import find_tokens

    named = named_tokens(text)
    return None if named is None else find_tokens(named, len(prompt), prompt.tokens)
