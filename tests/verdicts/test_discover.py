"""Circuits that are found: faithful at every point by brute force, and without any of their parts no longer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.errors import ModelError, ProoflensError, QueryError
from prooflens.models.edits import mean_of, places_of
from prooflens.progress import silent
from prooflens.results import Verdict
from prooflens.results.discovery import Discovery
from prooflens.verdicts.circuit_files import outside, read_json
from prooflens.verdicts.discover import search, weighed
from tests.checker.forging import TOY
from tests.conftest import Call
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

METRIC = torch.tensor([1.0, -1.0]).double()


@pytest.fixture(scope="module")
def found() -> Discovery:
    toy = pl.load("toy")
    return pl.discover(toy, toy.example(), pl.Ball(0.01), "logit0-logit1", 0.2, budget="50/1/5")


def test_the_circuit_is_faithful_at_every_point(toy: pl.Transformer, found: Discovery) -> None:
    assert found.removed
    assert sorted([*found.circuit, *found.removed]) == sorted(places_of(toy.architecture))
    x, _ = pl.Ball(0.01).around(toy.example()).sample(400, seed=1)
    effects = (toy(x) - pl.edit(toy, list(found.removed))(x)) @ METRIC
    assert found.certificate is not None
    lower, upper = found.certificate.ends
    assert -0.2 <= lower <= float(effects.min()) <= float(effects.max()) <= upper <= 0.2


def test_every_part_of_a_minimal_circuit_has_a_witness(toy: pl.Transformer, found: Discovery) -> None:
    assert found.minimal
    assert sorted(found.needed) == sorted(found.circuit)
    for part, effect in found.needed.items():
        other = pl.edit(toy, [*found.removed, part])
        witness = effect.claims[0].witness  # type: ignore[union-attr]
        assert witness is not None
        assert float((witness.x - toy.example().x).abs().max()) <= 0.01
        assert abs(float((toy(witness.x) - other(witness.x)) @ METRIC)) > 0.2


def test_what_is_kept_is_checked_and_read_again(
    found: Discovery, toy: pl.Transformer, tmp_path: Path
) -> None:
    found.save(tmp_path / "found")
    assert check(tmp_path / "found" / "certificate", TOY).ok
    for part in found.circuit:
        report = check(tmp_path / "found" / "needed" / part, TOY)
        assert report.ok
        assert report.counts["witness confirmed"] == 1
    circuit = read_json(tmp_path / "found" / "circuit.json")
    assert sorted(outside(circuit, toy.architecture)) == sorted(found.removed)
    assert json.loads(json.dumps(found.to_dict()))["minimal"]
    assert "every part is needed" in str(found)
    with pytest.raises(ProoflensError, match="not empty"):
        found.save(tmp_path / "found")


class _Fake:
    """A judgement: parts hold together if none of the given sets is among them."""

    ends = (0.0, 0.0)

    def __init__(self, verdict: Verdict) -> None:
        self.verdicts = [verdict]


def test_parts_are_tried_again_when_others_have_gone() -> None:
    """c can go only once d is gone; a never; b is not known."""

    def judge(parts: Sequence[str]) -> _Fake:
        if "a" in parts or ("c" in parts and "d" not in parts):
            return _Fake(Verdict.FAILS)
        return _Fake(Verdict.UNKNOWN if "b" in parts else Verdict.HOLDS)

    removed, trials, certificate, needed = search("abcd", judge, silent)  # type: ignore[arg-type]
    assert removed == ["d", "c"]
    assert certificate is not None
    assert sorted(needed) == ["a", "b"]
    assert [trial.part for trial in trials] == [*"abcd", *"abc", *"ab"]
    assert {trial.out for trial in trials[-2:]} == {2}


def test_parts_at_their_means(toy: pl.Transformer) -> None:
    prompts = [toy.example(i) for i in range(4)]
    edits = {part: mean_of(toy, part, prompts) for part in ("a0.h0", "a1.h0")}
    found = pl.discover(
        toy, toy.example(), pl.Ball(0.001), "logit0-logit1", 1e3, parts=["a0.h0", "a1.h0"], edits=edits
    )
    assert sorted(found.removed) == ["a0.h0", "a1.h0"]
    other = pl.edit(toy, [edits[name] for name in found.removed])
    assert found.certificate is not None
    lower, upper = found.certificate.ends
    assert lower <= float((toy(toy.example()) - other(toy.example())) @ METRIC) <= upper


def test_a_circuit_that_is_given_is_judged(toy: pl.Transformer, found: Discovery) -> None:
    """What was found is faithful and minimal; with a part more that part is superfluous; with one less it is broken."""
    x, ball, metric = toy.example(), pl.Ball(0.01), "logit0-logit1"

    def judged(circuit: Sequence[str]) -> Discovery:
        return pl.discover(toy, x, ball, metric, 0.2, circuit=circuit, budget="50/1/5")

    same = judged(found.circuit)
    assert same.verdicts == [Verdict.HOLDS, Verdict.HOLDS]
    assert sorted(same.circuit) == sorted(found.circuit)
    extra = found.removed[-1]
    more = judged([*found.circuit, extra])
    assert more.verdicts[1] is Verdict.FAILS
    assert extra in more.superfluous
    assert f"superfluous: {extra}" in str(more)
    less = judged(found.circuit[1:])
    assert less.faithful is Verdict.FAILS
    with pytest.raises(ModelError, match="none of the parts"):
        judged(["a9.h0"])


def test_a_judgement_is_open_where_nothing_is_known() -> None:
    verdicts = {"a": Verdict.FAILS, "b": Verdict.UNKNOWN, "c": Verdict.HOLDS}

    def judge(parts: Sequence[str]) -> _Fake:
        return _Fake(verdicts.get(parts[-1], Verdict.HOLDS))

    removed, trials, certificate, needed = weighed("abcd", "abc", judge, silent)  # type: ignore[arg-type]
    found = Discovery("m", "", "", 0.1, "", list("abc"), removed, trials, certificate, needed, 0.0)
    assert (removed, found.open, found.superfluous, found.minimal) == (["d"], ["b"], ["c"], False)
    assert found.verdicts == [Verdict.HOLDS, Verdict.FAILS]
    open_only = Discovery("m", "", "", 0.1, "", ["b"], removed, [], certificate, {"b": needed["b"]}, 0.0)
    assert open_only.verdicts == [Verdict.HOLDS, Verdict.UNKNOWN]


def test_over_a_family_against_every_member() -> None:
    model = reader("gpt2")
    parts = ["a0.h0", "a0.h1", "a1.h2", "m1"]
    found = pl.family_discover(model, TEMPLATE, "logit{A}-logit{B}", 0.05, parts=parts, batch=50)

    def worst(names: Sequence[str]) -> float:
        other, effects = pl.edit(model, names), []
        for member in TEMPLATE.of(model):
            ids = torch.tensor(member.ids)
            a, b = (member.ids[member.roles[slot][0][0]] for slot in "AB")
            one, two = model(ids)[-1], other(ids)[-1]
            effects.append(abs(float((one[a] - one[b]) - (two[a] - two[b]))))
        return max(effects)

    assert found.minimal
    assert sorted([*found.circuit, *found.removed]) == parts
    if found.removed:
        assert worst(found.removed) <= 0.05
    for part in found.circuit:
        assert worst([*found.removed, part]) > 0.05
    again = pl.family_discover(
        model, TEMPLATE, "logit{A}-logit{B}", 0.05, parts=parts, circuit=found.circuit, batch=50
    )
    assert again.verdicts == [Verdict.HOLDS, Verdict.HOLDS]


def test_the_command(call: Call, tmp_path: Path) -> None:
    asked = ("discover", "toy", "--eps", "0.01", "--metric", "logit0-logit1", "--budget", "50/1/5")
    out = tmp_path / "found"
    code, told, _ = call(*asked, "--faithful", "0.2", "--parts", "a0.h0,m1", "--json", "-o", str(out))
    document = json.loads(told)
    assert (code, document["circuit"], document["removed"]) == (0, ["m1"], ["a0.h0"])
    assert call("check", str(out / "certificate"))[0] == 0
    given = ("--faithful", "0.2", "--parts", "a0.h0,m1", "--circuit")
    code, told, _ = call(*asked, *given, str(out / "circuit.json"))
    assert (code, "every part is needed" in told) == (0, True)
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"nodes": {"m1": True, "a0.h0": True}}))
    code, told, _ = call(*asked, *given, str(whole))
    assert (code, "superfluous: a0.h0" in told) == (3, True)
    code, _, err = call(*asked, "--faithful", "0.2", "--parts", "a9.h0")
    assert (code, err.count("\n")) == (1, 1)


def test_what_cannot_be_asked_says_why(toy: pl.Transformer) -> None:
    x, ball = toy.example(), pl.Ball(0.01)
    with pytest.raises(QueryError, match="at least 0"):
        pl.discover(toy, x, ball, "logit0-logit1", -1.0)
    with pytest.raises(ModelError, match="no part"):
        pl.discover(toy, x, ball, "logit0-logit1", 1.0, parts=[])
    with pytest.raises(ModelError, match="twice"):
        pl.discover(toy, x, ball, "logit0-logit1", 1.0, parts=["m0", "m0"])


@pytest.mark.parametrize("kind", ["segment", "hull"])
def test_minimal_on_ways_between_prompts(toy: pl.Transformer, kind: str, tmp_path: Path) -> None:
    x, y, z = (toy.example(i).x for i in range(3))
    ends = [x, x + 0.05 * (y - x), x + 0.03 * (z - x)]
    place = pl.Segment(*ends[:2]) if kind == "segment" else pl.Hull(ends)
    parts = ["a0.h0", "m1", "a1.h0"]
    found = pl.discover(toy, x, place, "logit0-logit1", 0.2, parts=parts, everywhere=True, budget="20/1/2")
    assert (found.minimal, found.verdicts) == (True, [Verdict.HOLDS, Verdict.HOLDS])
    points, _ = place.region().sample(200, seed=2)
    for part in found.needed_everywhere:
        effects = (toy(points) - pl.edit(toy, [*found.removed, part])(points)) @ METRIC
        assert float(effects.abs().min()) > 0.2
    assert found.needed_everywhere
    found.save(tmp_path / "found")


def test_a_circuit_is_checked_whole(call: Call, found: Discovery, tmp_path: Path) -> None:
    out = tmp_path / "found"
    found.save(out)
    code, told, _ = call("check", str(out), "--json")
    rows = json.loads(told)["rows"]
    assert (code, len(rows)) == (0, 1 + len(found.circuit)), told
    assert {row["status"] for row in rows[1:]} == {"witness confirmed"}
    assert rows[0]["status"] in ("re-proved", "not checkable")
    stated = json.loads((out / "circuit.json").read_text())
    first, second = found.circuit[:2]
    forgeries = [
        {"faithful": 0.1},
        {"metric": "logit1-logit0"},
        {"circuit_is_faithful": "fails"},
        {"open": [first]},
        {"removed": [*stated["removed"], first]},
        {"circuit": [first], "nodes": {first: True}, "removed": [*stated["removed"], second]},
        {"model_sha256": "0" * 64},
    ]
    for forged in forgeries:
        (out / "circuit.json").write_text(json.dumps(stated | forged))
        assert call("check", str(out))[0] == 3, forged
    (out / "circuit.json").write_text(json.dumps(stated))
    (out / "needed" / first).rename(tmp_path / "hidden")
    assert call("check", str(out))[0] == 3
