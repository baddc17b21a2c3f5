"""Values inside the model over families of prompts: margins and counts against every member by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.cli.view import torch_powers, torch_tables
from prooflens.errors import QueryError
from prooflens.families import Member
from prooflens.models import Transformer
from prooflens.models.files import write_model
from prooflens.models.reads import hooks_of
from prooflens.models.tree import Runner
from tests.checker.forging import edit
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

HOOK = "blocks.1.hook_resid_post"


def vectors(model: Transformer) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    d = model.architecture.d_model
    W, b, v = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((6, d), (6,), (d,)))
    return {"SAE": pl.Dictionary.of(HOOK, W, b, 0.1 * v, 0.2, "jumprelu"), "D": v}


def truth(model: Transformer, member: Member, query: str) -> float:
    """The margin of a claim, from the cache of the member alone."""
    _, cache = model.run_with_cache(torch.tensor(member.ids))
    held = vectors(model)
    sae, v = held["SAE"], held["D"]
    assert isinstance(sae, pl.Dictionary)
    assert isinstance(v, torch.Tensor)
    first = member.roles["A"][0][0]
    if query.startswith("neuron 1.3>0"):
        return min(float(cache["blocks.1.mlp.hook_pre"][i, 3]) for span in member.roles["A"] for i in span)
    if query.startswith("neuron"):
        return float(cache["blocks.0.mlp.hook_pre"][-1, 2] - cache["blocks.0.mlp.hook_pre"][-1, 5])
    if query.startswith("feature"):
        read = (cache[HOOK][-1] - sae.center) @ sae.weight[4] + sae.bias[4] - sae.threshold[4]
        return -float(read)
    return float(cache["blocks.0.hook_attn_out"][first] @ v) + 0.25


QUERIES = [
    "neuron 1.3>0@{A}",
    "neuron 0.2>neuron 0.5@-1",
    "feature SAE.4 off@-1",
    "read(blocks.0.hook_attn_out@{A.1.first},D)>=-0.25",
]


@pytest.mark.parametrize(("kind", "tree"), [("llama", True), ("gpt2", False)])
def test_counts_are_those_of_every_member(kind: str, tree: bool) -> None:
    model = reader(kind)
    family = TEMPLATE.of(model)
    found = pl.family(model, family, QUERIES, vectors=vectors(model), tree=tree, confirm=2.0, nearest=2)
    every = [
        member
        for shape in family.shapes
        for _, digits in shape.blocks(0, 1000, shape.combinations)
        for member in family.members(shape, digits)
    ]
    assert len(every) == family.size
    for row, query in zip(found, QUERIES, strict=True):
        margins = [truth(model, member, query) for member in every]
        strict = [m >= 0 if "off" in query or ">=" in query else m > 0 for m in margins]
        assert (row.held, row.asked) == (sum(strict), len(every))
        assert row.least == pytest.approx(min(margins), rel=1e-9, abs=1e-12)
        assert row.nearest[0].confirmed == "confirmed"


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_runs_are_run_again_by_the_checker(kind: str, tmp_path: Path) -> None:
    model = reader(kind)
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    queries = [*QUERIES, "1.1:spec{A}>{B}@-1 & neuron 1.3>0@-1", "read(blocks.1.attn.hook_q@-1,Q)>0"]
    held = vectors(model) | {"Q": torch.ones(16).double()}
    pl.family(model, TEMPLATE, queries, vectors=held, out=tmp_path / "run", confirm=0.0, nearest=2)
    report = check(tmp_path / "run", tmp_path / "model", torch_tables, torch_powers)
    assert report.ok, (report.problems, [f for f in report.findings if f.status == "WRONG"])
    assert report.counts["re-run"] > 5 * len(queries)
    notes = [finding.note for finding in report.findings]
    assert sum("directions are the stored ones" in note for note in notes) == 2
    assert any("hook_q is not run again" in note for note in notes)

    def other_direction(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        tensors["read/D/weight"] = -tensors["read/D/weight"]
        return 0

    edit(tmp_path / "run", other_direction)
    assert not check(tmp_path / "run", tmp_path / "model", torch_tables, torch_powers).ok


def test_small_families_are_proved_again(tmp_path: Path) -> None:
    model = reader("llama")
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    small = pl.Template("When{A} met{B}", A=[" Mary", " Tom"], B=[" John", " Kate"])
    queries = ["neuron 1.3>0@{A}", "feature SAE.4 off@-1"]
    res = pl.family(model, small, queries, vectors=vectors(model), out=tmp_path / "run")
    assert [row.word for row in res] == ["proved", "proved"]
    report = check(tmp_path / "run", tmp_path / "model", torch_tables, torch_powers)
    assert report.counts["re-proved"] == 2, report


def test_attention_and_values_are_joined(tmp_path: Path) -> None:
    model = reader("llama")
    parts = ["1.2:top1={B.1.first}@{B.2.first}", "neuron 1.3>0@-1"]
    res = pl.family(model, TEMPLATE, [*parts, " & ".join(parts)], out=tmp_path / "run", confirm=0.0)
    held = [row.held for row in res]
    assert max(0, held[0] + held[1] - res.family.size) <= held[2] <= min(held[:2])


def test_every_hook_is_read_in_trees_as_in_lists() -> None:
    model = reader("llama")
    ids = torch.tensor([[0, 1, 7, 2], [0, 1, 7, 3], [0, 2, 7, 1]])
    places = [(hook.name, at) for hook in hooks_of(model.architecture) for at in (1, 3)]
    tree, plain = (Runner.of(model, 4, (), False, as_tree, places)(ids).values for as_tree in (True, False))
    for hook, at in places:
        read = pl.read_at(model, hook, at, torch.eye(tree[hook, at].shape[1]).double())
        assert torch.allclose(tree[hook, at], plain[hook, at], rtol=1e-12, atol=1e-12)
        assert torch.allclose(plain[hook, at], read(model.embed(ids)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("neuron 1.3@-1", "has no sign"),
        ("neuron 1.3>0@{C}", "names no slot"),
        ("feature SAE.4 active@-1", "no direction or dictionary"),
    ],
)
def test_what_families_do_not_answer_is_one_line(query: str, words: str) -> None:
    with pytest.raises(QueryError, match=words):
        pl.family(reader("llama"), TEMPLATE, query)
