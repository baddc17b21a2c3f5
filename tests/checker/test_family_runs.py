"""Runs about families of prompts: honest ones are run again, forged ones are caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prooflens as pl
from prooflens.checker import CheckReport, check
from prooflens.checker.network import Network
from prooflens.checker.plain import PlainNetwork
from prooflens.cli.view import torch_powers, torch_tables
from prooflens.models import load, scores_name
from prooflens.models.files import write_model
from tests.checker.forging import edit, head
from tests.enumeration.test_enumerate import CLAIMS, TEMPLATE
from tests.enumeration.words import reader
from tests.models.hf_families import DECODERS, ENCODERS, VOCABULARY, decoder, encoder

Rows = list[dict[str, Any]]


def examined(run: Path) -> CheckReport:
    return check(run, run.parent / "model", torch_tables, torch_powers)


def written(folder: Path, kind: str, queries: list[str], **options: Any) -> Path:
    model = reader(kind)
    write_model(folder / "model", model.architecture, dict(model.weights))
    pl.family(model, options.pop("prompts", TEMPLATE), queries, out=folder / "run", **options)
    return folder / "run"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_honest_runs_are_run_again(kind: str, tmp_path: Path) -> None:
    queries = [text for text in CLAIMS if kind != "bert" or ("{P}" not in text and "logit" not in text)]
    queries += ["0.2:top1={self-1}@{B.2.first} & 1.1:spec{A}>{B}@-1", "0.0:top1={self}"]
    report = examined(written(tmp_path, kind, queries))
    assert report.ok, (report.problems, [f for f in report.findings if f.status == "WRONG"])
    members = [f for f in report.findings if f.status == "re-run"]
    assert len(members) > 20 * len(queries)


def test_small_families_are_proved_again(tmp_path: Path) -> None:
    small = pl.Template("When{A} met{B}", A=[" Mary", " Tom"], B=[" John", " Kate"])
    run = written(tmp_path, "llama", ["1.1:spec{A}>{B}@-1", "argmax={A}"], prompts=small)
    assert examined(run).counts["re-proved"] == 2


def test_estimates_are_not_checkable_but_add_up(tmp_path: Path) -> None:
    report = examined(written(tmp_path, "llama", ["1.0:spec{A}>{P}@-1"], sample=80))
    assert report.ok
    assert report.findings[0].status == "not checkable"


def test_a_sample_of_a_family_beyond_all_counting_is_kept_and_checked(tmp_path: Path) -> None:
    huge = pl.Swaps([1] * 14, dict.fromkeys(range(13), pl.ALL))
    run = written(tmp_path, "llama", ["0.1:top1={self}@-1"], prompts=huge, sample=30)
    assert huge.of(reader()).size == 60**13 > 2**63
    assert examined(run).ok


def first(rows: Rows, what: str, **wanted: object) -> int:
    return next(
        i for i, r in enumerate(rows) if r["what"] == what and all(r[k] == v for k, v in wanted.items())
    )


def change(what: str, **values: object) -> Callable[[Rows, dict[str, Any]], int]:
    def changed(rows: Rows, tensors: dict[str, Any]) -> int:
        at = first(rows, what)
        rows[at] |= values
        return at

    return changed


def without_a_failure(rows: Rows, tensors: dict[str, Any]) -> int:
    """One failure less, and every count in keeping with it."""
    at = first(rows, "failure")
    rows[at] |= {"what": "worst", "held": 1}
    return at


def as_many_more(rows: Rows, tensors: dict[str, Any]) -> int:
    at = first(rows, "claim")
    rows[at] |= {"held": rows[at]["held"] + 1, "share": (rows[at]["held"] + 1) / rows[at]["asked"]}
    return at


def all_hold(rows: Rows, tensors: dict[str, Any]) -> int:
    """A claim that is true everywhere, with all tables in keeping, and no failure listed."""
    at = first(rows, "claim")
    rows[at] |= {"held": rows[at]["asked"], "share": 1.0}
    for name, table in tensors.items():
        if name.startswith(("claim/0/slot", "claim/0/pair")):
            table[0] = table[1]
    for row in rows:
        if row["what"] in ("filler", "pair"):
            row |= {"held": row["asked"], "share": 1.0}
        if row["what"] == "failure":
            row |= {"what": "worst", "held": 0}
    return at


def another_member(rows: Rows, tensors: dict[str, Any]) -> int:
    at = first(rows, "failure")
    rows[at]["ids"] = [*rows[at]["ids"][:-1], 19]
    return at


@pytest.mark.parametrize(
    "forge",
    [
        change("claim", word="proved"),
        change("claim", word="certain"),
        change("claim", members=7),
        change("claim", share=1.0),
        change("claim", margin=99.0),
        change("failure", margin=-99.0),
        change("nearest", margin=0.0),
        change("failure", held=1),
        change("filler", held=0, asked=0),
        without_a_failure,
        as_many_more,
        all_hold,
        another_member,
    ],
)
def test_forgeries_are_caught(forge: Callable[[Rows, dict[str, Any]], int], tmp_path: Path) -> None:
    run = written(tmp_path, "llama", ["0.1:mass>=0.3@{A,B}@-1"])
    assert examined(run).ok
    changed = edit(run, forge)
    report = examined(run)
    assert report.problems or any(f.status == "WRONG" for f in report.findings), changed


def test_another_number_of_members_is_caught(tmp_path: Path) -> None:
    run = written(tmp_path, "llama", ["0.1:mass>=0.3@{A,B}@-1"])
    head(run, family={"differ": []})
    assert examined(run).counts["WRONG"] > 0


@pytest.mark.parametrize("name", [*DECODERS, *(name for name in ENCODERS)])
def test_the_plain_network_is_the_model(name: str, tmp_path: Path) -> None:
    model = load(decoder(name) if name in DECODERS else encoder(name))
    write_model(tmp_path, model.architecture, dict(model.weights))
    net = PlainNetwork(Network.read(tmp_path, torch_tables, torch_powers))
    ids = torch.randint(3, VOCABULARY, (5, 6), generator=torch.Generator().manual_seed(0))
    last = model.architecture.n_layers - 1
    found = net.run(ids.numpy(), [0, last], output=True)
    values = model.uncapped.run(model.embed(ids), [scores_name(0), scores_name(last), "output"])
    seen = model.mask(6, layer=last).numpy()
    gap = np.abs(found[last] - values[scores_name(last)].numpy())[..., seen]
    assert gap.max() < 1e-6
    theirs = values["output"]
    if model.architecture.pool == "none":
        theirs = theirs[:, -1]
    assert np.abs(found["logits"] - theirs.numpy()).max() < 1e-6
