"""How the cost of `taylor` grows: with tokens, with depth, with the tokens that move, with the number of generators.

python benchmarks/growth.py MODEL [--part tokens layers moving generators] [--device cuda] [--memory 120] [--json FILE]
python benchmarks/growth.py --plot PICTURE.svg --json FILE

MODEL is a short name, or a folder made by `slice_model.py` from a text of at least 32 tokens, such as TEXT below: the
first S embedded tokens of it are the input. Every part changes one thing and leaves the others at S = 8, layer 1, all
tokens moving; each row is all top-1 queries of one layer (the last depth: eight coordinates of the output), as one JSON
line with seconds, peak GiB and how many are proved. Rows that FILE holds are left out.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from charts import Panel, curves
from measuring import Line, Meter, known, tell, told
from prooflens import Ball, Region, Transformer, load
from prooflens.engines import forms_of
from prooflens.engines.functionals import bound_claims
from prooflens.engines.hidden import output_forms
from prooflens.engines.protocol import EngineOptions
from prooflens.engines.taylor import Taylor
from prooflens.memory import keep_freed
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.verdicts.decide import is_proved

TEXT = (
    "the movie was long but good and the people in it spoke so softly that in the last row of the old house "
    "nobody could hear a single word of what they said to each other"
)
"""More than 32 tokens."""

LABELS = {
    "tokens": "tokens S",
    "layers": "layers walked",
    "moving": "moving tokens of 8",
    "generators": "generators p",
}
KINDS = {"seconds": "proved-line", "peak GiB": "attack-line"}


@dataclass(frozen=True)
class Asked:
    """One row: what is changed, and the question that comes of it."""

    part: str
    value: int
    tokens: int = 8
    layers: int = 1
    moving: int | None = None
    generators: int | None = None

    def region(self, x: Tensor, eps: float) -> Region:
        """The ball on the tokens that move, or a part of it with few generators."""
        center = x[: self.tokens]
        if self.generators is None:
            return Ball(eps, None if self.moving is None else range(self.moving)).around(center)
        draw = torch.Generator().manual_seed(self.generators)
        signs = torch.randint(0, 2, (self.generators, *center.shape), generator=draw) * 2.0 - 1.0
        return Region(center, generators=(signs * (eps / self.generators)).to(center))


def questions(parts: list[str], depth: int) -> list[Asked]:
    """The rows of the parts, cheap ones first."""
    rows = {
        "tokens": [Asked("tokens", S, tokens=S) for S in (8, 16, 32)],
        "layers": [Asked("layers", n, layers=n) for n in range(1, depth + 1)],
        "moving": [Asked("moving", n, moving=n) for n in (1, 2, 4, 8)],
        "generators": [Asked("generators", p, generators=p) for p in (1, 8, 64, 512)],
    }
    return [row for part in parts for row in rows[part]]


def measure(model: Transformer, x: Tensor, asked: Asked, options: argparse.Namespace) -> Line:
    """One row."""
    problem = Problem(model, asked.region(x, options.eps))
    line: Line = {
        "model": options.model,
        "part": asked.part,
        "value": asked.value,
        "eps": options.eps,
        "tokens": problem.n_tokens,
        "layers": asked.layers,
        "p": problem.region.n_factors,
    }
    engine, limits = Taylor(), EngineOptions(options.memory * 2**30)
    claims = []
    if asked.layers < model.architecture.n_layers:
        bound = parse_query("top1").bind(problem.setting([asked.layers]))
        claims = [claim for claim in bound if claim.functionals and claim.clean_holds]
        forms = forms_of([f for claim in claims for f in claim.functionals])
    else:
        d = model.headless.architecture.d_model
        problem = Problem(model.headless, problem.region)
        forms = output_forms(torch.eye(d, dtype=torch.float64)[:: max(1, d // 8)])
    if reason := engine.refuses(problem, forms, limits):
        return line | {"refused": reason}
    with Meter(model.device) as meter:
        if claims:
            parts, _ = bound_claims(engine, problem, claims, options=limits)
        else:
            found = engine.bound_forms(problem, forms, limits)
    line |= {"seconds": round(meter.seconds, 3), "peak GiB": round(meter.gib, 3)}
    if not claims:
        return line | {"mean width": float((found.upper - found.lower).mean())}
    holds = [is_proved(claim, part) for claim, part in zip(claims, parts, strict=True)]
    return line | {"claims": len(claims), "proved": sum(holds)}


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """The rows that are not there yet."""
    model = load(options.model).to(options.device)
    held = model.examples is not None and options.text is None
    prompt = model.example() if held else model.prompt(options.text or TEXT)
    x = prompt.x.to(model.device)
    done = told(options.json)
    todo = [
        asked
        for asked in questions(options.part, model.architecture.n_layers)
        if not known(done, model=options.model, part=asked.part, value=asked.value, eps=options.eps)
    ]
    if todo and model.device.type != "cpu":
        measure(model, x, todo[0], options)  # the first work on a device takes long whatever it is
    for asked in todo:
        if asked.tokens > len(x):
            print(f"the prompt has {len(x)} tokens: no row for {asked.tokens}", file=sys.stderr)
            continue
        yield measure(model, x, asked, options)


def plot(rows: list[Line], path: Path) -> None:
    """One panel per part."""
    panels = []
    for part, label in LABELS.items():
        points = {
            float(str(row["value"])): {name: float(str(row[name])) for name in KINDS}
            for row in rows
            if row.get("part") == part and "seconds" in row
        }
        if points:
            panels.append(Panel(label, sorted(points.items())))
    names = ", ".join(dict.fromkeys(str(row["model"]).rsplit("/", 1)[-1] for row in rows))
    path.write_text(curves(f"Cost of taylor: {names}", panels, KINDS).svg(alone=True), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--part", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument(
        "--text", help="another prompt than the model's embedded example, or than TEXT where it has none"
    )
    parser.add_argument("--eps", type=float, default=0.0005)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=8, help="GiB for the engine")
    parser.add_argument("--json", type=Path, help="append the lines to this file, and go on where it ends")
    parser.add_argument("--plot", type=Path, help="draw the rows of --json there")
    options = parser.parse_args()
    keep_freed()
    if options.model is not None:
        for line in lines(options):
            tell(line, options.json)
    if options.plot is not None:
        plot(told(options.json), options.plot)


if __name__ == "__main__":
    main()
