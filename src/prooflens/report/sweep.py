"""A whole sweep as one page: how far each head is proved over all prompts, at which rates, and the worst prompts.

Everything is counted by prompt. A head's proved radius on a prompt is that of its weakest row: of verdicts the largest
ε at which all of its rows hold, of searched radii the smallest certified one; what is proved on a ball is proved on
every smaller one, so at an ε the rate is the share of prompts whose proved radius is at least that. Prompts are the
trials of the Clopper–Pearson intervals: rows of one prompt depend on each other, prompts may not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from prooflens.errors import RunError
from prooflens.report.head_radii import HeadRadii, draw_radii
from prooflens.report.page import document, footer, header, panels, table
from prooflens.report.svg import Drawing, escaped
from prooflens.report.written import slug, write_drawings, write_page
from prooflens.statistics import clopper_pearson
from prooflens.sweep.drive import status
from prooflens.sweep.store import SweepStore

WORST = 200
"""How many prompts are listed."""

STEPS = (1.0, 3.0)
"""Rates of searched radii are given at these multiples of powers of ten."""

FROM_VERDICTS = """
with at_eps as (
    select model, prompt, layer, head, query, eps,
           bool_and(verdict = 'holds') as proved, bool_or(verdict = 'fails') as broken
    from rows group by all),
  heads as (
    select model, prompt, layer, head, query, coalesce(max(eps) filter (proved), 0.0) as proved,
           coalesce(min(eps) filter (broken), 'inf'::double) as broken
    from at_eps group by all)
"""
FROM_RADII = """
with heads as (
    select model, prompt, layer, head, query, min(coalesce(certified, 'inf'::double)) as proved,
           min(coalesce(attack, 'inf'::double)) as broken
    from rows group by all)
"""
RADII_BY_HEAD = """
select model, query, layer, head, count(*) as prompts, quantile_disc(proved, [0, 0.25, 0.5, 0.75, 1]) as proved,
       quantile_disc(broken, 0.5) as broken
from heads group by model, query, layer, head order by model, query, layer, head
"""
RATES = """
select model, layer, head, query, eps, count(*) as prompts, count(*) filter (proved >= eps) as proved,
       count(*) filter (broken <= eps) as broken
from heads, (select unnest({radii}::double[]) as eps) group by all order by model, query, layer, head, eps
"""
PROMPTS = """
select model, prompt, count(*) as heads, count(*) filter (proved = 0) as unproved, min(proved) as smallest,
       quantile_disc(proved, 0.5) as median, min(broken) as broken,
       first(coalesce(layer || '.' || head || ' ', '') || query order by proved, broken, layer, head, query) as weakest
from heads group by model, prompt order by unproved desc, median, smallest, broken, model, prompt limit {most}
"""

CAPTIONS = {
    "spread": "A line per head. Line: from the smallest to the largest radius that is <b>proved</b> over all prompts, "
    "each prompt with the head's weakest row; box: the middle half; stroke: the median. Circle: the median of the "
    "radii at which a point that breaks it was <b>found</b>. Left edge: nothing proved on that prompt. Right edge: "
    "proved for every ε, or nothing broken.",
    "rates": "Per head and ε, the share of prompts on which all rows of the head are <b>proved</b>, and on which one "
    "was <b>broken</b>, with 95 % Clopper–Pearson intervals. They speak about the texts that the prompts are an "
    "independent sample of; for prompts that were chosen, or filled into one template, read the shares alone.",
    "prompts": "Prompts by how many of their heads have no proved radius, then by the median radius of their heads.",
    "failed": "Tasks that failed: <code>prooflens resume</code> tries them again.",
}


@dataclass(frozen=True)
class SweepReport:
    """What the page of a sweep is made of."""

    name: str
    header: dict[str, Any]
    state: dict[str, Any]
    heads: tuple[HeadRadii, ...]
    rates: tuple[dict[str, Any], ...]
    prompts: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...]
    engines: tuple[str, ...]

    @classmethod
    def of(cls, path: Path | str) -> SweepReport:
        """Read a sweep; only aggregates are held.

        Args:
            path: the directory of the sweep.
        """
        store = SweepStore.open(Path(path))
        base = FROM_RADII if store.holds_radii else FROM_VERDICTS

        def ask(sql: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = store.query(sql).to_pylist()
            return found

        heads = [HeadRadii(**row) for row in ask(base + RADII_BY_HEAD)]
        if not heads:
            raise RunError(f"{path} has no rows yet: `prooflens resume {path}` does its tasks")
        grid = store.header["spec"]["regions"].get("eps") or _steps(heads)
        rates = [_with_intervals(row) for row in ask(base + RATES.format(radii=[*grid]))] if grid else []
        return cls(
            Path(path).name,
            store.header,
            status(store),
            tuple(heads),
            tuple(rates),
            tuple(_finite(row) for row in ask(base + PROMPTS.format(most=WORST))),
            tuple(_failure(record) for record in store.errors().values()),
            tuple(row["engine"] for row in ask("select distinct engine from rows order by engine")),
        )


def report_sweep(path: Path | str, out: Path | str, figures: Path | str | None = None) -> list[Path]:
    """Write the page of a sweep, and with `figures` its pictures; the pictures' paths come back.

    Args:
        path: the directory of the sweep.
        out: the file to write.
        figures: a folder for its pictures; None for none.
    """
    data = SweepReport.of(path)
    write_page(Path(out), render_sweep(data))
    named = ((f"spread-{slug(name)}", drawing) for name, drawing in pictures(data))
    return [] if figures is None else write_drawings(named, Path(figures))


def pictures(data: SweepReport) -> Iterator[tuple[str, Drawing]]:
    """A picture of each model and query, with its name.

    Args:
        data: what is known of the sweep.
    """
    for model, query in dict.fromkeys((head.model, head.query) for head in data.heads):
        chosen = [head for head in data.heads if (head.model, head.query) == (model, query)]
        yield f"{model}, {query}", draw_radii(chosen)


def render_sweep(data: SweepReport) -> str:
    """The HTML text.

    Args:
        data: what is known of the sweep.
    """
    spec, state = data.header["spec"], data.state
    many = len(spec["prompts"] or spec["samples"])
    tasks = f"{state['done']} of {state['tasks']} done, {state['failed']} failed"
    facts = {
        "models": "<br>".join(
            f"{escaped(name)} <code>{escaped(facts['sha256'][:16])}</code>"
            for name, facts in data.header["models"].items()
        ),
        "prompts": f"{many:,}",
        "queries": escaped(", ".join(spec["queries"])),
        "regions": escaped(_regions(spec["regions"])),
        "engines": escaped(", ".join(data.engines)),
        "tasks": tasks,
    }
    about = "values inside" if data.heads[0].layer is None else "attention"
    title = f"What is proved about {about} over {many:,} prompts"
    names, drawn = zip(*pictures(data), strict=True)
    body = _captioned("spread", "Radii per head", panels("model, query", "spread", names, drawn))
    rates = ("model", "layer", "head", "query", "eps", "prompts", "proved", "proved_low", "proved_high", "broken",
             "broken_low", "broken_high")  # fmt: skip
    worst = ("prompt", "model", "heads", "unproved", "median", "smallest", "broken", "weakest")
    if data.rates:
        body += table("rates", "Rates", rates, data.rates, CAPTIONS["rates"])
    body += table("prompts", "Worst prompts", worst, data.prompts, CAPTIONS["prompts"])
    if data.failed:
        body += table(
            "failed", "Failed tasks", ("prompt", "model", "layer", "error"), data.failed, CAPTIONS["failed"]
        )
    top = header(title, data.name, state["verdicts"], facts)
    notes = [] if state["done"] == state["tasks"] else [f"Not all tasks are in this page: {tasks}."]
    return document(data.name, f"{top}<main>{body}</main>{footer(notes)}")


def _captioned(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2><p class="caption">{CAPTIONS[name]}</p>{body}</section>'


def _regions(regions: dict[str, Any]) -> str:
    tokens = "" if regions["tokens"] is None else f" on tokens {', '.join(map(str, regions['tokens']))}"
    if regions["eps"]:
        return f"balls{tokens}, ε = {', '.join(f'{eps:g}' for eps in regions['eps'])}"
    low, high = regions["radius"]["between"]
    alone = " of one token at a time" * regions["radius"]["per_token"]
    return f"balls{tokens}{alone}, radii searched between {low:g} and {high:g}"


def _steps(heads: list[HeadRadii]) -> list[float]:
    """Round radii between the smallest and the largest that is proved."""
    known = [radius for head in heads for radius in head.proved if 0.0 < radius < math.inf]
    if not known:
        return []
    powers = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    return [step * 10.0**power for power in powers for step in STEPS]


def _with_intervals(row: dict[str, Any]) -> dict[str, Any]:
    found = dict(row)
    for name in ("proved", "broken"):
        found[name] = row[name] / row["prompts"]
        found[f"{name}_low"], found[f"{name}_high"] = _interval(row[name], row["prompts"])
    return found


_interval = lru_cache(maxsize=None)(clopper_pearson)
"""Few counts are asked for often."""


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in row.items()}


def _failure(record: dict[str, Any]) -> dict[str, Any]:
    task = record["task"]
    return {name: task[name] for name in ("model", "layer")} | {
        "prompt": str(task["prompt"]),
        "error": record["error"],
    }
