"""Every study on a tiny budget: which rows it has, out of how many, and that proofs never exceed the attack."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prooflens.evaluation.studies import (
    Result,
    StudyRow,
    StudySettings,
    base,
    get_study,
    neighbourhoods,
    pretrained,
    pruning,
    widths,
)
from prooflens.evaluation.studies.base import COUNT
from prooflens.evaluation.studies.measure import StudyCase
from prooflens.evaluation.studies.prompts import OPENINGS, paraphrase_sets
from prooflens.evaluation.studies.render import save
from prooflens.models import Transformer, load
from tests.evaluation.studies.conftest import Run
from tests.families import bert

pytestmark = pytest.mark.slow


def sound(result: Result) -> None:
    """Counts lie in their denominators, and nothing that is proved exceeds what an attack leaves or attains."""
    assert result.rows
    for row in result.rows:
        if row.proved is None or row.attack is None:
            continue
        assert row.proved <= row.attack if row.unit == COUNT else row.proved >= row.attack or row.unit == "s"


@pytest.mark.parametrize(
    ("name", "n", "groups"),
    [
        ("layer0_all", 8, ["ε = 0.01", "ε = 0.02"]),
        ("attention_stability", 16, ["ε = 0.005", "ε = 0.03"]),
        ("queries_scale", None, [f"d = {d}, ε = {eps}" for d in (8, 16) for eps in (0.01, 0.02, 0.05)]),
        ("connector_ablation", 8, ["ε = 0.005, layer 2"]),
        ("capability_matrix", 8, ["layer 1, ε = 0.02"]),
        ("per_head", 6, ["ε = 0.01, head 0", "ε = 0.01, head 1"]),
        ("adv_validation", 6, ["ε = 0.01"]),
        ("ablation_app", 1, ["ε = 0.01"]),
    ],
)
def test_synthetic(run: Run, name: str, n: int | None, groups: list[str]) -> None:
    result = run(name)
    sound(result)
    assert list(dict.fromkeys(row.group for row in result.rows)) == groups
    assert n is None or {row.n for row in result.rows} == {n}


@pytest.mark.parametrize("name", ["layer1_all", "timing", "entropy_bounds", "extended_queries", "multilayer"])
def test_more_of_the_synthetic_ones(run: Run, name: str) -> None:
    result = run(name, model="toy" if name in ("entropy_bounds", "extended_queries") else None)
    sound(result)
    if name == "extended_queries":
        by_query = {row.label: row.n for row in result.rows}
        assert by_query == {"ranking": 8, "ranking 2": 8, "circuit": 4}


def test_widths_and_generators(run: Run) -> None:
    main = run("main_app")
    sound(main)
    assert len(main.rows) == 3
    stages = run("gi_count_app").rows
    assert [row.label for row in stages[:7]] == [row.label for row in stages[7:]]
    assert stages[0].proved == pytest.approx(0.1)
    for name in ("scalability", "d128_bounds"):
        sound(run(name, model="toy"))


def test_remainders(run: Run) -> None:
    result = run("analytical_remainder")
    rows = result.rows
    smaller = sum((rows[i + 2].proved or 0.0) < (rows[i].estimated or 0.0) for i in (0, 3))
    assert result.notes[0].startswith(f"In {smaller} of 2 settings")
    assert len([row for row in rows if row.estimated is not None]) == 2
    assert all(row.engine == "jacobian" for row in rows if row.estimated is not None)


def test_budgets_are_the_papers(run: Run) -> None:
    assert all(row.measured == row.paper for row in run("mc_budgets").rows)


@pytest.mark.parametrize(
    ("name", "settings", "n"),
    [
        ("bert_sst2", {}, {8}),
        ("bert_layer1", {}, {2}),
        ("gpt2", {"engine": "layer0"}, {2}),
        ("gpt2_layer1", {"engine": "crown"}, {2}),
        ("gpt2_layer2", {"model": "toy-4layer"}, {2}),
        ("gpt2_medium", {"engine": "cpz"}, {2}),
        ("gpt2_trained", {"model": "toy-4layer"}, {8}),
        ("output_verification", {}, {1}),
        ("alphacrown", {}, {1}),
        ("k_j_sweep", {}, {1}),
    ],
)
def test_pretrained_on_a_toy(run: Run, name: str, settings: dict[str, str], n: set[int]) -> None:
    result = run(name, **{"model": "toy", **settings})
    sound(result)
    assert {row.n for row in result.rows} == n
    for row in result.rows:
        assert (row.estimated is not None) == row.engine.startswith("jacobian")


@pytest.mark.parametrize(("name", "texts"), [("gpt2_layer1", 5), ("gpt2_layer2", 1), ("gpt2_medium", 3)])
def test_as_many_texts_as_the_paper(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, texts: int) -> None:
    """The full study asks all positions of so many texts."""
    asked = []

    def rows(group: str, cases: Sequence[StudyCase], *others: object) -> list[StudyRow]:
        asked.append((len(cases), set(cases[0].claims)))
        return []

    monkeypatch.setattr(pretrained, "rows_of", rows)
    result = get_study(name)(StudySettings(model="toy-4layer"))
    assert asked[0] == (texts, {"Q1"})  # as hard as the paper's
    assert asked[-1] == (texts, {"Q1", "Q2", "Q3"})
    assert f"of {texts} text(s) of 4 tokens; the paper has {texts}" in result.notes[0]


def test_the_model_that_was_asked_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "trained", lambda name, settings: load("toy"))
    result = run("d128_bounds")
    assert result.model == "toy-d32"
    assert result.title.endswith("on toy-d32")


def test_headlines_are_rows_of_other_studies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {k: v for k, v in pretrained.HEADLINES.items() if v[0] in ("layer0_all", "bert_layer1")}
    monkeypatch.setattr(pretrained, "HEADLINES", kept)
    rows = run("main_results", model="toy").rows
    assert {row.group for row in rows} == set(kept)
    assert {row.engine: row.paper for row in rows if row.group.startswith("BERT")} == {
        "crown": 51.2,
        "interval": 3.8,
        "jacobian": 92.5,
    }


def test_headlines_are_read_where_they_are_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pretrained, "HEADLINES", {"layer 0": ("layer0_all", "ε = 0.02", "Q1")})
    held = run("layer0_all", samples=1)
    save(replace(held, rows=held.rows[:1], quick=False), tmp_path)
    monkeypatch.setattr(base, "_RESULTS", {})
    assert len(run("main_results", kept=tmp_path).rows) == 4, "what is kept was not quick, so it is run"
    save(replace(held, rows=[row for row in held.rows if row.engine == "cpz"]), tmp_path)
    monkeypatch.setattr(base, "_RESULTS", {})
    again = get_study("main_results")(StudySettings(kept=tmp_path))
    assert [(row.label, row.n) for row in again.rows] == [("ε = 0.02, Q1", 8)]
    assert again.notes[0] == f"layer 0: `{held.command}`, {held.code}."


def test_a_result_names_the_choices_that_it_depends_on(run: Run) -> None:
    """A layer that a study does not ask about must not stand in its command, name or title."""
    result = run("layer0_all", layer=5, engine="crown", device="cpu")
    assert result.command == "prooflens reproduce layer0_all --quick --samples 1"
    assert result.key == "layer0_all"
    asked = run("bert_sst2", model="toy", engine="interval", layer=5)
    assert "--model toy --engine interval --samples 1" in asked.command
    assert "--layer" not in asked.command
    assert "--layer 1" in run("wang_probe", model="toy", layer=1, engine="interval").command


def test_a_study_of_studies_names_their_choices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "HEADLINES", {"BERT": ("bert_sst2", "ε = 0.001", "Q1")})
    alone = run("bert_sst2", model="toy", engine="interval")
    assert "--engine interval" in alone.command
    assert "--engine interval" in run("main_results", model="toy", engine="interval").command


def test_a_folder_without_text_is_asked_about_its_examples() -> None:
    toy = load("toy")
    prompts = pretrained.prompts_for(toy, 3)
    assert [torch.equal(p.x, toy.example(i).x) for i, p in enumerate(prompts)] == [True] * 3


def test_paraphrases(run: Run) -> None:
    result = run("paraphrase", model="toy")
    sound(result)
    assert len(result.rows) == 2 * 2 * 3
    assert {row.n for row in result.rows} == {4}
    assert {row.engine for row in result.rows} == {"layer0", "exact", "crown"}


@pytest.mark.pretrained
def test_openings_are_the_papers_fifty_of_eight_tokens(smollm2: Transformer) -> None:
    assert len(set(OPENINGS)) == 50
    assert {len(smollm2.prompt(text)) for text in OPENINGS} == {8}


@pytest.mark.pretrained
def test_paraphrases_have_equal_length(minilm: Transformer) -> None:
    sets = paraphrase_sets(minilm, 3)
    assert [len({len(prompt) for prompt in some}) for some in sets] == [1, 1, 1]
    assert [len(some) for some in sets] == [5, 5, 5]


def test_nearest_tokens_against_brute_force() -> None:
    table = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([3, 0, 39, 7])
    found = neighbourhoods.nearest(table, chosen, chunk=3)
    for row, value in zip(chosen.tolist(), found.tolist(), strict=True):
        others = [float((table[row] - table[k]).abs().max()) for k in range(40) if k != row]
        assert value == pytest.approx(min(others))


def test_calibration_of_a_tiny_vocabulary(run: Run, tmp_path: object) -> None:
    module = bert()
    module.save_pretrained(tmp_path)
    result = run("emb_calibration", model=str(tmp_path), samples=60)
    values = [row.measured or 0.0 for row in result.rows[:5]]
    assert values == sorted(values)
    assert {row.n for row in result.rows} == {60}


def test_rules_over_seeds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "trained_with", lambda seed, settings: load("toy-induction"))
    result = run("multiseed", samples=2)
    assert [entry["seed"] for entry in result.data["seeds"]] == [42, 123]
    assert {row.n for row in result.rows} == {2 * 2}
    by_rule = {(row.group, row.label): row.attack for row in result.rows}
    for (group, label), value in by_rule.items():
        assert value is not None
        assert value <= (by_rule[group, "by hindsight (the better head)"] or 0), label


def test_the_papers_signed_rank_test() -> None:
    """The gaps that the paper publishes give its p-values: twelve and fourteen seeds tie."""
    large = [10, 30, 10, 30, 10, 10, 10, 10] + [0] * 12
    small = [10, 30, 10, 40, 10, 10] + [0] * 14
    zeros = [0.0] * 20
    assert pruning.signed_rank(large, zeros) == pytest.approx(0.0042, abs=2e-4)
    assert pruning.signed_rank(small, zeros) == pytest.approx(0.0118, abs=5e-4)
    assert pruning.signed_rank(zeros, zeros) is None


def test_accuracies_after_pruning(run: Run) -> None:
    rows = run("certified_pruning", samples=3).rows
    assert len(rows) == 6
    assert {row.n for row in rows} == {3}
    whole = [row for row in rows if row.label == "nothing pruned"]
    assert whole[0].attack == whole[1].attack
    assert all(f"of {row.n} right" in row.note for row in rows)


def test_single_inputs(run: Run) -> None:
    rows = run("empirical_baselines", samples=5).rows
    assert sorted(row.label for row in rows) == ["head 0"] * 3 + ["head 1"] * 3
    assert all(row.measured is not None and row.proved is None for row in rows)
