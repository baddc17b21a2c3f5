"""Edited networks, alone and side by side: parts held, frozen patterns, hidden keys, cut edges."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb

from prooflens.checker import edited as tables
from prooflens.checker.depth import Walk, attention, beside, output_form, steps, walk, writing
from prooflens.checker.network import Network
from prooflens.errors import ModelError
from prooflens.models import Transformer
from prooflens.models.dictionaries import Dictionary
from prooflens.models.edits import edit, places_of
from prooflens.models.held import hooks_at
from prooflens.models.held_edits import feature
from prooflens.models.parts import Edit
from prooflens.models.reads import find_hook, value_name
from prooflens.problem import Problem
from tests.checker.depth.cases import KNOWN, Case, worst
from tests.checker.depth.test_beside import worst as worst_effect

Maker = Callable[[Transformer, random.Random, int], list[Edit]]


def drawn(choose: random.Random, n: int) -> torch.Tensor:
    return torch.tensor([choose.gauss(0.0, 0.5) for _ in range(n)], dtype=torch.float64)


def some(choose: random.Random, n: int) -> str:
    return "".join(f"@{token}" for token in choose.sample(range(n), choose.randint(1, min(2, n))))


def parts(model: Transformer, choose: random.Random, n: int) -> list[Edit]:
    """A part at some tokens, and perhaps another one at all; at 0 or at a constant."""
    a = model.architecture
    names = [*places_of(a), *(f"a{layer}" for layer in range(a.n_layers))]
    names += choose.sample([name for name in places_of(a, neurons=True) if ".n" in name] or names, 1)
    names += [f"a{choose.randrange(a.n_layers)}.h{choose.randrange(a.n_heads)}.result"]
    name = choose.choice(names)
    result = ".h" not in name or name.endswith("result")
    width = 1 if ".n" in name else a.d_model if result else a.head_dim
    found = [Edit(f"{name}{some(choose, n)}", drawn(choose, width) if choose.random() < 0.5 else None)]
    other = choose.choice(
        [name for name in names if name.split(".")[0] != found[0].place.split(".")[0].split("@")[0]]
    )
    return [*found, Edit(other)] if choose.random() < 0.5 else found


def streams(model: Transformer, choose: random.Random, n: int) -> list[Edit]:
    """A direction of any value."""
    a, at = model.architecture, choose.choice(["", some(choose, n)])
    hook = choose.choice(hooks_at(a, choose.randrange(a.n_layers)))
    value = drawn(choose, 1) if choose.random() < 0.5 else None
    return [Edit(f"{hook}{at}", value, direction=drawn(choose, a.d_model))]


def patterns(model: Transformer, choose: random.Random, n: int) -> list[Edit]:
    a = model.architecture
    name = f"a{choose.randrange(a.n_layers)}.h{choose.randrange(a.n_heads)}.pattern"
    return [Edit(name, torch.stack([3.0 * drawn(choose, n) for _ in range(n)]))]


def hidden(model: Transformer, choose: random.Random, n: int) -> list[Edit]:
    a = model.architecture
    key, query = sorted(choose.sample(range(n), 2))
    of = choose.choice(["", f".q{query}"])
    return [Edit(f"a{choose.randrange(a.n_layers)}.h{choose.randrange(a.n_heads)}{of}.k{key}")]


def features(model: Transformer, choose: random.Random, n: int) -> list[Edit]:
    a = model.architecture
    hook, size = choose.choice(hooks_at(a, choose.randrange(a.n_layers))), 4
    W, D = (torch.stack([drawn(choose, a.d_model) for _ in range(size)]) for _ in range(2))
    held = Dictionary.of(
        hook,
        W,
        drawn(choose, size),
        drawn(choose, a.d_model),
        decoder=D.T,
        decoder_bias=drawn(choose, a.d_model),
    )
    tokens = tuple(choose.sample(range(n), choose.randint(0, min(2, n))))
    value = choose.gauss(0.0, 1.0) if choose.random() < 0.5 else None
    return [feature(held, choose.randrange(size), value, tokens, choose.random() < 0.5)]


def jumps(model: Transformer, choose: random.Random, n: int) -> list[Edit]:
    """A feature that jumps at a threshold that is drawn, or near what it reads at some input."""
    (one,) = features(model, choose, n)
    assert one.feature is not None
    held, tokens = one.feature.dictionary, one.tokens
    x = torch.stack([drawn(choose, model.architecture.d_model) for _ in range(n)])
    values = model.run_with_cache(2.0 * x)[1]
    h = values[value_name(values, find_hook(model.architecture, held.hook))][-1]
    read = (h - held.center) @ held.weight.T + held.bias
    threshold = torch.where(read > 0.0, read, drawn(choose, held.size).abs())
    held = replace(held, threshold=threshold, kind="jumprelu")
    return [feature(held, one.feature.index, choose.gauss(0.0, 1.0), tokens, one.feature.error)]


def edges(model: Transformer, choose: random.Random, n: int) -> list[Edit]:
    """Up to three edges of a model whose parts add up."""
    a = model.architecture
    senders = ["input", *places_of(a), *(f"a{i}" for i in range(a.n_layers))]
    senders += [name for name in places_of(a, neurons=True) if ".n" in name][:6]
    receivers = [
        "logits",
        *(f"m{i}" for i in range(a.n_layers) if a.has_network),
        *(f"a{i}" for i in range(a.n_layers)),
    ]
    receivers += [
        f"a{i}.h{h}{c}" for i in range(a.n_layers) for h in range(a.n_heads) for c in ("", ".q", ".k", ".v")
    ]
    found: list[Edit] = []
    for _ in range(30):
        name = f"{choose.choice(senders)}->{choose.choice(receivers)}{choose.choice(['', some(choose, n)])}"
        try:
            edit(model, [*found, Edit(name)])
        except ModelError:
            continue
        found.append(Edit(name))
        if len(found) == 3:
            break
    return found


KINDS: dict[str, Maker] = {
    "parts": parts,
    "streams": streams,
    "patterns": patterns,
    "hidden": hidden,
    "features": features,
    "jumps": jumps,
    "edges": edges,
}


def network(model: Transformer, case: Case) -> Network:
    weights = {name: t.numpy() for name, t in model.weights.items()}
    return Network.made(model.architecture.to_dict(), weights, case.net.tables)


def pair_of(kind: str, family: str, seed: int, **size: Any) -> tuple[Case, Case]:
    """A case, and the same with an edit of one kind, walked beside it."""
    case, choose = Case.of(family, seed, **size), random.Random(f"{kind} {family} {seed}")
    made = KINDS[kind](case.problem.model, choose, len(case.walk.center))
    edited = edit(case.problem.model, made)
    net = network(edited, case)
    first = Walk(case.net, case.walk.center, case.walk.generators, other=net)
    with np.errstate(all="ignore"):
        second = first.beside()
    return replace(case, walk=first), Case(net, second, Problem(edited, case.problem.region), seed)


def alone(pair: tuple[Case, Case]) -> Case:
    """The edited case by itself."""
    return replace(pair[1], walk=Walk(pair[1].net, pair[1].walk.center, pair[1].walk.generators))


FAMILIES = {
    kind: [
        f
        for f in KNOWN
        if kind != "edges" or f not in ("encoder", "bert", "mpnet", "olmo2", "gemma2", "gemma3")
    ]
    for kind in KINDS
}
CASES = [(kind, family) for kind in KINDS for family in FAMILIES[kind]]


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_no_point_breaks_a_bound_of_an_edited_network(kind: str, family: str) -> None:
    pair = pair_of(kind, family, 1)
    case = alone(pair)
    assert worst(case, 1) <= 1.0
    assert worst_effect(*pair) <= 1.0


@pytest.mark.parametrize(
    ("kind", "family"),
    [(kind, f) for kind in KINDS for f in ("encoder", "gpt2", "llama") if f in FAMILIES[kind]],
)
def test_the_centre_is_the_models(kind: str, family: str) -> None:
    """What the walk has at the centre is what the model computes there, but for rounding."""
    for seed in range(4):
        case = alone(pair_of(kind, family, seed, eps=1e-3))
        with np.errstate(all="ignore"):
            form = output_form(case.walk, {0: 1.0, 1: -1.0})
            low, high = form.bounds()
        outputs = case.values(np.zeros((1, case.walk.generators.shape[-1])))[1]
        # A kink in reach is put in the middle of its chord: the centre is off by no more than its bounds.
        f = float(outputs[0, 0] - outputs[0, 1])
        assert low <= f <= high
        if case.net.arch["activation"] not in ("relu", "relu2") and kind not in ("features", "jumps"):
            assert form.center == pytest.approx(f, abs=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_edits_over_the_reals_are_held(kind: str) -> None:
    """Regions so small that rounding is all there is: values in Arb, without tolerance."""
    for seed in range(3):
        first, second = pair_of(kind, "gpt2", seed, eps=1e-14, depth=2)
        form = output_form(first.walk, {0: 1.0, 1: -1.0}).plus(output_form(second.walk, {0: -1.0, 1: 1.0}))
        exact = np.frompyfunc(arb, 1, 1)
        alpha = np.sign(np.random.default_rng(0).standard_normal((2, len(form.slope))))
        c, G = exact(first.walk.center), exact(first.walk.generators)
        points = [c + np.tensordot(G, exact(one), 1) for one in alpha]
        outputs = [[at["logits"] for at in case.net.run(points, (), True)] for case in (first, second)]
        for low, high in (form.bounds(), form.tight_bounds()):
            assert high - low < 1e-3
            for one, other in zip(*outputs, strict=True):
                value = (one[0] - one[1]) - (other[0] - other[1])
                assert not value < low
                assert not value > high


PLACES, AGREED, FROZEN = tables.places, writing._agreed, tables.frozen


def nowhere(weights: Any, stem: str, n: int) -> Any:
    chosen, put = PLACES(weights, stem, n)
    return 0.0 * chosen, 0.0 * put


def everywhere_alike(every: Any, d: int, n: int) -> Any:
    common, apart = AGREED(every[:1], d, n)
    return common, apart


def straight(self: Any, name: str, x: Any, function: str, bent: Any, down: Any, other: Any = None) -> Any:
    return x.mapped(*bent).mapped(*down)


def uncut(x: Any, *_: object) -> Any:
    return x


MUTANTS: dict[str, tuple[str, object, str, object]] = {
    "parts are held nowhere": ("parts", writing, "places", nowhere),
    "columns that differ are taken for the same": ("parts", writing, "_agreed", everywhere_alike),
    "directions are held nowhere": ("streams", writing, "places", nowhere),
    "directions of the stream are let go": ("streams", steps.Steps, "_mapped", lambda self, x, maps: x),
    "features are held nowhere": ("features", steps, "places", nowhere),
    "the kink of features is forgotten": ("features", steps.Steps, "_neurons", straight),
    "patterns move with their queries": ("patterns", tables, "frozen", lambda weights, number, before: before),
    "frozen queries still move": ("patterns", walk.Walk, "_frozen", lambda self, number, q: (
        FROZEN(self.net.weights, number, self.net.score_bias(self.n_tokens)), q)),
    "keys are hidden from nobody": ("hidden", Network, "masks", lambda self, n, layer: np.repeat(
        self._mask(n, layer)[None], self.arch["n_heads"], 0)),
    "another mask is taken for the same": ("hidden", walk, "mixes_alike", lambda *_: True),
    "a frozen pattern is taken for the same": ("patterns", walk, "mixes_alike", lambda *_: True),
    "edges into blocks are not cut": ("edges", attention, "without", uncut),
    "edges into the output are not cut": ("edges", walk, "without", uncut),
    "edges are cut at every token": ("edges", tables.Edge, "places", lambda self, n: np.ones(n)),
    "edges into queries are taken for the same": ("edges", beside, "edges_of", lambda *_: []),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_an_edit_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, *where = MUTANTS[name]
    families = ("gpt2", "bloom") if kind == "edges" else ("encoder", "gpt2", "bert")
    monkeypatch.setattr(*where)  # type: ignore[call-overload]
    found = 0.0
    for family in families:
        for seed in range(8):
            try:
                pair = pair_of(kind, family, seed, depth=2, eps=0.01)
                found = max(found, worst(alone(pair), 1), worst_effect(*pair))
            except ValueError:  # an edge that is cut at every token twice
                continue
            if found > 1.0:
                return
    pytest.fail(f"{found} of a bound at most")
