"""Many prompts in one call: the answers of one call each, and weights worked on once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import prooflens as pl
from prooflens.cli import app
from prooflens.engines.attack import AttackBudget, AttackCase, attack_cases
from prooflens.engines.attack.cases import values_at
from prooflens.engines.attack.search import AttackSearch
from prooflens.engines.first_layer.layer import FirstLayer, Spectra
from prooflens.engines.protocol import EngineOptions, Workspace
from prooflens.models import Transformer
from prooflens.models.program import Program
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.verdicts.certify import Interrupted
from tests.engines.support import center_of, model_of


def test_a_list_has_the_rows_of_one_call_each() -> None:
    model = pl.load("toy")
    prompts = [model.example(i) for i in range(3)]
    together = pl.certify(model, prompts, pl.Ball(0.02), layer=0)
    apart = [pl.certify(model, prompt, pl.Ball(0.02), layer=0) for prompt in prompts]
    for name in ("verdict", "lower", "upper", "engine", "attack"):
        expected = [value for one in apart for value in one.table.column(name).to_pylist()]
        assert together.table.column(name).to_pylist() == expected
    assert [len(part) for part in together.by_subject] == [len(one) for one in apart]


@pytest.mark.parametrize("engine", ["auto", "attack"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_prompts_of_one_length_and_of_several_end_as_alone(family: str, engine: str) -> None:
    """Whichever prompts are beside it, a claim ends as it does alone, and a witness is one of its own prompt."""
    model = model_of(family)
    prompts = [center_of(model, size, seed) for seed, size in enumerate((4, 4, 3, 4, 2, 3, 4))]
    for some in (prompts[:2], prompts):
        together = pl.certify(model, some, pl.Ball(0.6), layer=0, engine=engine)
        apart = [pl.certify(model, prompt, pl.Ball(0.6), layer=0, engine=engine) for prompt in some]
        alone = [outcome for one in apart for outcome in one.outcomes]
        assert [(str(o.claim), o.verdict) for o in together.outcomes] == [
            (str(o.claim), o.verdict) for o in alone
        ]
        assert [str(o.verdict) for o in alone].count("fails") > 3
        found = iter(together.outcomes)
        for prompt, one in zip(some, apart, strict=True):
            region = pl.Ball(0.6).around(prompt)
            for outcome in itertools.islice(found, len(one)):
                if outcome.witness is not None:
                    assert region.contains(outcome.witness.x)
                    assert torch.equal(region.point(outcome.witness.alpha), outcome.witness.x)
                    values = values_at(Problem(model, region), outcome.claim, outcome.witness.x)
                    assert outcome.claim.broken_by(values)
                    assert torch.equal(values, outcome.witness.values)


def test_a_break_about_one_prompt_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs in one search: each has the points that it has by itself, and what breaks breaks its own claims."""
    model = model_of("bert")
    prompts = [center_of(model, 4, seed) for seed in range(2)]
    regions = [pl.Ball(0.1).around(prompt) for prompt in prompts]
    problems = [Problem(model, region) for region in regions]
    cases = [
        AttackCase(p, [c for c in parse_query("top1").bind(p.setting([0])) if c.functionals])
        for p in problems
    ]
    passed = list[torch.Size]()
    run = Program.run

    def counted(program: Program, x: torch.Tensor, *names: object) -> dict[str, torch.Tensor]:
        passed.append(x.shape)
        return run(program, x, *names)  # type: ignore[arg-type]

    monkeypatch.setattr(Program, "run", counted)
    budget = AttackBudget(0, 6, 3)
    both = attack_cases(cases, budget)
    assert max(shape[0] for shape in passed if len(shape) == 4) > max(len(case.claims) for case in cases) // 2
    for case, result in zip(cases, both, strict=True):
        (alone,) = attack_cases([case], budget)
        assert [w is None for w in alone.witnesses] == [w is None for w in result.witnesses]
        assert torch.allclose(alone.values, result.values, rtol=1e-9)
        assert torch.allclose(alone.alpha, result.alpha, atol=1e-9)
        for claim, witness in zip(case.claims, result.witnesses, strict=True):
            assert witness is None or claim.broken_by(values_at(case.problem, claim, witness.x))
    assert any(both[1].witnesses)
    assert not all(both[1].witnesses)


@pytest.mark.parametrize("room", [2**24, 2**12])
def test_each_prompt_starts_where_it_starts_alone(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Whether all targets of a head go down at a time, or few of each prompt."""
    model = model_of("gpt2")
    problems = [Problem(model, pl.Ball(0.1).around(center_of(model, 5, seed))) for seed in range(3)]
    claims = [[c for c in parse_query("top1").bind(p.setting([0])) if c.functionals] for p in problems]
    cases = [AttackCase(problem, some) for problem, some in zip(problems, claims, strict=True)]
    begun = list[tuple[int, torch.Tensor]]()

    def noted(search: AttackSearch, descent: Any, alpha: torch.Tensor, steps: int) -> None:
        begun.extend(zip(descent.chunk.tolist(), alpha, strict=True))

    monkeypatch.setattr(AttackSearch, "_descend", noted)
    monkeypatch.setattr("prooflens.engines.attack.landscape.CHUNK_ELEMENTS", room)
    attack_cases(cases, AttackBudget(20, 5, 3))
    together, first = dict(begun), 0
    for case in cases:
        begun.clear()
        attack_cases([case], AttackBudget(20, 5, 3))
        assert len(begun) > 4
        for number, alpha in begun:
            assert torch.allclose(together[first + number], alpha)
        first += len(case.claims)


def test_an_interruption_keeps_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts before come back whole, those side by side with what engines had proved of them."""
    model = pl.load("toy")
    prompts = [model.example(i) for i in range(4)]

    def stopped(orders: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prooflens.verdicts.beside.carry_out_together", stopped)
    with pytest.raises(Interrupted) as caught:
        pl.certify(model, [prompts[0].x[:3], *prompts], pl.Ball(0.02), layer=0)
    first, *others = caught.value.results.by_subject
    assert (len(first), len(others)) == (6, 4)
    assert {str(outcome.verdict) for part in others for outcome in part.outcomes} == {"holds"}


def test_without_memory_for_all_each_is_decided_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pl.load("toy")
    prompts = [model.example(i) for i in range(3)]

    def scarce(orders: object) -> None:
        raise MemoryError

    expected = pl.certify(model, prompts, pl.Ball(0.02), layer=0)
    monkeypatch.setattr("prooflens.verdicts.beside.carry_out_together", scarce)
    found = pl.certify(model, prompts, pl.Ball(0.02), layer=0)
    for name in ("verdict", "lower", "attack"):
        assert found.table.column(name).to_pylist() == expected.table.column(name).to_pylist()


def test_weights_are_rounded_and_their_norms_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack's float32 copy and the first layer's spectra serve all prompts of a call, and end with it."""
    done: list[str] = []
    moved, found = Transformer.to, FirstLayer._spectra
    monkeypatch.setattr("prooflens.verdicts.portfolio.is_small", lambda problem: False)  # search in float32

    def counted_move(model: Transformer, dtype: torch.dtype | None = None) -> Transformer:
        done.append("to")
        return moved(model, dtype=dtype)

    def counted_spectra(view: FirstLayer) -> Spectra:
        done.append("spectra")
        return found(view)

    monkeypatch.setattr(Transformer, "to", counted_move)
    monkeypatch.setattr(FirstLayer, "_spectra", counted_spectra)
    model = pl.load("toy")
    prompts = [model.example(i) for i in range(3)]
    for calls in (1, 2):
        pl.certify(model, prompts, pl.Ball(0.2), layer=0)
        assert done.count("to") == done.count("spectra") == calls


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_spectra_of_another_model_length_or_padding_are_not_taken(family: str) -> None:
    options = EngineOptions(workspace=Workspace())
    model = model_of(family)
    other = Transformer(model.architecture, {name: 1.5 * value for name, value in model.weights.items()})
    padding = torch.tensor([True, True, True, False])
    for held, size, hidden in ((model, 4, None), (other, 4, None), (model, 3, None), (model, 4, padding)):
        problem = Problem(held, pl.Ball(0.01).around(center_of(held, size, 0)), hidden)
        shared, own = FirstLayer.of(problem, options).spectra, FirstLayer.of(problem).spectra
        assert all(torch.equal(one, another) for one, another in zip(shared, own, strict=True))


def test_what_a_workspace_holds() -> None:
    work, one, other = Workspace(), object(), object()
    assert work.shared("a", one, lambda: 1) == 1
    assert work.shared("a", one, lambda: 2) == 1
    assert work.shared("a", other, lambda: 3) == 3
    work.put("b", one, 4)
    work.forget(other)
    assert len(work) == 1
    assert work.take("b") == 4
    assert work.take("b") is None
    work.put("b", one, 4)
    work.clear()
    assert len(work) == 0


def test_the_command_line_reads_a_file_of_prompts(minilm: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("the cat sat\n\na man ran\n")
    command = ["certify", "minilm", "--texts", str(path), "--heads", "0.1", "--positions=-1", "--eps", "1e-4"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    assert "the cat sat: 1 row, 1 holds" in told.output
    assert "2 rows, 2 holds" in told.output
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["rows"]
    assert [row["tokens"][1] for row in rows] == ["the", "a"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--text", "a b"], "--texts does not go with --text: it gives the prompts"),
        (["-o", "run"], "--texts does not go with --out: a run is about one prompt"),
        (["--to", "a b"], "--texts does not go with --to"),
        (["--deployed", "bfloat16"], "--texts does not go with --deployed: ask one prompt at a time"),
    ],
)
def test_texts_go_with_no_other_prompt_and_no_run(tmp_path: Path, extra: list[str], said: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a b\n")
    told = CliRunner().invoke(app, ["certify", "toy", "--texts", str(path), "--eps", "0.1", *extra])
    assert told.exit_code == 1
    assert said in str(told.exception)
