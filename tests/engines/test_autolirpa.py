"""The adapter to auto_LiRPA: what is exported is the model, and a missing library is a message."""

import importlib.util

import pytest
import torch
import transformers

from peer_models import PEERS, peer_model
from prooflens import Ball, Pixels, load
from prooflens.engines import forms_of, get_engine
from prooflens.engines.autolirpa import ALPHA, CROWN, LIBRARY, AutoLirpa, Dense, Exported, Patches, placed
from prooflens.engines.hidden import output_forms
from prooflens.engines.relaxations.interval_walk import form_program
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.queries.attention import TopK
from tests.engines.cases import margins, problem_of, tiny_problem
from tests.models.hf_families import IMAGE, randomised


@pytest.mark.parametrize("name", ["bert", "mpnet", "toy"])
def test_the_exported_module_is_the_model(name: str) -> None:
    problem = problem_of(name, 0.1)
    forms = margins(problem, 1)
    module = Exported(problem, form_program(problem, forms), forms)
    for x in problem.region.sample(5)[0]:
        expected = forms.evaluate(*problem.values(x[None], forms.layers, False))
        torch.testing.assert_close(module(x[None]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_box_of_pixels_is_exported_by_its_patches(clipped: bool) -> None:
    config = transformers.ViTConfig(**IMAGE, intermediate_size=24, num_labels=3)
    model = load(randomised(transformers.ViTForImageClassification(config)))
    image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    if clipped:
        image[:, 0, 0] = 1.0
    region = Pixels(image, 0.05).of(model)
    place = placed(region)
    assert isinstance(place, Patches)
    alpha = torch.rand(1, region.n_factors, dtype=torch.float64)
    torch.testing.assert_close(place(alpha) + region.center, region.point(alpha), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Dense(region)(alpha), place(alpha), rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(importlib.util.find_spec(LIBRARY) is None, reason="auto_LiRPA is not installed")
def test_its_search_is_no_worse_than_its_crown() -> None:
    problem = tiny_problem(19, 3, 0.1, norm_place="none", n_layers=2)
    forms = output_forms(torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64))
    plain, searched = (AutoLirpa(method=method).bound_forms(problem, forms) for method in (CROWN, ALPHA))
    assert bool((searched.lower >= plain.lower).all())
    assert bool((searched.lower > plain.lower).any())
    assert torch.equal(searched.upper, plain.upper)


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
