"""Attributions and the logit lens over families: counts against every member by itself, and the checker's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.cli.view import torch_powers, torch_tables
from prooflens.errors import ProoflensError, QueryError
from prooflens.families import Member
from prooflens.models import Transformer
from prooflens.models.files import write_model
from tests.checker.forging import edit
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

QUERIES = [
    "lens 0 logit{A}>logit{B}",
    "lens 1 argmax={A}",
    "dla 1.1 logit{A}-logit{B}>0",
    "dla-live m0 logit{A}-logit{B}<=0",
    "1.1:spec{A}>{B}@-1 & dla a0 logit3-logit5>0 & lens 0 logit{A}>logit4",
]


def members(model: Transformer) -> list[Member]:
    family = TEMPLATE.of(model)
    return [
        member
        for shape in family.shapes
        for _, digits in shape.blocks(0, 1000, shape.combinations)
        for member in family.members(shape, digits)
    ]


def attributed(model: Transformer, member: Member, part: str, a: int, b: int) -> float:
    """The direct contribution with the norm frozen at the member, by the direction of `pl.attribution`."""
    prompt = model.prompt(list(member.ids))
    hook, v = pl.attribution(model, part, (a, b), prompt)
    return float(model.run(prompt, hook)[hook][-1].flatten() @ v)


def truth(model: Transformer, member: Member) -> list[bool]:
    prompt = model.prompt(list(member.ids))
    a, b = (member.ids[member.roles[slot][0][0]] for slot in "AB")
    first = model.cut(1)(prompt)
    first = first[-1] if first.ndim == 2 else first
    last = model(prompt)
    last = last[-1] if last.ndim == 2 else last
    pattern = model.pattern(prompt, 1)[1, -1]
    masses = [sum(float(pattern[i]) for span in member.roles[slot] for i in span) for slot in "AB"]
    return [
        bool(first[a] > first[b]),
        bool(last.argmax() == a),
        attributed(model, member, "a1.h1", a, b) > 0,
        attributed(model, member, "m0", a, b) <= 0,
        masses[0] > masses[1] and attributed(model, member, "a0", 3, 5) > 0 and bool(first[a] > first[4]),
    ]


@pytest.mark.parametrize(("kind", "tree"), [("llama", True), ("gpt2", False)])
def test_counts_are_those_of_every_member(kind: str, tree: bool) -> None:
    model = reader(kind)
    found = pl.family(model, TEMPLATE, QUERIES, tree=tree, confirm=1.0, nearest=2)
    every = [truth(model, member) for member in members(model)]
    counts = [sum(column) for column in zip(*every, strict=True)]
    assert [row.held for row in found] == counts
    assert any(0 < count < len(every) for count in counts)
    assert all(judged.confirmed != "contradicted" for row in found for judged in row.nearest)


def test_the_checker_runs_them_again(tmp_path: Path) -> None:
    model = reader("llama")
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    run = tmp_path / "run"
    pl.family(model, TEMPLATE, QUERIES, out=run, confirm=0.0, nearest=2)

    found = check(run, tmp_path / "model", tables=torch_tables, powers=torch_powers)
    assert found.ok
    assert found.counts["re-run"] >= len(QUERIES)

    def other(rows: list[dict[str, object]], tensors: dict[str, object]) -> int:
        for row in rows:  # another block under the same counts
            row["query"] = str(row["query"]).replace("lens 0 logit{A}>logit{B}", "lens 1 logit{A}>logit{B}")
        return 0

    edit(run, other)
    assert not check(run, tmp_path / "model", tables=torch_tables, powers=torch_powers).ok


def test_readouts_of_two_hooks_are_compared(tmp_path: Path) -> None:
    """Brute force: both values from the cache of the member alone."""
    model, run = reader("llama"), tmp_path / "run"
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    first, second = "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"
    d, generator = model.architecture.d_model, torch.Generator().manual_seed(3)
    D, E = (torch.randn(d, generator=generator, dtype=torch.float64) for _ in range(2))
    queries = [
        f"read({first}@-1,D)>read({second}@-1,E)",
        f"read({second}@{{A.1.first}},D)<=read({second}@-1,D)",
        f"read({first}@-1,D)>neuron 1.3@-1 & neuron 0.2@-1>neuron 0.3@-1",
    ]
    found = pl.family(model, TEMPLATE, queries, vectors={"D": D, "E": E}, out=run, confirm=2.0, nearest=2)
    counts = [0, 0, 0]
    for member in members(model):
        _, cache = model.run_with_cache(torch.tensor(member.ids))
        a, b = cache[first], cache[second]
        neurons = [cache[f"blocks.{layer}.mlp.hook_pre"][-1] for layer in (0, 1)]
        counts[0] += bool(a[-1] @ D > b[-1] @ E)
        counts[1] += bool(b[member.roles["A"][0][0]] @ D <= b[-1] @ D)
        counts[2] += bool(a[-1] @ D > neurons[1][3]) and bool(neurons[0][2] > neurons[0][3])
    assert [row.held for row in found] == counts
    assert all(judged.confirmed == "confirmed" for row in found for judged in row.nearest)
    assert check(run, tmp_path / "model", tables=torch_tables, powers=torch_powers).ok
    with pytest.raises(QueryError, match="ask without `deployed`"):
        pl.family(model, TEMPLATE, queries[0], vectors={"D": D, "E": E}, deployed="float32")
    prompt = model.prompt([1, 2, 3])
    region = pl.certify(model, prompt, pl.Ball(1e-6), queries=queries[0], vectors={"D": D, "E": E})
    _, cache = model.run_with_cache(prompt)
    held = bool(cache[first][-1] @ D > cache[second][-1] @ E)
    assert region.table["verdict"].to_pylist() == ["holds" if held else "fails"]


def test_deployed_precision_is_measured_there_too() -> None:
    model = reader("llama")
    found = pl.family(model, TEMPLATE, QUERIES[:3], confirm=0.0, nearest=2, deployed="float32")
    assert all(row.deployed is not None and row.deployed.at_nearest is not None for row in found)
    who = [row.deployed.deployed for row in found if row.deployed is not None]
    assert ["cut or read at a hook" in one for one in who] == [True, False, True]  # lens 1 is the model


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("lens 0 argmax", "write 'argmax={A}'"),
        ("lens 0 logit3>=0.5", "compares outputs"),
        ("dla 1.1 logit{A}-logit{B}>0.5", "compare with 0"),
        ("dla 1.1 logit{A}-logit{B}", "compare with 0"),
    ],
)
def test_what_has_no_sign_says_so(query: str, says: str) -> None:
    with pytest.raises(QueryError, match=says):
        pl.family(reader("llama"), TEMPLATE, query)


def test_models_without_such_a_head_say_so() -> None:
    with pytest.raises(ProoflensError, match=r"no head|give model\.cut"):
        pl.family(reader("bert"), TEMPLATE, "lens 0 logit3>logit4")
