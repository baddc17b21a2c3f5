"""Features that jump as they become active, in every engine: near, above, below and astride their thresholds."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import prooflens as pl
from prooflens.engines.crown import lines
from prooflens.engines.jacobian.interval import _derivative
from prooflens.engines.relaxations import activations, interval_steps
from prooflens.engines.relaxations.activations import chord, deviation, parabola
from prooflens.engines.relaxations.interval_steps import apply_step
from prooflens.engines.taylor import network
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.segments import FeedForward
from prooflens.models.held_edits import feature
from prooflens.models.sites import Affine, Elementwise
from prooflens.problem import Problem
from prooflens.queries import Box
from tests.engines.taylor.test_sites import assert_site_holds, moves, value_of
from tests.engines.test_edit_tables import FEW, dictionary, encloses
from tests.engines.test_relu2 import interval
from tests.models.test_edits import drawn

JUMP = Elementwise("y", ("x",), "jump")
LOWS = st.one_of(st.floats(-30, 30), st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1e-18]))
WIDTHS = st.one_of(st.floats(0, 30), st.sampled_from([0.0, 5e-324, 1e-18]))


@given(low=LOWS, width=WIDTHS)
def test_boxes_lines_parabolas_and_slopes_hold(low: float, width: float) -> None:
    box, x = interval(low, width)
    y = JUMP(x)
    made = apply_step(JUMP, box)
    assert (float(made.lower), float(made.upper)) == (float(y[0]), float(y[-1]))
    for side, sign in (
        (lines.activation("jump", box).lower, -1.0),
        (lines.activation("jump", box).upper, 1.0),
    ):
        assert bool((sign * (side.slope * x + side.offset - y) >= -1e-15).all())
    c = 0.5 * box.lower + 0.5 * box.upper
    for how in (chord, parabola):
        found = deviation("jump", c, box, *how("jump", c, box))
        inside = y - found.value - found.slope * (x - c) - found.curvature * (x - c) ** 2
        assert bool((inside.abs() <= found.error).all())
    steep = _derivative("jump", box)
    jumps = y[0] != y[-1]
    assert bool(steep.lower.isnan()) == bool(steep.upper.isnan()) == bool(jumps)


def test_what_is_not_known_may_jump() -> None:
    nothing, inf = torch.tensor([torch.nan]).double(), torch.tensor([torch.inf]).double()
    for box in (Box(nothing, nothing), Box(-inf, inf)):
        made = deviation("jump", nothing, box, 0.0 * inf, 0.0 * inf)
        assert (float(made.value), float(made.error)) == (0.5, 0.5)
        assert float(interval_steps._activation("jump", box).upper) == 1.0
        assert float(interval_steps._activation("jump", box).lower) == 0.0


def assert_network_holds(h: float) -> None:
    """One neuron that reads a value between h − 1 and h + 1."""
    one = torch.ones(1, 1).double()
    step = FeedForward("n", "r", "jump", Affine("h", ("r",), one, h * one[0], 1, (1,)), None, None)
    site = NetworkSite(step, value_of(0.0 * one[0], one, 0.0 * one))
    linear, _ = moves(one, 0.0 * one)
    assert_site_holds(site, linear, JUMP(linear + h) - site.output[0] - linear @ site.jacobian[0].T)


@pytest.mark.parametrize("h", [-1.5, -1.0, -0.9, 0.0, 0.9, 1.0, 1.5])
def test_a_site_of_taylor_holds(h: float) -> None:
    assert_network_holds(h)


def rounded_wrongly(seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """A point, a row and a bias, such that the sign of their pre-activation in float64 is not the real one."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x, w = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        bias = -(w * x).sum()
        exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(w, x, strict=True))
        y = torch.nn.functional.linear(x, w[None], bias[None])[0]
        real = exact + Fraction(float(bias)) > 0
        if real != bool(y > 0):
            return x, w[None], bias[None], float(real)


def test_the_sign_of_a_rounded_number_is_not_trusted() -> None:
    for seed in range(20):
        x, W, bias, real = rounded_wrongly(seed)
        step = Affine("h", ("r",), W, bias, 1, (1,))
        made = apply_step(JUMP, apply_step(step, Box(x[None], x[None])))
        assert float(made.lower) <= real <= float(made.upper)
        none = torch.zeros(5, 1).double()
        site = NetworkSite(FeedForward("n", "r", "jump", step, None, None), value_of(x, none, none))
        assert abs(float(site.output[0]) - real) <= float(site.kink[0])


def jumping(toy: pl.Transformer, beyond: float, error: bool, region: pl.Region) -> tuple[Problem, Problem]:
    """The toy, and the toy without the feature that is largest at the last token, `beyond` its threshold there."""
    hook, x = "blocks.0.hook_resid_post", region.center
    plain = dictionary(hook, toy.architecture.d_model, torch.Generator().manual_seed(3))
    h = toy.run(x, hook)[hook][-1]
    read = plain.weight @ (h - plain.center) + plain.bias
    sae = dictionary(
        hook,
        toy.architecture.d_model,
        torch.Generator().manual_seed(3),
        "jumprelu",
        (read - beyond).clamp(min=0.05),
    )
    edited = pl.edit(toy, feature(sae, int(read.argmax()), None, (-1,), error))
    return Problem(toy, region), Problem(edited, region)


def region_of(toy: pl.Transformer, engine: str) -> pl.Region:
    x, end = toy.example().x[:FEW], toy.example(1).x[:FEW]
    if engine == "chebyshev":
        return pl.Segment(x, x + 0.05 * (end - x)).region()
    return pl.Ball(0.01, tokens=[1]).around(x)


ENGINES = ("interval", "crown", "zonotope", "cpz", "taylor", "chebyshev", "jacobian-proved")


@pytest.mark.parametrize(
    ("engine", "beyond"),
    [*((name, beyond) for name in ENGINES for beyond in (0.5, 0.0)), ("beta-crown", 0.5), ("taylor", -0.5)],
)
def test_bounds_enclose_what_an_attack_attains(toy: pl.Transformer, engine: str, beyond: float) -> None:
    problem, edited = jumping(toy, beyond, engine in ("taylor", "zonotope"), region_of(toy, engine))
    encloses(engine, problem, edited, tight=beyond > 0.1)


@pytest.mark.parametrize(
    ("engine", "family"), [("taylor", "gpt2"), ("taylor", "encoder"), ("crown", "gemma2")]
)
def test_bounds_hold_on_random_models(engine: str, family: str) -> None:
    model, x, generator = drawn(family)
    x = x[:FEW]
    region = pl.Ball(0.01).around(x)
    for hook, error in (("blocks.0.hook_resid_post", True), ("blocks.1.hook_attn_out", False)):
        plain = dictionary(hook, model.architecture.d_model, generator)
        read = (model.run(x, hook)[hook][-1] - plain.center) @ plain.weight.T + plain.bias
        sae = pl.Dictionary.of(
            hook,
            plain.weight,
            plain.bias,
            plain.center,
            (read + torch.tensor([-1.0, -0.01, 0.0, 0.01, 1.0, 0.0]).double()).clamp(min=0.0),
            "batchtopk",
            plain.decoder,
            plain.decoder_bias,
        )
        edits = [feature(sae, i, 0.3, (-1,)) for i in range(6)] if error else [feature(sae, 1, error=False)]
        encloses(engine, Problem(model, region), Problem(pl.edit(model, edits), region), tight=False)


def forgotten(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that trust the centre alone: the jump is where it is there, however far values move."""
    if which == "taylor":
        plain = NetworkSite.__post_init__

        def still(self: NetworkSite) -> None:
            plain(self)
            if self.step.function == "jump":
                self.post, self.kink = JUMP(self.h), torch.zeros_like(self.kink)

        monkeypatch.setattr(network.NetworkSite, "__post_init__", still)
    if which == "crown":
        monkeypatch.setattr(
            lines, "_jump", lambda box: lines.flat(Box(*[JUMP(0.5 * box.lower + 0.5 * box.upper)] * 2))
        )
    if which == "zonotope":
        monkeypatch.setattr(
            activations,
            "_jump_range",
            lambda hull: activations.Relaxation(
                JUMP(0.5 * hull.lower + 0.5 * hull.upper), *(torch.zeros_like(hull.lower) for _ in range(3))
            ),
        )


@pytest.mark.parametrize("engine", ["taylor", "crown", "zonotope"])
def test_a_jump_that_is_left_out_is_caught(
    toy: pl.Transformer, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, edited = jumping(toy, 1e-3, False, region_of(toy, engine))
    encloses(engine, problem, edited, tight=False)
    forgotten(engine, monkeypatch)
    with pytest.raises(AssertionError):
        encloses(engine, problem, edited, tight=False)
