"""The command `prune`: which head to drop by certificates, the model without it, and what that is worth."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.options import AttackEffort, Device, EngineName, Json, Model, Radius, Seed
from prooflens.errors import PromptError
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.models import Prompt, Transformer


@app.command()
def prune(
    model: Model,
    eps: Radius,
    text: Annotated[list[str] | None, typer.Option(help="A prompt (may be repeated).")] = None,
    samples: Annotated[int, typer.Option(help="So many example inputs of a model without text.")] = 10,
    layer: Annotated[int, typer.Option(help="The layer whose heads are looked at.")] = 0,
    heads: Annotated[str | None, typer.Option(help="Prune these heads instead of the suggested one.")] = None,
    rule: Annotated[
        str, typer.Option(help="certified, responsive, gradient, ablation or entropy.")
    ] = "certified",
    tau: Annotated[float, typer.Option(help="Threshold of the mass query.")] = 0.3,
    engine: EngineName = "auto",
    proof: Annotated[str | None, typer.Option(help="Engine that proves answers afterwards.")] = None,
    budget: AttackEffort = None,
    device: Device = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the pruned model.")] = None,
    as_json: Json = False,
) -> None:
    """Suggest a head to prune from certificates, prune it, and evaluate: answers kept, under attack, and proved."""
    from prooflens.models import load
    from prooflens.models.export import export
    from prooflens.models.files import check_replaceable
    from prooflens.verdicts.prune import answers, choose, evaluate, profile
    from prooflens.verdicts.prune import prune as without
    from prooflens.verdicts.settings import checked_device

    if out is not None:
        check_replaceable(out)
    with shown(True) as tell:
        held = load(model, tell)
        held = held if device is None else held.to(checked_device(device))
        prompts = _prompts(held, text, samples)
        labels = answers(held, prompts)
        tell("heads", 0.1)
        found = profile(held, prompts, eps, layer=layer, tau=tau, engine=engine, seed=seed, budget=budget)
        layer_, head = choose(found, rule)  # type: ignore[arg-type]  # an unknown rule is its own error
        chosen = heads or f"{layer_}.{head}"
        small = without(held, chosen)
        worth = {}
        for name, one in (("whole", held), ("pruned", small)):
            tell(name, 0.5)
            worth[name] = evaluate(one, prompts, labels, eps, restarts=4, steps=20, engine=proof, seed=seed)
    if out is not None:
        export(small, out)
    rows = [{"head": f"{one.head[0]}.{one.head[1]}", **_plain(asdict(one))} for one in found]
    if as_json:
        results = {name: asdict(one) for name, one in worth.items()}
        print_json({"heads": rows, "rule": rule, "pruned": chosen, "sha256": small.sha256, "worth": results})
        return
    print_table(list(rows[0]), [row.values() for row in rows])
    say(f"pruned by {'hand' if heads else rule}: {chosen}")
    columns = ["model", "answers as before", "attack leaves", "proved", "of"]
    print_table(columns, [[name, one.clean, one.attack, one.proved, one.n] for name, one in worth.items()])
    if out is not None:
        say(f"written to {out}")


def _prompts(model: Transformer, texts: list[str] | None, samples: int) -> list[Prompt]:
    from prooflens.verdicts.question import as_prompt

    if texts:
        return [as_prompt(model, text) for text in texts]
    if model.examples is None:
        raise PromptError(f'{model.name} needs texts: --text "…", as often as you like')
    return [as_prompt(model, model.example(i)) for i in range(min(samples, len(model.examples)))]


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "head"}
