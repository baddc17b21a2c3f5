"""The page of a sweep says what its rows say, counted by prompt."""

import json
import math
from pathlib import Path

import pytest

from prooflens.errors import RunError
from prooflens.report.sweep import SweepReport, render_sweep, report_sweep
from prooflens.statistics import clopper_pearson
from prooflens.sweep.drive import start
from prooflens.sweep.spec import parse_spec
from prooflens.sweep.store import SweepStore
from tests.conftest import Call
from tests.sweep.conftest import SPEC, performed, rows_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def radii(tmp_path_factory: pytest.TempPathFactory) -> SweepStore:
    search = {"between": [1e-3, 1.0], "tolerance": 0.5}
    path = tmp_path_factory.mktemp("radii") / "run"
    return performed(path, regions={"radius": search}, layers=[0], samples=[0, 1, 2], queries=["top1"])


def test_rates_are_those_of_the_rows(undisturbed: SweepStore) -> None:
    data = SweepReport.of(undisturbed.path)
    rows = rows_of(undisturbed).to_pylist()
    assert len(data.rates) == 2 * 2 * 2 * 2  # layers, heads, queries, radii
    assert {rate["eps"] for rate in data.rates} == set(SPEC["regions"]["eps"])
    for rate in data.rates:
        same = [row for row in rows if all(row[name] == rate[name] for name in ("layer", "head", "query"))]
        proved = broken = 0
        for prompt in {row["prompt"] for row in same}:
            mine = [row for row in same if row["prompt"] == prompt]
            at = {
                eps: [row["verdict"] for row in mine if row["eps"] == eps] for eps in SPEC["regions"]["eps"]
            }
            proved += any(set(at[eps]) == {"holds"} for eps in at if eps >= rate["eps"])
            broken += any("fails" in at[eps] for eps in at if eps <= rate["eps"])
        n = len(SPEC["samples"])
        assert (rate["prompts"], rate["proved"], rate["broken"]) == (n, proved / n, broken / n)
        assert (rate["proved_low"], rate["proved_high"]) == clopper_pearson(proved, n)
    assert {rate["proved"] for rate in data.rates} > {1.0}  # not all of them


def test_spreads_are_those_of_the_radii(radii: SweepStore) -> None:
    data = SweepReport.of(radii.path)
    rows = rows_of(radii).to_pylist()
    assert [(spread.layer, spread.head) for spread in data.heads] == [(0, 0), (0, 1)]
    for spread in data.heads:
        weakest: dict[str, float] = {}
        for row in rows:
            if row["head"] == spread.head:
                radius = math.inf if row["certified"] is None else row["certified"]
                weakest[row["prompt"]] = min(radius, weakest.get(row["prompt"], math.inf))
        least, _, median, _, most = spread.proved
        assert [least, median, most] == sorted(weakest.values())
        for rate in data.rates:
            if rate["head"] == spread.head:
                assert rate["proved"] == sum(value >= rate["eps"] for value in weakest.values()) / 3
    assert [row["smallest"] for row in data.prompts] == [
        min(row["certified"] for row in rows if row["prompt"] == worst["prompt"]) for worst in data.prompts
    ]


def test_the_page_is_written(radii: SweepStore, undisturbed: SweepStore, tmp_path: Path) -> None:
    for store in (radii, undisturbed):
        made = report_sweep(store.path, tmp_path / "page.html", tmp_path / store.path.parent.name)
        page = (tmp_path / "page.html").read_text()
        assert all(f'<section id="{name}"' in page for name in ("spread", "rates", "prompts"))
        assert '<section id="failed"' not in page
        assert any(path.suffix == ".svg" for path in made)
        assert "http://" not in page.replace("http://www.w3.org", "")


def test_texts_cannot_do_harm(tmp_path: Path) -> None:
    store = performed(tmp_path / "run", layers=[0], queries=["top1"])
    task = {"model": "toy", "layer": 0, "prompt": "<script>alert(1)</script>"}
    store.write_error("0" * 64, {"error": "</script><img src=x>", "task": task})
    page = render_sweep(SweepReport.of(store.path))
    assert '<section id="failed"' in page
    assert "<script>alert" not in page
    assert "<img" not in page


def test_the_command_writes_it(call: Call, undisturbed: SweepStore, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, _ = call("report", str(undisturbed.path), "-o", str(page), "--json")
    assert (code, json.loads(out)) == (0, {"report": str(page), "figures": []})
    code, _, err = call("report", str(undisturbed.path), str(tmp_path), "-o", str(page))
    assert (code, "give the folder alone" in err) == (1, True)


def test_a_sweep_without_rows_has_no_page(tmp_path: Path) -> None:
    store = start(parse_spec(SPEC, "test"), tmp_path / "run")
    with pytest.raises(RunError, match="has no rows yet"):
        SweepReport.of(store.path)
