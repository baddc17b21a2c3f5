"""`prooflens effect`: one document, exit codes, circuits from files, errors of one line."""

import json
from pathlib import Path

import pytest

import prooflens as pl
from prooflens.errors import QueryError
from prooflens.verdicts.circuit_files import outside
from tests.conftest import Call
from tests.enumeration.words import reader

ASKED = ("effect", "toy", "--metric", "logit0-logit1", "--budget", "50/1/5")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--faithful", "5"), 0),
        (("--faithful", "0"), 3),
        (("--necessary", "0", "--engine", "interval", "--budget", "0/0/0"), 2),
        (("--faithful", "0.01", "--metric", "prob(0|0,1)"), 0),
        (("--faithful", "0", "--metric", "kl(0,1)"), 3),
        ((), 0),
    ],
)
def test_exit_codes(call: Call, arguments: tuple[str, ...], code: int) -> None:
    found, out, _ = call(*ASKED, "--eps", "0.01", "--without", "a1.h0", *arguments)
    assert found == code, out
    assert "toy minus toy without a1.h0" in out


def test_a_circuit_is_kept_and_the_rest_taken_out(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "circuit.json"
    path.write_text('{"nodes": {"input": true, "a0.h1": true, "m1": {"in_graph": true}, "a1.h0": false}}')
    code, out, _ = call(*ASKED, "--to", "1", "--circuit", str(path), "--json")
    document = json.loads(out)
    toy = pl.load("toy")
    edited = pl.edit(toy, ["a0.h0", "m0", "a1.h0", "a1.h1"])
    assert (code, document["edited_sha256"], document["engine"]) == (0, edited.sha256, "chebyshev")
    (lower, upper), (least, most) = document["proved"], document["attained"]
    assert lower <= least <= document["clean"]["effect"] + 1e-12 <= most + 2e-12 <= upper + 3e-12


def test_circuits_that_are_no_part_of_a_model_say_so() -> None:
    architecture = pl.load("toy").architecture
    assert outside({"edges": ["a0.h0->m1", "a0.h1->logits"]}, architecture) == ["m0", "a1.h0", "a1.h1"]
    with pytest.raises(QueryError, match="does not have"):
        outside(["a7.h0"], architecture)
    with pytest.raises(QueryError, match="whole model"):
        outside(["a0.h0", "a0.h1", "a1.h0", "a1.h1", "m0", "MLP 1"], architecture)
    with pytest.raises(QueryError, match="no node of a circuit"):
        outside(["b0"], architecture)


def test_a_run_is_kept_checked_and_reported(call: Call, tmp_path: Path) -> None:
    out, page = str(tmp_path / "run"), str(tmp_path / "report.html")
    code, _, _ = call(*ASKED, "--eps", "0.01", "--without", "a1.h0", "--faithful", "0", "-o", out)
    assert code == 3
    code, told, _ = call("check", out, "--json")
    assert code == 0, told
    assert json.loads(told)["summary"]["witness confirmed"] == 1
    assert call("report", out, "-o", page)[0] == 0
    assert "without a1.h0" in Path(page).read_text()
    code, told, _ = call("query", out, "select query, verdict from rows", "--json")
    assert (code, "|effect(logit0-logit1)|<=0.0 without a1.h0" in told) == (0, True)
    code, _, err = call(*ASKED, "--eps", "0.01", "--without", "a1.h0", "-o", out)
    assert (code, "not empty" in err) == (1, True)


def test_effects_over_a_family(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prooflens.models.load", lambda *_: reader("gpt2"))
    out = str(tmp_path / "run")
    family = (
        "--template",
        "When{A} and{B} met the{P},{B} spoke to",
        "--slot",
        "A= Mary, Tom",
        "--slot",
        "B= John, Kate",
        "--slot",
        "P= store, park",
    )
    asked = ("effect", "model", "--metric", "logit{A}-logit{B}", *family, "--without", "a0.h1,m1")
    code, told, _ = call(*asked, "--each", "--faithful", "1e9", "--json", "-o", out)
    document = json.loads(told)
    assert (code, document["word"], document["asked"], len(document["rows"])) == (0, "enumerated", 8, 2)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["kind"] == "family effects"
    assert call(*asked, "--necessary", "1e9")[0] == 3
    assert call(*asked, "--samples", "2", "--faithful", "1e9")[0] == 2
    code, _, err = call(*asked, "--eps", "0.1")
    assert (code, "of its own" in err) == (1, True)


def test_each_part_by_itself_on_a_region(call: Call, tmp_path: Path) -> None:
    out = str(tmp_path / "runs")
    asked = (*ASKED, "--eps", "0.01", "--without", "a0.h1,m1", "--each", "--faithful", "1e9")
    code, told, _ = call(*asked, "--json", "-o", out)
    names = [one["edited"] for one in json.loads(told)["effects"]]
    assert (code, [name.rsplit(" ", 1)[-1] for name in names]) == (0, ["a0.h1", "m1"])
    for name in ("a0.h1", "m1"):
        assert (tmp_path / "runs" / name / "run.json").is_file()
    code, told, _ = call(*asked)
    assert (code, told.count("faithful")) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--eps", "0.01"), "--without a9.h6,m3 or --circuit"),
        (("--eps", "0.01", "--without", "0.1"), "write a head as a9.h6"),
        (("--without", "m0"), "give one of --eps"),
        (("--without", "m0", "--eps", "0.1", "--samples", "3"), "for families"),
        (("--without", "m0", "--eps", "0.1", "--metric", "kl(0)"), "name at least two outputs"),
        (("--without", "m0", "--slot", "A= x"), "are for --template"),
    ],
)
def test_errors_are_one_line(call: Call, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = call(*ASKED, *arguments)
    assert (code, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1


def test_parts_at_any_value_of_a_set(call: Call, tmp_path: Path) -> None:
    out, quick = str(tmp_path / "run"), (*ASKED, "--eps", "0.002", "--engine", "taylor")
    claims = ("--faithful", "1", "--sufficient")
    code, told, _ = call(*quick, "--without", "a1.h0@-1", "--spread", "0.03", *claims, "-o", out)
    assert (code, "toy with a1.h0@-1 at any value within 0.03 of 0" in told) == (0, True), told
    assert "ball ε=0.002 × [−1, 1]^4" in told
    assert call("check", out)[0] == 0
    code, told, _ = call(*quick, "--without", "a1.h0@-1,m1@0", "--each", "--between", "1", "--json")
    one, other = json.loads(told)["effects"]
    assert (code, one["edited"].split(" at ")[1]) == (0, "any value between those on a prompt and a prompt")
    assert one["proved"][0] <= one["attained"][0] <= one["attained"][1] <= one["proved"][1]
    assert other["edited_sha256"] != one["edited_sha256"]
    code, told, _ = call(
        *quick, "--without", "a1.h0@-1", "--spread", "0.01", "--patched", "1", "--json", "--budget", "50/1/5"
    )
    found = json.loads(told)
    assert "at any value within 0.01 of its value on another prompt" in found["edited"]
    assert code in (0, 3)
    code, told, _ = call(*quick, "--without", "a1.h0@-1", "--between", "1", "--between", "2")
    assert code == 0, told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--without", "a1.h0", "--spread", "-1"), "at least 0"),
        (("--without", "a1.h0", "--spread", "nan"), "at least 0"),
        (("--without", "a1.h0.k1", "--spread", "0.1"), "one value"),
        (("--without", "a1.h0", "--spread", "0.1", "--between", "1"), "--between is given"),
        (("--without", "a1.h0", "--between", "1", "--between", "2", "--between", "0"), "--between is given"),
    ],
)
def test_sets_that_are_none_say_so(call: Call, arguments: tuple[str, ...], said: str) -> None:
    code, out, errors = call(*ASKED, "--eps", "0.01", *arguments)
    assert code == 1
    assert said in " ".join((out + errors).split())
