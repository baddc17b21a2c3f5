"""`prooflens family`: templates, files, parts, and the run that it writes, queried, checked and reported."""

import json
from pathlib import Path
from typing import Any

import pytest

import prooflens as pl
from prooflens.models import Transformer
from tests.conftest import Call
from tests.enumeration.words import reader

TEXT = "When{A} and{B} met,{B} spoke"
YAML = f"""
template: "{TEXT}"
slots: {{A: names, B: [" John", " Kate"]}}
differ: [[A, B]]
queries: ["1.0:top1={{B.1}}@{{B.2}}", "logit{{A}}>logit{{B}}"]
"""


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line loads a tiny model that reads words."""
    for name in pl.__all__:  # what is first imported while the loader is another one would keep it
        getattr(pl, name)

    def load(name: str, tell: Any = None) -> Transformer:
        return reader()

    monkeypatch.setattr("prooflens.models.load", load)


def test_a_file_and_options_say_the_same(call: Call, tmp_path: Path) -> None:
    (tmp_path / "family.yaml").write_text(YAML)
    code, out, _ = call("family", "tiny", str(tmp_path / "family.yaml"), "--json")
    found = json.loads(out)
    assert found["family"]["members"] == 10
    assert code == (3 if any(row["verdict"] == "fails" for row in found["rows"]) else 0)
    (tmp_path / "words.txt").write_text(" John\n Kate\n")
    code, out, _ = call(
        *(
            "family",
            "tiny",
            "--template",
            TEXT,
            "--slot",
            "A=names",
            "--slot",
            f"B=@{tmp_path / 'words.txt'}",
        ),
        *("--differ", "A,B", "--query", "1.0:top1={B.1}@{B.2}", "--query", "logit{A}>logit{B}", "--json"),
    )
    assert [row["held"] for row in json.loads(out)["rows"]] == [row["held"] for row in found["rows"]]


def test_the_run_is_queried_and_reported(call: Call, tmp_path: Path) -> None:
    (tmp_path / "family.yaml").write_text(YAML)
    run = tmp_path / "run"
    code, out, _ = call("family", "tiny", str(tmp_path / "family.yaml"), "-o", str(run))
    assert code in (0, 3)
    assert f"written to {run}" in out
    sql = "select query, held, asked from rows where what = 'claim'"
    _, out, _ = call("query", str(run), sql, "--json")
    assert [row["asked"] for row in json.loads(out)["rows"]] == [10, 10]
    code, out, _ = call("report", str(run), "-o", str(tmp_path / "page.html"), "--json")
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    assert "Shares by two slots" in page
    assert "histogram" not in page
    assert all(word in page for word in ("Claims", "Margins", "Shares by filler"))
    code, _, err = call("report", str(run), str(run), "-o", str(tmp_path / "page.html"))
    assert code == 1
    assert "alone" in err


def test_parts_are_joined_by_the_last(call: Call, tmp_path: Path) -> None:
    (tmp_path / "family.yaml").write_text(YAML)
    run = tmp_path / "run"
    code, out, _ = call("family", "tiny", str(tmp_path / "family.yaml"), "-o", str(run), "--part", "1/2")
    assert "kept beside" in out
    code, out, _ = call("family", "tiny", str(tmp_path / "family.yaml"), "-o", str(run), "--part", "2/2")
    assert "written to" in out
    assert code in (0, 3)


def test_prompts_of_a_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("When Mary met\n\nWhen Tom met John\n")
    _, out, _ = call(
        "family", "tiny", "--prompts", str(tmp_path / "prompts.txt"), "--query", "0.0:top1={-1}@-1", "--json"
    )
    assert json.loads(out)["family"]["members"] == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "give one family"),
        (["--template", TEXT, "--slot", "A=nomes"], "'nomes' is no list"),
        (["--template", TEXT, "--slot", "A"], "is no slot"),
        (["--template", TEXT, "--slot", "A=names", "--slot", "A=names"], "twice"),
        (["--template", TEXT, "--slot", "A=names", "--slot", "B=names"], "no claim is asked"),
        (["--template", TEXT, "--slot", "A=@none.txt"], "cannot read words"),
        (["missing.yaml"], "cannot be read"),
        (["--prompts", "missing.txt", "--query", "0.0:top1={-1}@-1"], "cannot read prompts"),
    ],
)
def test_wrong_options_are_one_line(call: Call, given: list[str], told: str) -> None:
    code, _, err = call("family", "tiny", *given)
    assert code == 1
    assert told in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("template: [a]\nslots: {}", "must be a text"),
        ("template: a\nprompts: [a]", "give one of"),
        ("colour: red", "no field 'colour'"),
        ("- a", "must be a mapping"),
        ("prompts: [a]\nqueries: {a: b}", "list of texts"),
        ("swaps: {prompt: a}", "swaps must be"),
        ("template: '{A}'\nslots: {A: {file: none}}", "cannot read words"),
        ("template: '{A'\nslots: {A: names}", "not well formed"),
        ("template: '{A}'\nslots: {A: names}\ndiffer: 3", "differ must be"),
        ("a: [", "not YAML"),
    ],
)
def test_wrong_files_are_one_line(call: Call, tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "family.yaml").write_text(text)
    code, _, err = call("family", "tiny", str(tmp_path / "family.yaml"))
    assert code == 1
    assert told in err


def test_results_in_memory_are_reported_too(tmp_path: Path) -> None:
    template = pl.Template("When{A} met{B}", A=[" Mary", " Tom"], B=[" John", " Kate"])
    found = pl.family(reader(), template, "1.0:spec{A}>{B}@-1")
    page = pl.report(found, path=tmp_path / "page.html", figures=tmp_path / "figures")
    assert "spec{A}" in page.read_text()
    assert {path.name.partition("-")[0] for path in (tmp_path / "figures").iterdir()} == {"matrix", "margins"}


SLOTS = ("--template", TEXT, "--slot", "A= Mary", "--slot", "B= John")


def test_one_prompt_with_slots_is_certified_by_roles(call: Call) -> None:
    model = reader()
    members = pl.Template(TEXT, A=[" Mary", " Tom"], B=[" John", " Kate"]).of(model)
    prompt = next(members.prompt(one) for one in members if one.text == "When Mary and John met, John spoke")
    queries = ["1.0:top1={B.1}@{B.2}", "logit{A}>logit{B}"]
    found = pl.certify(model, prompt, pl.Ball(1e-4), queries=queries)
    asked = (
        "certify",
        "tiny",
        *SLOTS,
        "--eps",
        "1e-4",
        "--query",
        queries[0],
        "--query",
        queries[1],
        "--json",
    )
    code, out, _ = call(*asked)
    rows = json.loads(out)["rows"]
    assert [(row["query"], row["verdict"]) for row in rows] == [
        (row["query"], row["verdict"]) for row in found.table.to_pylist()
    ]
    assert code == (3 if any(row["verdict"] == "fails" for row in rows) else 0)


def test_roles_stand_on_the_way_to_another_prompt(call: Call) -> None:
    asked = ("--to", "When Mary and John met, Kate spoke", "--query", "logit{A}>logit{B}", "--json")
    code, out, err = call("certify", "tiny", *SLOTS, *asked)
    assert code in (0, 2, 3), err
    assert len(json.loads(out)["rows"]) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--slot", "A= Mary"), "--slot is for --template"),
        ((*SLOTS, "--text", "When"), "one of them"),
        (("--template", TEXT, "--slot", "A= Mary"), "slot {B} has no fillers"),
        ((*SLOTS, "--slot", "C= x"), "no slot {C}"),
        ((*SLOTS, "--slot", "A= Tom"), "given twice"),
        (("--template", TEXT, "--slot", "A"), "'A= Mary'"),
        (("--template", TEXT, "--slot", "A=", "--slot", "B= John"), "slot A has no filler"),
    ],
)
def test_slots_that_do_not_fit_are_one_line(call: Call, options: tuple[str, ...], says: str) -> None:
    code, out, err = call("certify", "tiny", *options, "--eps", "0.01")
    assert (code, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1
