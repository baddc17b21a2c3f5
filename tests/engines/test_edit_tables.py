"""Edits that are tables of a model (tokens, directions, patterns) through every engine, runs and the checker."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.engines import forms_of, get_engine
from prooflens.engines.attack.effects import attack_effects
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.relational import bound_effects
from prooflens.engines.taylor import segments
from prooflens.evaluation.soundness.cases import random_model
from prooflens.models.edits import freeze
from prooflens.models.export import export
from prooflens.models.held_edits import feature
from prooflens.models.parts import Edit
from prooflens.problem import Problem
from prooflens.queries.functionals import Functional, Logit
from tests.checker.forging import TOY
from tests.conftest import Call
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader
from tests.models.test_edits import drawn

FEW = 2
"""Tokens of the inputs that engines are asked about."""
CHEAP: Any = {"budget": "20/1/2", "engine": "interval"}
"""Options where a witness is all that is wanted."""


def edits_of(toy: pl.Transformer, n: int = 4) -> dict[str, list[str | Edit]]:
    d = toy.architecture.d_model
    v, last = torch.linspace(-1.0, 1.0, d).double(), min(2, n - 1)
    frozen = [freeze(toy, "a0.h1", toy.example(1)), freeze(toy, "a1", toy.example(2))]
    found: dict[str, list[str | Edit]] = {
        "tokens": [
            "a0.h1@1",
            "m1@-1",
            Edit(f"a1.h0@0@{last}", torch.ones(2, d // 2).double()),
            f"m0.n3@{last}",
        ],
        "directions": [
            Edit("blocks.1.hook_resid_pre@1", direction=v),
            Edit(f"m0@{last}", torch.ones(1), direction=v),
        ],
        "frozen": [
            replace(one, value=one.value[:, :n, :n]) for one in frozen if isinstance(one.value, torch.Tensor)
        ],
        "features": features_of(d, last),
    }
    # A part can be edited once: the two directions are put beside different others.
    found["places"] = [*found["tokens"], found["directions"][0]]
    found["patterns"] = [*found["frozen"], found["directions"][1]]
    return found | {
        "all": [*found["tokens"][:3], *found["directions"][:1], found["frozen"][0], *found["features"]]
    }


def dictionary(
    hook: str,
    d: int,
    generator: torch.Generator,
    kind: str = "standard",
    threshold: torch.Tensor | float = 0.0,
) -> pl.Dictionary:
    W, b, c, D, o = (
        torch.randn(*size, generator=generator).double() for size in ((6, d), (6,), (d,), (d, 6), (d,))
    )
    return pl.Dictionary.of(hook, W, b, c, threshold, kind, D, o)


def features_of(d: int, last: int = 2) -> list[str | Edit]:
    one, two = (
        dictionary(f"blocks.{i}.hook_{h}", d, torch.Generator().manual_seed(i))
        for i, h in ((0, "resid_post"), (1, "attn_out"))
    )
    return [feature(one, 1, None, (last,)), feature(one, 3, 0.5), feature(two, 2, None, (-1,), error=False)]


EDGES = ["a0.h0->a1.h0.q", "m0->a1.h0.k@1", "a0.h0->m1", "m0.n1->m1", "a0->logits@-1", "input->a1.h0.v"]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [*((engine, "llama") for engine in ("taylor", "crown", "chebyshev", "interval")), ("zonotope", "gpt2")],
)
def test_bounds_of_cut_edges_enclose_what_an_attack_attains(engine: str, kind: str) -> None:
    model, x, generator = drawn(kind)
    x, end = x[:FEW], torch.randn(FEW, x.shape[1], generator=generator).double()
    region = (
        pl.Ball(0.01, tokens=[1]).around(x)
        if engine != "chebyshev"
        else pl.Segment(x, x + 0.3 * (end - x)).region()
    )
    patch = Edit("a0.h0->a1.h0.k@0", torch.ones(model.architecture.head_dim).double())
    problem, edited = (Problem(one, region) for one in (model, pl.edit(model, [*EDGES, patch])))
    encloses(engine, problem, edited)


def encloses(engine: str, problem: Problem, edited: Problem, tight: bool = True) -> None:
    """Joint bounds and those of the edited model hold what samples and an attack attain; those of `taylor` closely."""
    forms = forms_of(
        [Functional(((1.0, Logit(0)), (-1.0, Logit(1))), 0.0, "margin")],
        problem.model.architecture.d_out or 0,
    )
    chosen, region = get_engine(engine), problem.region
    assert chosen.refuses(edited, forms) is None
    alone, joint = chosen.bound_forms(edited, forms), bound_effects(chosen, problem, edited, forms)
    points, _ = region.sample(100, seed=2)
    out = problem.read_output(edited.model(points))
    margin = out[..., 0] - out[..., 1]
    assert alone.lower[0] <= margin.min() + 1e-12
    assert alone.upper[0] >= margin.max() - 1e-12
    reached = attack_effects(problem, edited, forms, AttackBudget(64, 2, 5), 0, [joint])
    assert joint.lower[0] <= reached.lower[0] + 1e-12
    assert joint.upper[0] >= reached.upper[0] - 1e-12
    if engine == "taylor" and tight:
        assert joint.upper[0] - joint.lower[0] <= 1.3 * (reached.upper[0] - reached.lower[0]) + 1e-9


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        *(("taylor", kind) for kind in ("places", "patterns", "features")),
        *((engine, "all") for engine in ("interval", "crown", "zonotope", "cpz", "chebyshev")),
    ],
)
def test_bounds_enclose_what_an_attack_attains(toy: pl.Transformer, engine: str, kind: str) -> None:
    x, end = toy.example().x[:FEW], toy.example(1).x[:FEW]
    region = (
        pl.Ball(0.01, tokens=[1]).around(x)
        if engine != "chebyshev"
        else pl.Segment(x, x + 0.3 * (end - x)).region()
    )
    problem, edited = Problem(toy, region), Problem(pl.edit(toy, edits_of(toy, FEW)[kind]), region)
    encloses(engine, problem, edited)


@pytest.mark.parametrize("kind", ["tokens", "directions", "frozen"])
def test_an_edited_model_travels_and_its_runs_are_checked(
    toy: pl.Transformer, tmp_path: Path, kind: str
) -> None:
    edited = pl.edit(toy, edits_of(toy)[kind])
    again = pl.load(export(edited, tmp_path / "edited"))
    assert again.sha256 == edited.sha256
    assert torch.equal(again(toy.example()), edited(toy.example()))
    for metric in ("logit0-logit1", "neuron 1.3@2"):
        found = pl.effect(toy, edited, toy.example(), pl.Ball(0.01), metric, faithful=0.0, **CHEAP)
        found.save(tmp_path / metric[:5])
        report = check(tmp_path / metric[:5], TOY)
        assert report.ok, report
        assert report.counts["witness confirmed"] == 1


def test_words_say_all_of_parts_taken_out_at_tokens(toy: pl.Transformer, tmp_path: Path, call: Call) -> None:
    asked = (
        "effect",
        "toy",
        "--metric",
        "logit0-logit1",
        "--budget",
        "20/1/2",
        "--engine",
        "interval",
        "--eps",
        "0.01",
        "--faithful",
        "0",
    )
    out = str(tmp_path / "run")
    code, told, _ = call(*asked, "--without", "a0.h1@1@-1,m0@2", "-o", out)
    assert (code, "without a0.h1@1@-1, m0@2" in told) == (3, True), told
    code, told, _ = call("check", out, "--json")
    assert (code, json.loads(told)["summary"]["witness confirmed"], "free text" in told) == (0, 1, False)
    other = replace(pl.edit(toy, "a0.h1@2"), name="toy without a0.h1@1")
    found = pl.effect(
        toy, other, toy.example(), pl.Ball(0.001), "logit0-logit1", faithful=0.0, budget="20/1/2"
    )
    found.save(tmp_path / "forged")
    assert "other parts are taken out" in str(check(tmp_path / "forged", TOY))
    code, told, _ = call(*asked, "--frozen", "a0.h1", "-o", str(tmp_path / "frozen"))
    assert (code, "with a0.h1.pattern at the prompt" in told) == (3, True)
    assert check(tmp_path / "frozen", TOY).ok


def test_members_of_families_are_run_with_parts_held_at_tokens(tmp_path: Path) -> None:
    model = reader("gpt2")
    tree, plain = (
        pl.family_effects(model, [["a0.h1@-1", "m1@2"]], TEMPLATE, "logit{A}-logit{B}", tree=tree)
        for tree in (True, False)
    )
    assert tree.ends == pytest.approx(plain.ends, rel=1e-9)
    assert tree.ends[1] > tree.ends[0]


def test_a_checked_family_and_prompt_have_their_edges_cut(tmp_path: Path) -> None:
    model = reader("llama")
    folder = export(model, tmp_path / "model")
    found = pl.family_effects(
        model, [["a0.h1->a1.h0.k", "m0->logits", "m0.n2->a1.h0.q"]], TEMPLATE, "logit{A}-logit{B}"
    )
    found.save(tmp_path / "family")
    report = check(tmp_path / "family", folder)
    assert report.ok, report
    model = reader("gpt2")
    folder = export(model, tmp_path / "gpt2")
    prompt = model.prompt([1, 2, 3, 4])
    for number, metric in enumerate(("logit0-logit1", "neuron 1.0@-1", "neuron 0.1@-1")):
        cut = [*EDGES[:3], "m1->logits", "a0.h1->m0", *(["m0.n2->m1"] if number == 1 else ["m0.n2@1"])]
        one = pl.effect(model, cut, prompt, pl.Ball(0.001), metric, faithful=0.0, **CHEAP)
        one.save(tmp_path / f"run{number}")
        report = check(tmp_path / f"run{number}", folder)
        assert report.ok, report
        assert report.counts["witness confirmed"] == 1
        assert "free text" not in str(report)
    other = replace(pl.edit(model, "a0.h0->m1"), name=f"{model.name} without a0.h1->m1")
    one = pl.effect(model, other, prompt, pl.Ball(0.001), "logit0-logit1", faithful=0.0, **CHEAP)
    one.save(tmp_path / "forged")
    assert "other parts are taken out" in str(check(tmp_path / "forged", folder))


def test_edges_of_an_early_layer_pass_later_attentions() -> None:
    """Senders of layer 0 and receivers behind layer 1: `taylor` takes them along, jointly as tight as the attack."""
    model = random_model("gpt2", random.Random("deep"), 3)
    x = torch.randn(FEW, model.architecture.d_model, generator=torch.Generator().manual_seed(1)).double()
    region = pl.Ball(0.005).around(x)
    edited = pl.edit(model, ["a0.h0->a2.h0.q", "a1.h0->logits", "a0.h0->m2@1", "m0->a2.h0.v"])
    encloses("taylor", Problem(model, region), Problem(edited, region))


@pytest.mark.parametrize("edits", [["m0@-1", "a0.h0@-2"], ["pattern"]])
def test_tokens_count_from_the_end_where_the_first_do_not_move(edits: list[str]) -> None:
    """`chebyshev` walks the tokens in front of the first that moves by themselves: there @-1 is none of theirs."""
    model, x, generator = drawn("gpt2")
    x = x[:3]
    end = x.clone()
    end[-1] = torch.randn(x.shape[-1], generator=generator).double()
    frozen = Edit("a1.h0.pattern", torch.randn(len(x), len(x), generator=generator).double())
    region = pl.Segment(x, end).region()
    edited = pl.edit(model, [frozen] if edits == ["pattern"] else list(edits))
    encloses("chebyshev", Problem(model, region), Problem(edited, region))


def test_a_walk_that_loses_what_is_sent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation of `taylor`: the root behind an attention holds a tenth less of what its maps write."""
    plain = segments._stacked

    def losing(*given: Any) -> set[str]:
        made = plain(*given)
        here = given[-1][-2]
        output = here.attention.output
        here.attention = replace(here.attention, output=replace(output, weight=0.9 * output.weight))
        return made

    monkeypatch.setattr(segments, "_stacked", losing)
    model, x, _ = drawn("gpt2")
    region = pl.Ball(0.001).around(x[:FEW])
    with pytest.raises(AssertionError):
        encloses("taylor", Problem(model, region), Problem(pl.edit(model, "a0.h0->m1"), region))


def test_the_command_line_keeps_the_edges_of_a_circuit(tmp_path: Path, call: Call) -> None:
    model, x, _ = drawn("gpt2")
    folder = export(replace(model, examples=x[None]), tmp_path / "model")
    kept = ["input->logits", "input->a0.h0", "a0.h0->m0", "a0.h0->logits", "m0->a1.h0<q>"]
    (tmp_path / "circuit.json").write_text(json.dumps({"nodes": {}, "edges": dict.fromkeys(kept, True)}))
    asked = (
        "effect",
        str(folder),
        "--sample",
        "0",
        "--eps",
        "0.001",
        "--metric",
        "logit0-logit1",
        "--budget",
        "20/1/2",
        "--engine",
        "interval",
    )
    out = str(tmp_path / "run")
    code, told, said = call(
        *asked, "--circuit", str(tmp_path / "circuit.json"), "--edges", "--faithful", "0", "-o", out
    )
    assert (code, "->" in told) == (3, True), told + said
    assert check(Path(out), folder).ok
    code, _, said = call(
        "effect",
        "toy",
        "--circuit",
        str(tmp_path / "circuit.json"),
        "--edges",
        "--eps",
        "0.1",
        "--metric",
        "logit0",
    )
    assert (code, "do not add up" in said) == (1, True), said
