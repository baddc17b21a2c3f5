"""Charts of the benchmarks: every number has its bar or point, and the file is an SVG."""

import math
from xml.etree import ElementTree

from charts import Panel, bars, by_site, curves

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_by_layer_and_site() -> None:
    numbers = by_site(
        {
            "blocks.0.hook_resid_mid": 0.5,
            "blocks.0.attn.hook_q": 9.0,
            "blocks.10.hook_mlp_out": 2.0,
            "blocks.10.hook_normalized_resid_post": math.inf,
            "hook_pooled": 9.0,
        }
    )
    assert numbers == {(0, "attention"): 0.5, (10, "network"): 2.0, (10, "second norm"): math.inf}
    drawn = ElementTree.fromstring(bars("e / τ", numbers).svg(alone=True))
    wide = [float(bar.attrib["width"]) for bar in drawn.findall(f"{SVG}rect")]
    assert wide[0] * 4 == wide[1] == wide[2]
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"layer 0", "layer 10", "0.5", "2", "→ ∞"} <= set(texts)


def test_curves_have_a_point_for_every_measurement() -> None:
    panels = [
        Panel("tokens", [(8, {"seconds": 1.0, "GiB": 2.0}), (16, {"seconds": 10.0})]),
        Panel("one", [(1, {"seconds": 3.0, "GiB": 0.0})]),
    ]
    drawn = ElementTree.fromstring(
        curves("cost", panels, {"seconds": "proved-line", "GiB": "attack-line"}).svg(alone=True)
    )
    assert len(drawn.findall(f"{SVG}circle")) == 4
