"""What a report says in sentences: what was proved, what that does not mean, and where it was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

CAPTIONS = {
    "radius": "Each cell is a head. Upper half: the largest ε for which its claim is <b>proved</b> on the whole ball, "
    "for its weakest row. Lower half: the smallest ε at which a point that breaks it was <b>found</b>. The true radius "
    "lies between. Hatched: nothing proved, or nothing broken.",
    "map": "Each cell is a head at a position, its colour and letter the verdict: h holds, F fails, ? unknown, "
    "e estimated. Where several rows share a cell it shows the weakest.",
    "attention": "Rows are queries, columns keys. The fill and the number are the clean attention weight; the bar is "
    "the range that is <b>proved</b> for every point of the ball, from 0 at the left of the cell to 1 at its right, "
    "the tick the clean weight on it. Where several radii were computed, a slider moves through them.",
    "image": "Attention from one token of a head to the patches of the image: a patch is the brighter, the more of the "
    "weight it has, the brightest being the most attended one. The frame says whether the most attended patch is "
    "<b>proved</b> to stay so on the whole region; a tip gives a patch's clean weight and the range proved for it.",
    "curve": "Every point of the ball has a margin on or above the solid line: that is <b>proved</b>. The dashed line "
    "was <b>attained</b>, by the attack or by the clean input. Where the solid line is above 0 the claim holds; where "
    "the dashed line is below, it fails; the shaded gap is open.",
    "way": "The region between the prompts, cut into pieces. On each piece every point has a margin within the band: "
    "that is <b>proved</b>. Where the band lies above 0 the claim holds on the whole piece. A hull of three prompts is "
    "drawn as a triangle.",
    "circuit": "Parts by layer, coloured by verdict: a part that <b>holds</b> is proved on the whole region. The ring "
    "marks the weakest link: the weakest verdict, then the smallest proved margin.",
    "strip": "Only one token moves at a time. Bar: the radius for which all rows asked are <b>proved</b>. Dashed: "
    "where the attack breaks one. Diamond and numbers beneath: ℓ∞ distance, after embedding, to the nearest other "
    "token of the vocabulary, which is what an ε is worth in words.",
    "inside": "Bars: how far a neuron, a direction or a feature is from its threshold, as bounds allow it on the whole "
    "region; tick: on the clean input. Right of 0 everywhere, the value is <b>proved</b> to stay on its side: "
    "a feature that is active stays active, one that is off stays off. Readouts without a threshold are "
    "drawn as they are.",
    "effects": "Each bar is an edit: the effect, the metric of the model minus that of the edited one, is nowhere "
    "outside of the bar: <b>proved</b> on a region, run member by member over a family. Tick: at the prompt, or the "
    "mean. Its colour is the weakest verdict of its claims, whose thresholds are dashed; light blue: nothing is "
    "claimed. A part whose bar lies beyond a threshold everywhere matters everywhere.",
    "sizes": "One edit on balls of several radii around one prompt: its effect on the metric is <b>proved</b> to lie "
    "in the band at every point of each ball. A circle has the weakest verdict of the claims at its radius; lines at "
    "the side are 0 and the thresholds of claims; a circle on the axis has no proved ends.",
    "profile": "Rows are heads, columns keys by their distance to the query. The colour and the number are the "
    "<b>proved</b> lower end of the share of all prompts on which that key is attended most, alone; tips have both.",
    "output": "Bars: the distances between the logits of the answer and of a candidate that bounds allow on the whole "
    "region; tick: on the clean input. Right of 0 everywhere, the candidate is <b>proved</b> to stay behind. Outputs "
    "without a bar are part of the verdict too: the line beneath says how they were decided.",
}
"""What each picture shows, as HTML."""

MOST_NAMED = 12
"""Up to this many positions are named with their tokens."""


def said_first(counts: Mapping[str, int], regions: Sequence[str], radii: Sequence[Row]) -> str:
    """Say in two or three sentences what rows prove, and what that does not mean.

    Args:
        counts: how many rows have each verdict.
        regions: the regions that were asked about, in words.
        radii: rows of radii, if there are some.
    """
    said = []
    if total := sum(counts.values()):
        where = regions[0] if len(regions) == 1 else f"{len(regions)} regions"
        others = [f"{counts[verdict]:,} {words}" for verdict, words in OTHERS.items() if counts.get(verdict)]
        rest = f"; {' and '.join(others)}" if others else ""
        said.append(
            f"Of {total:,} claims, {counts.get('holds', 0):,} are proved for every point of the region ({where}){rest}."
        )
    if radii:
        proved = sum(row.get("certified") is None or row["certified"] > 0 for row in radii)
        said.append(
            f"For {proved:,} of {len(radii):,} rows a radius is proved: every point that close counts."
        )
    said.append(
        "This is about this model in exact arithmetic and these regions alone: not about other prompts, not about the "
        "model's weights in another precision, and not about what the attention is for."
    )
    return " ".join(said)


OTHERS = {
    "fails": "fail, each by a point that was run through the model",
    "unknown": "are open",
    "estimated": "are only estimated, which is no proof",
}


def positions_asked(rows: Sequence[Row], tokens: Sequence[str]) -> str:
    """Say at which query positions rows of attention were asked.

    Args:
        rows: rows with the columns layer and position.
        tokens: the tokens of the prompt.
    """
    found = sorted({row["position"] for row in rows if row.get("layer") is not None})
    if len(found) == len(tokens):
        return f"Asked at all {len(tokens)} positions; a cell shows its weakest row."
    if len(found) > MOST_NAMED:
        return f"Asked at {len(found)} of {len(tokens)} positions, the first of them {found[0]}, the last {found[-1]}."
    named = ", ".join(f"{position} (“{tokens[position].strip()}”)" for position in found)
    return f"Asked only at position {named}, of {len(tokens)}."
