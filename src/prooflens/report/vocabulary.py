"""The positional profile of heads over all prompts: which key is attended most, on which share of them."""

from __future__ import annotations

from pathlib import Path

from prooflens.certificate.store import read_run
from prooflens.errors import RunError
from prooflens.report.data import DAMAGE
from prooflens.report.folders import VOCABULARY
from prooflens.report.page import document, footer, header, panels, section, table
from prooflens.report.source import with_badges
from prooflens.report.svg import SCALE, Drawing, escaped, hit, ink_on
from prooflens.report.written import write_drawings, write_page
from prooflens.results.vocabulary import Profiles

CELL_WIDTH, CELL_HEIGHT = 62.0, 26.0


COLUMNS = ("head", "claim_text", "lower", "upper", "lower_count", "upper_count", "prompts", "checked")


def report_vocabulary(path: Path | str, out: Path | str, figures: Path | str | None = None) -> list[Path]:
    """Write the page about heads of layer 0 over all prompts.

    Args:
        path: the run directory that `prooflens vocabulary -o` wrote.
        out: the HTML file to write.
        figures: a folder for the picture as a file; None for none.

    Returns:
        The paths of the pictures.

    Raises:
        RunError: if the run is about something else, or damaged.
    """
    run = read_run(Path(path))
    if run.info["kind"] != VOCABULARY:
        raise RunError(f"{path} does not count over all prompts: give runs of one kind to a report")
    try:
        found = Profiles.from_dict(run.info["document"])
        drawing, rows = draw_profiles(found), with_badges(run.rows, Path(path)).to_pylist()
    except DAMAGE as error:
        raise RunError(f"{path} is damaged: its document cannot be read ({error})") from error
    facts = {
        "model": escaped(found.model),
        "sha256 of its weights": f"<code>{escaped(found.model_sha256)}</code>",
        "vocabulary": f"{found.vocabulary:,}",
    }
    command = (run.info.get("configuration") or {}).get("command")
    more = "" if command is None else f'<pre class="command">{escaped(command)}</pre>'
    body = section(
        "profile", "Which key is attended most", panels("heads", "profile", ["all heads"], [drawing])
    )
    body += table("counts", "Counts", COLUMNS, rows, COUNTED)
    top = header(f"{found.model} over every prompt", run.info["region"]["label"], {}, facts, more)
    write_page(Path(out), document(found.model, f"{top}<main>{body}</main>{footer([])}"))
    return [] if figures is None else write_drawings([("vocabulary", drawing)], Path(figures))


COUNTED = (
    "Of all prompts at least <b>lower_count</b> and at most <b>upper_count</b> satisfy the claim; both are "
    "<b>proved</b>, rounding included. <b>lower</b> and <b>upper</b> are the same as shares."
)


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
    kept = "all" if found.whole else f"{found[0].top[0].prompts // found[0].each:,}"
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
