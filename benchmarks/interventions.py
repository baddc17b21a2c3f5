"""Effects of edits: joint bounds against bounding both models alone, and every head of some layers of a model.

python benchmarks/interventions.py [WORK …] [--device cuda] [--layers 17-18] [-o FILE.jsonl]

| work | what |
|---|---|
| widths | `toy-4layer`, every head and network taken out by itself, on balls: joint, alone, attained by an attack |
| values | small models, every part at the last token at any value near its own on another input, on balls: likewise |
| read | minilm: heads of layers 1 and 2 taken out by themselves, the stream behind it or later; one token moves |
| family | the effect of every head of `--layers` on logit{A} − logit{B} over an IOI template, every member run |
| segment | the same on the segment between two prompts |
| ball | the same on a ball of radius `--eps` |
| circuits | small models, 8 inputs each: circuits that are proved faithful on a ball, and those that samples call so |
| ioi | a circuit among the heads of `--layers` that is faithful on every member of the IOI template |
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import prooflens as pl
from families import ioi
from measuring import Line, Meter, tell
from prooflens.engines import get_engine
from prooflens.engines.attack import AttackBudget
from prooflens.engines.attack.effects import attack_effects
from prooflens.engines.hidden import output_forms
from prooflens.engines.relational import both_alone, bound_effects
from prooflens.models import Transformer
from prooflens.models.edits import places_of, value_on
from prooflens.problem import Problem
from prooflens.progress import silent
from prooflens.regions import Ball, Segment
from prooflens.results import Verdict
from prooflens.results.effects import Effect
from prooflens.verdicts.discover import search
from prooflens.verdicts.pair import Pair

A = "When Mary and John went to the store, John gave a drink to"
B = "When Mary and John went to the store, John gave a book to"
METRIC = "logit{ Mary}-logit{ John}"
WORK = ("widths", "values", "read", "family", "segment", "ball", "circuits", "ioi")
SMALL = {"toy": 0.2, "toy-induction": 0.5, "toy-4layer": 0.5}
"""Models, and how far a circuit's logit0 − logit1 may be off."""
DRAWN = 30
"""Points by which samples call a circuit faithful."""
SENTENCE, MOVES = "the movie was great", 3
"""What minilm reads, and the token that moves and is read."""
RADII = (0.001, 0.003, 0.01, 0.03)
SPREADS = (0.003, 0.01, 0.03, 0.1)
"""How far each number of a part's value may be from that on another input."""


def widths(eps: float) -> Line:
    """Widths of the effects of all parts of `toy-4layer`, and the medians of their ratios."""
    model, engine = pl.load("toy-4layer"), get_engine("taylor")
    region, forms = Ball(eps).around(model.example()), output_forms(torch.tensor([[1.0, -1.0]]).double())
    problem = Problem(model, region)
    rows = []
    with Meter(model.device) as meter:
        for name in places_of(model.architecture):
            edited = Problem(pl.edit(model, name), region)
            joint, alone = (f(engine, problem, edited, forms) for f in (bound_effects, both_alone))
            reached = attack_effects(problem, edited, forms, AttackBudget(2000, 10, 50), 0, [joint])
            rows.append([float(found.upper - found.lower) for found in (joint, alone, reached)])
    return {"work": "widths", "model": model.name, "eps": eps} | _ratios(rows, meter)


def values(name: str, eps: float, spread: float) -> Line:
    """Widths of the effects of all parts of a small model at any value of a box, over inputs and values."""
    model, engine = pl.load(name), get_engine("taylor")
    prompt, rows = model.example(), []
    with Meter(model.device) as meter:
        for part in places_of(model.architecture):
            held = replace(value_on(model, f"{part}@-1", model.example(1)), spread=spread)
            pair = Pair.of(model, held, prompt, Ball(eps), "logit0-logit1", None, None)
            both = pair.problem, pair.edited, pair.forms
            joint, alone = (f(engine, *both) for f in (bound_effects, both_alone))
            reached = attack_effects(*both, AttackBudget(2000, 10, 50), 0, [joint])
            rows.append([float(found.upper - found.lower) for found in (joint, alone, reached)])
    return {"work": "values", "model": name, "eps": eps, "spread": spread} | _ratios(rows, meter)


def read_widths(layer: int, eps: float, heads: int, behind: int | None = None) -> Line:
    """Widths of the effects of heads of a layer of minilm on a random direction of the stream behind it, or later."""
    read = layer if behind is None else behind
    model, engine = pl.load("minilm"), get_engine("taylor")
    prompt = model.prompt(SENTENCE)
    v = torch.randn(model.architecture.d_model, generator=torch.Generator().manual_seed(layer)).double()
    metric, region = f"read(blocks.{read}.hook_resid_post@{MOVES},DIR)", Ball(eps, tokens=[MOVES])
    rows = []
    with Meter(model.device) as meter:
        for head in range(heads):
            pair = Pair.of(model, f"a{layer}.h{head}", prompt, region, metric, None, {"DIR": v / v.norm()})
            both = pair.problem, pair.edited, pair.forms
            joint, alone = (f(engine, *both) for f in (bound_effects, both_alone))
            reached = attack_effects(*both, AttackBudget(200, 4, 30), 0, [joint])
            rows.append([float(found.upper - found.lower) for found in (joint, alone, reached)])
    asked = {"work": "read", "model": model.name, "layer": layer, "behind": read, "eps": eps}
    return asked | _ratios(rows, meter)


def _ratios(rows: list[list[float]], meter: Meter) -> Line:
    """Medians of ratios of widths: joint, alone, attained."""
    one, both, seen = torch.tensor(rows).double().T
    middle = {"joint / alone": one / both, "joint / attained": one / seen, "alone / attained": both / seen}
    return {
        "parts": len(rows),
        **{name: round(float(ratios.median()), 3) for name, ratios in middle.items()},
        "most joint / attained": round(float((one / seen).max()), 3),
        "seconds": round(meter.seconds, 1),
    }


def heads_of(model: Transformer, layers: str) -> list[str]:
    """The heads of some layers, as in 17-18."""
    first, _, last = layers.partition("-")
    chosen = range(int(first), int(last or first) + 1)
    return [f"a{layer}.h{head}" for layer in chosen for head in range(model.architecture.n_heads)]


def over_family(model: Transformer, names: list[str], given: argparse.Namespace) -> list[Line]:
    """The effect of every head over the template, exactly."""
    family = ioi(model, given.names)
    with Meter(model.device) as meter:
        found = pl.family_effects(
            model, names, family, "logit{A}-logit{B}", necessary=given.delta, faithful=given.delta,
            batch=given.batch, progress=True,
        )  # fmt: skip
    rows = zip(names, found.rows, strict=True)
    return [
        {
            "work": "family",
            "head": name,
            "members": found.asked,
            "least": row.least,
            "most": row.most,
            "mean": row.mean,
            "delta": given.delta,
            "necessary": row.necessary,
            "faithful": row.faithful,
            "seconds of all": round(meter.seconds, 1),
        }
        for name, row in rows
    ]


def on_region(model: Transformer, names: Sequence[str], work: str, given: argparse.Namespace) -> None:
    """The effects of heads on a region, each by itself: proved and attained, told as they come."""
    prompt, kept = model.prompt(A), ("clean", "proved", "attained", "engine", "seconds")
    region = Segment(prompt, model.prompt(B)) if work == "segment" else Ball(given.eps)
    meter = Meter(model.device)

    def told(number: int, effect: Effect) -> None:
        document = effect.to_dict()
        line = {"work": work, "head": names[number], **({"eps": given.eps} if work == "ball" else {})}
        line |= {key: document[key] for key in kept}
        line |= {"verdicts": {row.claim: row.verdict.value for row in effect.claims}}
        tell(line | {"device": str(model.device)}, given.out)

    with meter:
        pl.effects(
            model,
            names,
            prompt,
            region,
            METRIC,
            necessary=given.delta,
            faithful=given.delta,
            found=told,
            progress=True,
        )
    spent = {
        "seconds": round(meter.seconds, 1),
        "gib": round(meter.gib, 2),
        "threads": torch.get_num_threads(),
    }
    tell({"work": f"{work}, all", "heads": len(names), **spent, "device": str(model.device)}, given.out)


class Sampled:
    """The verdict of samples on an edit: `holds` if no point is off by more than δ."""

    def __init__(self, largest: float, delta: float) -> None:
        self.ends = -largest, largest
        self.verdicts = [Verdict.HOLDS if largest <= delta else Verdict.FAILS]


def circuits(name: str, eps: float, delta: float, inputs: int = 8) -> Line:
    """Circuits that are proved on a ball, and circuits that some of its points call faithful, attacked."""
    model, ball = pl.load(name), Ball(eps)
    metric = torch.tensor([1.0, -1.0]).double()
    sizes, minimal, open_, drawn_sizes, broken, proved = [], 0, 0, [], 0, 0
    with Meter(model.device) as meter:
        for index in range(inputs):
            x = model.example(index)
            found = pl.discover(model, x, ball, "logit0-logit1", delta, budget="200/2/10")
            sizes.append(len(found.circuit))
            minimal += found.minimal
            open_ += len(found.open)
            points = torch.cat([x.x[None], ball.around(x).sample(DRAWN, index)[0]])
            clean = model(points) @ metric

            def judge(parts: Sequence[str], points: Tensor = points, clean: Tensor = clean) -> Sampled:
                away = (clean - pl.edit(model, list(parts))(points) @ metric).abs()
                return Sampled(float(away.max()), delta)

            order = {part: judge([part]).ends[1] for part in places_of(model.architecture)}
            removed, *_ = search(sorted(order, key=order.__getitem__), judge, silent)  # type: ignore[arg-type]
            drawn_sizes.append(len(order) - len(removed))
            if removed:
                told = pl.effect(model, removed, x, ball, "logit0-logit1", faithful=delta)
                broken += told.claims[0].verdict is Verdict.FAILS
                proved += told.claims[0].verdict is Verdict.HOLDS
    return {
        "work": "circuits",
        "model": name,
        "eps": eps,
        "delta": delta,
        "inputs": inputs,
        "parts": len(places_of(model.architecture)),
        "proved circuits": sizes,
        "minimal": minimal,
        "open parts": open_,
        "sampled circuits": drawn_sizes,
        "sampled and broken by a point": broken,
        "sampled and proved": proved,
        "seconds": round(meter.seconds, 1),
    }


def ioi_circuit(model: Transformer, names: list[str], given: argparse.Namespace) -> Line:
    """A circuit among some heads that is faithful on every member of the template."""
    family = ioi(model, given.names)
    with Meter(model.device) as meter:
        found = pl.family_discover(
            model, family, "logit{A}-logit{B}", given.delta, parts=names, batch=given.batch, progress=True
        )
    return {
        "work": "ioi",
        "members": family.size,
        "delta": given.delta,
        "circuit": list(found.circuit),
        "removed": list(found.removed),
        "ends": None if found.certificate is None else found.certificate.ends,
        "minimal": found.minimal,
        "trials": len(found.trials),
        "seconds": round(meter.seconds, 1),
        "device": str(model.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="*", choices=[*WORK, []], default=list(WORK))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", default="17-18")
    parser.add_argument("--only", nargs="*", help="heads in place of all of --layers, as in a17.h4")
    parser.add_argument("--eps", type=float, default=1e-5)
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--small", nargs="*", choices=SMALL, default=list(SMALL), help="models of `circuits`")
    parser.add_argument("--radii", nargs="*", type=float, default=RADII[:3], help="radii of `circuits`")
    parser.add_argument("--read-layers", nargs="*", type=int, default=[1, 2], help="layers of `read`")
    parser.add_argument(
        "--read-behind", type=int, help="the layer behind which `read` reads, if not that of the head"
    )
    parser.add_argument("--read-eps", type=float, default=0.001, help="the radius of `read`")
    parser.add_argument("--values-eps", type=float, default=0.003, help="the radius of `values`")
    parser.add_argument("--heads", type=int, default=1, help="heads of each layer of `read`")
    parser.add_argument("--names", type=int, default=92)
    parser.add_argument("--batch", type=int, help="members of one batch (default: as many as fit)")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    for work in given.work or WORK:
        if work == "widths":
            for eps in RADII:
                tell(widths(eps), given.out)
            continue
        if work == "values":
            for name in given.small:
                for spread in SPREADS:
                    tell(values(name, given.values_eps, spread), given.out)
            continue
        if work == "read":
            for layer in given.read_layers:
                tell(read_widths(layer, given.read_eps, given.heads, given.read_behind), given.out)
            continue
        if work == "circuits":
            for eps in given.radii:
                for name in given.small:
                    tell(circuits(name, eps, SMALL[name]), given.out)
            continue
        model = pl.load(given.model).to(given.device)
        names = heads_of(model, given.layers)
        if work == "ioi":
            tell(ioi_circuit(model, names, given), given.out)
            continue
        if work == "family":
            for line in over_family(model, names, given):
                tell(line, given.out)
            continue
        on_region(model, given.only or names, work, given)


if __name__ == "__main__":
    main()
