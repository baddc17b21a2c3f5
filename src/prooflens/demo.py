"""`prooflens demo`: one head-by-head certificate on an embedded model, a witness, and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from prooflens.certify import Outcome, Verdict, settle
from prooflens.engines import Problem, get_engine
from prooflens.engines.attack import BUDGETS
from prooflens.models import Transformer, load
from prooflens.queries import parse_query
from prooflens.regions import Ball

MODEL = "toy-induction"
SAMPLE = 1
EPSILONS = (0.01, 0.02, 0.05, 0.1)
SHOWN = 0.05


@dataclass(frozen=True, eq=False)
class Demo:
    """What the demo found: outcomes per radius, and where the picture is."""

    model: Transformer
    outcomes: dict[float, list[Outcome]]
    picture: Path


def run_demo(folder: Path, seed: int = 0) -> Demo:
    """Ask of every layer-0 head and position whether its most attended token is the same on a whole ball."""
    model = load(MODEL)
    prompt = model.example(SAMPLE)
    outcomes = {}
    for eps in EPSILONS:
        problem = Problem(model, Ball(eps).around(prompt))
        claims = parse_query("top1").bind(problem.setting([0], tokens=prompt.tokens))
        outcomes[eps] = settle(problem, claims, get_engine("layer0"), BUDGETS["layer0"], seed)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "demo.svg"
    draw(model, outcomes, picture)
    return Demo(model, outcomes, picture)


def draw(model: Transformer, outcomes: dict[float, list[Outcome]], path: Path) -> None:
    """Clean attention of every head; a cell's frame says what is proved about its row's top token."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    pattern = model.pattern(model.example(SAMPLE).x, 0)
    heads = len(pattern)
    figure = Figure(figsize=(4.2 * heads, 4.9))
    FigureCanvasSVG(figure)
    frames = {
        Verdict.HOLDS: ("#1a7f37", "-"),
        Verdict.FAILS: ("#cf222e", "--"),
        Verdict.UNKNOWN: ("#9a6700", ":"),
    }
    for head in range(heads):
        axes = figure.add_subplot(1, heads, head + 1)
        axes.imshow(pattern[head].numpy(), cmap="Blues", vmin=0.0, vmax=1.0)
        axes.set_title(f"head 0.{head}")
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        for outcome in outcomes[SHOWN]:
            row = outcome.claim.rows[0]
            if row.head == head:
                top = int(torch.argmax(pattern[head, row.position]))
                colour, line = frames[outcome.verdict]
                corner = (top - 0.46, row.position - 0.46)
                axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, lw=2.5, ec=colour, ls=line))
                ink = "white" if float(pattern[head, row.position, top]) > 0.5 else "black"
                number = _radius(outcomes, row.head, row.position)
                axes.text(top, row.position, number, ha="center", va="center", fontsize=8, color=ink)
    figure.suptitle(
        f"{model.name}, sample {SAMPLE}: is the framed token attended most on the whole ball ε={SHOWN:g}?\n"
        "solid green: proved   dashed red: broken by a witness   dotted brown: unknown   number: largest ε proved",
        fontsize=9,
    )
    figure.subplots_adjust(top=0.84, bottom=0.1)
    figure.savefig(path, metadata={"Date": None})


def _radius(outcomes: dict[float, list[Outcome]], head: int, position: int) -> str:
    """The largest radius of the grid at which the row's claim was proved."""
    proved = [
        eps
        for eps, found in outcomes.items()
        for outcome in found
        if outcome.verdict is Verdict.HOLDS
        and (outcome.claim.rows[0].head, outcome.claim.rows[0].position) == (head, position)
    ]
    return f"{max(proved):g}" if proved else "–"
