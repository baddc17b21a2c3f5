"""Regions so small that rounding is all there is: bounds hold the values over the reals, in Arb, without tolerance."""

import numpy as np
import pytest
from flint import arb

from prooflens.checker.depth import Walk, output_form, score_form, shapes
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.shapes import Array
from prooflens.checker.network import Network
from tests.checker.depth.cases import KNOWN, Case


def scaled(net: Network, seed: int) -> Network:
    """Weights of very different sizes: matrices that blow up and matrices that vanish."""
    rng = np.random.default_rng(seed)
    weights = {name: t * 10.0 ** rng.integers(-3, 4) for name, t in net.weights.items()}
    return Network(net.arch, weights, net.tables)


def contained(net: Network, center: Array, generators: Array, seed: int) -> tuple[int, float]:
    """How many bounds were finite, and the least width of one against its value; every bound must hold the values."""
    walk, rng = Walk(net, center, generators), np.random.default_rng(seed)
    layers = range(net.arch["n_layers"])
    corners = [np.zeros(generators.shape[-1]), *rng.choice([-1.0, 1.0], (3, generators.shape[-1]))]
    exact = np.frompyfunc(arb, 1, 1)
    points = [exact(center) + np.tensordot(exact(generators), exact(alpha), 1) for alpha in corners]
    found = net.run(points, layers, True)
    finite, least = 0, np.inf
    with np.errstate(all="ignore"):
        for layer in layers:
            mask = walk.layer(layer).scores.mask
            seen = np.argwhere(mask)
            for h, i, j in rng.permutation(seen)[:4].tolist():
                k = int(rng.choice(np.flatnonzero(mask[h, i])))
                form = score_form(walk, layer, [(1.0, h, i, j), (-1.0, h, i, k)])
                values = [at[layer][h, i, j] - at[layer][h, i, k] for at in found]
                for low, high in (form.bounds(), form.tight_bounds()):
                    assert not any(v < low or v > high for v in values)
                    finite += bool(np.isfinite(high))
                    least = min(least, (high - low) / (abs(form.center) + 1e-300))
        form = output_form(walk, {0: 1.0, 2: -3.0})
        for low, high in (form.bounds(), form.tight_bounds()):
            assert not any(
                v < low or v > high for v in (at["logits"][0] - 3 * at["logits"][2] for at in found)
            )
            finite += bool(np.isfinite(high))
    return finite, least


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("eps", [0.0, 1e-16, 1e-13, 1e-10])
def test_values_over_the_reals_are_held(family: str, eps: float) -> None:
    case = Case.of(family, 11, eps=1.0, depth=3)
    finite, least = contained(case.net, case.walk.center, eps * case.walk.generators, 0)
    assert finite > 8
    assert eps > 1e-13 or least < 1e-4  # RoPE's tables are known to a float32 unit


@pytest.mark.parametrize("family", KNOWN)
def test_sizes_of_weights_and_inputs_do_not_matter(family: str) -> None:
    for seed in range(4):
        case = Case.of(family, seed, eps=1.0, depth=2)
        size = 10.0 ** (4 * seed - 6)
        contained(scaled(case.net, seed), size * case.walk.center, 1e-14 * size * case.walk.generators, seed)


def test_rounding_that_is_not_counted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "U", 0.0)
    case = Case.of("mpnet", 4, eps=1.0, depth=3)
    with pytest.raises(AssertionError):
        contained(case.net, case.walk.center, 0.0 * case.walk.generators, 4)


@pytest.mark.parametrize("family", KNOWN)
def test_the_noise_of_a_mixing_holds_what_its_centre_rounds_by_and_little_more(family: str) -> None:
    """The centre of the next root in Arb, from the same floats; weights are divided by their real sum."""
    case = Case.of(family, 6, eps=1e-9, depth=2)
    walk, exact = case.walk, np.frompyfunc(arb, 1, 1)
    walk.layer(1)
    layer = walk.kept(0)
    mix, behind = layer.mix, layer.behind
    assert isinstance(mix, MixSite)
    assert behind is not None
    s, v, stream = exact(mix.s), exact(mix.v.c), exact(mix.stream.c)
    most = 1e-9 if case.net.rotary(mix.S, 0) is None else 1e-5  # RoPE's tables are known to a float32 unit
    for place, t in enumerate(mix.tokens):
        z = [(s[h, t][:, None] * v[:, h]).sum(0) / s[h, t].sum() for h in range(mix.H)]
        off = stream[t] + exact(mix.out) @ np.concatenate(z) + exact(mix.bias) - exact(behind.c[place])
        size = np.linalg.norm(behind.c[place]) + np.linalg.norm(mix.out) * np.abs(mix.v.c).max()
        assert np.linalg.norm([float(abs(x).upper()) for x in off]) <= mix.noises[t] <= most * size
