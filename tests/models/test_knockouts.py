"""Knocked-out keys against attention computed by hand, through every engine, runs, the checker and families."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.engines import forms_of, get_engine
from prooflens.engines.attack.effects import attack_effects
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.relational import bound_effects
from prooflens.errors import ModelError, ProoflensError
from prooflens.models.export import export
from prooflens.models.knockouts import knockouts_of, table_name
from prooflens.models.parts import Edit
from prooflens.problem import Problem
from prooflens.queries.functionals import Functional, Logit
from prooflens.verdicts.vocabulary import profile
from tests.conftest import Call
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

ENGINES = ("interval", "crown", "zonotope", "cpz", "taylor", "jacobian-proved")
HIDDEN = ["a0.h1.k1", "a1.h0.q2.k0"]


MARGIN = forms_of([Functional(((1.0, Logit(0)), (-1.0, Logit(1))), 0.0, "margin")], 2)


def by_hand(
    model: pl.Transformer, x: torch.Tensor, hidden: dict[int, list[tuple[int, int, int]]]
) -> torch.Tensor:
    """The output, with attention weights of hidden keys set to 0 and the others divided by what is left."""
    program = model.program(x.shape[-2])
    values = {"blocks.0.hook_resid_pre": x}
    for step in program.steps:
        value = step(*(values[name] for name in step.inputs))
        for layer, keys in hidden.items():
            if step.out == f"blocks.{layer}.attn.hook_pattern":
                for head, query, key in keys:
                    value[..., head, query, key] = 0.0
                value = value / value.sum(-1, keepdim=True)
        values[step.out] = value
    return values["output"]


@pytest.mark.parametrize("kind", ["toy", "gpt2", "llama"])
def test_the_rest_shares_the_weight(kind: str) -> None:
    model = pl.load("toy") if kind == "toy" else reader(kind)
    x = torch.randn(3, 5, model.architecture.d_model, generator=torch.Generator().manual_seed(1)).double()
    edited = pl.edit(model, HIDDEN)
    others = [(1, i, 1) for i in range(5) if i != 1]
    assert torch.allclose(edited(x), by_hand(model, x, {0: others, 1: [(0, 2, 0)]}), rtol=0, atol=1e-12)
    pattern = edited.pattern(x[0], 0)
    assert bool((pattern[1, [0, 2, 3, 4], 1] == 0).all())
    assert pattern[1, 1, 1] > 0
    assert torch.allclose(edited(x[:, :1]), model(x[:, :1]))  # there is no token 1


def test_an_edited_model_is_a_model_of_its_own(toy: pl.Transformer, tmp_path: Path) -> None:
    edited = pl.edit(toy, HIDDEN)
    assert edited.name == "toy without a0.h1.k1, a1.h0.q2.k0"
    assert pl.edit(toy, HIDDEN[::-1]).sha256 == edited.sha256 != toy.sha256
    assert pl.edit(pl.edit(toy, HIDDEN[0]), HIDDEN[1]).sha256 == edited.sha256
    again = pl.load(export(edited, tmp_path / "edited"))
    assert again.sha256 == edited.sha256
    assert knockouts_of(again.weights, 0) == knockouts_of(edited.weights, 0) != []
    assert edited.to(dtype=torch.bfloat16).weights[table_name(0)].dtype == torch.float64
    assert torch.equal(again(toy.example()), edited(toy.example()))


@pytest.mark.parametrize("engine", [*ENGINES, "chebyshev"])
def test_bounds_enclose_what_an_attack_attains(toy: pl.Transformer, engine: str) -> None:
    x, end = toy.example().x, toy.example(1).x
    region = pl.Ball(0.01, tokens=[1]).around(x) if engine != "chebyshev" else pl.Segment(x, end).region()
    problem, edited = Problem(toy, region), Problem(pl.edit(toy, HIDDEN), region)
    forms, chosen = MARGIN, get_engine(engine)
    assert chosen.refuses(edited, forms) is None
    alone, joint = chosen.bound_forms(edited, forms), bound_effects(chosen, problem, edited, forms)
    points, _ = region.sample(200, seed=2)
    margin = edited.model(points) @ torch.tensor([1.0, -1.0]).double()
    assert alone.lower[0] <= margin.min() + 1e-12
    assert alone.upper[0] >= margin.max() - 1e-12
    reached = attack_effects(problem, edited, forms, AttackBudget(64, 2, 5), 0, [joint])
    assert joint.lower[0] <= reached.lower[0] + 1e-12
    assert joint.upper[0] >= reached.upper[0] - 1e-12
    unmasked = chosen.bound_forms(problem, forms)
    assert engine == "interval" or not torch.equal(unmasked.lower, alone.lower)


@pytest.mark.parametrize("engine", ENGINES)
def test_masks_of_heads_that_agree_are_the_mask_of_the_layer(toy: pl.Transformer, engine: str) -> None:
    """A key that no prompt has is hidden: every head has a mask of its own, and bounds are the same bit by bit."""
    region, forms = pl.Ball(0.01, tokens=[1]).around(toy.example()), MARGIN
    same = pl.edit(toy, ["a0.h0.k9", "a1.h1.k9"])
    one, two = (get_engine(engine).bound_forms(Problem(model, region), forms) for model in (toy, same))
    assert torch.equal(one.lower, two.lower)
    assert torch.equal(one.upper, two.upper)


def test_runs_are_kept_and_checked(call: Call, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    asked = ("effect", "toy", "--metric", "logit0-logit1", "--budget", "50/1/5", "--eps", "0.01")
    hidden = ",".join(HIDDEN)
    code, told, _ = call(*asked, "--without", hidden, "--faithful", "0", "--necessary", "-1", "-o", out)
    assert (code, "without a0.h1.k1, a1.h0.q2.k0" in told) == (3, True)
    code, told, _ = call("check", out, "--json")
    assert code == 0, told
    assert json.loads(told)["summary"]["witness confirmed"] == 1
    assert "free text" not in told


def test_the_checker_sees_other_keys_than_the_name_says(
    toy: pl.Transformer, tmp_path: Path, call: Call
) -> None:
    other = replace(pl.edit(toy, "a0.h1.k2"), name="toy without a0.h1.k1")
    found = pl.effect(
        toy, other, toy.example(), pl.Ball(0.001), "logit0-logit1", faithful=0.0, budget="20/1/2"
    )
    found.save(tmp_path / "run")
    code, told, _ = call("check", str(tmp_path / "run"), "--json")
    assert (code, "other parts are taken out than the edit names" in told) == (3, True), told


def test_members_of_families_are_run_with_hidden_keys() -> None:
    model = reader("gpt2")
    tree, plain = (
        pl.family_effects(model, [["a0.h1.k1"]], TEMPLATE, "logit{A}-logit{B}", tree=tree)
        for tree in (True, False)
    )
    assert tree.ends == pytest.approx(plain.ends, rel=1e-9)
    assert tree.ends[1] > tree.ends[0]
    with pytest.raises(ModelError, match="the prompt has tokens 0"):
        pl.family_effects(model, ["a0.h1.k99"], TEMPLATE, "logit{A}-logit{B}")


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ("a7.h0.k1", "layers are 0"),
        ("a0.h9.k1", "heads 0"),
        (["a0.h0.k1", "a0.h0.k1"], "twice"),
        (Edit("a0.h0.k1", torch.ones(4)), "has no value"),
        ("a0.h0.k", "no part of a model"),
    ],
)
def test_what_cannot_be_hidden_says_why(toy: pl.Transformer, edits: object, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        pl.edit(toy, edits)  # type: ignore[arg-type]


def test_a_query_keeps_a_key(toy: pl.Transformer) -> None:
    empty = pl.edit(toy, [f"a0.h0.q1.k{key}" for key in range(4)])
    with pytest.raises(ModelError, match="no key left at token 1"):
        empty(toy.example())
    with pytest.raises(ModelError, match="tokens 0 … 3"):
        pl.effect(toy, "a0.h0.k9", toy.example(), pl.Ball(0.01), "logit0")
    with pytest.raises(ModelError, match="comes later"):
        pl.edit(reader("gpt2"), "a0.h0.q1.k3")


def test_statements_about_rows_of_such_a_layer_are_refused(toy: pl.Transformer) -> None:
    edited = pl.edit(toy, "a0.h1.k1")
    with pytest.raises(ProoflensError, match="knocked out in layer 0"):
        pl.certify(edited, toy.example(), pl.Ball(0.01), "0.1", positions=[-1])
    later = pl.certify(edited, toy.example(), pl.Ball(0.001), "1.1", positions=[-1])
    assert len(later) == 1
    with pytest.raises(ProoflensError, match="knocked out in layer 0"):
        profile(pl.edit(reader("gpt2"), "a0.h1.k1"), length=3)


@pytest.mark.parametrize("row", [[0.5, 0, 1], [5, 0, 1], [0, -2, 1], [0, 0, -1]])
def test_tables_that_are_none_do_not_load(toy: pl.Transformer, row: list[float]) -> None:
    edited = pl.edit(toy, "a0.h1.k1")
    with pytest.raises(ModelError, match="knocked_out"):
        pl.Transformer(toy.architecture, {**edited.weights, table_name(0): torch.tensor([row]).double()})
