"""PGD steps per second on all top-1 margins of layer 0: all targets and restarts in one batch, beside one at a time.

python benchmarks/attack_speed.py [--model NAME]... [--restarts 10] [--steps 20] [--loop-steps 100] [--eps 0.01]

A step is one forward and one backward pass of one restart of one target. Models that are not at hand are left out; cuda
is used where there is one.
"""

import argparse
import time
from collections.abc import Callable

import torch

from prooflens import Ball, Transformer, load
from prooflens.engines import Forms
from prooflens.engines.attack.landscape import Landscape
from prooflens.engines.attack.search import AttackBudget, AttackSearch
from prooflens.engines.attack.targets import Targets
from prooflens.engines.protocol import Stopwatch
from prooflens.errors import ProoflensError
from prooflens.problem import Problem
from prooflens.queries import Row

TEXT = "The keys to the cabinet are on the table"


def margins(problem: Problem) -> Forms:
    """The clean winner of every row against each other key."""
    scores = problem.setting([0]).scores[0].masked_fill(~problem.mask, -torch.inf)
    entries: list[tuple[int, Row, int, float]] = []
    for head, rows in enumerate(scores.argmax(-1).tolist()):
        for i, winner in enumerate(rows):
            for j in problem.mask[i].nonzero()[:, 0].tolist():
                if j != winner:
                    number = len(entries) // 2
                    row = Row(0, head, i)
                    entries += [(number, row, winner, 1.0), (number, row, j, -1.0)]
    return Forms.of(entries, len(entries) // 2)


def batched(landscape: Landscape, targets: Targets, budget: AttackBudget) -> float:
    """Steps per second of the engine's own search."""
    AttackSearch(landscape, targets).run(AttackBudget(0, 1, 1), seed=0)
    watch = Stopwatch(landscape.region.center.device)
    AttackSearch(landscape, targets).run(budget, seed=0)
    return targets.size * budget.restarts * budget.steps / watch.seconds()


def looped(landscape: Landscape, targets: Targets, steps: int) -> float:
    """Steps per second of sign steps on one restart of one target after the other."""
    targets = targets.to(landscape.region.center)
    alpha = landscape.region.center.new_zeros(1, 1, landscape.region.n_factors)
    watch = Stopwatch(alpha.device)
    for number in range(steps):
        one = targets.select(torch.tensor([number % targets.size]))
        _, gradient = landscape.descent(one, alpha)
        alpha = (alpha - 0.5 * gradient.sign()).clamp(-1.0, 1.0)
    return steps / watch.seconds()


def problems(eps: float, names: list[str]) -> dict[str, Callable[[], Problem]]:
    """A ball around an example input, or around a text."""

    def of(model: Transformer) -> Problem:
        prompt = model.example(0) if model.tokenizer is None else model.prompt(TEXT)
        return Problem(model, Ball(eps).around(prompt))

    return {name: lambda name=name: of(load(name)) for name in names}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="default: toy and minilm")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loop-steps", type=int, default=100)
    parser.add_argument("--eps", type=float, default=0.01)
    options = parser.parse_args()
    budget = AttackBudget(0, options.restarts, options.steps)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print(f"PGD, {options.restarts} restarts, {options.steps} steps, {torch.get_num_threads()} threads")
    print(
        f"{'model':8} {'device':6} {'precision':9} {'targets':>7} {'batched/s':>12} {'looped/s':>10} {'ratio':>7}"
    )
    for name, make in problems(options.eps, options.model or ["toy", "minilm"]).items():
        try:
            original = make()
        except ProoflensError as error:
            print(f"{name:8} left out: {error}")
            continue
        targets = Targets.of_forms(margins(original), original.n_tokens)
        for device in devices:
            problem = Problem(original.model.to(device), original.region.to(device))
            for dtype in (torch.float64, torch.float32):
                landscape = Landscape.of(problem, (0,), False, problem.model.to(dtype=dtype))
                fast, slow = (
                    batched(landscape, targets, budget),
                    looped(landscape, targets, options.loop_steps),
                )
                kind = str(dtype).removeprefix("torch.")
                print(
                    f"{name:8} {device:6} {kind:9} {targets.size:7} {fast:12,.0f} {slow:10,.0f} {fast / slow:6.0f}x"
                )


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
