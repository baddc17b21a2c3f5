"""Effects over a family of prompts as one page: a bar for every edit, counts, and the prompts at both ends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from prooflens.certificate.store import read_run
from prooflens.errors import RunError
from prooflens.report.data import DAMAGE, Row
from prooflens.report.effects import EffectBar, EffectChart, draw_effects
from prooflens.report.folders import FAMILY_EFFECTS, label_of
from prooflens.report.page import document, footer, header, panels, section, table
from prooflens.report.source import with_badges
from prooflens.report.svg import escaped
from prooflens.report.written import slug, write_drawings, write_page
from prooflens.results.families import ENUMERATED
from prooflens.results.outcome import Verdict

COLUMNS = (
    "edited", "word", "asked", "members", "least", "mean", "most", "necessary", "faithful", "same", "patched",
    "least_text", "most_text", "checked",
)  # fmt: skip
CAPTION = (
    "One row per edit: the least, the mean and the largest effect on the members that were run, in float64, and the "
    "prompts that have the least and the largest. <b>necessary</b>, <b>faithful</b>, <b>same</b> (answer) and "
    "<b>patched</b> count members. <b>enumerated</b>: every member was run; <b>estimated</b>: a sample was."
)


def report_family_effects(runs: list[Path], out: Path | str, figures: Path | None = None) -> list[Path]:
    """Write the page about effects over a family of prompts.

    Args:
        runs: run directories that `prooflens effect --template … -o` or `discover` wrote, about one model and family.
        out: the HTML file to write.
        figures: a folder for the pictures as files; None for none.

    Returns:
        The paths of the pictures.

    Raises:
        RunError: if the runs are about something else, or about different models or families.
    """
    infos, rows = [], []
    for path in runs:
        run = read_run(path)
        if run.info["kind"] != FAMILY_EFFECTS:
            raise RunError(f"{path} holds no effects over a family: give runs of one kind to a report")
        infos.append(run.info)
        try:
            rows += [_row(path, run.info, row) for row in with_badges(run.rows, path).to_pylist()]
        except DAMAGE as error:
            raise RunError(f"{path} is damaged: {error}") from error
    first = infos[0]
    for info, path in zip(infos, runs, strict=True):
        if (info["model"]["sha256"], info["family"]) != (first["model"]["sha256"], first["family"]):
            raise RunError(f"a report is about one model and family: {path} has others than {runs[0]}")
    charts = _charts(first, rows)
    write_page(Path(out), _render(first, infos, rows, charts))
    if figures is None:
        return []
    return write_drawings(((f"effects-{slug(one.metric)}", draw_effects(one)) for one in charts), figures)


def _row(path: Path, info: dict[str, Any], row: Row) -> Row:
    """A row with its claims and their verdicts, and a label."""
    label = label_of(path, row["edited"].removeprefix(info["model"]["name"]).strip())
    whole = Verdict.HOLDS if row["word"] == ENUMERATED else Verdict.ESTIMATED
    asked, claimed = row["asked"], info["claimed"]
    words = {
        "necessary": f"effect ≥ {claimed.get('necessary')}",
        "faithful": f"|effect| ≤ {claimed.get('faithful')}",
        "same": "same answer",
        "patched": "patched: the other prompt's side",
    }
    claims = tuple(
        (
            words[name],
            (whole if row[name] == asked else Verdict.FAILS).value,
            f"on {row[name]:,} of {asked:,}",
        )
        for name in words
        if row.get(name) is not None  # runs of older versions have no column of patches
    )
    return {"patched": None} | row | {"label": label, "claims": claims}


def _charts(info: dict[str, Any], rows: list[Row]) -> list[EffectChart]:
    found = []
    for metric, word in dict.fromkeys((row["metric"], row["word"]) for row in rows):
        bars = tuple(
            EffectBar(row["label"], row["edited"], row["least"], row["most"], row["mean"], row["claims"])
            for row in rows
            if (row["metric"], row["word"]) == (metric, word)
        )
        claimed = info["claimed"]
        within = claimed.get("faithful")
        marks = [claimed["necessary"]] if "necessary" in claimed else []
        marks += [] if within is None else [-within, within]
        found.append(EffectChart(metric, info["region"]["label"], bars, tuple(marks), word))
    return found


def _render(
    info: dict[str, Any], infos: list[dict[str, Any]], rows: list[Row], charts: list[EffectChart]
) -> str:
    """The HTML text."""
    model, members = info["model"], rows[0]["members"] if rows else None
    facts = {
        "model": escaped(model["name"]),
        "sha256 of its weights": f"<code>{escaped(model['sha256'])}</code>",
        "members": "more than 2⁶³" if members is None else f"{members:,}",
        "metric": escaped(", ".join(dict.fromkeys(chart.metric for chart in charts))),
    }
    told = dict.fromkeys((one.get("configuration") or {}).get("command") for one in infos)
    more = "".join(f'<pre class="command">{escaped(line)}</pre>' for line in told if line)
    counts = Counter(verdict for row in rows for _, verdict, _ in row["claims"])
    names, drawn = [chart.name for chart in charts], [draw_effects(chart) for chart in charts]
    body = section("effects", "What each edit changes", panels("metric", "effects", names, drawn))
    body += table("edits", "Edits", COLUMNS, rows, CAPTION)
    top = header(f"What edits of {model['name']} change", info["region"]["label"], counts, facts, more)
    return document(model["name"], f"{top}<main>{body}</main>{footer([])}")
