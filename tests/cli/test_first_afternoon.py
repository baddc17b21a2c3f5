"""What a person meets on the first afternoon: many rows at a glance, help that helps, names that agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.cli.maps import MOST_LINES, verdict_maps
from prooflens.cli.options import ENGINES
from prooflens.engines import Guarantee, engine_names, get_engine
from prooflens.engines.attack import BUDGETS
from prooflens.errors import ModelError, PromptError, QueryError, RunError
from prooflens.models import Prompt
from prooflens.report.data import collect
from prooflens.report.page import render
from tests.checker.forging import TOY
from tests.conftest import Call

NONE = ("--budget", "0/0/0")


def test_many_rows_are_a_map_of_heads_and_positions(call: Call) -> None:
    queries = ("--query", "top1", "--query", "mass>=0.3", "--query", "top1={self}")
    command = ("certify", "toy", "--eps", "0.03", *queries, *NONE)
    _, out, _ = call(*command)
    _, document, _ = call(*command, "--json")
    rows = json.loads(document)["rows"]
    lines = out.splitlines()
    letters = {"holds": "h", "fails": "F", "unknown": "?", "estimated": "e"}
    for query in ("top1", "mass>=0.3"):
        start = next(i for i, line in enumerate(lines) if line.startswith(f"{query}: "))
        assert lines[start + 1].split() == ["position", "0123"]
        for line, head in zip(lines[start + 2 :], ("0.0", "0.1", "1.0", "1.1"), strict=False):
            drawn = dict(enumerate(line.split()[1]))
            assert line.split()[0] == head
            for row in rows:
                if row["query"] == query and f"{row['layer']}.{row['head']}" == head:
                    assert drawn[row["position"]] == letters[row["verdict"]]
    assert sum(line.startswith("top1={…}: ") for line in lines) == 1  # a role is one map, not one a token
    assert "F fails" in out
    assert "positions: 0 x0, 1 x1, 2 x2, 3 x3" in out


def test_a_map_of_very_many_heads_has_a_line_for_each_layer() -> None:
    place = [{"layer": i, "head": j, "position": p} for i in range(9) for j in range(12) for p in range(11)]
    rows = [row | {"query": "top1", "verdict": "holds"} for row in place]
    rows[-1]["verdict"] = "unknown"
    assert MOST_LINES < 9 * 12
    drawn = verdict_maps(rows)
    assert [line for line in drawn if line.startswith("  layer 8")] == ["  layer 8  hhhhhhhhhhh?"]
    few = verdict_maps([row for row in rows if row["layer"] == 8])
    assert few[1:3] == ["                      1", "  position  01234567890"]
    assert few[-3] == "  8.11      hhhhhhhhhh?"
    twice = [rows[0], rows[0] | {"verdict": "fails"}]
    assert "  0.0       F" in verdict_maps(twice)
    assert verdict_maps([rows[0] | {"layer": None}]) == []


def test_tables_show_the_token_and_every_reason_in_full(call: Call) -> None:
    _, out, _ = call("certify", "toy", "--eps", "0.03", "--layer", "0", "--query", "top1={-1}", *NONE)
    assert "0 x0" in out
    assert "0.1@1, 0.0@2, 0.1@2, 0.0@3: the clean input breaks it" in out
    command = (
        "certify",
        "toy",
        "--eps",
        "0.06",
        "--heads",
        "1.0",
        "--positions",
        "1",
        "--engine",
        "interval",
    )
    _, out, _ = call(*command, *NONE)
    _, document, _ = call(*command, *NONE, "--json")
    (row,) = json.loads(document)["rows"]
    assert row["verdict"] == "unknown"
    assert f"1.0@1: {row['reason']}" in out


def test_rows_that_fail_rest_on_their_witness(tmp_path: Path) -> None:
    toy = pl.load("toy")
    res = pl.certify(toy, toy.example(), pl.Ball(0.05), "0", budget="100/3/15", out=tmp_path / "run")
    words = {row["verdict"]: row["guarantee"] for row in res.rows}
    assert words["fails"] == "witness"
    assert words["holds"] == "proved"
    found = check(tmp_path / "run", TOY)
    assert found.ok
    assert found.counts["witness confirmed"] == res.counts["fails"]
    assert len(res.sel(guarantee="witness")) == res.counts["fails"]


def test_several_rows_say_which_is_the_weakest() -> None:
    toy = pl.load("toy")
    res = pl.certify(toy, toy.example(), pl.Ball(0.03), "0.1", queries=["top1", "mass>=0.3"], budget="0/0/0")
    weak = res["0.1"].weakest
    assert res["0.1"].verdict == weak.verdict
    assert repr(res["0.1"]).endswith(f"weakest: 0.1:{weak.query}@{weak.position} {weak.verdict}>")
    one = res["0.1:mass>=0.3@-1"]
    assert (len(one), one.query, one.position) == (1, "mass>=0.3", 3)
    assert len(res["0.1:top1"]) == 4
    assert "weakest" not in repr(one)
    with pytest.raises(QueryError, match=r"'2\.4:top1@3'"):
        res["top1"]


def test_several_prompts_are_one_call(tmp_path: Path) -> None:
    toy = pl.load("toy")
    short = Prompt(toy.example(1).x[:3], toy.example(1).tokens[:3])
    both = pl.certify(toy, [toy.example(0), short], pl.Ball(0.01), "0.1", budget="0/0/0")
    parts = [pl.certify(toy, one, pl.Ball(0.01), "0.1", budget="0/0/0") for one in (toy.example(0), short)]
    assert [row["lower"] for row in both.rows] == [row["lower"] for part in parts for row in part.rows]
    assert [row.position for row in both["0.1@-1"]] == [3, 2]  # each counts from the end of its own prompt
    with pytest.raises(QueryError, match="several prompts"):
        both.save(tmp_path / "run")
    with pytest.raises(RunError, match="several prompts"):
        pl.report(both, path=tmp_path / "report.html")
    assert [len(part) for part in both.by_subject] == [4, 3]
    both.by_subject[1].save(tmp_path / "one")
    pl.report(both.by_subject[0], path=tmp_path / "report.html")
    assert "7 rows" in repr(both)
    assert both._repr_html_().count("<tr>") == 8
    with pytest.raises(RunError, match="one prompt"):
        pl.certify(toy, [short], pl.Ball(0.01), out=tmp_path / "run")
    with pytest.raises(PromptError, match="empty"):
        pl.certify(toy, [], pl.Ball(0.01))
    with pytest.raises(PromptError, match=r"model\.prompt\(ids\)"):
        pl.certify(toy, [3, 4], pl.Ball(0.01))  # type: ignore[list-item]


def test_other_inputs_say_how_to_convert_them() -> None:
    toy = pl.load("toy")
    x = toy.example().x
    with pytest.raises(ModelError, match=r"convert the input with x\.to\(torch\.float64\)"):
        pl.certify(toy, x.float(), pl.Ball(0.01))
    with pytest.raises(PromptError, match=r"torch\.from_numpy\(x\)\.double\(\)"):
        pl.certify(toy, np.asarray(x), pl.Ball(0.01))  # type: ignore[arg-type]
    assert torch.equal(torch.from_numpy(np.asarray(x)).double(), x)


def test_help_names_engines_budgets_and_queries(call: Call) -> None:
    for command in ("certify", "attack", "radius", "plan", "compare"):
        _, out, _ = call(command, "--help")
        packed = "".join(out.split())
        assert "aprevious-tokenhead" in packed
        assert all(name in packed for name in BUDGETS)
        if command not in ("attack", "compare"):
            assert all(name in packed for name in engine_names())
    estimating = ENGINES.partition(";")[2].partition(" only estimate")[0].replace(" and ", ", ").split(", ")
    only = {name for name in engine_names() if get_engine(name).guarantee is Guarantee.ESTIMATED}
    assert {name.strip() for name in estimating} == only - {"attack"}


@pytest.mark.parametrize(
    ("now", "earlier"),
    [
        ("output toy --eps 0.001 --cut 1 --budget 0/0/0", "output toy --eps 0.001 --layers=1 --budget 0/0/0"),
        (
            "compare toy --eps 0.01 --heads 0.1 --engine layer0,interval --json --budget 0/0/0",
            "compare toy --eps 0.01 --heads 0.1 --engines layer0,interval --json --budget 0/0/0",
        ),
    ],
)
def test_earlier_names_of_options_still_work(call: Call, now: str, earlier: str) -> None:
    def stable(text: str) -> list[str]:
        return [line for line in text.splitlines() if '"ms"' not in line and '"mb"' not in line]

    first, second = call(*now.split()), call(*earlier.split())
    assert first[0] == second[0] == 0
    assert stable(first[1]) == stable(second[1])
    _, out, _ = call(now.split()[0], "--help")
    assert "--layers" not in out
    assert "--engines" not in out


def test_a_report_says_what_was_proved_where_and_hides_a_slider_of_one_stop() -> None:
    toy = pl.load("toy")
    res = pl.certify(toy, toy.example(), pl.Ball(0.01), "0", positions=[-1], budget="0/0/0")
    page = render(collect(res))
    held = res.counts["holds"]
    assert f"Of 2 claims, {held} are proved for every point of the region" in page
    assert "not about other prompts" in page
    assert "Asked only at position 3 (“x3”), of 4." in page
    assert 'id="eps"' not in page
    more = pl.certify(toy, toy.example(), pl.Ball(0.02), "0", budget="0/0/0")
    page = render(collect(res, more))
    assert 'id="eps"' in page
    assert "Asked at all 4 positions" in page
    assert "2 x2" in page  # the key, by its text
