"""The checker on honest runs, and on runs that were tampered with in ways that hashes alone cannot show."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import prooflens as pl
from prooflens.checker import WORDS, check
from prooflens.models.load import EMBEDDED
from tests import families
from tests.checker.forging import PACKAGE, TOY, Change, column, edit, first, rows_of


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the toy model with verdicts of every kind."""
    run = tmp_path_factory.mktemp("runs") / "toy"
    model = pl.load("toy")
    queries = ["top1", "rank2", "mass>=0.2", "entropy<=1.3", "entropy"]
    pl.certify(model, model.example(0), pl.Ball(0.1), "0-1", queries=queries).save(run)
    return run


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


@pytest.mark.slow
def test_an_honest_run_has_nothing_wrong(honest: Path) -> None:
    report = check(honest, TOY)
    rows = rows_of(honest)
    assert report.ok
    assert {finding.status for finding in report.findings} <= set(WORDS)
    pairs = list(zip(rows, report.findings, strict=True))
    assert all(finding.status == "witness confirmed" for row, finding in pairs if row["verdict"] == "fails")
    provable = [
        f for row, f in pairs if row["verdict"] == "holds" and row["layer"] == 0 and row["query"] != "entropy"
    ]
    # The engine writes out the whole Hessian of so small a model; the checker's curvature is coarser.
    assert sum(finding.status == "re-proved" for finding in provable) >= 0.9 * len(provable)


@pytest.mark.parametrize("part", ["rows", "tensors"])
def test_one_flipped_bit_is_caught(copy: Path, part: str) -> None:
    path = next((copy / part).iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = check(copy, TOY)
    assert not report.ok
    assert path.name in report.problems[0]


def test_changed_weights_are_caught(honest: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TOY, tmp_path / "weights"))
    state = load_file(folder / "model.safetensors")
    name = sorted(state)[0]
    changed = state[name].copy()
    changed.flat[0] = np.nextafter(changed.flat[0], np.inf)
    save_file(state | {name: changed}, folder / "model.safetensors")
    assert "fingerprint" in check(honest, folder).problems[0]


def test_a_missing_run_or_folder_is_wrong_not_a_traceback(honest: Path, tmp_path: Path) -> None:
    assert not check(tmp_path, TOY).ok
    assert not check(honest, tmp_path).ok


def _raise_bound(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """A margin that is proved, but not by as much."""
    i = first(rows, query="top1", verdict="holds", layer=0)
    k = int(np.argmin(tensors[f"row/{i}/lower"]))
    tensors[f"row/{i}/lower"][k] = 0.5 * (rows[i]["lower"] + rows[i]["clean"])
    rows[i]["lower"] = float(tensors[f"row/{i}/lower"].min())
    return i


def _turn_verdict(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """A failing margin with bounds that say it holds, its witness removed."""
    i = first(rows, query="top1", verdict="fails", layer=0)
    tensors[f"row/{i}/lower"][:] = 1e-6
    rows[i] |= {"verdict": "holds", "lower": 1e-6, "attack": None}
    for name in [name for name in tensors if name.startswith(f"row/{i}/witness")]:
        del tensors[name]
    return i


def _verdict_only(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="top1", verdict="unknown")
    rows[i]["verdict"] = "holds"
    return i


def _mass_bound(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="mass>=0.2", verdict="holds", layer=0)
    tensors[f"row/{i}/lower"][:] = rows[i]["lower"] = rows[i]["clean"] - 1e-3
    return i


def _table_only(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="top1", verdict="holds", layer=0)
    rows[i]["lower"] *= 1.01
    return i


def _witness_outside(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="top1", verdict="fails")
    tensors[f"row/{i}/witness_alpha"] *= 1.5
    center, radius = tensors["region/0/center"], tensors["region/0/radius"]
    tensors[f"row/{i}/witness"] = center + radius * tensors[f"row/{i}/witness_alpha"].reshape(center.shape)
    return i


def _witness_moved(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="top1", verdict="fails")
    tensors[f"row/{i}/witness"] += 1e-3
    return i


def _harmless_witness(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="top1", verdict="fails", layer=0)
    tensors[f"row/{i}/witness_alpha"] *= 0.0
    tensors[f"row/{i}/witness"] = tensors["region/0/center"]
    return i


def _bounds_beside_a_witness(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """A row that fails, whose bounds exclude what the clean input attains."""
    i = first(rows, query="top1", verdict="fails", guarantee="witness", layer=0)
    tensors[f"row/{i}/upper"][:] = tensors[f"row/{i}/lower"][:] = 50.0
    rows[i] |= {"lower": 50.0, "upper": 50.0}
    return i


def _larger_eps(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="top1", verdict="holds")
    rows[i]["eps"] *= 2.0
    return i


def _margin_left_out(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    i = first(rows, query="top1", verdict="holds", layer=0)
    claim = json.loads(rows[i]["claim"])
    k = int(np.argmin(tensors[f"row/{i}/lower"]))
    del claim["functionals"][k], claim["clean"][k]
    for side in ("lower", "upper"):
        tensors[f"row/{i}/{side}"] = np.delete(tensors[f"row/{i}/{side}"], k)
        rows[i][side] = float(tensors[f"row/{i}/{side}"].min())
    rows[i]["claim"] = json.dumps(claim)
    return i


def _nothing_asked(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """A failing claim without its functional: "true by the mask"."""
    i = first(rows, query="entropy<=1.3", verdict="fails")
    claim = json.loads(rows[i]["claim"]) | {"functionals": [], "clean": []}
    sides = {"lower": None, "upper": None, "attack": None}
    rows[i] |= sides | {"claim": json.dumps(claim), "verdict": "holds", "guarantee": "proved"}
    for name in [name for name in tensors if name.startswith(f"row/{i}/")]:
        del tensors[name]
    tensors |= {f"row/{i}/lower": np.zeros(0), f"row/{i}/upper": np.zeros(0)}
    return i


def _smaller_threshold(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """A mass of 0.9 whose functional asks for less."""
    i = first(rows, query="mass>=0.2", verdict="holds", layer=0)
    rows[i]["query"] = "mass>=0.9"
    return i


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        _nothing_asked,
        _smaller_threshold,
        column("query", "rank2", query="top1", verdict="holds"),
        column("query", "top2", query="rank2"),
        column("query", "entropy<=0.1", query="entropy<=1.3"),
        column("query", "mass>=0.2@{0}", query="mass>=0.2", top=2),
        column("query", "spec{0}>{1}", query="entropy"),
        column("query", "TOP1", query="top1"),
        column("verdict", "proved", query="top1", verdict="holds"),
        column("guarantee", "estimated", query="top1", verdict="holds"),
        column("guarantee", "witness", query="top1", verdict="holds"),
        column("guarantee", "proof", query="top1", verdict="fails"),
        _bounds_beside_a_witness,
        column("clean", 9.0, query="top1", verdict="holds"),
        column("top", 99, query="top1", verdict="holds"),
        column("head", None, query="mass>=0.2", verdict="holds"),
        _raise_bound,
        _turn_verdict,
        _verdict_only,
        _mass_bound,
        _table_only,
        _witness_outside,
        _witness_moved,
        _harmless_witness,
        _larger_eps,
        _margin_left_out,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_edits_with_fresh_hashes_are_caught_by_mathematics(copy: Path, change: Change) -> None:
    row = edit(copy, change)
    report = check(copy, TOY)
    assert not report.problems
    assert [finding.row for finding in report.findings if finding.status == "WRONG"] == [row]


QUERIES = [
    "top1", "top3", "top4", "rank1", "rank4", "mass>=0.2", "mass>=0.35@{0,-1}", "mass>=0.2@{0,1,2,3}", "spec{0,1}>{2}",
    "entropy", "entropy>=0.5", "0.5<=entropy<=1.35", "logit0>logit1", "argmax", "0:top1@-1 & 0.1:rank2@[0,1] & argmax",
    "0.5 * 0.0:mass>=0.2@-1 + -2.0 * 0.0:mass>=0.2@-1 + 3.0 * 0.1:entropy<=1.3@0 > 0",
    "1.0 * 0.0:spec{1}>{2}@3 + 0.1 * 0.0:spec{2}>{3}@3 > 0",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy", "toy-induction"])
def test_every_short_form_is_read_as_the_engines_read_it(name: str, tmp_path: Path) -> None:
    model = pl.load(name)
    prompt = model.example(0)
    pl.certify(model, prompt, pl.Ball(1e-4), "0", queries=QUERIES[:14]).save(tmp_path / "rows")
    found = [check(tmp_path / "rows", PACKAGE / "models" / "embedded" / name)]
    for number, query in enumerate(QUERIES[14:]):
        pl.circuit(model, prompt, pl.Ball(1e-4), query).save(tmp_path / str(number))
        found.append(check(tmp_path / str(number), PACKAGE / "models" / "embedded" / name))
    for report in found:
        assert report.ok, [f for f in report.findings if f.status == "WRONG"] or report.problems
        assert not any("query" in finding.note for finding in report.findings)


def test_a_claim_that_the_mask_decides_is_checked_alone(tmp_path: Path) -> None:
    """Position 0 of a causal model has one key: nothing of the layer is run."""
    families.gpt2().save_pretrained(tmp_path / "weights")
    model = pl.load(tmp_path / "weights")
    x = model.embed(torch.tensor([3, 14, 15]))
    queries = ["top1", "top3", "rank3", "mass>=0.2", "mass>=0.35@{0,-1}"]
    found = pl.certify(model, x, pl.Ball(1e-3), "0.0", queries=queries, positions=[0])
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", tmp_path / "weights")
    assert report.counts["re-proved"] == found.counts["holds"] == 5


def test_a_circuit_that_names_no_heads_is_not_checkable(toy: pl.Transformer, tmp_path: Path) -> None:
    pl.certify(toy, toy.example(0), pl.Ball(1e-4), "0.0", queries=["top1 & mass>=0.2"]).save(tmp_path / "run")
    (finding,) = check(tmp_path / "run", TOY).findings
    assert finding.status == "not checkable"
    assert "of which heads" in finding.note


def test_a_ledger_must_add_up(copy: Path) -> None:
    """A ledger beyond layer 0: the checker's own proof does not need it, but one that does not add up is WRONG."""

    def write(shift: float) -> int:
        def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
            i = first(rows, query="mass>=0.2", verdict="holds", layer=1)
            low, p = tensors[f"row/{i}/lower"], tensors["region/0/radius"].size
            tensors[f"row/{i}/ledger/corner"] = np.zeros((len(low), p))
            tensors[f"row/{i}/ledger/value"] = low + 1e-3 - shift
            tensors[f"row/{i}/ledger/penalty"] = np.full((len(low), 4), 2.5e-4)
            return i

        return edit(copy, change)

    i = write(0.0)
    assert check(copy, TOY).findings[i].status == "re-proved"
    write(1e-6)
    assert check(copy, TOY).findings[i].status == "WRONG"


@pytest.mark.slow
@pytest.mark.parametrize("convex", [False, True])
def test_hulls_are_checked_and_nothing_honest_is_called_wrong(
    toy: pl.Transformer, tmp_path: Path, convex: bool
) -> None:
    x, y = toy.example(0).x, toy.example(1).x
    hull = pl.Paraphrases([x, x + 0.02 * (y - x), x + 0.04 * (y - x)], convex=convex)
    queries = ["top1", "mass>=0.2", "entropy<=1.3"]
    pl.certify(toy, toy.example(0), hull, "0-1", queries=queries).save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.ok, [finding for finding in report.findings if finding.status == "WRONG"]
    assert report.counts["re-proved"] > 0


def test_circuits_outputs_and_single_tokens_are_not_called_wrong(toy: pl.Transformer, tmp_path: Path) -> None:
    prompt = toy.example(1)
    found = {
        "circuit": pl.circuit(toy, prompt, pl.Ball(0.05), "0.0:top1@-1 & 0.1:top1@1 & 1.0:mass>=0.2@-1"),
        "sum": pl.circuit(toy, prompt, pl.Ball(0.02), "0.5 * 0.0:mass>=0.2@-1 + 2 * 0.1:mass>=0.2@1 > 0"),
        "output": pl.certify(toy, prompt, pl.Ball(0.02), queries=["argmax"]),
        "token": pl.certify(toy, prompt, pl.Ball(0.05, tokens=[1]), layer=0, queries=["top2", "rank2"]),
    }
    for name, results in found.items():
        results.save(tmp_path / name)
        report = check(tmp_path / name, TOY)
        assert report.ok, (name, report)


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_fingerprint_is_the_models(name: str) -> None:
    from prooflens.checker.network import Network

    assert Network.read(PACKAGE / "models" / "embedded" / name).sha256 == pl.load(name).sha256


@pytest.mark.pretrained
@pytest.mark.slow
def test_witnesses_deep_in_a_pretrained_model_are_confirmed(minilm: pl.Transformer, tmp_path: Path) -> None:
    """Layer 3 of six, on points that are c + rα with 53-bit factors: nothing may be lost on the way."""
    from prooflens.models.cache import model_folder

    prompt = minilm.prompt("a good movie")
    found = pl.certify(minilm, prompt, pl.Ball(0.05), heads="3.0", engine="attack", positions=[3])
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", model_folder("minilm"))
    assert found.counts["fails"] > 0
    assert report.counts["witness confirmed"] == found.counts["fails"]
    assert report.ok
