"""Labels of the paper that are no experiment of their own: what each method can do, and how hard its attacks try."""

from __future__ import annotations

from prooflens.engines.attack import BUDGETS
from prooflens.evaluation.studies.base import Sheet, StudyRow, StudySettings, study
from prooflens.evaluation.studies.measure import FULL, QUICK, StudyCase, rows_of
from prooflens.evaluation.studies.synthetic import inputs, trained

ENGINES = ("interval", "crown", "alpha-crown", "zonotope", "pz", "cpz", "jacobian")
PAPER_BUDGETS = {
    "synthetic": (500_000, 20, 50),
    "multilayer": (500_000, 20, 50),
    "bert-output": (2_000, 5, 30),
    "layer0": (5_000, 10, 50),
    "gpt2-layer1": (5_000, 10, 50),
    "next-token": (2_000, 10, 50),
    "pruning": (0, 20, 50),
}
"""Tab. `mc_budgets`: samples, restarts, steps."""


@study("capability_matrix", "What each formalism proves of an internal query at layer 1", "synthetic", "toy")
def capability_matrix(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `capability_matrix`, measured: the paper says which methods have internal queries; here all answer one."""
    model = trained("toy", settings)
    cases = [StudyCase.of(model, x, 0.02, {"Q1": "top1"}, 1) for x in inputs(model, settings.count(5, 1))]
    engines = {name: name for name in ENGINES}
    sheet.add(
        *rows_of("layer 1, ε = 0.02", cases, engines, QUICK if settings.quick else FULL, None, settings.seed)
    )


@study("mc_budgets", "Budgets of the attacks", "synthetic", "none")
def mc_budgets(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `mc_budgets`: the budgets are part of the package; `--budget NAME` uses one."""
    for name, paper in PAPER_BUDGETS.items():
        budget = BUDGETS[name]
        ours = (budget.samples, budget.restarts, budget.steps)
        for label, value, published in zip(("samples", "restarts", "steps"), ours, paper, strict=True):
            sheet.add(StudyRow(name, label, "number", paper=published, measured=value, n=1))
