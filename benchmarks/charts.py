"""Pictures of measured rows, drawn with the strokes of the reports.

python benchmarks/charts.py ROWS.jsonl PICTURE.svg [--key "e / τ"] [--title "…"]

A bar chart of what the proof leaves over by layer and site, from the last row of the file that has the key: a mapping
of value names to numbers, as `depth.py --sizes` writes it. `curves` is for `growth.py`.
"""

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prooflens.report.svg import SCALE, Drawing, number

SITES = {
    "hook_resid_mid": "attention",
    "ln1.hook_normalized": "first norm",
    "ln2.hook_normalized": "second norm",
    "hook_mlp_out": "network",
    "hook_resid_post": "residual sum",
    "hook_normalized_resid_post": "second norm",
}
"""What the value of each name comes from; other values are linear maps of these."""

COLOURS = {
    name: SCALE[place] for place, name in zip((7, 5, 4, 3, 1), dict.fromkeys(SITES.values()), strict=True)
}
LINE, LEFT, WIDTH = 17.0, 190.0, 760.0

Sites = Mapping[tuple[int, str], float]


def by_site(values: Mapping[str, float]) -> dict[tuple[int, str], float]:
    """Numbers of values by layer and site, in the order of the model."""
    found = {}
    for name, value in values.items():
        block, _, rest = name.removeprefix("blocks.").partition(".")
        if name.startswith("blocks.") and rest in SITES:
            found[int(block), SITES[rest]] = value
    return found


def bars(title: str, numbers: Sites) -> Drawing:
    """One bar per layer and site, grouped by layer; numbers that are not finite get an arrow."""
    layers = sorted({layer for layer, _ in numbers})
    top = 44.0
    height = top + LINE * len(numbers) + 8.0 * len(layers) + 26.0
    made = Drawing(WIDTH, height, title)
    made.text(10, 20, title, anchor="start")
    finite = [value for value in numbers.values() if math.isfinite(value)]
    most = max(finite, default=0.0) or 1.0
    y, before = top, None
    for (layer, site), value in numbers.items():
        if layer != before:
            y += 0.0 if before is None else 8.0
            made.text(12, y + 12, f"layer {layer}", "small quiet", "start")
            before = layer
        wide = (WIDTH - LEFT - 70.0) * (min(value / most, 1.0) if math.isfinite(value) else 1.0)
        made.text(LEFT - 8, y + 12, site, "small", "end")
        made.rect(LEFT, y + 2, max(wide, 0.5), LINE - 4, fill=COLOURS.get(site, SCALE[6]))
        shown = number(value) if math.isfinite(value) else "→ ∞"
        made.text(LEFT + wide + 5, y + 12, shown, "small", "start")
        y += LINE
    made.line(LEFT, top - 4, LEFT, y + 4, "axis")
    return made


@dataclass(frozen=True)
class Panel:
    """Points (x, {series: y}) of one axis of growth."""

    label: str
    points: Sequence[tuple[float, Mapping[str, float]]]


def curves(title: str, panels: Sequence[Panel], kinds: Mapping[str, str]) -> Drawing:
    """Panels side by side, all logarithmic with one scale of y; `kinds` gives the stroke of every series."""
    wide, high, left, top = 190.0, 190.0, 46.0, 66.0
    made = Drawing(left + (wide + 26.0) * len(panels) + 10.0, top + high + 56.0, title)
    made.text(10, 20, title, anchor="start")
    x = 12.0
    for name, kind in kinds.items():
        made.line(x, 38, x + 26, 38, kind)
        made.text(x + 32, 42, name, "small", "start")
        x += 60.0 + 6.5 * len(name)
    values = [y for panel in panels for _, there in panel.points for y in there.values() if y > 0]
    low, up = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (0, 1)
    up = max(up, low + 1)
    for k in range(low, up + 1):
        y = top + high * (up - k) / (up - low)
        made.text(left - 6, y + 4, number(10.0**k), "small quiet", "end")
        made.line(left, y, left + (wide + 26.0) * len(panels) - 26.0, y, "axis")
    for place, panel in enumerate(panels):
        _panel(made, panel, kinds, (left + (wide + 26.0) * place, top, wide, high), (low, up))
    return made


def _panel(
    made: Drawing,
    panel: Panel,
    kinds: Mapping[str, str],
    frame: tuple[float, float, float, float],
    decades: tuple[int, int],
) -> None:
    left, top, wide, high = frame
    low, up = decades
    xs = [x for x, _ in panel.points]
    first, last = math.log(min(xs)), math.log(max(xs))

    def across(x: float) -> float:
        share = 0.5 if first == last else (math.log(x) - first) / (last - first)
        return left + 12.0 + share * (wide - 24.0)

    def down(y: float) -> float:
        return top + high * (up - math.log10(y)) / (up - low)

    for x in xs:
        made.text(across(x), top + high + 18, number(x), "small quiet")
    made.text(left + wide / 2, top + high + 40, panel.label, "small")
    for name, kind in kinds.items():
        there = [(across(x), down(values[name])) for x, values in panel.points if values.get(name, 0.0) > 0]
        for (x1, y1), (x2, y2) in itertools.pairwise(there):
            made.line(x1, y1, x2, y2, kind)
        for x, y in there:
            made.add("circle", None, cx=round(x, 2), cy=round(y, 2), r=3, kind=kind)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--key", default="e / τ")
    parser.add_argument("--title", help="in place of one made from the row")
    options = parser.parse_args()
    held = [json.loads(text) for text in options.rows.read_text(encoding="utf-8").splitlines() if text]
    row = [row for row in held if options.key in row][-1]
    title = options.title or f"{row['model']}, ε = {row['eps']:g}: {options.key} by layer and site"
    options.picture.write_text(bars(title, by_site(row[options.key])).svg(alone=True), encoding="utf-8")


if __name__ == "__main__":
    main()
