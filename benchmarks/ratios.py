"""What sharing saves, as ratios of processor seconds that were taken in one run: they hold on any machine.

python benchmarks/ratios.py [--models toy-4layer minilm smollm2]

- **mass forms**: the forms that mass claims of layer 0 are made of in one call of `layer0`, over the same forms in
  calls of their own for margins, single scores and tangents. Near 1 where a form pays for the tokens it reads alone.
- **deeper layers**: layers one after another by `taylor` with one workspace, over a workspace for each.
- **prompts**: prompts in one call of `certify`, over a call for each.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

import prooflens as pl
from prooflens.engines import get_engine
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineOptions, Workspace
from prooflens.problem import Problem
from prooflens.queries import parse_query
from texts import MOVIE

REPEATS = 3
"""The least of so many runs counts: what else the machine does only adds."""


def seconds(work: Callable[[], object]) -> float:
    """The least processor seconds of some runs."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def mass_forms(name: str, eps: float) -> float:
    """All forms of mass claims at once, over the same by how many tokens they read."""
    model = pl.load(name)
    problem = Problem(model, pl.Ball(eps).around(model.prompt(MOVIE)))
    rows = [claim.rows[0] for claim in parse_query("top1").bind(problem.setting([0]))]
    keys, entries, size = range(problem.n_tokens), [], 0
    for row in rows:
        entries += [(size, row, key, 1.0 / len(keys)) for key in keys]
        for j, k in itertools.combinations(keys, 2):
            size += 1
            entries += [(size, row, j, 1.0), (size, row, k, -1.0)]
        for key in keys:
            size += 1
            entries.append((size, row, key, 1.0))
        size += 1
    forms = Forms.of(entries, size)
    widths = forms.tokens_read(problem.n_tokens).sum(-1)
    alike = [forms.select((widths == width).nonzero()[:, 0]) for width in widths.unique()]

    def bound(some: list[Forms]) -> None:
        for part in some:
            get_engine("layer0").bound_forms(problem, part)

    return seconds(lambda: bound([forms])) / seconds(lambda: bound(alike))


def deeper_layers(name: str, eps: float) -> float:
    """Layers 1, 2, … with one workspace, over a workspace for each."""
    model = pl.load(name)
    problem = Problem(model, pl.Ball(eps).around(model.example(0).x))
    asked = [
        Forms.of([(0, row, 0, 1.0), (0, row, 1, -1.0)], 1)
        for layer in range(1, model.architecture.n_layers)
        for row in [parse_query(f"{layer}.0:top1@-1").bind(problem.setting([layer]))[0].rows[0]]
    ]

    def bound(shared: bool) -> None:
        work = Workspace()
        for forms in asked:
            work = work if shared else Workspace()
            get_engine("taylor").bound_forms(problem, forms, EngineOptions(workspace=work))

    return seconds(lambda: bound(True)) / seconds(lambda: bound(False))


def prompts(name: str, eps: float) -> float:
    """Four prompts in one call, over a call for each."""
    model = pl.load(name)
    texts = [f"The {noun} sat on the mat" for noun in ("cat", "dog", "man", "son")]

    def alone() -> None:
        for text in texts:
            pl.certify(model, text, pl.Ball(eps), layer=0, positions=[-1])

    together = seconds(lambda: pl.certify(model, texts, pl.Ball(eps), layer=0, positions=[-1]))
    return together / seconds(alone)


RATIOS: dict[str, tuple[str, Callable[[str, float], float], float]] = {
    "mass forms": ("minilm", mass_forms, 2e-3),
    "deeper layers": ("toy-4layer", deeper_layers, 1e-3),
    "prompts": ("smollm2", prompts, 3e-4),
}
"""Names, models, what is measured, and ε."""


def measured(models: list[str] | None) -> list[dict[str, Any]]:
    """The rows of all ratios, or of those about some models."""
    return [
        {"ratio": name, "model": model, "value": measure(model, eps)}
        for name, (model, measure, eps) in RATIOS.items()
        if not models or model in models
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", help="only these")
    torch.set_num_threads(1)
    for row in measured(parser.parse_args().models):
        print(f"{row['ratio']} ({row['model']}): {row['value']:.2f}")


if __name__ == "__main__":
    main()
