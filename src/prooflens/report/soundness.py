"""The dashboard of a soundness run: how many proved bounds were attacked, per family, engine and query."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prooflens.certificate.store import write_atomically
from prooflens.report.page import document, footer, header, table
from prooflens.report.svg import Drawing, as_json, escaped, ink_on, shade

LEFT, TOP, WIDE, HIGH = 130.0, 40.0, 92.0, 26.0

CAPTION = (
    "Proved bounds that an attack tried to cross. A bound is counted once per engine, functional and side; what was "
    "attained must lie inside all of them."
)


def tried_grid(found: Mapping[str, Any]) -> Drawing:
    """Engines down, families across: proved bounds attacked.

    Args:
        found: what a soundness run came to, as `to_dict` has it.
    """
    counts: dict[tuple[str, str], int] = {}
    for row in found["attacked"]:
        place = row["engine"], row["family"]
        counts[place] = counts.get(place, 0) + row["bounds"]
    engines, families = (sorted({place[i] for place in counts}) for i in (0, 1))
    made = Drawing(
        LEFT + WIDE * (len(families) + 1) + 10, TOP + HIGH * (len(engines) + 1) + 10, "bounds attacked"
    )
    for j, family in enumerate([*families, "all"]):
        made.text(LEFT + (j + 0.5) * WIDE, TOP - 10, family)
    for i, engine in enumerate([*engines, "all"]):
        y = TOP + i * HIGH
        made.text(LEFT - 10, y + 17, engine, "", "end")
        for j, family in enumerate([*families, "all"]):
            count = sum(n for (e, f), n in counts.items() if engine in (e, "all") and family in (f, "all"))
            inner = engine != "all" and family != "all" and count > 0
            fill = shade(count, 1.0, max(counts.values())) if inner else "none"
            ink = {"style": f"fill:{ink_on(fill)}"} if inner else {}
            made.rect(LEFT + j * WIDE, y, WIDE - 2, HIGH - 2, fill=fill)
            made.text(LEFT + (j + 0.5) * WIDE, y + 17, f"{count:,}", **ink)
    return made


def render_soundness(found: Mapping[str, Any], command: str) -> str:
    """The page of a run's `Report.to_dict()`.

    Args:
        found: what a soundness run came to, as `to_dict` has it.
        command: the command that ran it.
    """
    broken = found["violations"]
    facts = {
        "cases": escaped(", ".join(f"{count:,} {kind}" for kind, count in found["cases"].items())),
        "proved claims attacked": f"{found['claims_proved']:,}",
        "planted counterexamples": f"{sum(found['planted'].values()):,} asked, none may be certified",
        "seconds": f"{found['seconds']:.0f}",
    }
    counts = {"bounds attacked": found["bounds_attacked"], "broken": len(broken)}
    more = f'<p class="eyebrow">reproduce with</p><pre class="command">{escaped(command)}</pre>'
    body = f'<section id="grid"><h2>What was tried</h2><p class="caption">{CAPTION}</p>'
    body += f'<div class="scroll">{tried_grid(found).svg()}</div></section>'
    body += table("tried", "Per query", ("family", "engine", "query", "bounds"), found["attacked"])
    gaps = [{"engine": name, "gap": gap} for name, gap in sorted(found["tightest_relative_gap"].items())]
    caption = "The least slack of a bound over what was attained, relative to the range that was attained."
    body += table("gaps", "How near an attack came", ("engine", "gap"), gaps, caption)
    if broken:
        body += table("broken", "Violations", ("seed", "family", "engine", "what"), broken)
    top = header("Proved bounds under attack", command, counts, facts, more)
    return document("soundness", f"{top}<main>{body}</main>{footer([])}")


def write_soundness(found: Mapping[str, Any], folder: Path, command: str) -> None:
    """`soundness.json`, `soundness.html` and `soundness.svg` in a folder, each whole or not at all.

    Args:
        found: what a soundness run came to, as `to_dict` has it.
        folder: where the files go.
        command: the command that ran it.
    """
    texts = {
        "soundness.json": as_json({"command": command, **found}) + "\n",
        "soundness.html": render_soundness(found, command),
        "soundness.svg": tried_grid(found).svg(alone=True) + "\n",
    }
    for name, text in texts.items():
        write_atomically(folder / name, partial(_write, text))


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
