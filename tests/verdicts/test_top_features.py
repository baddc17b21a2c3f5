"""Features of TopK dictionaries: above 0 and among the k largest, on balls and over families, against brute force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prooflens as pl
from prooflens.checker import check
from prooflens.checker.claims import standing
from prooflens.cli.view import torch_powers, torch_tables
from prooflens.engines import Guarantee
from prooflens.engines.bounds import Bounds
from prooflens.engines.standings import folded, unfolded
from prooflens.errors import ModelError, QueryError
from prooflens.models.files import write_model
from prooflens.queries import Functional, Standing, parse_query
from tests.checker.forging import TOY, edit
from tests.conftest import Call
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

HOOK = "blocks.1.hook_resid_post"
NUMBER = st.floats(-2.0, 2.0).map(lambda x: round(x, 2))


def dictionary(model: pl.Transformer, k: int = 3, size: int = 8) -> pl.Dictionary:
    generator = torch.Generator().manual_seed(1)
    d = model.architecture.d_model
    W, b, c = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((size, d), (size,), (d,)))
    return pl.Dictionary.of(HOOK, W, 0.3 * b, 0.1 * c, kind="topk", k=k)


def is_active(y: torch.Tensor, i: int, k: int) -> bool:
    """By its definition: above 0, and fewer than k others are at least as large."""
    return bool(y[i] > 0) and sum(bool(y[j] >= y[i]) for j in range(len(y)) if j != i) < k


@given(y=st.lists(NUMBER, min_size=1, max_size=6), k=st.integers(1, 6), data=st.data())
def test_a_standing_is_positive_iff_the_feature_is_active(
    y: list[float], k: int, data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, len(y) - 1))
    values = torch.tensor(y, dtype=torch.float64)
    rivals = tuple(j for j in range(len(y)) if j != i)
    found = Standing(i, rivals, k).value(values)
    assert bool(found > 0) is is_active(values, i, k)
    if k <= len(y):
        held = pl.Dictionary.of(HOOK, torch.eye(len(y)).double(), kind="topk", k=k)
        assert bool(held.active(values)[i]) is is_active(values, i, k)
        assert float(held.distances(values)[i]) == float(found)


@settings(max_examples=60)
@given(data=st.data(), k=st.integers(1, 5), sign=st.sampled_from([1.0, -1.0]))
def test_bounds_of_differences_bound_a_standing(data: st.DataObject, k: int, sign: float) -> None:
    """Ends at points that are drawn: what lies between the differences' ends lies between the standing's."""
    size = 5
    points = data.draw(st.lists(st.lists(NUMBER, min_size=size, max_size=size), min_size=2, max_size=4))
    y = torch.tensor(points, dtype=torch.float64)
    functionals = [
        Functional(((sign, Standing(0, (1, 2, 3, 4), k)),), 0.25),
        Functional(((sign, Standing(2, (0, 1), k)),)),
    ]
    plain, parts = unfolded(functionals)
    at = torch.stack([f.value({}, y) for f in plain])
    ends = Bounds(at.amin(1), at.amax(1), Guarantee.PROVED, "drawn", 0.0)
    found = folded(functionals, parts, ends)
    for i, functional in enumerate(functionals):
        values = functional.value({}, y)
        assert bool((found.lower[i] <= values).all())
        assert bool((values <= found.upper[i]).all())
    tight = Bounds(at[:, 0], at[:, 0], Guarantee.PROVED, "drawn", 0.0)
    exact = folded(functionals, parts, tight)
    first = torch.stack([f.value({}, y[0]) for f in functionals])
    assert torch.allclose(exact.lower, first, atol=1e-12)
    assert torch.allclose(exact.upper, first, atol=1e-12)


def test_balls_are_proved_and_broken_as_points_say(tmp_path: Path) -> None:
    toy = pl.load("toy")
    x, sae = toy.example(), dictionary(pl.load("toy"))
    _, cache = toy.run_with_cache(x)
    y = (cache[HOOK][3] - sae.center) @ sae.weight.T + sae.bias
    active = [is_active(y, i, 3) for i in range(sae.size)]
    assert 0 < sum(active) <= 3
    assert sae.active(cache[HOOK][3]).tolist() == active
    queries = [f"feature S.{i} {'active' if on else 'off'}@-1" for i, on in enumerate(active)]
    res = pl.certify(toy, x, pl.Ball(1e-5), queries=queries, vectors={"S": sae}, budget="8/1/2")
    assert res.counts["holds"] == sae.size
    assert res.table["query"][0].as_py() == f"feature S.0 {'top3' if active[0] else 'not top3'}@3"
    turned = [f"feature S.{i} {'off' if on else 'active'}@-1" for i, on in enumerate(active)]
    res = pl.certify(toy, x, pl.Ball(1e-5), queries=turned, vectors={"S": sae}, budget="8/1/2")
    assert res.counts["fails"] == sae.size


@pytest.mark.parametrize("eps", [0.02, 0.5])
def test_no_point_contradicts_a_verdict_and_the_checker_agrees(eps: float, tmp_path: Path) -> None:
    toy = pl.load("toy")
    x, sae, ball = toy.example(), dictionary(pl.load("toy"), k=2), pl.Ball(eps)
    on = sae.active(toy.run_with_cache(x)[1][HOOK][3]).tolist()
    queries = [f"feature S.{i} {'active' if one else 'off'}@-1" for i, one in enumerate(on)]
    res = pl.certify(toy, x, ball, queries=queries, vectors={"S": sae}, budget="200/4/20")
    points, _ = ball.around(x).sample(512, corners=0.5)
    with torch.no_grad():
        h = toy.run(points, HOOK)[HOOK][:, 3]
    y = (h - sae.center) @ sae.weight.T + sae.bias
    for i, row in enumerate(res.rows):
        seen = {is_active(one, i, 2) for one in y}
        if row["verdict"] == "holds":
            assert seen == {on[i]}, row
        if row["verdict"] == "fails":
            outcome = res.outcomes[i]
            assert outcome.witness is not None
            at = toy.run(outcome.witness.x, HOOK)[HOOK][3]
            assert is_active((at - sae.center) @ sae.weight.T + sae.bias, i, 2) is not on[i]
    assert res.counts["holds" if eps < 0.1 else "fails"]
    res.save(tmp_path / "run")
    found = check(tmp_path / "run", TOY)
    assert found.ok
    assert found.counts["re-proved" if eps < 0.1 else "witness confirmed"]


def test_a_weaker_claim_under_the_same_query_is_wrong(tmp_path: Path) -> None:
    toy = pl.load("toy")
    sae = dictionary(toy, k=2)
    on = int(sae.active(toy.run_with_cache(toy.example())[1][HOOK][3]).int().argmax())
    res = pl.certify(
        toy, toy.example(), pl.Ball(1e-4), queries=f"feature S.{on} active@-1", vectors={"S": sae}
    )
    for place, value in ((3, 3), (4, [0])):
        run = tmp_path / f"run-{place}"
        res.save(run)

        def weaker(
            rows: list[dict[str, Any]], tensors: dict[str, Any], place: int = place, value: object = value
        ) -> int:
            claim = json.loads(rows[0]["claim"])
            claim["functionals"][0]["terms"][0][place] = value
            rows[0]["claim"] = json.dumps(claim)
            return 0

        assert check(run, TOY).ok
        edit(run, weaker)
        assert not check(run, TOY).ok


def test_radii_and_tables_of_features() -> None:
    toy = pl.load("toy")
    sae = dictionary(toy)
    found = pl.features(toy, toy.example(), sae, pl.Ball(1e-5), off=3, budget="8/1/2")
    active = sae.active(toy.run_with_cache(toy.example())[1][HOOK][3])
    assert found.summary["active"] == int(active.sum()) == found.summary["stay active"]
    rad = pl.radius(toy, toy.example(), found.queries[0], vectors={"SAE": sae}, tolerance=1.0, budget="8/1/4")
    assert rad.certified > 0.0
    assert rad.attack is None or rad.certified <= rad.attack


def test_families_count_them(tmp_path: Path) -> None:
    model = reader("llama")
    sae = dictionary(model, k=2, size=5)
    family = TEMPLATE.of(model)
    queries = ["feature S.0 active@-1", "feature S.1 off@{A.1.first}", "feature S.2 not top2@-1"]
    found = pl.family(
        model, TEMPLATE, queries, vectors={"S": sae}, confirm=2.0, nearest=2, out=tmp_path / "run"
    )
    every = [
        member
        for shape in family.shapes
        for _, digits in shape.blocks(0, 1000, shape.combinations)
        for member in family.members(shape, digits)
    ]
    counts = [0, 0, 0]
    for member in every:
        h = model.run_with_cache(torch.tensor(member.ids))[1][HOOK]
        y = (h - sae.center) @ sae.weight.T + sae.bias
        counts[0] += is_active(y[-1], 0, 2)
        counts[1] += not is_active(y[member.roles["A"][0][0]], 1, 2)
        counts[2] += not is_active(y[-1], 2, 2)
    assert [row.held for row in found] == counts
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    again = check(tmp_path / "run", tmp_path / "model", tables=torch_tables, powers=torch_powers)
    assert again.ok


@given(low=st.lists(NUMBER, min_size=3, max_size=3), k=st.integers(1, 4))
def test_the_checkers_standing_is_the_same(low: list[float], k: int) -> None:
    from flint import arb

    y = torch.tensor(low, dtype=torch.float64)
    own = standing(arb(low[0]), [arb(v) for v in low[1:]], k)
    assert own.overlaps(arb(float(Standing(0, (1, 2), k).value(y)), 1e-12))


def test_texts_and_errors(call: Call) -> None:
    for text in ("feature SAE.5 top32@-1", "feature SAE.5 not top3@2"):
        assert str(parse_query(text)) == text
        assert parse_query(str(parse_query(text))) == parse_query(text)
    toy = pl.load("toy")
    x, sae = toy.example(), dictionary(toy)
    with pytest.raises(QueryError, match="active or off, or have a range"):
        pl.certify(toy, x, pl.Ball(1e-4), queries="feature S.0>0.5@-1", vectors={"S": sae})
    with pytest.raises(QueryError, match="at least one feature"):
        parse_query("feature SAE.5 top0@-1")
    eye = torch.eye(4).double()
    for options, word in (
        ({"kind": "topk"}, "has its k"),
        ({"kind": "standard", "k": 2}, "has its k"),
        ({"kind": "topk", "k": 5}, "how many of the 4"),
        ({"kind": "topk", "k": 2, "threshold": 0.5}, "no threshold"),
    ):
        with pytest.raises(ModelError, match=word):
            pl.Dictionary.of(HOOK, eye, **options)
    state = {"W_enc": eye, "b_enc": eye[0]}
    for config in (
        {"architecture": "topk", "k": 2},
        {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 2}},
    ):
        read = pl.Dictionary.from_state({**config, "hook_name": HOOK}, state)
        assert (read.kind, read.k) == ("topk", 2)
    code, _, err = call("certify", "toy", "--eps", "0.01", "--query", "feature S.1 top@-1")
    assert (code, len(err.strip().splitlines())) == (1, 1)
