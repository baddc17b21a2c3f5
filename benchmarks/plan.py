"""Predicted against taken: seconds and GiB of the engines that plans predict, on pretrained models.

    OMP_NUM_THREADS=1 python benchmarks/plan.py -o benchmarks/measured/plan.jsonl

The speed of the machine is measured anew before every engine, since other work changes it. Questions about one prompt
and radius share a workspace, as `certify` does layer after layer: walks go on. One line per engine and question;
`ratio` is predicted over taken, in seconds of the processor for each thread, as on a machine without other work.
`--words` cuts the prompt of smollm2 so that `taylor` fits into the memory of a laptop.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from measuring import Meter, tell
from prooflens import Ball, load
from prooflens.engines import get_engine
from prooflens.engines.functionals import refusal
from prooflens.evaluation.memory_meter import resident
from prooflens.problem import Problem
from prooflens.verdicts.evidence import Evidence
from prooflens.verdicts.forecast import forecast
from prooflens.verdicts.machine import measure_again
from prooflens.verdicts.portfolio import prove
from prooflens.verdicts.question import ask
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import Stage

MARY = "When Mary and John went to the store, John gave a drink to"
CAT = "the cat sat on the mat"


@dataclass(frozen=True)
class Case:
    """A question and the engines that are asked."""

    model: str
    text: str
    layer: int
    eps: float
    engines: tuple[str, ...]
    positions: tuple[int, ...] | None = None


CASES = (
    Case("minilm", CAT, 0, 5e-4, ("layer0", "interval", "crown")),
    Case("minilm", CAT, 1, 5e-4, ("interval", "crown", "taylor")),
    Case("minilm", CAT, 2, 5e-4, ("interval", "taylor")),
    Case("smollm2", MARY, 0, 1e-4, ("layer0", "interval", "crown")),
    Case("smollm2", MARY, 1, 1e-4, ("interval", "crown", "taylor"), (-1,)),
)


def measure(
    case: Case, words: int | None, out: Path | None, held: dict[tuple[str, float], tuple[Problem, Settings]]
) -> None:
    """Predict, ask, and write both down, engine by engine; `held` has the problem and the workspace of each prompt."""
    model = load(case.model)
    text = " ".join(case.text.split()[:words]) if case.model == "smollm2" else case.text
    question = ask(model, text, Ball(case.eps), layer=case.layer, positions=case.positions)
    problem, settings = held.setdefault((case.model, case.eps), (question.problem, Settings()))
    model = problem.model
    functionals = [f for claim in question.claims for f in claim.functionals]
    for name in case.engines:
        speed = measure_again(model.device)
        expected = forecast(Stage(name), problem, question.claims, settings)
        line: dict[str, object] = {
            "model": case.model,
            "layer": case.layer,
            "eps": case.eps,
            "tokens": problem.n_tokens,
            "claims": len(question.claims),
            "engine": name,
            "multiplications_per_s": speed.multiplications,
            "predicted_s": expected.seconds,
            "predicted_gib": None if expected.memory is None else expected.memory / 2**30,
        }
        if reason := refusal(get_engine(name), problem, functionals):
            tell(line | {"refused": reason}, out)
            continue
        evidence = [Evidence.about(claim) for claim in question.claims]
        before = resident() / 2**30
        with Meter(model.device) as meter:
            start = time.process_time()
            prove(problem, evidence, get_engine(name), settings.options)
            cpu = (time.process_time() - start) / torch.get_num_threads()
        proved = sum(not item.open for item in evidence)
        ratio = None if expected.seconds is None else expected.seconds / cpu
        taken = {"taken_s": meter.seconds, "cpu_s": cpu, "ratio": ratio, "taken_gib": meter.gib - before}
        tell(line | taken | {"proved": proved}, out)


def main(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A file that gets the lines, too.")] = None,
    words: Annotated[int | None, typer.Option(help="Words of smollm2's prompt (default: all).")] = None,
    only: Annotated[str | None, typer.Option(help="One model (default: all).")] = None,
) -> None:
    """Ask every engine of every case."""
    tell({"threads": torch.get_num_threads(), "torch": torch.__version__}, out)
    held: dict[tuple[str, float], tuple[Problem, Settings]] = {}
    for case in CASES:
        if only in (None, case.model):
            measure(case, words, out, held)


if __name__ == "__main__":
    typer.run(main)
