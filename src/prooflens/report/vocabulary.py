"""The positional profile of heads over all prompts: which key is attended most, on which share of them."""

from __future__ import annotations

from prooflens.report.svg import SCALE, Drawing, hit, ink_on
from prooflens.results.vocabulary import Profiles

CELL_WIDTH, CELL_HEIGHT = 62.0, 26.0


def draw_profiles(found: Profiles) -> Drawing:
    """Heads as rows, keys as columns, the proved share of prompts on which each is attended most.

    Args:
        found: what `profile` returned.
    """
    keys = sorted({key for profile in found for key in profile.keys})
    left, top = 64.0, 62.0
    width = left + CELL_WIDTH * len(keys) + 24.0
    height = top + CELL_HEIGHT * len(found) + 40.0
    drawing = Drawing(max(width, 560.0), max(height, 240.0), f"Profile of heads of {found.model}")
    kept = "all" if found.whole else f"{len(found[0].tokens):,}"
    drawing.text(
        left,
        20.0,
        f"{found.model}, layer 0, prompts of {found.length} tokens, {kept} query tokens",
        "",
        "start",
    )
    for column, key in enumerate(keys):
        name = "self" if key == found.position else f"{key - found.position:+d}".replace("-", "−")
        drawing.text(left + CELL_WIDTH * (column + 0.5), top - 8.0, name, "small quiet")
    for row, profile in enumerate(found):
        y = top + CELL_HEIGHT * row
        drawing.text(left - 8.0, y + 17.0, profile.head, "small", "end")
        for key, count in zip(profile.keys, profile.top, strict=True):
            x = left + CELL_WIDTH * keys.index(key)
            low, high = (float(share) for share in count.shares)
            colour = SCALE[round(low * (len(SCALE) - 1))]
            tip = (
                f"{profile.head} attends most to key {key} on {count.lower} to {count.upper} of {count.prompts} "
                f"prompts: {100 * low:.6f} to {100 * high:.6f} %"
            )
            drawing.open(kind="hit", **hit(tip))
            drawing.rect(x, y, CELL_WIDTH - 2.0, CELL_HEIGHT - 2.0, style=f"fill:{colour}")
            drawing.text(
                x + CELL_WIDTH / 2 - 1.0,
                y + 16.0,
                f"{100 * low:.2f} %",
                "small",
                style=f"fill:{ink_on(colour)}",
            )
            drawing.close()
    note = "share of prompts on which a key is attended most, alone; keys by distance to the query"
    drawing.text(left, top + CELL_HEIGHT * len(found) + 22.0, note, "small quiet", "start")
    return drawing
