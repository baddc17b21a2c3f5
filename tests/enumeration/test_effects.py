"""Effects over a family against every member by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError, ProoflensError, QueryError
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

EDITS = ["a0.h1", "m1", ["a1.h0", "m0.n3"]]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tree", [True, False])
def test_counts_are_those_of_every_member(kind: str, tree: bool) -> None:
    model = reader(kind)
    found = pl.family_effects(
        model,
        EDITS,
        TEMPLATE,
        "logit{A}-logit{B}",
        necessary=0.01,
        faithful=0.02,
        sufficient=True,
        tree=tree,
        batch=7,
    )
    family = TEMPLATE.of(model)
    assert (found.asked, found.members, found.word) == (family.size, family.size, "enumerated")
    for row, edits in zip(found.rows, EDITS, strict=True):
        other, effects, same = pl.edit(model, edits), {}, 0
        for member in family:
            ids = torch.tensor(member.ids)
            a, b = (member.ids[member.roles[slot][0][0]] for slot in "AB")
            one, two = model(ids)[-1], other(ids)[-1]
            effects[member.text] = float((one[a] - one[b]) - (two[a] - two[b]))
            same += int(one.argmax() == two.argmax())
        assert row.edited == other.name
        values = list(effects.values())
        assert row.necessary == sum(value >= 0.01 for value in values)
        assert row.faithful == sum(abs(value) <= 0.02 for value in values)
        assert row.same == same
        assert abs(row.mean - sum(values) / len(values)) < 1e-12
        assert abs(row.least[0] - min(values)) < 1e-12
        assert abs(effects[row.most[1]] - max(values)) < 1e-12


def test_a_sample_is_estimated_and_says_so() -> None:
    found = pl.family_effects(reader(), ["m1"], TEMPLATE, "logit{A}-logit{B}", sample=5)
    assert (found.asked, found.word) == (5, "estimated")
    assert "5 of" in str(found)
    assert found.to_dict()["rows"][0]["necessary"] is None


@pytest.mark.parametrize(
    ("edits", "metric", "says"),
    [
        ([], "logit{A}-logit{B}", "no edit"),
        (["m1"], "logit3", "a difference of outputs"),
        (["m9"], "logit{A}-logit{B}", "layers are"),
        ([pl.load("toy")], "logit{A}-logit{B}", "is no edit of"),
    ],
)
def test_what_cannot_be_asked_says_why(edits: list[object], metric: str, says: str) -> None:
    with pytest.raises(ProoflensError, match=says) as error:
        pl.family_effects(reader(), edits, TEMPLATE, metric)  # type: ignore[arg-type]
    assert isinstance(error.value, ModelError) or metric == "logit3"


def test_logits_behind_a_cap_are_not_measured() -> None:
    model = reader()
    capped = replace(model, architecture=replace(model.architecture, logit_cap=0.5))
    with pytest.raises(QueryError, match="cap"):
        pl.family_effects(capped, ["m1"], TEMPLATE, "logit{A}-logit{B}")


@pytest.mark.parametrize("metric", ["prob({A})", "prob({A}|{A},{B},9)", "kl({A},{B},9)"])
def test_distributions_of_every_member(metric: str) -> None:
    model = reader("gpt2")
    found = pl.family_effects(model, EDITS, TEMPLATE, metric, faithful=0.001, batch=7)
    family = TEMPLATE.of(model)
    for row, edits in zip(found.rows, EDITS, strict=True):
        other, effects = pl.edit(model, edits), {}
        for member in family:
            ids = torch.tensor(member.ids)
            a, b = (member.ids[member.roles[slot][0][0]] for slot in "AB")
            one, two = model(ids)[-1], other(ids)[-1]
            if metric != "prob({A})":
                one, two = one[[a, b, 9]], two[[a, b, 9]]
            p, q = one.softmax(-1), two.softmax(-1)
            at = a if metric == "prob({A})" else 0
            effect = (p * (p / q).log()).sum() if metric.startswith("kl") else p[at] - q[at]
            effects[member.text] = float(effect)
        values = list(effects.values())
        assert row.faithful == sum(abs(value) <= 0.001 for value in values)
        assert abs(row.least[0] - min(values)) < 1e-12
        assert abs(effects[row.most[1]] - max(values)) < 1e-12


def test_an_output_that_some_member_names_twice_is_refused() -> None:
    with pytest.raises(QueryError, match="one token on some member"):
        pl.family_effects(reader("gpt2"), ["m1"], TEMPLATE, "kl({A},{B},3)")
