"""The tables of docs/baselines.md: our baselines beside auto_LiRPA, and `compare` on small and pretrained models.

OMP_NUM_THREADS=1 python benchmarks/baselines.py [peer-tiny peer-d128 toy minilm smollm2] [--peers FOLDER]
    [--engine taylor] [--budget 5000/50/50]

The first two need the peer models, `minilm` and `smollm2` the pretrained ones. Every bound of a peer model is attacked,
also from an engine's corners; one that is left is an error. Seconds of the peers are CPU seconds of this process; those
of the others are as `prooflens compare` gives them.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from peer_models import peer_model
from prooflens import Ball, load
from prooflens.engines import forms_of, get_engine
from prooflens.engines.attack import Attack, AttackBudget
from prooflens.evaluation.compare import Comparison, compare
from prooflens.evaluation.memory_meter import MemoryMeter
from prooflens.problem import Problem
from prooflens.queries.attention import TopK
from prooflens.verdicts.question import ask
from prooflens.verdicts.settings import Settings, parse_budget
from texts import IOI, MOVIE

LIRPA = {
    ("peer-tiny", 0, 0.01): (".0228 [8], < 0.1 s", ".0226, 6 s"),
    ("peer-tiny", 0, 0.02): (".0475 [7], < 0.1 s", ".0466, 6 s"),
    ("peer-tiny", 0, 0.05): (".134 [4], < 0.1 s", ".128, 6 s"),
    ("peer-tiny", 1, 0.01): (".0529 [8], 0.5–0.9 s", ".0450 [8], 80–100 s"),
    ("peer-tiny", 1, 0.02): (".143 [6], 0.5–0.9 s", ".102 [7], 80–100 s"),
    ("peer-tiny", 1, 0.05): ("1.13 [0], 0.5–0.9 s", ".414 [0], 80–100 s"),
    ("peer-d128", 1, 0.002): (".0597 [15]", "–"),
    ("peer-d128", 1, 0.005): (".232 [11]", "–"),
    ("peer-d128", 1, 0.01): ("1.31 [0], 22 s, 1.0 GB", "–"),
}
"""auto_LiRPA 0.7.1, measured separately on 2 cores: CROWN, and α-CROWN (layer 0: 5 iterations, layer 1: 20)."""

PEERS = {
    "peer-tiny": ("crown", "alpha-crown", "zonotope", "cpz", "taylor"),
    "peer-d128": ("crown", "alpha-crown", "taylor"),
}


@dataclass(frozen=True)
class Asked:
    """One line of a comparison: what `prooflens compare` is given."""

    model: str
    layer: int
    eps: float
    engines: str
    text: str | None = None
    queries: tuple[str, ...] = ("top1",)
    positions: tuple[int, ...] | None = None
    budget: str | None = None

    @property
    def command(self) -> str:
        """The same on the command line."""
        parts = [
            f"prooflens compare {self.model} --layer {self.layer} --eps {self.eps:g} --engines {self.engines}"
        ]
        parts += [] if self.text is None else [f'--text "{self.text}"']
        parts += [f'--query "{query}"' for query in self.queries if self.queries != ("top1",)]
        parts += [] if self.positions is None else [f"--positions={','.join(map(str, self.positions))}"]
        parts += [] if self.budget is None else [f"--budget {self.budget}"]
        return " ".join(parts)

    def run(self) -> Comparison:
        model = load(self.model)
        prompt = model.example(0) if self.text is None else model.prompt(self.text)
        question = ask(
            model,
            prompt,
            Ball(self.eps),
            layer=self.layer,
            queries=list(self.queries),
            positions=None if self.positions is None else list(self.positions),
        )
        settings = Settings(budget=parse_budget(self.budget))
        return compare(question, self.engines.split(","), settings)


SMALL = "interval,crown,alpha-crown,zonotope,pz,cpz,jacobian,taylor,layer0"
MODELS = {
    "toy": [
        Asked("toy", layer, eps, SMALL, queries=("top1", "mass>=0.2"))
        for layer in (0, 1)
        for eps in (0.01, 0.02, 0.05)
    ],
    "minilm": [
        Asked(
            "minilm", 0, 0.005, "interval,layer0,crown,alpha-crown", MOVIE, positions=(0,), budget="128/2/16"
        ),
        Asked(
            "minilm", 0, 0.02, "interval,layer0,crown,alpha-crown", MOVIE, positions=(0,), budget="128/2/16"
        ),
        Asked("minilm", 1, 0.0003, "interval,crown", MOVIE, positions=(0,), budget="32/1/8"),
        Asked("minilm", 1, 0.001, "interval,crown", MOVIE, positions=(0,), budget="32/1/8"),
    ],
    "smollm2": [
        Asked("smollm2", 0, 0.0003, "interval,layer0,crown", IOI[0], positions=(-1,), budget="32/1/8"),
        Asked("smollm2", 0, 0.001, "interval,layer0,crown", IOI[0], positions=(-1,), budget="32/1/8"),
        Asked("smollm2", 0, 0.0042, "interval,layer0,crown", IOI[0], positions=(-1,), budget="32/1/8"),
    ],
}


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Markdown on stdout, line by line."""
    names = list(head)
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(map(_cell, row)) + " |", flush=True)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def peers(folder: Path, engines: list[str], budget: AttackBudget, name: str) -> None:
    """Mean width of all margins a_j − a_j* [top-1 queries certified], seconds, peak memory."""

    def line(layer: int, eps: float, others: tuple[str, str]) -> list[str]:
        model, x = peer_model(folder / name)
        problem = Problem(model, Ball(eps).around(x))
        claims = TopK(k=1).bind(problem.setting([layer]))
        forms = forms_of([f for claim in claims for f in claim.functionals])
        sizes = [len(claim.functionals) for claim in claims]
        cells, bounds = [], []
        for engine in engines or PEERS[name]:
            made = get_engine(engine)
            with MemoryMeter(model.device) as peak:
                start = time.process_time()
                found = made.bound_forms(problem, forms)
                seconds = time.process_time() - start
            held = sum(bool((part > 0).all()) for part in found.lower.split(sizes))
            width = float((found.upper - found.lower).mean())
            cells.append(f"{width:.4f} [{held}], {seconds:.2g} s, {peak.bytes / 1e9:.2f} GB")
            bounds.append(found)
        best = Attack(budget=budget, starts=bounds[-1]).bound_forms(problem, forms)
        if any(bool(((best.lower < b.lower) | (best.upper > b.upper)).any()) for b in bounds):
            raise AssertionError("a bound was proved and is left")
        left = sum(bool((part > 0).all()) for part in best.lower.split(sizes))
        attained = f"{float((best.upper - best.lower).mean()):.4f} [{left}]"
        return [name, str(layer), f"{eps}", attained, *others, *cells]

    head = [
        "model",
        "layer",
        "ε",
        "attack",
        "CROWN*",
        "α-CROWN*",
        *(f"`{engine}`" for engine in engines or PEERS[name]),
    ]
    table(head, (line(layer, eps, them) for (peer, layer, eps), them in LIRPA.items() if peer == name))


def models(name: str) -> None:
    """`compare`, one table per question."""
    for asked in MODELS[name]:
        print(f"\n    {asked.command}\n", flush=True)
        found = asked.run()
        kept = [column for column in found.columns if column not in ("gap", "tightest", "reason")]
        names = [column.replace("holds: ", "holds, ") for column in kept]
        rows = []
        for row in found.rows:
            cells = [_share(column, row[column]) for column in kept]
            rows.append(cells if row["ms"] is not None else [*cells[:-1], row["reason"]])
        table(names, rows)


def _share(column: str, value: object) -> object:
    """Rates in per cent, times in seconds are easier to read."""
    return f"{100 * value:.1f} %" if column.startswith("holds: ") and isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PEERS, *MODELS])
    parser.add_argument("--peers", type=Path, default=Path("..") / "shared" / "models")
    parser.add_argument("--engine", action="append", default=[], help="only these engines on the peer models")
    parser.add_argument(
        "--budget", default="1000/2/50", help="of the attack on peer models: samples/restarts/steps"
    )
    chosen = parser.parse_args()
    budget = parse_budget(chosen.budget)
    assert budget is not None
    makers: dict[str, Callable[[], None]] = {
        name: partial(peers, chosen.peers, chosen.engine, budget, name) for name in PEERS
    }
    makers |= {name: partial(models, name) for name in MODELS}
    torch.manual_seed(0)
    for name in chosen.parts or makers:
        print(f"\n## {name}\n")
        makers[name]()


if __name__ == "__main__":
    main()
