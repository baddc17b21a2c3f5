"""Widths of what comes out of the synthetic encoders, and the generators on the way (the paper's App. B).

A width is the mean over tokens and coordinates of the last norm's output. The paper does not define its "average output
bound width"; its figures are about d times ours for intervals, so that they compare in kind only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prooflens.engines.polyzono import VARIANTS, PolyZono
from prooflens.engines.relaxations.interval_walk import value_boxes
from prooflens.evaluation.studies.base import Sheet, StudyRow, StudySettings, rounded, study
from prooflens.evaluation.studies.synthetic import inputs, trained
from prooflens.models import Prompt, Transformer
from prooflens.problem import Problem
from prooflens.regions import Ball

WIDTH = "width"
SAMPLED_POINTS = 20_000

MAIN = {
    "interval": (63.8, 72.1, 76.1, 76.5),
    "pz": (0.88, 7.6, 127.5, 2767.0),
    "cpz": (0.49, 2.9, 6.1, 8.9),
}
"""Tab. `main_app` at ε = 0.01, 0.02, 0.05, 0.1."""

ABLATION = {
    "interval": (63.7, 71.7, 76.2, 76.6),
    "pz": (1.10, 11.5, 196.7, 4481.0),
    "pz-norm": (1.10, 7.3, 7.7, 8.3),
    "pz-simplex": (0.70, 3.6, 32.2, 656.0),
    "cpz": (0.70, 4.5, 7.3, 7.6),
}
"""Tab. `ablation_app`: intervals, no constraint, the norm's, the simplex', both."""

STAGES: Mapping[str, tuple[str, tuple[int, float], tuple[int, float]]] = {
    "L0 input": ("blocks.0.hook_resid_pre", (0, 0.10), (0, 0.10)),
    "L0 attention": ("blocks.0.attn.hook_z", (8, 0.78), (8, 0.78)),
    "L0 norm 1": ("blocks.0.ln1.hook_normalized", (16, 0.37), (16, 0.37)),
    "L0 norm 2": ("blocks.0.hook_normalized_resid_post", (80, 0.29), (80, 0.29)),
    "L1 attention": ("blocks.1.attn.hook_z", (120, 6.64), (8, 2.92)),
    "L1 norm 1": ("blocks.1.ln1.hook_normalized", (113, 1.41), (96, 0.62)),
    "L1 norm 2": ("blocks.1.hook_normalized_resid_post", (31, 1.40), (105, 0.61)),
}
"""Tab. `gi_count_app`: the value, then G_I and width of PZ and of CPZ."""

SCALABILITY = {
    "toy": (2.0, 0.4),
    "toy-d16": (12.8, 0.7),
    "toy-d32": (9.5, 1.0),
    "toy-d64": (105.9, 1.8),
    "toy-d128": (233.0, 54.0),
}
"""Tab. `scalability`: width and seconds of CPZ at ε = 0.01."""

D128 = {0.01: (233.1, 1141.6), 0.02: (234.3, 1141.6), 0.05: (234.0, 1141.6), 0.1: (234.3, 1141.6)}
"""Tab. `d128_bounds`: CPZ and IBP."""

RADII = (0.01, 0.02, 0.05, 0.1)


def last_norm(model: Transformer) -> str:
    """The name of the value whose width is measured."""
    return f"blocks.{model.architecture.n_layers - 1}.hook_normalized_resid_post"


def output_width(
    engine: str, model: Transformer, prompts: Sequence[Prompt], eps: float
) -> tuple[float, float]:
    """Return the mean proved width of the last norm's output, and seconds per input.

    Args:
        engine: `interval`, or a polynomial zonotope.
        model: the model.
        prompts: the inputs.
        eps: the radius of the ball around each of them.
    """
    out, found, start = last_norm(model), [], time.perf_counter()
    for prompt in prompts:
        problem = Problem(model, Ball(eps).around(prompt))
        if engine == "interval":
            box = value_boxes(problem, [out])[out]
            found.append(float((box.upper - box.lower).mean()))
        else:
            found.append(PolyZono(engine, VARIANTS[engine]).walk(problem, [out]).stages[-1].width)
    return sum(found) / len(found), (time.perf_counter() - start) / len(found)


def sampled_width(model: Transformer, prompts: Sequence[Prompt], eps: float, seed: int = 0) -> float:
    """Return the mean span over sampled points: no bound can be narrower.

    Args:
        model: the model.
        prompts: the inputs.
        eps: the radius of the ball around each of them.
        seed: seed of the samples.
    """
    out, spans = last_norm(model), []
    for prompt in prompts:
        points = Ball(eps).around(prompt).sample(SAMPLED_POINTS, seed)[0]
        values = model.run(points, out)[out]
        spans.append(float((values.amax(0) - values.amin(0)).mean()))
    return sum(spans) / len(spans)


def _row(
    engine: str,
    model: Transformer,
    prompts: Sequence[Prompt],
    eps: float,
    paper: float | None,
    attained: float,
) -> StudyRow:
    width, seconds = output_width(engine, model, prompts, eps)
    return StudyRow(
        f"ε = {eps:g}",
        f"after 2 layers, {engine}",
        WIDTH,
        engine,
        paper,
        proved=width,
        attack=attained,
        n=len(prompts),
        seconds=seconds,
    )


def widths(
    settings: StudySettings, sheet: Sheet, published: Mapping[str, tuple[float, ...]], full: int
) -> None:
    """Measure every engine at every radius.

    Args:
        settings: how much is measured, and where.
        sheet: where rows are written.
        published: the paper's widths by method, one per radius.
        full: how many inputs are measured in full.
    """
    model = trained("toy", settings)
    prompts = inputs(model, settings.count(full, 1))
    for place, eps in enumerate(RADII):
        attained = sampled_width(model, prompts, eps, settings.seed)
        for engine, paper in published.items():
            sheet.add(_row(engine, model, prompts, eps, paper[place], attained))
    sheet.note("What the attack column shows is the mean span of 20,000 sampled points.")


@study("main_app", "Width after two layers: intervals, PZ, CPZ", "synthetic", "toy")
def main_app(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `main_app`: 5 samples."""
    widths(settings, sheet, MAIN, 5)
    for eps in RADII:
        found = {row.engine: row.proved for row in sheet.rows if row.group == f"ε = {eps:g}"}
        share = 1.0 - (found["cpz"] or 0.0) / (found["interval"] or 1.0)
        sheet.note(f"ε = {eps:g}: cpz is {100 * share:.1f} % narrower than interval.")


@study("ablation_app", "Width after two layers, constraint by constraint", "synthetic", "toy")
def ablation_app(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `ablation_app`: 3 samples."""
    widths(settings, sheet, ABLATION, 3)


@study("gi_count_app", "Generators and widths, stage by stage", "synthetic", "toy")
def gi_count_app(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `gi_count_app`: ε = 0.05, example 0. Our G_I is absorbed at every stage, so that it cannot pile up."""
    model = trained("toy", settings)
    problem = Problem(model, Ball(0.05).around(model.example(0)))
    for place, engine in enumerate(("pz", "cpz")):
        stages = {
            stage.name: stage for stage in PolyZono(engine, VARIANTS[engine]).walk(problem, ["output"]).stages
        }
        for label, (name, of_pz, of_cpz) in STAGES.items():
            stage, (count, width) = stages[name], (of_pz, of_cpz)[place]
            note = f"{stage.dependent} dependent and {stage.independent} independent generators; paper: G_I = {count}"
            sheet.add(StudyRow(engine, label, WIDTH, engine, width, proved=stage.width, n=1, note=note))


@study("scalability", "Width and time of CPZ across widths d", "synthetic", "toy … toy-d128")
def scalability(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `scalability`: ε = 0.01, 3 samples."""
    names, times = list(SCALABILITY)[: 3 if settings.quick else None], []
    for name in names:
        model = trained(name, settings)
        prompts = inputs(model, settings.count(1 if name == "toy-d128" else 3, 1))
        width, seconds = output_width("cpz", model, prompts, 0.01)
        coarse, _ = output_width("interval", model, prompts, 0.01)
        attained = sampled_width(model, prompts, 0.01, settings.seed)
        paper, time_paper = SCALABILITY[name]
        group = f"d = {model.architecture.d_model} ({model.n_parameters:,} parameters)"
        note = f"{100 * (1 - width / coarse):.1f} % narrower than interval"
        sheet.add(
            StudyRow(
                group,
                "width, cpz",
                WIDTH,
                "cpz",
                paper,
                proved=width,
                attack=attained,
                n=len(prompts),
                seconds=seconds,
                note=note,
            ),
        )
        times.append(
            StudyRow(
                "seconds by cpz", group, "s", "cpz", time_paper, measured=rounded(seconds), n=len(prompts)
            )
        )
        if width > 0.99 * coarse:
            sheet.note(
                f"{name}: cpz proves nothing that intervals do not: only the bound of the norm is left."
            )
    sheet.add(*times)


@study("d128_bounds", "Width after two layers of a wide encoder against ε", "synthetic", "toy-d128")
def d128_bounds(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `d128_bounds`. The paper's widths do not depend on ε: only the norm's own bound is left of them."""
    name = "toy-d32" if settings.quick else "toy-d128"
    model, sheet.model = trained(name, settings), name
    prompts = inputs(model, settings.count(1, 1))
    for eps, (cpz, interval) in settings.some([(1e-3, (None, None)), *D128.items()], 2):
        attained = sampled_width(model, prompts, eps, settings.seed)
        for engine, paper in (("cpz", cpz), ("interval", interval)):
            sheet.add(_row(engine, model, prompts, eps, paper, attained))
        fine, coarse = (row.proved or 0.0 for row in sheet.rows[-2:])
        if fine > 0.99 * coarse:
            sheet.note(
                f"ε = {eps:g}: cpz is no narrower than interval. Only the bound of the norm itself is left."
            )
    sheet.note(
        "The paper's widths (233.1 to 234.3, and 1141.6 by IBP) do not depend on ε either, from ε = 0.01 on: nothing "
        "of the input is left in them."
    )
