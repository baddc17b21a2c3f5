"""The whole way from one prompt to another, and hulls of a few: heads proved, broken and open, pieces, seconds.

python benchmarks/few_factors.py [MODEL] [--layers 1 2 8] [--pairs …] [--hull] [--output] [--device cuda] [-o FILE]

Each question goes to `certify` (or `output`) as a user asks it. Beside the verdicts stands how many claims are true on
33 points of the way (500 points of a hull).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import prooflens as pl
from charts import Panel, curves
from measuring import Line, told
from measuring import tell as write
from prooflens.engines.attack import AttackBudget, attack_claims
from prooflens.engines.forms import forms_of
from prooflens.models import Prompt, Transformer
from prooflens.problem import Problem
from prooflens.report.svg import Drawing
from prooflens.verdicts.question import Place, ask

TEXT = "When Mary and John went to the store, John gave a drink to"
PAIRS = {
    "Mary → Alice": TEXT.replace("Mary", "Alice"),
    "John → Tom": TEXT.replace("John", "Tom"),
    "drink → book": TEXT.replace("drink", "book"),
    "store → park": TEXT.replace("store", "park"),
}
NEXT = {
    **PAIRS,
    "gave → handed": TEXT.replace("gave", "handed"),
}
HULLS = {
    "Mary, Alice, Kate": [TEXT.replace("Mary", name) for name in ("Alice", "Kate")],
    "Mary → Alice, drink → book": [TEXT.replace("Mary", "Alice"), TEXT.replace("drink", "book")],
}
FIVE = [
    TEXT.replace("Mary", "Alice"),
    TEXT.replace("store", "park"),
    TEXT.replace("drink", "book"),
    TEXT.replace("John", "Tom"),
]
POINTS = 33
MANY, BATCH = 10_000, 500
TEN_TIMES = AttackBudget(5000, 50, 50)
"""Ten times the paper's budget at depth."""


def truth(model: Transformer, start: Prompt | str, region: Place, layer: int) -> int:
    """How many heads keep their key at the last position, on 33 points of a way or 500 of a hull."""
    question = ask(model, start, region, layer=layer, positions=[-1])
    problem: Problem = question.problem
    if problem.region.n_factors == 1:
        alpha = torch.linspace(-1.0, 1.0, POINTS, dtype=torch.float64)[:, None].to(problem.region.center)
    else:
        alpha = problem.region.sample(500, seed=1)[1]
    held = 0
    with torch.no_grad():
        scores, _ = problem.values(problem.region.point(alpha), [layer], False)
        for claim in question.claims:
            values = forms_of(claim.functionals, 0).evaluate(scores, None)
            held += bool((values > 0).all())
    return held


def crossed(results: pl.Results, model: Transformer, start: Prompt | str, region: Place, layer: int) -> int:
    """How many rows have a value below their proved bound: at 10⁴ points, or by ten times the paper's budget."""
    question = ask(model, start, region, layer=layer, positions=[-1])
    problem: Problem = question.problem
    least = torch.full((len(question.claims),), torch.inf, dtype=torch.float64)
    for seed in range(MANY // BATCH):
        _, alpha = problem.region.sample(BATCH, seed=seed, corners=0.05)
        with torch.no_grad():
            scores, _ = problem.values(problem.region.point(alpha), [layer], False)
            for i, claim in enumerate(question.claims):
                values = forms_of(claim.functionals, 0).evaluate(scores, None)
                least[i] = torch.minimum(least[i], values.min().cpu())
    attacked = attack_claims(problem, question.claims, TEN_TIMES, 0, [None] * len(question.claims), True)
    least = torch.minimum(least, attacked.values.cpu())
    lower = torch.tensor([outcome.lower for outcome in results.outcomes], dtype=torch.float64)
    return int((least < lower).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--hulls", nargs="+", default=[])
    parser.add_argument("--examples", action="store_true", help="the hull of all examples of a sliced model")
    parser.add_argument("--five", action="store_true", help="the hull of five prompts, four factors")
    parser.add_argument("--output", action="store_true", help="the next token, over the whole vocabulary")
    parser.add_argument(
        "--spans", type=int, nargs="*", default=[], help="so many dense directions, 10 %% of the norm"
    )
    parser.add_argument("--attack", action="store_true", help="10⁴ points, and ten times the paper's budget")
    parser.add_argument("--time", help="time that a question may take, as in 10m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument(
        "--chart", type=Path, help="draw seconds and pieces by layer from the rows in -o, and end"
    )
    given = parser.parse_args()
    if given.chart is not None:
        given.chart.write_text(chart(told(given.out)).svg(alone=True), encoding="utf-8")
        return
    model = pl.load(given.model).to(given.device)
    regions: dict[str, Place] = (
        {}
        if given.hulls or given.five or given.spans or given.examples
        else {name: pl.Segment(TEXT, PAIRS[name]) for name in given.pairs if name in PAIRS}
    )
    regions |= {name: pl.Hull([TEXT, *HULLS[name]]) for name in given.hulls}
    start: Prompt | str = TEXT
    if given.examples:
        assert model.examples is not None
        prompts = [model.example(i) for i in range(len(model.examples))]
        start, regions["all examples"] = prompts[0], pl.Hull(prompts)
    if given.five:
        regions["five prompts"] = pl.Hull([TEXT, *FIVE])
    for k in given.spans:
        regions[f"{k} dense directions"] = span(model, k)
    if given.output:
        regions = {name: pl.Segment(TEXT, text) for name, text in NEXT.items()}
    for layer in [model.architecture.n_layers] if given.output else given.layers:
        for name, region in regions.items():
            tell(given, model, start, name, region, layer)


def chart(rows: Sequence[Line]) -> Drawing:
    """Seconds and pieces against the layer: ways (one factor) in four panels, then the hull of three (two factors)."""
    panels = []
    for name in (*PAIRS, *HULLS):
        seen: dict[int, dict[str, float]] = {}
        for row in rows:
            if (
                row.get("region") == name
                and "pieces" in row
                and "crossed" not in row
                and row.get("device") == "cuda"
            ):
                numbers = {"seconds": row["seconds"], "pieces": row["pieces"]}
                seen[int(str(row["layer"]))] = {key: float(str(value)) for key, value in numbers.items()}
        if seen:
            panels.append(Panel(f"layer, {name}", sorted(seen.items())))
    return curves(
        "Seconds and pieces by layer, SmolLM2, H200",
        panels,
        {"seconds": "proved-line", "pieces": "attack-line"},
    )


def span(model: Transformer, k: int) -> pl.Span:
    """Random directions at the last token but one, each a tenth of its length."""
    x = model.prompt(TEXT).x
    generator = torch.Generator().manual_seed(k)
    ways = [torch.randn(x.shape[1], generator=generator, dtype=torch.float64) for _ in range(k)]
    far = 0.1 * float(x[-2].norm())
    return pl.Span(TEXT, [pl.direction(x.cpu(), -2, way / way.norm()) for way in ways], far)


def tell(
    given: argparse.Namespace, model: Transformer, start: Prompt | str, name: str, region: Place, layer: int
) -> None:
    """Ask one question and write a line."""
    if given.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    row = {"model": given.model, "region": name, "layer": layer, "device": given.device}
    if given.output:
        found = pl.output(model, start, region)
        row |= {"verdict": str(found.whole.verdict), "answer": found.whole.text}
    else:
        results = pl.certify(model, start, region, layer=layer, positions=[-1], time=given.time)
        row |= {word: int(count) for word, count in results.counts.items()}
        covers = [outcome.bounds.cover for outcome in results.outcomes if outcome.bounds.cover is not None]
        row["pieces"] = max((len(cover.low) for cover in covers), default=0)
    row["seconds"] = round(time.perf_counter() - begin, 2)
    if given.device != "cpu":
        row["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if not given.output:
        row["true on points"] = truth(model, start, region, layer)
        if given.attack:
            row["crossed"] = crossed(results, model, start, region, layer)
    write(row, given.out)


if __name__ == "__main__":
    main()
