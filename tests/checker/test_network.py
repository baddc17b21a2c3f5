"""The checker's own reading and running of models, against the package's, for every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb

import prooflens as pl
from prooflens.checker import check
from prooflens.checker.balls import Ball, spectral_radius
from prooflens.checker.first_layer import FirstLayer
from prooflens.checker.network import Network
from prooflens.engines import get_engine
from prooflens.engines.forms import Forms
from prooflens.models.sites import rotary_tables
from prooflens.problem import Problem
from prooflens.queries.rows import Row
from tests import families


def untied() -> Any:
    """A model whose config says that its unembedding is its embedding, and has another."""
    model = families.gpt2()
    model.lm_head.weight = torch.nn.Parameter(2.0 * model.lm_head.weight.detach())
    return model


def padded() -> Any:
    """An MPNet whose config names another padding token: positions start at 2 all the same."""
    model = families.mpnet()
    model.config.pad_token_id = 5
    return model


MAKERS: dict[str, Callable[[], Any]] = {
    "bert": families.bert,
    "bert-without-head": lambda: families.bert(heads=False),
    "mpnet": families.mpnet,
    "mpnet-padded": padded,
    "gpt2": families.gpt2,
    "gpt2-untied": untied,
    "llama": families.llama,
}


@pytest.fixture(params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny random model, as transformers writes it."""
    MAKERS[request.param]().save_pretrained(tmp_path)
    return tmp_path


def some_input(model: pl.Transformer) -> torch.Tensor:
    return model.embed(torch.tensor([3, 14, 15, 9, 26]))


def torch_tables(n_tokens: int, d_head: int, theta: float) -> Any:
    tables = rotary_tables(n_tokens, d_head, theta, torch.zeros(1, dtype=torch.float64))
    return tuple(table.numpy() for table in tables)


def test_other_rope_tables_are_refused(tmp_path: Path) -> None:
    families.llama().save_pretrained(tmp_path)
    net = Network.read(tmp_path, lambda n, d, theta: torch_tables(n, d, 2.0 * theta))
    with pytest.raises(ValueError, match="RoPE"):
        net.rotary(5)


@pytest.mark.parametrize("tables", [None, torch_tables])
def test_fingerprint_and_values_are_the_models(folder: Path, tables: Any) -> None:
    model, net = pl.load(folder), Network.read(folder, tables)
    assert net.sha256 == model.sha256
    x = some_input(model)
    layers = range(model.architecture.n_layers)
    (found,) = net.run([np.frompyfunc(arb, 1, 1)(x.numpy())], layers, output=True)
    _, cache = model.run_with_cache(x)
    wanted: dict[int | str, torch.Tensor] = {i: cache[f"blocks.{i}.attn.hook_attn_scores"] for i in layers}
    wanted["logits"] = cache["output"] if model.architecture.pool != "none" else cache["output"][-1]
    # Without the library's RoPE tables these are balls of one float32 unit, which the second layer magnifies.
    slack = 1e-9 if model.architecture.rope_theta is None or tables is not None else 1.0
    for name, values in wanted.items():
        for ball, value in zip(found[name].ravel(), values.flatten().tolist(), strict=True):
            assert abs(ball - value).lower() <= 1e-12
            assert float(ball.rad()) <= slack


def test_layer0_bounds_hold_at_points_and_are_near_the_engines(folder: Path) -> None:
    model, net = pl.load(folder), Network.read(folder)
    x = some_input(model)
    region = pl.Ball(0.01).around(x)
    assert region.radius is not None
    first = FirstLayer(net, x.numpy(), region.radius.numpy())
    points, _ = region.sample(200, seed=1)
    scores = model.scores(points, 0)
    entries: list[tuple[int, Row, int, float]] = []
    forms: list[float] = []
    for head, i, j, k in [(0, 4, 1, 2), (1, 4, 4, 0), (1, 3, 2, 3), (3, 2, 0, 1)]:
        upper, reached = first.upper(head, i, j, k)
        values = scores[:, head, i, j] - scores[:, head, i, k]
        assert float(values.max()) <= upper
        assert reached <= upper
        row, number = Row(0, head, i), len(forms)
        entries += [(number, row, j, 1.0), (number, row, k, -1.0)]
        forms.append(upper)
    engine = get_engine("layer0").bound_forms(Problem(model, region), Forms.of(entries, len(forms)))
    span = (engine.upper - engine.lower).numpy()
    assert np.all(np.array(forms) <= engine.upper.numpy() + 0.2 * span)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(ValueError, match="rwkv"):
        Network.read(tmp_path)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_balls_contain_exact_results(size: int) -> None:
    from fractions import Fraction

    rng = np.random.default_rng(size)
    a, b = rng.standard_normal((size, size)), rng.standard_normal((size, size)) * 1e8
    product = Ball(a) @ b
    total = (Ball(a) * b - b).sum()
    for i in range(size):
        row = sum(Fraction(a[i, k]) * Fraction(b[i, k]) - Fraction(b[i, k]) for k in range(size))
        assert Fraction(total.low[i, 0]) <= row <= Fraction(total.high[i, 0])
        for j in range(size):
            exact = sum(Fraction(a[i, k]) * Fraction(b[k, j]) for k in range(size))
            assert Fraction(product.low[i, j]) <= exact <= Fraction(product.high[i, j])


@pytest.mark.parametrize("size", [1, 4, 32])
def test_the_spectral_radius_is_bounded_tightly(size: int) -> None:
    C = np.random.default_rng(size).standard_normal((size, size))
    true = np.abs(np.linalg.eigvals(C)).max()
    assert true <= spectral_radius(Ball(C)) * (1 + 1e-12)
    assert spectral_radius(Ball(C @ C.T)) <= 1.06 * np.linalg.norm(C, 2) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-2, 1e-1])
def test_honest_runs_of_every_family_have_nothing_wrong(folder: Path, tmp_path: Path, eps: float) -> None:
    model = pl.load(folder)
    queries = ["top1", "top2", "mass>=0.3", "spec{0}>{1,2}", "entropy", "entropy>=0.5"]
    found = pl.certify(
        model, some_input(model), pl.Ball(eps), layer=0, queries=queries, engine="layer0", positions=[2, 4]
    )
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", folder)
    assert report.ok, [finding for finding in report.findings if finding.status == "WRONG"]
    assert report.counts["witness confirmed"] == found.counts["fails"]
    margins = [
        finding.status
        for row, finding in zip(found.rows, report.findings, strict=True)
        if row["query"] in ("top1", "top2") and row["verdict"] == "holds"
    ]
    # At the larger radius only the engine's curvature, which keeps what entries share, decides some of them.
    assert eps > 1e-2 or margins.count("re-proved") >= 0.8 * len(margins)
