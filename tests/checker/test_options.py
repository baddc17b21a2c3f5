"""Some rows, little time, progress, and what is written beside a run for its report."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import prooflens as pl
from prooflens.checker import check
from prooflens.checker.depth import Walk, room
from prooflens.cli import app
from prooflens.report import report
from tests.checker.forging import TOY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toy, folder = pl.load("toy"), tmp_path_factory.mktemp("options") / "run"
    pl.certify(toy, toy.example(1), pl.Ball(0.05), seed=0).save(folder)
    return folder


def test_the_demos_run_has_nothing_that_is_not_checkable(run: Path) -> None:
    counts = check(run, TOY).counts
    assert counts["not checkable"] == counts["WRONG"] == 0
    assert counts["re-proved"] == 11


def test_some_rows_are_judged_alone(run: Path) -> None:
    found = check(run, TOY, only={3, 12})
    assert [finding.row for finding in found.findings] == [3, 12]
    assert found.counts["re-proved"] == 2


def test_after_its_time_no_proof_is_begun(run: Path) -> None:
    found = check(run, TOY, seconds=0.0, only=range(8, 16))
    late = [finding for finding in found.findings if finding.status == "not checkable"]
    assert len(late) == 4
    assert all("time" in finding.note for finding in late)
    assert found.counts["witness confirmed"] == 2


def test_progress_is_told(run: Path) -> None:
    told: list[tuple[str, float]] = []
    check(run, TOY, tell=lambda stage, share: told.append((stage, share)))
    assert ("layer 1", 0.5) in told
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_the_words_are_kept_beside_the_run_and_shown_in_its_report(run: Path, tmp_path: Path) -> None:
    check(run, TOY, only={0}).save(run)
    check(run, TOY, only={9}).save(run)
    held = json.loads((run / "check.json").read_text())
    assert {row: word for row, (word, _) in held["rows"].items()} == {
        "0": "re-proved",
        "9": "witness confirmed",
    }
    assert "witness confirmed" in report(run, path=tmp_path / "page.html").read_text()
    assert check(run, TOY).ok
    held["run_sha256"] = "0" * 64
    (run / "check.json").write_text(json.dumps(held))
    assert '"witness confirmed"' not in report(run, path=tmp_path / "page.html").read_text()
    check(run, TOY, only={1}).save(run)
    assert list(json.loads((run / "check.json").read_text())["rows"]) == ["1"]


@pytest.mark.parametrize(("only", "rows"), [("3", [3]), ("0-2,12", [0, 1, 2, 12])])
def test_the_command_takes_rows_and_a_time(run: Path, only: str, rows: list[int]) -> None:
    said = CliRunner().invoke(app, ["check", str(run), "--only", only, "--time", "2m", "--json"])
    assert said.exit_code == 0, said.output
    assert [row["row"] for row in json.loads(said.stdout)["rows"]] == rows


def test_rows_that_are_no_numbers_are_told_in_one_line(run: Path) -> None:
    said = CliRunner().invoke(app, ["check", str(run), "--only", "first"])
    assert said.exit_code != 0
    assert "--only takes numbers of rows" in (said.output + str(said.exception))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_walks_hold_shares_of_the_memory_that_is_given(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = room.numbers(share)
    with room.within(2**20):
        assert room.numbers(share) == int(share * 2**17)
    with room.within(None):
        assert 0 < room.numbers(share) <= 2 * whole
    monkeypatch.setattr(room, "MEMINFO", Path("nowhere"))
    with room.within(None):
        assert room.numbers(share) == whole == room.numbers(share)


def test_the_command_takes_memory_and_refuses_what_is_none(run: Path) -> None:
    said = CliRunner().invoke(app, ["check", str(run), "--only", "0", "--memory", "1GB", "--json"])
    assert said.exit_code == 0, said.output
    said = CliRunner().invoke(app, ["check", str(run), "--memory", "8"])
    assert "write the unit" in str(said.exception)


def test_without_memory_the_rest_is_judged_all_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(walk: Walk, number: int) -> None:
        raise MemoryError

    monkeypatch.setattr(Walk, "layer", short)
    found = check(run, TOY)
    assert found.ok
    layers = [row["layer"] for row in pl.Results.load(run).rows]
    notes = [finding.note for finding in found.findings if finding.status == "not checkable"]
    assert notes
    assert all("not enough memory" in note for note in notes)
    assert {layers[finding.row] for finding in found.findings if finding.status == "re-proved"} == {0}
