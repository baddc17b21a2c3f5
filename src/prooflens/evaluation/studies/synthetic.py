"""The paper's synthetic encoders: queries by method, layer and radius (its Tables in "Method Comparison").

Our encoders have the paper's shape and task but other weights, so rates compare in kind. τ of Q2 is 1.2/S, one of the
paper's two ratios over uniform attention; the paper does not say which τ and which evidence its S = 4 tables use.
"""

from __future__ import annotations

from collections.abc import Mapping

from prooflens.engines import Engine
from prooflens.evaluation.studies.base import Sheet, StudyRow, StudySettings, rounded, study
from prooflens.evaluation.studies.measure import (
    FULL,
    QUICK,
    Measured,
    Published,
    StudyCase,
    answered,
    attacked,
    rows_of,
)
from prooflens.models import Prompt, Transformer, load
from prooflens.models.cache import model_folder
from prooflens.models.load import TRAINED
from prooflens.models.train import train
from prooflens.queries.circuit import Circuit
from prooflens.queries.parse import parse_query

METHODS: Mapping[str, str | Engine] = {"CPZ": "cpz", "PZ": "pz", "CROWN": "crown", "IBP": "interval"}
"""The paper's methods and the engines that are them."""

LAYER0: Mapping[float, Published] = {
    0.01: {
        ("attack", "Q1"): 92.5,
        ("CPZ", "Q1"): 92.5,
        ("PZ", "Q1"): 90.0,
        ("CROWN", "Q1"): 90.0,
        ("IBP", "Q1"): 67.5,
        ("CPZ", "Q2"): 20.0,
        ("PZ", "Q2"): 20.0,
        ("CROWN", "Q2"): 17.5,
        ("IBP", "Q2"): 15.0,
        ("attack", "Q3"): 0.0068,
        ("CPZ", "Q3"): 0.0091,
        ("PZ", "Q3"): 0.0104,
        ("CROWN", "Q3"): 0.0105,
        ("IBP", "Q3"): 0.0200,
    },
    0.02: {
        ("attack", "Q1"): 85.0,
        ("CPZ", "Q1"): 85.0,
        ("PZ", "Q1"): 72.5,
        ("CROWN", "Q1"): 72.5,
        ("IBP", "Q1"): 57.5,
        ("CPZ", "Q2"): 17.5,
        ("PZ", "Q2"): 15.0,
        ("CROWN", "Q2"): 15.0,
        ("IBP", "Q2"): 12.5,
        ("attack", "Q3"): 0.0136,
        ("CPZ", "Q3"): 0.0185,
        ("PZ", "Q3"): 0.0209,
        ("CROWN", "Q3"): 0.0215,
        ("IBP", "Q3"): 0.0400,
    },
}
LAYER1: Mapping[float, Published] = {
    0.01: {
        ("attack", "Q1"): 87.5,
        ("CPZ", "Q1"): 85.0,
        ("PZ", "Q1"): 57.5,
        ("CROWN", "Q1"): 60.0,
        ("IBP", "Q1"): 0.0,
        ("CPZ", "Q2"): 5.0,
        ("PZ", "Q2"): 5.0,
        ("CROWN", "Q2"): 5.0,
        ("IBP", "Q2"): 0.0,
        ("attack", "Q3"): 0.0064,
        ("CPZ", "Q3"): 0.0113,
        ("PZ", "Q3"): 0.0174,
        ("CROWN", "Q3"): 0.0161,
        ("IBP", "Q3"): 1.3863,
    },
    0.02: {
        ("attack", "Q1"): 80.0,
        ("CPZ", "Q1"): 70.0,
        ("PZ", "Q1"): 35.0,
        ("CROWN", "Q1"): 37.5,
        ("IBP", "Q1"): 0.0,
        ("CPZ", "Q2"): 5.0,
        ("PZ", "Q2"): 2.5,
        ("CROWN", "Q2"): 2.5,
        ("IBP", "Q2"): 0.0,
        ("attack", "Q3"): 0.0130,
        ("CPZ", "Q3"): 0.0274,
        ("PZ", "Q3"): 0.0443,
        ("CROWN", "Q3"): 0.0425,
        ("IBP", "Q3"): 1.3863,
    },
}
STABILITY = {
    0.005: (95.0, 95.0, 87.5),
    0.010: (86.2, 86.2, 67.5),
    0.020: (68.8, 68.8, 33.8),
    0.030: (52.5, 52.5, 8.8),
    0.040: (37.5, 37.5, 3.8),
    0.050: (28.8, 28.8, 1.2),
}
"""Tab. `attention_stability`: MC+PGD, CPZ-margin, CROWN by ε."""

SCALES = {
    "toy": {0.01: (92.5, 92.5, 67.5), 0.02: (85.0, 85.0, 57.5), 0.05: (60.0, 60.0, 12.5)},
    "toy-d16": {0.01: (95.0, 95.0, 60.0), 0.02: (82.5, 82.5, 32.5), 0.05: (57.5, 57.5, 5.0)},
    "toy-d32": {0.01: (81.2, 81.2, 45.0), 0.02: (73.8, 73.8, 20.0), 0.05: (46.2, 45.0, 0.0)},
    "toy-d64": {0.01: (81.2, 81.2, 25.0), 0.02: (68.8, 68.8, 1.2), 0.05: (30.0, 30.0, 0.0)},
}
"""Tab. `queries_scale`: MC+PGD, CPZ-margin, CROWN/IBP by model and ε."""

EXTENDED = {
    ("toy-induction", 0.01): {"ranking": (92.5, 85.8, 79.2), "circuit": (85.0, 71.7, 58.3)},
    ("toy-induction", 0.05): {"ranking": (71.7, 63.3, 44.2), "circuit": (48.3, 35.0, 11.7)},
    ("toy-d16", 0.01): {"ranking": (91.2, 90.0, 57.5), "circuit": (82.5, 80.0, 32.5)},
    ("toy-d16", 0.05): {"ranking": (57.5, 41.2, 3.8), "circuit": (40.0, 15.0, 0.0)},
}
"""Tab. `extended_queries`: MC+PGD, CPZ, IBP."""

ENTROPY = {
    ("toy-induction", 0.01): (0.0183, 0.0237, 0.0472),
    ("toy-induction", 0.05): (0.0924, 0.1196, 0.2515),
    ("toy-d16", 0.01): (0.0052, 0.0097, 0.0342),
    ("toy-d16", 0.05): (0.0260, 0.0490, 0.1879),
}
"""Tab. `entropy_bounds`: MC+PGD, CPZ, CROWN/IBP."""

TIMING: Mapping[int, Mapping[str, tuple[float, float]]] = {
    0: {"attack": (2, 2), "cpz": (0.5, 0.5), "pz": (0.5, 0.5), "crown": (0.5, 0.5), "interval": (0.3, 0.3)},
    1: {"attack": (13, 9), "cpz": (237, 195), "pz": (237, 195), "crown": (6, 6), "interval": (2, 2)},
}
"""Tab. `timing`: seconds per sample by layer and method, at ε = 0.01 and 0.02."""


def trained(name: str, settings: StudySettings) -> Transformer:
    """A synthetic model; one that is not part of the package is trained once, into the cache."""
    if settings.model is not None:
        return settings.load(name)
    if name in TRAINED and not (model_folder(name) / "config.json").is_file():
        train(name, progress=settings.tell)
    return load(name)


def inputs(model: Transformer, count: int) -> list[Prompt]:
    """The first example inputs, none of them seen in training."""
    return [model.example(i) for i in range(min(count, 0 if model.examples is None else len(model.examples)))]


def queries_for(model: Transformer) -> dict[str, str]:
    """Q1, Q2, Q3 for a model's example inputs."""
    size = len(model.example(0))
    return {"Q1": "top1", "Q2": f"mass>={round(1.2 / size, 3)}", "Q3": "entropy"}


def by_method(settings: StudySettings, sheet: Sheet, layer: int, paper: Mapping[float, Published]) -> None:
    """Measure all methods on all queries of one layer of `toy`.

    Args:
        settings: how much is measured, and where.
        sheet: where rows are written.
        layer: the layer.
        paper: the paper's figures by radius.
    """
    model = trained("toy", settings)
    for eps, published in paper.items():
        cases = [
            StudyCase.of(model, prompt, eps, queries_for(model), layer)
            for prompt in inputs(model, settings.count(5, 2))
        ]
        budget = QUICK if settings.quick else FULL
        sheet.add(*rows_of(f"ε = {eps:g}", cases, METHODS, budget, published, settings.seed))


@study("layer0_all", "Three queries at layer 0, by method", "synthetic", "toy")
def layer0_all(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `layer0_all`: 5 samples, 40 queries per ε."""
    by_method(settings, sheet, 0, LAYER0)


@study("layer1_all", "Three queries at layer 1, by method", "synthetic", "toy")
def layer1_all(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `layer1_all`: the same through the whole of layer 0."""
    by_method(settings, sheet, 1, LAYER1)


@study(
    "attention_stability", "Top-1 stability at layer 0 of the d = 16 model against ε", "synthetic", "toy-d16"
)
def attention_stability(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `attention_stability`: 10 samples, 160 queries per ε."""
    model = trained("toy-d16", settings)
    engines = {"CPZ": "cpz", "layer0": "layer0", "CROWN": "crown"}
    for eps, (mc, cpz, crown) in list(STABILITY.items())[:: 3 if settings.quick else 1]:
        cases = [StudyCase.of(model, x, eps, {"Q1": "top1"}, 0) for x in inputs(model, settings.count(10, 2))]
        paper = {("attack", "Q1"): mc, ("CPZ", "Q1"): cpz, ("layer0", "Q1"): cpz, ("CROWN", "Q1"): crown}
        sheet.add(*rows_of(f"ε = {eps:g}", cases, engines, QUICK if settings.quick else FULL, paper))


@study("queries_scale", "Top-1 stability at layer 0 across widths", "synthetic", "toy … toy-d64")
def queries_scale(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `queries_scale`: 5 samples per cell, all heads."""
    engines = {"CPZ": "layer0", "CROWN": "crown", "IBP": "interval"}
    names = ["toy", "toy-d16"] if settings.quick else list(SCALES)
    for name in names:
        model = trained(name, settings)
        for eps, (mc, cpz, coarse) in SCALES[name].items():
            cases = [
                StudyCase.of(model, x, eps, {"Q1": "top1"}, 0) for x in inputs(model, settings.count(5, 2))
            ]
            paper = {
                ("attack", "Q1"): mc,
                ("CPZ", "Q1"): cpz,
                ("CROWN", "Q1"): coarse,
                ("IBP", "Q1"): coarse,
            }
            budget = QUICK if settings.quick else FULL
            sheet.add(
                *rows_of(f"d = {model.architecture.d_model}, ε = {eps:g}", cases, engines, budget, paper)
            )


@study(
    "extended_queries", "Ranking and cross-head circuits at layer 0", "synthetic", "toy-induction and toy-d16"
)
def extended_queries(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `extended_queries`. The paper's "ranking (top-1)" is top-1; the circuit is both heads at one position.

    `ranking 2` asks for more than the paper: that the two most attended tokens keep their order.
    """
    engines = {"CPZ": "cpz", "IBP": "interval"}
    for (name, eps), paper in EXTENDED.items():
        model = trained(name, settings)
        size = len(model.example(0))
        both = {
            f"circuit@{s}": Circuit((parse_query(f"0.0:top1@{s}"), parse_query(f"0.1:top1@{s}")))
            for s in range(size)
        }
        cases = [
            _joined(StudyCase.of(model, x, eps, {"ranking": "top1", "ranking 2": "rank2", **both}, 0))
            for x in inputs(model, settings.count(10, 2))
        ]
        published = {
            (method, query): values[place]
            for query, values in paper.items()
            for place, method in enumerate(("attack", "CPZ", "IBP"))
        }
        budget = QUICK if settings.quick else FULL
        sheet.add(*rows_of(f"{name}, ε = {eps:g}", cases, engines, budget, published))


def _joined(case: StudyCase) -> StudyCase:
    """The circuits of all positions as one query."""
    kept = {name: claims for name, claims in case.claims.items() if not name.startswith("circuit@")}
    circuits = [
        claim for name, claims in case.claims.items() if name.startswith("circuit@") for claim in claims
    ]
    return StudyCase(case.problem, {**kept, "circuit": circuits})


@study("entropy_bounds", "Width of the entropy range at layer 0", "synthetic", "toy-induction and toy-d16")
def entropy_bounds(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `entropy_bounds`: 10 samples."""
    engines = {"CPZ": "cpz", "CROWN": "crown", "IBP": "interval"}
    for (name, eps), (mc, cpz, coarse) in ENTROPY.items():
        model = trained(name, settings)
        cases = [
            StudyCase.of(model, x, eps, {"Q3": "entropy"}, 0) for x in inputs(model, settings.count(10, 2))
        ]
        paper = {("attack", "Q3"): mc, ("CPZ", "Q3"): cpz, ("CROWN", "Q3"): coarse, ("IBP", "Q3"): coarse}
        budget = QUICK if settings.quick else FULL
        sheet.add(*rows_of(f"{name}, ε = {eps:g}", cases, engines, budget, paper))


@study("timing", "Seconds per sample, all three queries", "synthetic", "toy")
def timing(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `timing`: wall-clock seconds for all heads, positions and queries of one input."""
    model = trained("toy", settings)
    for layer, methods in TIMING.items():
        for place, eps in enumerate((0.01, 0.02)):
            cases = [
                StudyCase.of(model, x, eps, queries_for(model), layer)
                for x in inputs(model, settings.count(5, 2))
            ]
            known: Measured | None = None
            for engine, published in methods.items():
                if engine == "attack":
                    continue
                tally = answered(engine, cases)
                known = known or tally
                sheet.add(_timed(f"layer {layer}, ε = {eps:g}", engine, tally, published[place]))
            left = attacked(cases, QUICK if settings.quick else FULL, settings.seed, known)
            row = _timed(f"layer {layer}, ε = {eps:g}", "attack", left, methods["attack"][place])
            sheet.add(row)


def _timed(group: str, engine: str, tally: Measured, paper: float) -> StudyRow:
    seconds = tally.seconds / max(1, tally.cases)
    return StudyRow(group, f"by {engine}", "s", engine, paper, measured=rounded(seconds), n=tally.cases)
