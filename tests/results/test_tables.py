"""Results in the hands of a researcher: indexing, selection, tables, notebooks."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

import prooflens as pl
from prooflens.engines.attack import AttackBudget
from prooflens.errors import QueryError
from prooflens.models import Transformer
from prooflens.results.circuits import CircuitResults
from prooflens.results.outcome import Verdict
from prooflens.results.tables import VERDICTS
from prooflens.verdicts.circuit_files import as_circuit, read_heads

SMALL = AttackBudget(100, 3, 15)


@pytest.fixture(scope="module")
def toy() -> Transformer:
    return pl.load("toy")


@pytest.fixture(scope="module")
def found(toy: Transformer) -> pl.Results:
    return pl.certify(
        toy, toy.example(0), pl.Ball(0.05), heads="0", queries=["top1", "mass>=0.2"], budget=SMALL
    )


def test_indexing_by_head(found: pl.Results) -> None:
    head = found["0.1"]
    assert len(head) == 8
    assert head.verdict is Verdict.FAILS
    assert head.bound == min(row["lower"] for row in head.rows)
    assert head.witness is not None
    row = head["0.1@3"].sel(query="top1")
    assert (row.layer, row.head, row.position, row.query) == (0, 1, 3, "top1")
    assert row.verdict is Verdict.HOLDS
    assert row.bound == row.lower > 0
    assert row.witness is None
    assert found[0].rows == found.rows[:1]
    assert found[-1].rows == found.rows[-1:]
    assert [len(one) for one in found] == [1] * len(found)


def test_selection(found: pl.Results) -> None:
    assert len(found.sel(position=-1)) == len(found.sel(position=3)) == 4
    assert len(found.sel(query="mass >= 0.20")) == 8
    assert len(found.sel(head=[0, 1], verdict="fails")) == found.counts["fails"]
    assert len(found.sel(layer=5)) == 0
    with pytest.raises(QueryError, match="did you mean 'verdict'"):
        found.sel(verdct="holds")
    with pytest.raises(QueryError, match="no rows"):
        _ = found.sel(layer=5).verdict


@pytest.mark.parametrize(("name", "message"), [("0.7", "did you mean"), ("seven", "does not name a head")])
def test_wrong_names(found: pl.Results, name: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        found[name]


def test_several_rows_have_no_single_value(found: pl.Results) -> None:
    with pytest.raises(AttributeError, match="16 rows have no single"):
        _ = found.clean
    with pytest.raises(AttributeError, match="no attribute"):
        _ = found.nothing


def test_tables(found: pl.Results) -> None:
    table = found.to_arrow()
    assert isinstance(table, pa.Table)
    assert table.schema.equals(VERDICTS)
    frame = found.to_pandas()
    assert list(frame.columns) == VERDICTS.names
    assert (frame.verdict == "holds").sum() == found.counts["holds"]
    document = json.loads(json.dumps(found.to_dict()))
    assert set(document) == {"rows", "summary"}
    assert document["rows"][0]["tokens"] == ["x0", "x1", "x2", "x3"]
    assert document["summary"]["holds"] == found.counts["holds"]


def test_notebook_view_is_escaped_and_short(found: pl.Results) -> None:
    text = found._repr_html_()
    assert "mass&gt;=0.2" in text
    assert text.count("<tr>") == 1 + len(found)
    assert "holds" in repr(found)


def test_circuit_names_its_weakest_link(toy: Transformer) -> None:
    prompt, ball = toy.example(0), pl.Ball(0.01)
    res = pl.circuit(toy, prompt, ball, ["0.0", "a1.h1"], budget=SMALL)
    assert isinstance(res, CircuitResults)
    assert len(res) == 3
    assert res.verdict is res.whole.verdict is Verdict.FAILS
    assert res.summary["weakest"] == "1.1:top1@3"
    assert res.whole.witness is not None
    assert res.whole.bound == min(row["lower"] for row in res.parts.rows)
    assert len(res.sel(layer=0)) == 1
    assert res.sel(layer=0).verdict is Verdict.HOLDS


def test_a_joint_sum_is_at_least_as_good_as_its_parts(toy: Transformer) -> None:
    """The parts share factors: bounding the sum as one loses nothing against adding the parts' bounds."""
    parts = ["0.0:mass>=0.2@-1", "0.1:mass>=0.2@-1"]
    res = pl.circuit(toy, toy.example(0), pl.Ball(0.02), f"1 * {parts[0]} + 1 * {parts[1]} > 0", budget=SMALL)
    assert res.verdict is Verdict.HOLDS
    assert res.whole.bound >= sum(row["lower"] for row in res.parts.rows) - 1e-12


@pytest.mark.parametrize(
    "circuit",
    [
        {"nodes": {"a0.h1": {"in_graph": True}, "m0": True, "a1.h0": {"in_graph": False}, "logits": True}},
        {"nodes": {"input": True, "a0.h1": True, "a1.h0": False}},
        {"edges": {"a0.h1->m0": {"in_graph": True}, "a1.h0->logits": {"in_graph": False}}},
        {"nodes": {}, "edges": {"input->a0.h1<q>": True}},
        ["0.1"],
        ["a0.h1", "A0.1", "L0H1"],
        {"a0.h1": True},
    ],
)
def test_circuits_of_other_tools(circuit: dict[str, object] | list[str]) -> None:
    assert read_heads(circuit) == [(0, 1)]


def test_circuit_files_and_mistakes(tmp_path: Path) -> None:
    (tmp_path / "ioi.json").write_text('{"nodes": {"a1.h0": {"in_graph": true}}}')
    assert str(as_circuit(str(tmp_path / "ioi.json"), "top1@-1")) == "1.0:top1@-1"
    with pytest.raises(QueryError, match="no node"):
        read_heads(["b0.h1"])
    with pytest.raises(QueryError, match="no attention heads"):
        read_heads({"nodes": {"m0": True}})
    with pytest.raises(QueryError, match="not a readable circuit file"):
        as_circuit("missing.json", "top1")
    with pytest.raises(QueryError, match="about one row"):
        as_circuit(["0.1"], "argmax")
    assert str(as_circuit("0.1, 1.0", "top1@-1")) == "0.1:top1@-1 & 1.0:top1@-1"


def test_every_kind_of_result_is_saved_and_read_back(toy: Transformer, tmp_path: Path) -> None:
    prompt, ball = toy.example(0), pl.Ball(0.02)
    found = {
        "verdicts": pl.certify(toy, prompt, ball, "0"),
        "radii": pl.radius(toy, prompt, "0.1:top1@-1"),
        "circuit": pl.circuit(toy, prompt, ball, ["0.1", "a1.h0"]),
        "output": pl.output(toy, prompt, ball),
    }
    for name, made in found.items():
        made.save(tmp_path / name)
        back = type(made).load(tmp_path / name)
        assert back.to_dict() == made.to_dict()
        assert repr(back) == repr(made)
        with pytest.raises(QueryError, match="read from a run"):
            back.save(tmp_path / "again")
    with pytest.raises(QueryError, match="holds no radii"):
        pl.Radii.load(tmp_path / "verdicts")
    with pytest.raises(QueryError, match="holds no outputs"):
        pl.OutputResults.load(tmp_path / "verdicts")
    assert "weakest: 1.0:top1@3" in repr(found["circuit"])


def test_rows_that_were_read_do_not_hide_their_witness(toy: Transformer, tmp_path: Path) -> None:
    """`None` would say that there is none."""
    pl.certify(toy, toy.example(0), pl.Ball(0.02), "0").save(tmp_path / "run")
    back = pl.Results.load(tmp_path / "run")
    assert back.sel(verdict="holds").witness is None
    with pytest.raises(QueryError, match="witness"):
        _ = back.sel(verdict="fails").witness
