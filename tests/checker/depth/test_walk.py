"""Whole networks of every family: bounds, and what second order leaves, against what the model does."""

from collections.abc import Callable

import numpy as np
import pytest
from flint import arb

from prooflens.checker.depth import (
    Walk,
    activations,
    boxes,
    mixing,
    moving,
    networks,
    norms,
    reading,
    row,
    shapes,
    solu,
    values,
    walk,
)
from prooflens.checker.depth.activations import Expansion
from prooflens.checker.depth.carried import parted
from prooflens.engines import get_engine
from prooflens.engines.forms import Forms
from prooflens.models.reads import hooks_of
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.regions import Region
from tests.checker.depth.cases import KNOWN, Case, worst
from tests.checker.depth.test_sites import (
    try_mixing,
    try_network,
    try_norm,
    try_products,
    try_solu,
    try_turning,
)


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("seed", range(2))
def test_no_point_of_a_region_breaks_a_bound(family: str, seed: int) -> None:
    assert worst(Case.of(family, seed)) <= 1.0


@pytest.mark.parametrize(("family", "why"), [("networks", "no attention")])
def test_what_is_not_known_is_refused(family: str, why: str) -> None:
    assert why in Walk.refuses(Case.of(family, 0).net)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_both_programs_hold_the_same_values(family: str) -> None:
    """The engine and the checker bound the same form; neither bound may miss the other's, and both hold the centre."""
    import torch

    case = Case.of(family, 3, eps=1e-3, depth=2)
    G = torch.tensor(np.moveaxis(case.walk.generators, -1, 0).copy())
    problem = Problem(case.problem.model, Region(torch.tensor(case.walk.center), generators=G))
    row = Row(1, 0, 1)
    asked = Forms.of([(0, row, 0, 1.0), (0, row, 1, -1.0)], size=1)
    found = get_engine("taylor").bound_forms(problem, asked)
    low, high = reading.score_form(case.walk, 1, [(1.0, 0, 1, 0), (-1.0, 0, 1, 1)]).tight_bounds()
    assert low <= found.upper.item()
    assert found.lower.item() <= high
    assert high - low <= 2.0 * (found.upper - found.lower).item()


def nothing(*_: object, **__: object) -> float:
    return 0.0


def without_rest(function: str, h: shapes.Array, b: shapes.Array) -> Expansion:
    at = activations.expansion(function, h, b)
    return Expansion(at.value, at.slope, at.second, at.third, 0.0 * at.rest)


def half(function: Callable[..., shapes.Array]) -> Callable[..., shapes.Array]:
    return lambda *arguments: 0.5 * function(*arguments)


PULL = mixing.MixSite.pull

MUTANTS: dict[str, tuple[object, str, object]] = {
    "no rest of activations": (networks, "expansion", without_rest),
    "weights of sums too small": (shapes, "shares", half(shapes.shares)),
    "weights of factors too small": (values, "factor_weights", half(values.factor_weights)),
    "products of moves left out": (reading, "_moves", lambda *_: (0.0, 0.0)),
    "softmax beyond second order left out": (row.Row, "beyond", lambda self: []),
    "softmax's second order left out": (row.Row, "second", lambda self: []),
    "covectors with the wrong sign": (mixing.MixSite, "pull", lambda self, v, t: {
        name: {j: -w for j, w in back.items()} for name, back in PULL(self, v, t).items()}),
    "earlier remainders forgotten": (row.Row, "carried", lambda self: []),
    "norms beyond second order left out": (norms.NormSite, "beyond", property(lambda self: (0 * self.q, 0 * self.q))),
    "norms' rest left out": (norms.NormSite, "rest", nothing),
    "networks' rest left out": (networks.NetworkSite, "rest", nothing),
    "SoLU's rest left out": (solu.SoluSite, "rest", nothing),
    "norms beyond second order left out of what moves": (norms.NormSite, "rest_alone", nothing),
    "networks beyond second order left out of what moves": (networks.NetworkSite, "rest_alone", nothing),
    "covectors that move forgotten": (moving.Moving, "meet", nothing),
    "products left out of what moves": (moving.Moving, "products", nothing),
    "second order of e left out": (moving, "image", lambda L, M: 0.0 * shapes.image(L, M)),
    "norms that turn around left out": (norms.NormSite, "steepest", property(lambda self: 0.0 * self.q)),
    "SoLU's box left out": (solu.SoluSite, "rest_box", property(lambda self: 0.0 * self.s)),
    "norms' mean kept": (norms.NormSite, "quadratic", lambda self, t: self.projection),
    "largest eigenvalue halved": (boxes, "top_eigenvalue", lambda M: 0.5 * shapes.top_eigenvalue(M)),
    "support halved": (reading, "support", half(shapes.support)),
}  # fmt: skip


def tried() -> float:
    """Everything that the tests of this folder try, a little of each."""
    sites = (try_norm, try_network, try_solu, try_turning, try_products)
    found = max(site(seed) for seed in range(12) for site in sites)
    found = max(found, *(try_mixing(family, seed) for family in ("encoder", "gpt2") for seed in range(3)))
    cases = [Case.of(family, seed) for family in ("encoder", "bert", "gpt2", "llama") for seed in (5, 6)]
    return max(found, max(map(worst, cases)))


def test_nothing_is_wrong_without_a_mutant() -> None:
    assert tried() <= 1.0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_any_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    try:
        assert tried() > 1.0
    except (AttributeError, ValueError, TypeError):  # a mutant that does not even run
        assert name == "norms' mean kept"


HOOKS = (
    *(
        "hook_resid_pre",
        "ln1.hook_normalized",
        "attn.hook_q",
        "attn.hook_rot_k",
        "attn.hook_v",
        "attn.hook_z",
        "hook_attn_out",
        "hook_resid_mid",
    ),
    *("ln2.hook_normalized", "mlp.hook_pre", "mlp.hook_post", "hook_mlp_out", "hook_resid_post"),
    *("mlp.hook_pre_linear", "hook_normalized_resid_post"),
)


def shrunk(root: values.Value, widths: list[int]) -> list[values.Value]:
    """The parts of a root, all but the first a little smaller."""
    first, *others = parted(root, widths)
    return [first, *(part.mapped(np.eye(part.c.shape[1]) * 0.9) for part in others)]


PAIRS = (
    ("hook_resid_post", "hook_resid_pre"),
    ("mlp.hook_pre", "attn.hook_v"),
    ("attn.hook_k", "mlp.hook_post"),
    ("hook_resid_mid", "hook_mlp_out"),
)


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama", "olmo2"])
@pytest.mark.parametrize("forgets", [False, True])
def test_values_at_two_places(family: str, forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds against the network's own values in balls; a walk that forgets some of what it carries is caught."""
    case, wrong = Case.of(family, 4, eps=0.01, depth=2), 0
    rng, widths = np.random.default_rng(0), hook_widths(case)
    if forgets:
        monkeypatch.setattr(walk, "parted", shrunk)
    for late, early in PAIRS:
        hooks = f"blocks.1.{late}", f"blocks.0.{early}"
        if not set(hooks) <= widths.keys():
            continue
        weight = rng.standard_normal((2, sum(widths[hook] for hook in hooks)))
        net = case.net.read_at(hooks[0], 1, weight, rng.standard_normal(2), (hooks[1], 0))
        form = reading.output_form(Walk(net, case.walk.center, case.walk.generators), {0: 1.0, 1: -0.5})
        ends = form.bounds(), form.tight_bounds()
        for alpha in case.samples(4, form.slope):
            point = case.walk.center + case.walk.generators @ alpha
            found = net.run([np.vectorize(arb, otypes=[object])(point)], (), True)[0]["logits"]
            f = float((found[0] - 0.5 * found[1]).mid())
            wrong += sum(not low - 1e-12 <= f <= high + 1e-12 for low, high in ends)
    assert (wrong > 0) == forgets


def hook_widths(case: Case) -> dict[str, int]:
    return {hook.name: hook.width for hook in hooks_of(case.problem.model.architecture)}


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama", "olmo2", "pythia"])
def test_values_inside_a_network(family: str) -> None:
    """A network that ends at any hook: bounds against its own values in balls, at corners that its slope points to."""
    case, tried = Case.of(family, 4, eps=0.01, depth=2), 0
    for hook in HOOKS:
        rng = np.random.default_rng(0)
        for width in sorted({t.shape[0] for t in case.net.weights.values() if t.ndim == 2}):
            weight = rng.standard_normal((2, width))
            net = case.net.read_at(f"blocks.1.{hook}", 1, weight, rng.standard_normal(2))
            try:
                form = reading.output_form(
                    Walk(net, case.walk.center, case.walk.generators), {0: 1.0, 1: -0.5}
                )
            except ValueError:  # the hook has another width, or the family does not have it
                continue
            tried += 1
            (low, high), (least, most), (H, rest) = form.bounds(), form.tight_bounds(), form.expanded()
            for alpha in case.samples(4, form.slope):
                point = case.walk.center + case.walk.generators @ alpha
                found = net.run([np.vectorize(arb, otypes=[object])(point)], (), True)[0]["logits"]
                f = float((found[0] - 0.5 * found[1]).mid())
                assert low - 1e-12 <= f <= high + 1e-12
                assert least - 1e-12 <= f <= most + 1e-12
                assert abs(f - form.center - form.slope @ alpha - 0.5 * alpha @ H.H @ alpha) <= rest + 1e-12
    assert tried >= 11


def test_a_norm_of_its_own_beside_attention_is_a_value_inside() -> None:
    """Of blocks whose network stands beside the attention and has a norm of its own, as GPT-NeoX has it."""
    case = next(
        found
        for seed in range(40)
        if "blocks.1.ln2.hook_normalized" in hook_widths(found := Case.of("pythia", seed, 0.01, 2))
        and found.net.arch["parallel"]
    )
    weight = np.random.default_rng(0).standard_normal((1, case.walk.center.shape[1]))
    net = case.net.read_at("blocks.1.ln2.hook_normalized", 1, weight, None)
    form = reading.output_form(Walk(net, case.walk.center, case.walk.generators), {0: 1.0})
    (low, high), (least, most) = form.bounds(), form.tight_bounds()
    for alpha in case.samples(4, form.slope):
        point = case.walk.center + case.walk.generators @ alpha
        f = float(net.run([np.vectorize(arb, otypes=[object])(point)], (), True)[0]["logits"][0].mid())
        assert max(low, least) - 1e-12 <= f <= min(high, most) + 1e-12


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama"])
def test_floors_of_many_outputs_are_below_their_bounds(family: str) -> None:
    case = Case.of(family, 8, eps=0.001, depth=2)
    floors = reading.output_floors(case.walk, {0: 1.0}, -1.0, [1, 2])
    outputs = case.values(case.samples())[1]
    for other, floor in zip((1, 2), floors.tolist(), strict=True):
        form = reading.output_form(case.walk, {0: 1.0, other: -1.0})
        assert floor <= form.bounds()[0] + 0.01 * abs(form.slope).sum()
        assert floor <= (outputs[:, 0] - outputs[:, other]).min()
        assert np.isfinite(floor)
