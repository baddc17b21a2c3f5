"""The adapter to auto_LiRPA: what is exported is the model, and a missing library is a message."""

import importlib.util

import pytest
import torch

from peer_models import PEERS, peer_model
from prooflens import Ball
from prooflens.engines import forms_of, get_engine
from prooflens.engines.autolirpa import LIBRARY, Exported
from prooflens.engines.relaxations.interval_walk import form_program
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.queries.attention import TopK
from tests.engines.cases import margins, problem_of


@pytest.mark.parametrize("name", ["bert", "mpnet", "toy"])
def test_the_exported_module_is_the_model(name: str) -> None:
    problem = problem_of(name, 0.1)
    forms = margins(problem, 1)
    module = Exported(problem, form_program(problem, forms), forms)
    for x in problem.region.sample(5)[0]:
        expected = forms.evaluate(*problem.values(x[None], forms.layers, False))
        torch.testing.assert_close(module(x[None]), expected, rtol=1e-12, atol=1e-12)


def test_a_missing_library_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prooflens.engines.autolirpa.LIBRARY", "no_such_library")
    problem = problem_of("toy")
    with pytest.raises(EngineError, match="pip install"):
        get_engine("autolirpa").bound_forms(problem, margins(problem))


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prooflens.engines.autolirpa.LIBRARY", "json")
    for name, reason in (("gpt2", "mask"), ("bert", "erf"), ("llama", "mask")):
        problem = problem_of(name)
        assert reason in str(get_engine("autolirpa").refuses(problem, margins(problem, 1)))


@pytest.mark.skipif(importlib.util.find_spec(LIBRARY) is None, reason="auto_LiRPA is not installed")
@pytest.mark.skipif(not PEERS.exists(), reason="the peer models are not beside this checkout")
@pytest.mark.parametrize(("layer", "eps", "width"), [(0, 0.02, 0.0475), (1, 0.01, 0.0529), (1, 0.05, 1.13)])
def test_published_widths(layer: int, eps: float, width: float) -> None:
    model, x = peer_model(PEERS / "peer-tiny")
    problem = Problem(model, Ball(eps).around(x))
    forms = forms_of([f for claim in TopK(k=1).bind(problem.setting([layer])) for f in claim.functionals])
    found = get_engine("autolirpa").bound_forms(problem, forms)
    assert float((found.upper - found.lower).mean()) == pytest.approx(width, rel=5e-3)
