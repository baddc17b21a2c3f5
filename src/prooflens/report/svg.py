"""A few strokes of SVG, and text that cannot do harm."""

from __future__ import annotations

import html
import json
import math
import unicodedata
from collections.abc import Mapping

STYLE = """
svg.figure{font-family:ui-sans-serif,system-ui,"Helvetica Neue",Arial,sans-serif;color:var(--ink)}
svg.figure text{fill:var(--ink);font-size:12px}
svg.figure .small{font-size:10.5px}
svg.figure .quiet{fill:var(--quiet)}
svg.figure .axis{stroke:var(--line);stroke-width:1;fill:none}
svg.figure .frame{stroke:var(--paper);stroke-width:1.5;fill:none}
svg.figure .holds{fill:var(--holds)} svg.figure .fails{fill:var(--fails)}
svg.figure .unknown{fill:var(--unknown)} svg.figure .estimated{fill:var(--estimated)}
svg.figure .proved-line{stroke:var(--holds);stroke-width:2.25;fill:none}
svg.figure .attack-line{stroke:var(--fails);stroke-width:2.25;stroke-dasharray:6 4;fill:none}
svg.figure .gap{fill:var(--gap)} svg.figure .zero{stroke:var(--ink);stroke-width:1;stroke-dasharray:2 3}
svg.figure .bar{stroke:#101418;stroke-width:3.5}
svg.figure .bar-back{stroke:#fff;stroke-width:7}
svg.figure .tick{stroke:#101418;stroke-width:1.25}
svg.figure .mark{fill:none;stroke-width:2.5;pointer-events:none}
svg.figure .off{display:none}
svg.figure .mark.holds{stroke:var(--holds);fill:none}
svg.figure .mark.fails{stroke:var(--fails);fill:none;stroke-dasharray:5 3}
svg.figure .mark.unknown{stroke:var(--unknown);fill:none;stroke-dasharray:1.5 3}
svg.figure .mark.estimated{stroke:var(--estimated);fill:none;stroke-dasharray:8 3}
svg.figure [data-mark].holds{stroke:#00785a} svg.figure [data-mark].fails{stroke:#b84700}
svg.figure [data-mark].unknown{stroke:#57606a} svg.figure [data-mark].estimated{stroke:#8e4a86}
svg.figure .weakest{fill:none;stroke:var(--ink);stroke-width:3}
svg.figure .edge{stroke:var(--line);stroke-width:1.25;fill:none}
svg.figure .hatch{fill:var(--hatch)}
svg.figure .onnode{fill:var(--paper);font-weight:600}
"""
"""How figures look; colours are variables that the page, or `PALETTE` in a file of its own, gives."""

PALETTE = (
    "--ink:#1b1f24;--quiet:#5b6470;--line:#c9ced6;--paper:#ffffff;--holds:#00785a;--fails:#b84700;"
    "--unknown:#6e7681;--estimated:#8e4a86;--gap:rgba(86,120,180,.18);--hatch:#eceef1"
)
"""The light palette: Okabe and Ito's bluish green and vermilion, darkened to a contrast of 4.5 on white."""

SCALE = ("#fde725", "#b5de2b", "#6ece58", "#35b779", "#1f9e89", "#26828e", "#31688e", "#3e4989", "#482878")
"""Viridis from small to large: ordered in lightness, so it survives colour blindness and a grey printer."""

HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="hatch"/><line x1="0" y1="0" x2="0" y2="6" class="axis"/></pattern>'
)


def visible(text: str) -> str:
    """A text with its control and direction marks written out, so that it cannot rearrange the page.

    Args:
        text: any text.
    """
    shown = []
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            shown.append(f"⟨U+{ord(character):04X}⟩")
        else:
            shown.append(character)
    return "".join(shown)


def escaped(text: object) -> str:
    """Any text as HTML.

    Args:
        text: what is written out as a text.
    """
    return html.escape(visible(str(text)), quote=True)


def as_json(value: object) -> str:
    """JSON that can stand inside a script element: no character ends it.

    Args:
        value: what JSON can hold.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def number(value: float | None, nothing: str = "–", figures: int = 3) -> str:
    """A few figures, as short as they can be written.

    Args:
        value: the number; None for none.
        nothing: what stands for none.
        figures: how many figures.
    """
    if value is None or math.isnan(value):
        return nothing
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0.0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.{figures}g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


class Drawing:
    """An SVG that is written down stroke by stroke."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[str] = []

    def add(self, tag: str, text: str | None = None, /, **attributes: object) -> None:
        """One element. `kind` is its class; underscores in names become hyphens; None is left out.

        Args:
            tag: the name of the element.
            text: what stands in it; None for nothing.
            attributes: its attributes by name.
        """
        self._parts.append(_element(tag, text, attributes))

    def open(self, **attributes: object) -> None:
        """Begin a group.

        Args:
            attributes: its attributes by name.
        """
        self._parts.append(_element("g", "", attributes).removesuffix("</g>"))

    def close(self) -> None:
        """End it."""
        self._parts.append("</g>")

    def text(
        self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle", **more: object
    ) -> None:
        """A line of text.

        Args:
            x: to the right.
            y: downwards, the line that the text stands on.
            text: the text.
            kind: its class.
            anchor: which end of it is at x: `start`, `middle` or `end`.
            more: more attributes by name.
        """
        self.add("text", text, x=round(x, 2), y=round(y, 2), kind=kind or None, text_anchor=anchor, **more)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, **more: object) -> None:
        """A straight line.

        Args:
            x1: where it begins, to the right.
            y1: where it begins, downwards.
            x2: where it ends, to the right.
            y2: where it ends, downwards.
            kind: its class.
            more: more attributes by name.
        """
        ends = {"x1": round(x1, 2), "y1": round(y1, 2), "x2": round(x2, 2), "y2": round(y2, 2)}
        self.add("line", None, kind=kind, **ends, **more)

    def rect(self, x: float, y: float, width: float, height: float, **more: object) -> None:
        """A rectangle.

        Args:
            x: its left side.
            y: its upper side.
            width: its width.
            height: its height.
            more: more attributes by name.
        """
        box = {"x": round(x, 2), "y": round(y, 2), "width": round(width, 2), "height": round(height, 2)}
        self.add("rect", None, **box, **more)

    def svg(self, alone: bool = False) -> str:
        """The element; `alone`, a file of its own with the light palette.

        Args:
            alone: whether it is a file of its own.
        """
        style = f"<style>svg.figure{{{PALETTE};background:#fff}}{STYLE}</style>" if alone else ""
        space = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
        return (
            f'<svg{space} class="figure" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
            f'height="{self.height:g}" role="group" aria-label="{escaped(self.label)}">'
            f"{style}<defs>{HATCH}</defs>{''.join(self._parts)}</svg>"
        )


def _element(tag: str, text: str | None, attributes: Mapping[str, object]) -> str:
    names = {"kind": "class"}
    given = "".join(
        f' {names.get(name, name.replace("_", "-"))}="{escaped(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}/>" if text is None else f"<{tag}{given}>{escaped(text)}</{tag}>"


def hit(tip: str, **place: object) -> dict[str, object]:
    """What makes an element answer to mouse and keyboard: a tip, and the rows that it filters the table to.

    Args:
        tip: what is told of the element.
        place: columns and the values that rows must have.
    """
    return {
        "tabindex": 0,
        "role": "button",
        "aria_label": tip,
        "data_tip": tip,
        "data_filter": json.dumps(place, ensure_ascii=False),
    }


def shade(value: float, low: float, high: float) -> str:
    """A colour of `SCALE` for a positive value on a logarithmic scale.

    Args:
        value: the value.
        low: the value of the lightest colour.
        high: the value of the darkest.
    """
    if high <= low:
        return SCALE[4]
    share = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return SCALE[round(max(0.0, min(1.0, share)) * (len(SCALE) - 1))]


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on a colour.

    Args:
        colour: the colour, as `#rrggbb`.
    """
    red, green, blue = (int(colour[i : i + 2], 16) / 255.0 for i in (1, 3, 5))
    return "#101418" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"
