"""The five pictures. Each says what is proved, what was broken, and leaves open what is open."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prooflens.report.attention import AttentionHead, telling_radius
from prooflens.report.data import CircuitGraph, MarginCurve, RadiusCell, TokenRadius
from prooflens.report.svg import SCALE, Drawing, hit, ink_on, number, shade, visible

BLUES = ("#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c")


def short(text: str, most: int = 10) -> str:
    """A token's text, cut where it would not fit.

    Args:
        text: the token's text.
        most: how many letters there is room for.
    """
    text = visible(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def radius_map(cells: Sequence[RadiusCell]) -> Drawing:
    """Layer × head: upper half the proved radius, lower half the attack's, hatched where there is none.

    Args:
        cells: the radii of every head.
    """
    layers = sorted({cell.layer for cell in cells})
    heads = range(max(cell.head for cell in cells) + 1)
    known = [r for c in cells for r in (c.certified, c.attack) if r is not None and 0.0 < r < math.inf]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    size = 74.0 if len(heads) <= 12 else 36.0
    left, top = 62.0, 34.0
    right = left + size * len(heads)
    drawing = Drawing(
        max(right + 20.0, 470.0), top + size * len(layers) + 74.0, "Radius map, layers by heads"
    )
    for head in heads:
        drawing.text(left + size * (head + 0.5), top - 10.0, f"{head}", "small quiet")
    drawing.text(left - 8.0, top - 10.0, "head", "small quiet", "end")
    for index, layer in enumerate(layers):
        drawing.text(left - 8.0, top + size * (index + 0.5) + 4.0, f"layer {layer}", "small quiet", "end")
    for cell in cells:
        x, y = left + size * cell.head, top + size * layers.index(cell.layer)
        tip = (
            f"head {cell.layer}.{cell.head}, {cell.query}: proved up to ε = {number(cell.certified, 'nothing')}, "
            f"broken from ε = {number(cell.attack, 'nothing broken')} (weakest of {cell.rows} rows)"
        )
        drawing.open(kind="hit", **hit(tip, layer=cell.layer, head=cell.head, query=cell.query))
        halves = (
            (cell.certified, f"M{x},{y}h{size}L{x},{y + size}z", (0.34, 0.34)),
            (cell.attack, f"M{x + size},{y}v{size}h{-size}z", (0.66, 0.76)),
        )
        for value, path, (across, down) in halves:
            there = value is not None
            colour = shade(min(value, high), low, high) if value is not None else "url(#hatch)"
            drawing.add("path", None, d=path, fill=colour)
            if size > 50.0:
                ink = ink_on(colour) if there else None
                style = f"fill:{ink}" if ink else None
                drawing.text(
                    x + size * across, y + size * down, number(value, figures=2), "small", style=style
                )
        drawing.add("path", None, kind="frame", d=f"M{x + size},{y}L{x},{y + size}")
        drawing.rect(x, y, size, size, kind="frame")
        drawing.close()
    _scale(drawing, left, top + size * len(layers) + 22.0, low, high)
    return drawing


def _scale(drawing: Drawing, x: float, y: float, low: float, high: float) -> None:
    """The legend of the radius map."""
    for i, colour in enumerate(SCALE):
        drawing.rect(x + 16.0 * i, y, 16.0, 10.0, fill=colour)
    drawing.text(x, y + 24.0, number(low), "small quiet", "start")
    drawing.text(x + 16.0 * len(SCALE), y + 24.0, f"ε = {number(high)}", "small quiet", "end")
    legend = x + 16.0 * len(SCALE) + 18.0
    drawing.add("path", None, d=f"M{legend},{y - 2}h14l-14,14z", fill=SCALE[3])
    drawing.text(legend + 18.0, y + 8.0, "proved", "small", "start")
    drawing.add("path", None, d=f"M{legend + 82},{y - 2}v14h-14z", fill=SCALE[6])
    drawing.text(legend + 88.0, y + 8.0, "broken from", "small", "start")
    drawing.rect(legend + 160.0, y - 2.0, 14.0, 14.0, fill="url(#hatch)")
    drawing.text(legend + 180.0, y + 8.0, "unknown", "small", "start")


def attention_map(head: AttentionHead, tokens: Sequence[str], eps: float | None = None) -> Drawing:
    """Rows are queries, columns keys; the fill is the clean weight, the bar in a cell its proved range from 0 to 1.

    Args:
        head: the head, with its rows.
        tokens: the tokens of the prompt.
        eps: the radius whose proved ranges are drawn; None for the clean pattern alone.
    """
    eps = telling_radius([head]) if eps is None else eps
    rows = [row for row in head.rows if row.eps == eps]
    size = 46.0 if len(tokens) <= 16 else 30.0
    left, top = 96.0, 88.0
    drawing = Drawing(
        max(left + size * len(tokens) + 24.0, 520.0),
        top + size * len(tokens) + 54.0,
        f"Attention of head {head.layer}.{head.head} with proved ranges at ε = {number(eps)}",
    )
    for i, token in enumerate(tokens):
        x = left + size * (i + 0.5)
        drawing.text(x, top - 8.0, short(token), "small", "start", transform=f"rotate(-45 {x:g} {top - 8:g})")
        drawing.text(left - 8.0, top + size * (i + 0.5) + 4.0, short(token, 13), "small", "end")
    drawing.rect(left, top, size * len(tokens), size * len(tokens), kind="axis")
    for row in rows:
        y = top + size * row.position
        for cell in row.cells:
            x = left + size * cell.key
            text = f"[{number(cell.low)}, {number(cell.high)}]" if cell.low is not None else "nothing proved"
            about = (
                f"head {head.layer}.{head.head}, query {row.position} “{short(tokens[row.position], 20)}” to key "
                f"{cell.key} “{short(tokens[cell.key], 20)}”: clean {number(cell.clean)}"
            )
            here = hit(
                f"{about}, proved {text} at ε = {number(eps)}",
                layer=head.layer,
                head=head.head,
                position=row.position,
            )
            inner, base = size - 8.0, y + size - 8.0
            place = {"data_cell": f"{row.position},{cell.key}", "data_about": about}
            drawing.open(kind="hit cell", data_from=x + 4.0, data_inner=inner, **place, **here)
            colour = BLUES[min(len(BLUES) - 1, int(cell.clean * len(BLUES)))]
            drawing.rect(x + 1.0, y + 1.0, size - 2.0, size - 2.0, fill=colour)
            low, high = cell.low or 0.0, cell.high or 0.0
            drawing.line(x + 3.0, base, x + size - 3.0, base, "bar-back")
            ends = (x + 4.0 + inner * low, x + 4.0 + inner * max(high, low + 0.02))
            drawing.line(ends[0], base, ends[1], base, "bar" if cell.low is not None else "bar off")
            middle = x + 4.0 + inner * cell.clean
            drawing.line(middle, base - 5.0, middle, base + 5.0, "tick")
            if size > 40.0:
                style = f"fill:{ink_on(colour)}"
                drawing.text(
                    x + size / 2, y + 18.0, f"{cell.clean:.2f}".lstrip("0") or "0", "small", style=style
                )
            drawing.close()
        x = left + size * row.top
        drawing.rect(
            x + 1.5, y + 1.5, size - 3.0, size - 3.0, kind=f"mark {row.verdict}", pointer_events="none"
        )
    base = top + size * len(tokens) + 26.0
    drawing.text(left, base, "frame of the most attended key:", "small quiet", "start")
    drawing.text(left, base + 16.0, f"proved ranges at ε = {number(eps)}", "small quiet at-eps", "start")
    for i, verdict in enumerate(("holds", "fails", "unknown")):
        drawing.rect(left + 190.0 + 78.0 * i, base - 10.0, 12.0, 12.0, kind=f"mark {verdict}")
        drawing.text(left + 208.0 + 78.0 * i, base, verdict, "small", "start")
    return drawing


def sandwich(curve: MarginCurve) -> Drawing:
    """The margin against ε: nothing lies below the proved line, the attack's points were attained, between is open.

    Args:
        curve: the bounds and what was attained, by radius.
    """
    layer, head, position, query = curve.key
    drawing = Drawing(560.0, 318.0, f"Margin of {layer}.{head}@{position}, {query}, against ε")
    left, right, top, bottom = 66.0, 540.0, 22.0, 246.0
    radii = [point[0] for point in curve.points]
    below = [(e, low) for e, low, _ in curve.points if low is not None]
    # The clean input is a point of every ball: where no attack got lower, its margin is what is attained.
    attained = [(e, curve.clean if reached is None else reached) for e, _, reached in curve.points]
    above = [(e, value) for e, value in attained if value is not None]
    values = [v for _, v in (*below, *above)] + ([curve.clean] if curve.clean is not None else []) + [0.0]
    least, most = min(values), max(values)
    span = (most - least) or 1.0
    least, most = least - 0.08 * span, most + 0.08 * span
    start, end = math.log(min(radii)), math.log(max(radii))

    def place(eps: float, value: float) -> tuple[float, float]:
        share = (math.log(eps) - start) / ((end - start) or 1.0)
        return left + share * (right - left), bottom - (value - least) / (most - least) * (bottom - top)

    drawing.add("path", None, kind="axis", d=f"M{left},{top}V{bottom}H{right}")
    _, zero = place(radii[0], 0.0)
    drawing.line(left, zero, right, zero, "zero")
    drawing.text(left - 8.0, zero + 4.0, "0", "small quiet", "end")
    for value in (least + 0.08 * span, most - 0.08 * span):
        _, y = place(radii[0], value)
        if abs(y - zero) > 14.0:
            drawing.text(left - 8.0, y + 4.0, number(value), "small quiet", "end")
    for eps in radii:
        drawing.text(place(eps, 0.0)[0], bottom + 18.0, number(eps), "small quiet")
    drawing.text((left + right) / 2, bottom + 38.0, "radius ε of the ball", "small")
    if below and above:
        outline = [place(e, v) for e, v in below] + [place(e, v) for e, v in reversed(above)]
        drawing.add("polygon", None, kind="gap", points=_points(outline))
    for points, kind, name in (
        (above, "attack-line", "attained by the attack"),
        (below, "proved-line", "proved"),
    ):
        if points:
            drawing.add("polyline", None, kind=kind, points=_points([place(*p) for p in points]))
        for eps, value in points:
            x, y = place(eps, value)
            tip = f"{layer}.{head}@{position} {query} at ε = {number(eps)}: {name} {number(value)}"
            here = hit(tip, layer=layer, head=head, position=position, query=query)
            side = "holds" if kind == "proved-line" else "fails"
            drawing.add("circle", None, kind=f"hit {side}", cx=round(x, 2), cy=round(y, 2), r=4.5, **here)
    if curve.clean is not None:
        drawing.text(right, top - 6.0, f"clean margin {number(curve.clean)}", "small quiet", "end")
    drawing.line(left, bottom + 60.0, left + 26.0, bottom + 60.0, "proved-line")
    drawing.text(left + 32.0, bottom + 64.0, "proved lower bound", "small", "start")
    drawing.line(left + 170.0, bottom + 60.0, left + 196.0, bottom + 60.0, "attack-line")
    drawing.text(left + 202.0, bottom + 64.0, "attained by a point of the ball", "small", "start")
    drawing.rect(left + 392.0, bottom + 53.0, 26.0, 13.0, kind="gap")
    drawing.text(left + 424.0, bottom + 64.0, "open", "small", "start")
    return drawing


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in places)


def circuit_graph(graph: CircuitGraph) -> Drawing:
    """Parts by layer from left to right, coloured by verdict; the weakest link has a ring; last the circuit.

    Args:
        graph: the parts and the circuit, with their verdicts.
    """
    layers = sorted({part.layer for part in graph.parts})
    columns = {layer: [i for i, part in enumerate(graph.parts) if part.layer == layer] for layer in layers}
    tallest = max((len(found) for found in columns.values()), default=1)
    width, height = 130.0 * (len(layers) + 1) + 60.0, max(170.0, 86.0 * tallest + 70.0)
    drawing = Drawing(max(width, 420.0), height, f"Circuit {visible(graph.name)}")
    places: dict[int, tuple[float, float]] = {}
    for index, layer in enumerate(layers):
        for j, i in enumerate(columns[layer]):
            places[i] = (70.0 + 130.0 * index, (height - 40.0) * (j + 0.5) / len(columns[layer]) + 20.0)
        drawing.text(70.0 + 130.0 * index, 16.0, f"layer {layer}", "small quiet")
    end = (70.0 + 130.0 * len(layers), (height - 40.0) / 2 + 20.0)
    for index, layer in enumerate(layers):
        following = [end] if index + 1 == len(layers) else [places[i] for i in columns[layers[index + 1]]]
        for i in columns[layer]:
            for target in following:
                (x1, y1), (x2, y2) = places[i], target
                bend = (x1 + x2) / 2
                drawing.add("path", None, kind="edge", d=f"M{x1},{y1}C{bend},{y1} {bend},{y2} {x2},{y2}")
    for i, part in enumerate(graph.parts):
        x, y = places[i]
        weak = ", the weakest link" if i == graph.weakest else ""
        tip = (
            f"{part.layer}.{part.head}@{part.position} {part.query}: {part.verdict}{weak}; "
            f"proved ≥ {number(part.lower)}, clean {number(part.clean)}"
        )
        here = hit(tip, layer=part.layer, head=part.head, position=part.position, query=part.query)
        drawing.open(kind="hit node", **here)
        if i == graph.weakest:
            drawing.add("circle", None, kind="weakest", cx=x, cy=y, r=28)
        drawing.add("circle", None, kind=part.verdict, cx=x, cy=y, r=22)
        drawing.text(x, y + 4.0, f"{part.layer}.{part.head}", "onnode")
        drawing.text(x, y + 42.0, short(f"{part.query}@{part.position}", 18), "small")
        drawing.close()
    drawing.open(kind="hit node", **hit(f"the circuit: {graph.verdict}", circuit=True))
    drawing.rect(end[0] - 36.0, end[1] - 20.0, 72.0, 40.0, rx=8, kind=graph.verdict)
    drawing.text(end[0], end[1] + 4.0, graph.verdict, "onnode")
    drawing.close()
    drawing.text(end[0], end[1] + 36.0, "the circuit", "small")
    drawing.text(20.0, height - 8.0, "ring: the weakest link", "small quiet", "start")
    return drawing


def token_strip(strip: Sequence[TokenRadius]) -> Drawing:
    """Per token: the radius proved when it moves alone, where the attack breaks it, the nearest other token beneath.

    Args:
        strip: the radii of every token.
    """
    width, left, top, bottom = 64.0, 74.0, 16.0, 186.0
    drawing = Drawing(max(left + width * len(strip) + 20.0, 420.0), 300.0, "Radius per token")
    known = [
        v
        for t in strip
        for v in (t.certified, t.attack, t.nearest)
        if v is not None and v > 0.0 and math.isfinite(v)
    ]
    low, high = (min(known) / 2.0, max(known) * 1.5) if known else (0.1, 1.0)

    def level(value: float) -> float:
        share = (math.log(min(value, high)) - math.log(low)) / (math.log(high) - math.log(low))
        return bottom - share * (bottom - top)

    drawing.add("path", None, kind="axis", d=f"M{left},{top}V{bottom}H{left + width * len(strip)}")
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        drawing.text(left - 8.0, level(10.0**power) + 4.0, number(10.0**power), "small quiet", "end")
        drawing.line(left - 4.0, level(10.0**power), left, level(10.0**power), "axis")
    drawing.text(left - 8.0, top - 2.0, "ε", "small quiet", "end")
    for i, token in enumerate(strip):
        x = left + width * (i + 0.5)
        near = (
            f"; nearest other token “{short(token.neighbour, 20)}” at {number(token.nearest)}"
            if token.neighbour
            else ""
        )
        tip = (
            f"token {i} “{short(token.token, 20)}” alone: proved up to ε = {number(token.certified, 'nothing')}, "
            f"broken from ε = {number(token.attack, 'nothing broken')}{near}"
        )
        drawing.open(kind="hit", **hit(tip, token=i))
        drawing.rect(left + width * i + 2.0, top, width - 4.0, 292.0 - top, fill="transparent")
        if token.certified is not None:
            drawing.rect(
                x - 11.0, level(token.certified), 22.0, bottom - level(token.certified), kind="holds"
            )
            highest = max(token.certified, token.attack or 0.0)
            drawing.text(x, level(highest) - 7.0, number(token.certified), "small")
        else:
            drawing.rect(x - 11.0, bottom - 40.0, 22.0, 40.0, fill="url(#hatch)")
        if token.attack is not None:
            drawing.line(x - 17.0, level(token.attack), x + 17.0, level(token.attack), "attack-line")
        drawing.text(x, bottom + 18.0, short(token.token, 9))
        if token.nearest is not None:
            y = level(token.nearest)
            drawing.add(
                "path",
                None,
                d=f"M{x},{y - 6}l6,6l-6,6l-6,-6z",
                kind="mark unknown",
                style="stroke-dasharray:none",
            )
            drawing.text(x, bottom + 44.0, number(token.nearest), "small")
            drawing.text(x, bottom + 60.0, short(token.neighbour or "", 9), "small quiet")
        drawing.close()
    if any(token.nearest is not None for token in strip):
        drawing.text(left - 8.0, bottom + 44.0, "nearest", "small quiet", "end")
        drawing.text(left - 8.0, bottom + 60.0, "token", "small quiet", "end")
    drawing.rect(left, 272.0, 12.0, 12.0, kind="holds")
    drawing.text(left + 18.0, 282.0, "proved", "small", "start")
    drawing.line(left + 70.0, 278.0, left + 96.0, 278.0, "attack-line")
    drawing.text(left + 102.0, 282.0, "broken from", "small", "start")
    drawing.add(
        "path",
        None,
        d=f"M{left + 186},272l6,6l-6,6l-6,-6z",
        kind="mark unknown",
        style="stroke-dasharray:none",
    )
    drawing.text(left + 198.0, 282.0, "nearest other token", "small", "start")
    return drawing
