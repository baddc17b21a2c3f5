"""Slices of models and studies without the command line: the same numbers in the same files."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import slice_model
import study
from prooflens import Transformer, load
from prooflens.evaluation.studies import Result, StudySettings, get_study
from prooflens.evaluation.studies.prompts import OPENINGS, SENTENCES


def call(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    script.main()


@pytest.mark.pretrained
def test_a_slice_has_the_texts_of_the_studies(
    minilm: Transformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(monkeypatch, slice_model, "minilm", "2", str(tmp_path), "--shard", "20")
    whole, cut = minilm, load(str(tmp_path))
    assert (cut.architecture.n_layers, cut.architecture.d_vocab) == (2, None)
    for i, text in enumerate(SENTENCES):
        x = whole.prompt(text).x
        assert torch.equal(cut.example(i).x, x)
        assert torch.equal(cut.scores(x, 1), whole.scores(x, 1))


@pytest.mark.slow
@pytest.mark.pretrained
def test_a_slice_with_tokens_reads_only_its_texts(
    smollm2: Transformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(monkeypatch, slice_model, "smollm2", "1", str(tmp_path), "--tokens", "--text", *OPENINGS[:2])
    whole, cut = smollm2, load(str(tmp_path))
    assert all(torch.equal(cut.prompt(text).x, whole.prompt(text).x) for text in OPENINGS[:2])
    assert not cut.prompt("elephants").x.any()


def test_a_study_is_what_reproduce_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call(monkeypatch, study, "mc_budgets", "-o", str(tmp_path))
    kept = Result.from_dict(json.loads((tmp_path / "data" / "mc_budgets.json").read_text(encoding="utf-8")))
    assert replace(kept, minutes=0.0) == replace(get_study("mc_budgets")(StudySettings()), minutes=0.0)
