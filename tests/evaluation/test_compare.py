"""`compare`: one row per engine, attained widths, crossed bounds, and all its outputs."""

import csv
import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prooflens import Ball, cli, load
from prooflens.engines import FormBounds, Forms, Guarantee, get_engine, protocol
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.errors import EngineError
from prooflens.evaluation.compare import Comparison, compare
from prooflens.evaluation.memory_meter import resident
from prooflens.problem import Problem
from prooflens.report.comparison import tightness_plot
from prooflens.verdicts.question import Question, ask
from prooflens.verdicts.settings import Settings, parse_budget

pytestmark = pytest.mark.slow

QUICK = Settings(budget=parse_budget("100/3/15"))
ENGINES = ("interval", "crown", "zonotope", "cpz", "jacobian", "no-such-engine", "layer0", "attack")


@pytest.fixture(scope="module")
def question() -> Question:
    model = load("toy")
    return ask(model, model.example(0), Ball(0.02), layer=1, queries=["top1", "mass>=0.2"], positions=[3])


@pytest.fixture(scope="module")
def table(question: Question) -> Comparison:
    return compare(question, ENGINES, QUICK)


def rows_of(table: Comparison) -> dict[str, dict[str, object]]:
    return {str(row["engine"]): row for row in table.rows}


def test_every_engine_has_a_row(table: Comparison) -> None:
    rows = rows_of(table)
    assert list(rows) == list(ENGINES)
    assert "there is no engine" in str(rows["no-such-engine"]["reason"])
    assert "layer 0 only" in str(rows["layer0"]["reason"])
    assert rows["layer0"]["holds"] is None
    assert rows["jacobian"]["holds"] is None
    assert rows["jacobian"]["estimated"] is not None


def test_proved_widths_are_at_least_what_is_attained(table: Comparison) -> None:
    """1 ≤ cpz ≤ crown ≤ interval on this input; nothing proved is crossed; the attack leaves what is proved."""
    rows = rows_of(table)
    widths = [rows[name]["width"] for name in ("attack", "cpz", "crown", "interval")]
    assert widths == sorted(widths, key=float)  # type: ignore[arg-type]
    for name in ("interval", "crown", "zonotope", "cpz"):
        assert rows[name]["crossed"] == 0
        for query in ("top1", "mass>=0.2"):
            assert float(rows[name][f"holds: {query}"]) <= float(rows["attack"][f"holds: {query}"])  # type: ignore[arg-type]


def test_a_wrong_engine_is_caught(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds a tenth of cpz's: the attack crosses them, and the table says so."""

    @dataclass(frozen=True)
    class Wrong:
        name: str = "wrong"
        guarantee: Guarantee = Guarantee.PROVED

        def refuses(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> str | None:
            return None

        def bound_forms(
            self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS
        ) -> FormBounds:
            found = get_engine("cpz").bound_forms(problem, forms, options)
            middle, half = 0.5 * (found.lower + found.upper), 0.05 * (found.upper - found.lower)
            return FormBounds(middle - half, middle + half)

    monkeypatch.setitem(protocol._REGISTRY, "wrong", Wrong)
    (wrong, attack) = compare(question, ["wrong"], QUICK).rows
    assert wrong["crossed"] > 0
    assert attack["engine"] == "attack"


def test_an_engine_that_gives_up_says_why(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: object) -> FormBounds:
        raise EngineError("too much for me")

    monkeypatch.setattr("prooflens.engines.crown.engine.bound_by", give_up)
    rows = rows_of(compare(question, ["interval", "crown"], QUICK))
    assert rows["crown"]["reason"] == "too much for me"
    assert rows["interval"]["reason"] is None


def test_only_unknown_engines_are_an_error(question: Question) -> None:
    with pytest.raises(Exception, match="did you mean 'crown'"):
        compare(question, ["crwon"], QUICK)


def test_no_claims(question: Question) -> None:
    found = compare(replace(question, claims=[]), ["interval"], QUICK)
    assert [row["claims"] for row in found.rows] == [0, 0]


def test_outputs(table: Comparison) -> None:
    read = list(csv.DictReader(io.StringIO(table.csv())))
    assert [row["engine"] for row in read] == list(ENGINES)
    assert float(read[1]["holds: top1"]) == table.rows[1]["holds: top1"]
    text = table.latex()
    assert text.count(r"\\") == len(ENGINES) + 1
    assert r"mass$\ge$0.2" in text
    for line in text.splitlines()[4:-2]:
        assert line.count(" & ") == len(table.columns) - 1
    drawing = ET.fromstring(tightness_plot(table.rows, "a <title>"))
    marks = [element for element in drawing.iter() if element.tag.endswith("circle")]
    assert len(marks) == sum(bool(row["width"] and row["ms"]) for row in table.rows)
    assert "no engine" in tightness_plot([], "nothing")


def test_the_command_writes_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {name: tmp_path / f"table.{name}" for name in ("csv", "latex", "plot")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    arguments = [
        "prooflens",
        "compare",
        "toy",
        "--layer",
        "0",
        "--eps",
        "0.02",
        "--engines",
        "interval, crown",
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, "--budget", "50/1/5", "--json", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["engine"] for row in rows] == ["interval", "crown", "attack"]
    assert all(path.stat().st_size for path in files.values())


def test_the_peak_is_seen() -> None:
    """In a process of its own: what tests before have left behind is not counted."""
    if not resident():
        pytest.skip("no /proc")
    program = """
import torch
from prooflens.evaluation.memory_meter import MemoryMeter
with MemoryMeter(torch.device("cpu")) as peak:
    held = torch.ones(2**24, dtype=torch.float64)
    held += 1.0
print(peak.bytes)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.8 * 2**27 <= int(found.stdout) <= 4 * 2**27
