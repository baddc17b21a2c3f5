"""Other neighbourhoods than one ball: hulls of paraphrases, and how ε compares with the distance to another token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack import AttackBudget
from prooflens.evaluation.studies.base import Sheet, StudyRow, StudySettings, study
from prooflens.evaluation.studies.measure import StudyCase, bind, rows_of
from prooflens.evaluation.studies.prompts import paraphrase_sets
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.regions import Ball, Paraphrases, Region

BALL = 0.002
HULL = "hull of 5 paraphrases"
QUERIES = {"Q1": "top1", "Q2": "mass>=0.2", "Q3": "entropy"}
TRIES = AttackBudget(128, 2, 16)
PERCENTILES = (0.10, 0.25, 0.50, 0.75, 0.90)
DISTANCES = (0.072, 0.093, 0.106, 0.119, 0.134)
"""Tab. `emb_calibration`: P10 … P90 for BERT-tiny; the minimum is 0.030."""


@study("paraphrase", "A ball and the hull of five paraphrases, head by head", "probes", "minilm", "BERT-tiny")
def paraphrase(settings: StudySettings, sheet: Sheet) -> None:
    """Fig. `paraphrase`: layer 0, three sets of five paraphrases, pooled per head. Claims are about the sets' means."""
    model = settings.load("minilm")
    sets = paraphrase_sets(model, settings.count(3, 1))
    hulls = [Paraphrases(prompts).region() for prompts in sets]
    balls = [Ball(BALL).around(region.center) for region in hulls]
    spread = max(float(region.dense_generators().abs().sum(0).max()) for region in hulls)
    asked = (
        (f"ball, ε = {BALL:g}", balls, "layer0", QUERIES),
        (HULL, hulls, "exact", {"Q1": QUERIES["Q1"]}),
        (HULL, hulls, "crown", {name: query for name, query in QUERIES.items() if name != "Q1"}),
    )
    for name, regions, engine, queries in asked:
        for head in range(model.architecture.n_heads):
            cases = [_case(model, region, queries, head) for region in regions]
            labels = {query: f"{query} of 0.{head}" for query in queries}
            sheet.add(*rows_of(name, cases, {"CPZ": engine}, TRIES, None, settings.seed, None, labels))
    for query in QUERIES:
        for name in (f"ball, ε = {BALL:g}", HULL):
            values = [
                row.proved or 0.0 for row in sheet.rows if row.group == name and row.label.startswith(query)
            ]
            most = next(row.n for row in sheet.rows if row.label.startswith(query))
            unit = "nat" if query == "Q3" else f"of {most}"
            sheet.note(f"{query}, {name}: from {min(values):.3g} to {max(values):.3g} {unit} across heads.")
    sheet.note(
        f"The hull spreads up to {spread:.3g} in a coordinate, {spread / BALL:.0f} times the ball (paper: up to 3,500 "
        "times). It has five factors, so that branch and bound (`exact`) is affordable for Q1."
    )
    sheet.note(
        "Paper, BERT-tiny, hull: Q1 43–57 % and 0–57 %, Q2 71 % and 14–71 %, Q3 width 0.68 and 0.88–1.41 nat."
    )


def _case(model: Transformer, region: Region, queries: dict[str, str], head: int) -> StudyCase:
    problem = Problem(model, region)
    return StudyCase(problem, bind(problem, queries, 0, heads=f"0.{head}"))


def nearest(table: Float[Tensor, "V d"], chosen: Tensor, chunk: int = 64) -> Float[Tensor, " n"]:
    """The ℓ∞ distance of some rows to their nearest other row, in float32."""
    table = table.float()
    found = []
    for rows in chosen.split(chunk):
        distances = torch.cdist(table[rows], table, p=torch.inf)
        distances[torch.arange(len(rows)), rows] = torch.inf
        found.append(distances.amin(-1))
    return torch.cat(found)


@study(
    "emb_calibration",
    "Distance to the nearest other token, and ε as a share of it",
    "probes",
    "bert-tiny-sst2",
    "BERT-tiny",
)
def emb_calibration(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `emb_calibration`: nearest-neighbour ℓ∞ distances after the embedding, where balls are, and in the table."""
    names = [settings.model] if settings.model else settings.some(("bert-tiny-sst2", "minilm", "smollm2"), 2)
    for name in names:
        model = StudySettings(model=name, tell=settings.tell).load(name)
        size = int(model.architecture.d_vocab or 0)
        few = settings.count(size if name == "bert-tiny-sst2" else 2000, 300)
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(settings.seed))[:few]
        embedded = torch.cat([model.embed(ids[:, None])[:, 0] for ids in torch.arange(size).split(4096)])
        tables = {"after the embedding": embedded, "rows of the token matrix": model.weights["embed.tokens"]}
        if torch.equal(*tables.values()):
            tables.pop("rows of the token matrix")
        medians = []
        for what, table in tables.items():
            distances = nearest(table, chosen)
            _report(sheet, f"{name}, {what}", distances, bool(name == "bert-tiny-sst2"), len(chosen))
            smallest, median = float(distances.min()), float(distances.median())
            medians.append(median)
            sheet.note(
                f"{name}, {what}: ε = 0.001 … 0.002 is {_share(median)} of the median distance and "
                f"{_share(smallest)} of the smallest ({smallest:.3g}; {len(chosen)} of {size} tokens asked)."
            )
        if len(medians) == 2:
            sheet.note(
                f"{name}: balls lie after the embedding, where the median is {medians[0] / medians[1]:.1f} times that "
                "of the token matrix. The paper's distances are of token embeddings: if its balls lie where ours do, "
                "ε is a smaller share of a token swap than it says."
            )


def _share(distance: float) -> str:
    """ε as a share of a distance; no share of none, where two tokens have the same embedding."""
    if distance == 0.0:
        return "no share"
    return " … ".join(f"{100 * eps / distance:.2g} %" for eps in (0.001, 0.002))


def _report(sheet: Sheet, group: str, distances: Tensor, has_paper: bool, n: int) -> None:
    for share, paper in zip(PERCENTILES, DISTANCES, strict=True):
        value = float(distances.double().quantile(share))
        label = f"P{round(100 * share)}"
        sheet.add(StudyRow(group, label, "distance", paper=paper if has_paper else None, measured=value, n=n))
