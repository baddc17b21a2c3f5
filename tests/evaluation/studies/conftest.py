"""Studies of pretrained models run on `toy` here: the same code, other inputs."""

from collections.abc import Callable

import pytest

from prooflens.evaluation.studies import (
    Result,
    StudySettings,
    base,
    depth,
    get_study,
    neighbourhoods,
    outputs,
    pretrained,
    probes,
    synthetic,
    widths,
)
from prooflens.evaluation.studies.prompts import FIRST, Duplicate, Words
from prooflens.models import Prompt, Transformer

Run = Callable[..., Result]


def examples(model: Transformer, count: int) -> list[Prompt]:
    return [model.example(i) for i in range(count)]


def duplicates(model: Transformer, count: int, words: Words = FIRST) -> list[Duplicate]:
    """Other examples for other words."""
    start = 0 if words is FIRST else count
    return [Duplicate(model.example(start + i), 0, 3) for i in range(count)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A study, quick, on one input, with examples in the place of texts, fewer radii, and nothing remembered."""
    monkeypatch.setattr(base, "_RESULTS", {})
    for module in (pretrained, outputs):
        monkeypatch.setattr(module, "sst2_sentences", examples)
    monkeypatch.setattr(pretrained, "prompts_for", examples)
    monkeypatch.setattr(probes, "ioi_prompts", duplicates)
    monkeypatch.setattr(
        probes,
        "repeated_sequences",
        lambda model, count, seed: [Duplicate(p, 0, 3) for p in examples(model, count)],
    )
    monkeypatch.setattr(
        neighbourhoods, "paraphrase_sets", lambda model, count: [examples(model, 3) for _ in range(count)]
    )
    probes.probe.cache_clear()
    monkeypatch.setattr(widths, "RADII", (0.01,))
    monkeypatch.setattr(widths, "SAMPLED_POINTS", 200)
    monkeypatch.setattr(depth, "REMAINDER", dict(list(depth.REMAINDER.items())[:2]))
    monkeypatch.setattr(synthetic, "LAYER1", {0.01: synthetic.LAYER1[0.01]})
    monkeypatch.setattr(synthetic, "TIMING", {0: synthetic.TIMING[0]})

    def quick(name: str, **settings: object) -> Result:
        return get_study(name)(StudySettings(quick=True, **{"samples": 1, **settings}))  # type: ignore[arg-type]

    return quick
