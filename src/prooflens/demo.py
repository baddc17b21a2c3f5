"""`prooflens demo`: a certificate and its check, a witness, a radius map and a report, on an embedded model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from prooflens.checker import CheckReport, check
from prooflens.models import Transformer, load
from prooflens.regions import Ball
from prooflens.report import report
from prooflens.results import Radii, Results
from prooflens.verdicts.certify import certify
from prooflens.verdicts.circuit import circuit
from prooflens.verdicts.radius import radius

MODEL = "toy"
SAMPLE = 1
EPSILONS = (0.01, 0.02, 0.05, 0.1)
SHOWN = 0.05
CIRCUIT = "0.0:top1@-1 & 0.1:top1@-1 & 1.0:top1@-1 & 1.1:top1@-1"


@dataclass(frozen=True, eq=False)
class Demo:
    """What the demo found, and where it is."""

    model: Transformer
    results: dict[float, Results]
    radii: Radii
    checked: CheckReport
    run: Path
    page: Path


def run_demo(folder: Path, seed: int = 0) -> Demo:
    """Ask of every head and position of a two-layer model whether its most attended token stays so on whole balls."""
    model = load(MODEL)
    prompt = model.example(SAMPLE)
    results = {eps: certify(model, prompt, Ball(eps), seed=seed) for eps in EPSILONS}
    run = folder / "run"
    if run.exists():
        shutil.rmtree(run)
    results[SHOWN].save(run, command=f"prooflens certify {MODEL} --sample {SAMPLE} --eps {SHOWN:g}")
    checked = check(run, Path(__file__).parent / "models" / "embedded" / MODEL)
    checked.save(run)
    radii = radius(model, prompt, seed=seed)
    tokens = radius(model, prompt, layer=0, per_token=True, seed=seed)
    whole = circuit(model, prompt, Ball(SHOWN / 2), CIRCUIT, seed=seed)
    others = [found for eps, found in results.items() if eps != SHOWN]
    page = report(run, *others, radii, tokens, whole, path=folder / "report.html")
    return Demo(model, results, radii, checked, run, page)
