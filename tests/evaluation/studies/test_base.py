"""Rows, results and the list of studies."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from prooflens.evaluation.studies import (
    Result,
    Sheet,
    StudyError,
    StudyRow,
    StudySettings,
    base,
    get_study,
    study_names,
)
from prooflens.evaluation.studies.base import Study
from prooflens.statistics import clopper_pearson

LABELS = (
    *("main_app", "gi_count_app", "ablation_app", "multilayer", "analytical_remainder", "connector_ablation"),
    *("scalability", "d128_bounds", "queries_scale", "layer0_all", "layer1_all", "attention_stability"),
    *("extended_queries", "entropy_bounds", "timing", "bert_sst2", "bert_layer1", "output_verification"),
    *("alphacrown", "k_j_sweep", "gpt2", "gpt2_layer1", "gpt2_layer2", "gpt2_medium", "main_results"),
    *("output_verification_gpt2", "wang_probe", "cross_head_circuit", "induction_probe", "paraphrase"),
    *("emb_calibration", "per_head", "multiseed", "certified_pruning", "capability_matrix", "mc_budgets"),
    *("empirical_baselines", "adv_validation", "multiseed_app"),
)
"""Every label of a table or figure of the paper but `overview`, which is a drawing of the method."""

OURS = ("gpt2_trained",)
"""Studies that the paper does not have."""


def test_every_label_has_a_study() -> None:
    assert sorted(study_names()) == sorted(LABELS + OURS)
    assert get_study("tab:gpt2").name == get_study("gpt2").name == "gpt2"


def test_a_near_miss_is_named() -> None:
    with pytest.raises(StudyError, match="did you mean 'wang_probe'"):
        get_study("wang_prob")


@pytest.mark.parametrize("counts", [{"proved": 5}, {"attack": -1}, {"estimated": 4, "n": None}])
def test_counts_beyond_their_denominator_are_refused(counts: dict[str, float]) -> None:
    with pytest.raises(StudyError, match="counts must lie"):
        StudyRow("g", "l", **{"n": 4, **counts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("paper", "place"), [(100.0, "above"), (80.0, "inside"), (10.0, "below"), (None, None)]
)
def test_the_papers_rate_against_our_interval(paper: float | None, place: str | None) -> None:
    row = StudyRow("g", "l", paper=paper, proved=30, n=40)
    low, high = clopper_pearson(30, 40)
    assert row.interval(30) == (100 * low, 100 * high)
    assert row.against_paper == place


def test_a_result_survives_json() -> None:
    def run(settings: StudySettings, sheet: Sheet) -> None:
        sheet.add(
            StudyRow("ε = 1", "Q1", engine="cpz", paper=90.0, proved=3, attack=4, n=4, seconds=0.123456)
        )
        sheet.note(f"seed {settings.seed}")

    made = Study("s", "A title", "synthetic", "toy", run)(StudySettings(quick=True, seed=3))
    assert Result.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert made.command == "prooflens reproduce s --quick --seed 3"
    assert made.rows[0].seconds == 0.1235
    with pytest.raises(StudyError, match="not the result"):
        Result.from_dict({"name": "s"})


def test_the_code_that_made_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "revision", lambda: "abc1234+")
    one = Study("s", "A title", "synthetic", "toy", lambda settings, sheet: None)
    made = one(StudySettings(seed=17))
    assert (made.commit, made.code) == ("abc1234+", "commit abc1234+")
    assert Result.from_dict(made.to_dict()) == made
    old = {name: value for name, value in made.to_dict().items() if name != "commit"}
    assert Result.from_dict(old).code == f"prooflens {made.version}", "older files do not say"


def test_a_stand_in_is_named_in_the_title() -> None:
    one = get_study("wang_probe")
    assert one.titled("smollm2").endswith("on smollm2, standing in for GPT-2 small")
    assert one.titled("gpt2", chosen=True).endswith("on gpt2")
    assert "standing in" not in one.titled("gpt2", chosen=True)


def test_no_study_calls_an_estimate_certified() -> None:
    for name in study_names():
        words = f"{get_study(name).title} {get_study(name).run.__doc__}".lower()
        assert not re.search(r"estimat\w+ certif|certif\w+ estimat", words)


def test_a_folder_is_called_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "mpnet"
    folder.mkdir()
    assert StudySettings(model=str(folder)).model_name == "mpnet"
    assert StudySettings(model="prajjwal1/bert-tiny").model_name == "prajjwal1/bert-tiny"
    one = Study("s", "A title", "pretrained", "mpnet", lambda s, sheet: sheet.note(str(s.model)), "GPT-2")
    assert one(StudySettings(model=str(folder))).title == "A title — on mpnet, standing in for GPT-2"
    assert one(StudySettings(model="toy")).title == "A title — on toy"


def test_settings_for_other_processes_forget_no_choice_and_make_none() -> None:
    """A study's command names what it looked at, also before it asked other processes, and nothing else."""

    def asks(settings: StudySettings, sheet: Sheet) -> None:
        sheet.note(str(settings.model))
        replace(settings.only(base.CHOICES), jobs=1)

    one = Study("s", "A title", "synthetic", "toy", asks)
    assert one(StudySettings(model="toy", layer=2)).command == "prooflens reproduce s --model toy"


def test_a_layer_has_a_result_of_its_own() -> None:
    one = Study(
        "s", "A title", "synthetic", "toy", lambda settings, sheet: sheet.note(f"layer {settings.layer}")
    )
    usual, deep = one(StudySettings()), one(StudySettings(layer=2))
    assert (usual.key, deep.key) == ("s", "s-layer2")
    assert "variant" not in usual.to_dict()
    assert Result.from_dict(deep.to_dict()) == deep


def test_settings() -> None:
    assert StudySettings(quick=True).count(60, 3) == 3
    assert StudySettings(quick=True).count(2, 3) == 2
    assert StudySettings(samples=7).count(60, 3) == 7
    assert list(StudySettings(quick=True).some([1, 2, 3], 2)) == [1, 2]
    with pytest.raises(StudyError, match="at least one input"):
        StudySettings(samples=0)
    with pytest.raises(StudyError, match="at least one process"):
        StudySettings(jobs=0)
    assert StudySettings(model="gpt2", layer=1).arguments == ["--model", "gpt2", "--layer", "1"]
