"""How results are shown and kept: tables, pictures, pages, the command."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from prooflens.evaluation.studies import Result, StudyError, StudyRow
from prooflens.evaluation.studies.pages import write_pages
from prooflens.evaluation.studies.render import (
    against_paper,
    agreement,
    markdown,
    picture,
    read,
    save,
    summary,
)
from tests.conftest import Call


def result(name: str = "layer0_all", group: str = "synthetic") -> Result:
    rows = [
        StudyRow(
            "ε = 0.1",
            "Q1",
            engine="cpz",
            paper=92.5,
            paper_attack=95.0,
            proved=37,
            attack=38,
            n=40,
            seconds=0.5,
        ),
        StudyRow("ε = 0.1", "Q1", engine="jacobian", paper=10.0, estimated=39, false=1, attack=38, n=40),
        StudyRow("ε = 0.1", "Q3", unit="nat", engine="cpz", paper=0.01, proved=0.02, attack=0.015, n=40),
        StudyRow("weights", "P10", unit="distance", paper=0.1, measured=0.2, n=7),
    ]
    return Result(
        name, "A title", group, f"prooflens reproduce {name}", "toy", False, 1.5, "0", rows, ["A remark."]
    )


def test_a_table_keeps_proofs_estimates_and_attacks_apart() -> None:
    text = markdown(result())
    assert (
        "| Q1 | `cpz` | 92.5 % (MC 95) | 37 = 92.5 % [80, 98] | – | 38 = 95.0 % [83, 99] | 40 | 0.5 |" in text
    )
    assert (
        "| Q1 | `jacobian` | 10 % | – | 39 = 97.5 % [87, 100], **1 false** | 38 = 95.0 % [83, 99] | 40 | – |"
        in text
    )
    assert "| P10 | 0.1 | 0.2 | 7 |" in text
    assert "    prooflens reproduce layer0_all\n" in text
    assert "\n1.5 minutes; model: toy; prooflens 0.\n" in text
    assert "; model: toy; commit abc1234.\n" in markdown(replace(result(), commit="abc1234"))
    assert "- A remark.\n" in text
    assert "- Estimated to hold, and broken by the attack: ε = 0.1, Q1, `jacobian`: 1 of 39.\n" in text
    assert text.rstrip().endswith(
        "- The paper's 2 rates to our intervals: 1 inside them, 1 below them (such as ε = 0.1, Q1, `jacobian`: 10 %, "
        "ours 39 = 97.5 %).\n- The paper's 2 values to ours: 0 within a factor of two, 2 half as large or less "
        "(such as ε = 0.1, Q3, `cpz`: 0.01, ours 0.02 nat)."
    )


def test_what_the_paper_says_against_itself() -> None:
    rows = [
        StudyRow("a", "Q1", paper=90.0, paper_attack=80.0, proved=1, n=2),
        StudyRow("b", "Q1", paper=90.0, paper_attack=80.0, estimated=1, n=2),
        StudyRow("a", "Q2", paper=80.0, paper_attack=80.0, proved=1, n=2),
        StudyRow("a", "Q3", unit="nat", paper=0.1, paper_attack=0.2, proved=0.3, n=2),
        StudyRow("a", "Q3", unit="nat", paper=0.3, paper_attack=0.2, proved=0.3, n=2),
    ]
    assert against_paper(replace(result(), rows=rows))[-1] == (
        "The paper's own figure is beyond its own MC+PGD, where no proof can be: Q1: 90 and 80; Q3: 0.1 and 0.2."
    )


def test_summary_and_agreement() -> None:
    assert agreement(result()) == "1 inside, 1 below"
    (line,) = [line for line in summary([result()]).splitlines() if "layer0_all" in line]
    assert "| 92.5 % (MC 95) | 37 = 92.5 % [80, 98] | – | 38 = 95.0 % [83, 99] | 40 |" in line
    assert line.endswith("`prooflens reproduce layer0_all` | 1.5 |")


def test_a_picture_is_well_formed() -> None:
    root = ElementTree.fromstring(picture(result()))
    bars = [
        e.get("class")
        for e in root.iter()
        if e.tag.endswith("rect") and e.get("class") in ("holds", "estimated")
    ]
    assert bars == ["holds", "estimated", "holds", "estimated"], "two of the legend, one per rate"


def test_pages_come_from_the_data(tmp_path: Path) -> None:
    save(result(), tmp_path)
    save(result("wang_probe", "probes"), tmp_path)
    assert [one.name for one in read(tmp_path / "data")] == ["layer0_all", "wang_probe"]
    written = {path.relative_to(tmp_path).as_posix() for path in write_pages(tmp_path)}
    pages = {"synthetic.md", "probes.md", "index.md"}
    assert written == pages | {"pictures/layer0_all.svg", "pictures/wang_probe.svg"}
    assert "[wang_probe](probes.md#wang_probe)" in (tmp_path / "index.md").read_text(encoding="utf-8")


def test_layers_of_a_study_lie_beside_each_other(tmp_path: Path) -> None:
    for variant in ("", "layer2"):
        save(replace(result("wang_probe", "probes"), variant=variant), tmp_path)
    assert [one.key for one in read(tmp_path / "data")] == ["wang_probe", "wang_probe-layer2"]
    write_pages(tmp_path)
    page = (tmp_path / "probes.md").read_text(encoding="utf-8")
    assert "## wang_probe-layer2\n" in page
    assert "(pictures/wang_probe-layer2.svg)" in page
    assert "(probes.md#wang_probe-layer2)" in (tmp_path / "index.md").read_text(encoding="utf-8")


def test_what_is_no_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds no results"):
        read(tmp_path)
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    with pytest.raises(StudyError, match="not the result of a study"):
        read(tmp_path)


def test_the_command(call: Call, tmp_path: Path) -> None:
    code, out, err = call("reproduce", "mc_budgets", "--json", "-o", str(tmp_path))
    document = json.loads(out)
    assert (code, err, document["missing"]) == (0, "", {})
    assert Result.from_dict(document["results"][0]) == read(tmp_path / "data")[0]
    assert (tmp_path / "index.md").is_file()
    code, out, _ = call("reproduce", "--list", "--json")
    assert {"name", "group", "model", "stands in for", "title"} == set(json.loads(out)["studies"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a study, or all"),
        (("layer0_al",), "did you mean 'layer0_all'"),
        (("gpt2", "--engine", "crow"), "did you mean 'crown'"),
        (("--pages", "nowhere"), "holds no"),
    ],
)
def test_errors_are_one_line(call: Call, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call("reproduce", *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_is_not_at_hand_is_left_out(call: Call, empty_home: Path) -> None:
    code, out, err = call("reproduce", "mc_budgets", "bert_sst2", "--json")
    document = json.loads(out)
    assert code == 2
    assert [one["name"] for one in document["results"]] == ["mc_budgets"]
    assert "prooflens train bert-tiny-sst2" in document["missing"]["bert_sst2"]
    assert "bert_sst2 is left out" in err
