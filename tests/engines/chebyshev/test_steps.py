"""One step at a time: what a step makes of P + e is P' + e', for every point of the piece and every e of its ellipsoid.

Every rule that bounds what is missed is also switched off, and the same test must then fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from prooflens.engines.chebyshev import attention, mixing, norms, tokens
from prooflens.engines.chebyshev import solu as solus
from prooflens.engines.chebyshev.attention import capped, scores, softmax
from prooflens.engines.chebyshev.grid import Finer, Grid
from prooflens.engines.chebyshev.mixing import mix
from prooflens.engines.chebyshev.norms import norm
from prooflens.engines.chebyshev.solu import solu
from prooflens.engines.chebyshev.tokens import affine, elementwise, opened, product
from prooflens.engines.chebyshev.values import Atom, Piece, Value
from prooflens.engines.relaxations.ellipsoids import gram
from prooflens.models.sites import ACTIVATIONS, Affine, Function, Mix, Norm, Scores, Softcap, Softmax, Solu

DTYPE = torch.float64
Truth = Callable[[Tensor], Tensor]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


class Setup:
    """A polynomial of three tokens, an ellipsoid of errors for each, and some of both."""

    def __init__(self, seed: int, degrees: tuple[int, ...], n: int, error: float, far: float = 0.6) -> None:
        self.grid = Grid(degrees, torch.zeros(1, dtype=DTYPE))
        self.piece = Piece(self.grid)
        c, ways = random(seed, 3, n) + 0.3, far * random(seed + 1, len(degrees), 3, n)
        bent = 0.2 * far * random(seed + 2, 3, n) * (1.0 if degrees and min(degrees) > 1 else 0.0)

        def input_at(alpha: Tensor) -> Tensor:
            return (
                c
                + torch.einsum("...k,ksn->...sn", alpha, ways)
                + bent * alpha.square().sum(-1)[..., None, None]
            )

        L = error * random(seed + 3, 3, n, n) / n**0.5
        self.piece.atoms["root"] = Atom(gram(L)[None])
        runs = input_at(self.grid.points)[None]
        self.value = Value("x", self.piece, runs, {"root": None}, torch.full((1, 3, n), 1e-14, dtype=DTYPE))
        self.alpha = (
            2.0 * torch.rand(40, len(degrees), generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
            - 1.0
        )
        self.alpha = torch.cat((self.alpha, self.alpha.sign()))
        xi = random(seed + 4, len(self.alpha), 3, n)
        xi = xi / xi.norm(dim=-1, keepdim=True)
        self.x = input_at(self.alpha) + torch.einsum("snm,psm->psn", L, xi)

    def polynomial(self, value: Value) -> Tensor:
        coefficients = value.coefficients[0][0]
        basis = torch.ones(len(self.alpha), self.grid.size, dtype=DTYPE)
        for i in range(len(self.grid.degrees)):
            angle = torch.acos(self.alpha[:, i].clamp(-1.0, 1.0))
            basis = basis * torch.cos(angle[:, None] * self.grid.exponents[i][None])
        return torch.einsum("pm,msn->psn", basis, coefficients)

    def holds(self, value: Value, truth: Tensor) -> bool:
        """Whether the truth minus the polynomial lies in the ellipsoid, seen in many directions."""
        value = opened(value)
        gap = truth.flatten(2) - self.polynomial(value)
        n = gap.shape[-1]
        w = torch.cat((torch.eye(n, dtype=DTYPE), random(9, 60, n)))
        # the directions of the gaps themselves, in the metric of the ellipsoid
        M = value.shape[0]
        worst = torch.linalg.solve(M + 1e-30 * torch.eye(n, dtype=DTYPE), gap.movedim(0, -1)).movedim(-1, 0)
        seen = torch.einsum("psn,wn->psw", gap, w).abs()
        bound = torch.einsum("wn,snm,wm->sw", w, M, w).clamp(min=0.0).sqrt()
        own = (gap * worst).sum(-1).clamp(min=0.0).sqrt()
        return bool((seen <= bound[None] * (1 + 1e-9) + 1e-13).all()) and bool((own <= 1.0 + 1e-6).all())


def norm_case(setup: Setup, heads: int, centred: bool, n: int) -> tuple[Value, Tensor]:
    d = n // heads
    step = Norm("y", ("x",), 1.0 + 0.3 * random(5, d), 0.2 * random(6, d), 1e-5, centred)
    setup.value.heads = heads
    made = norm(step, setup.value)
    return made, step(setup.x.unflatten(-1, (heads, d))).flatten(-2)


def network_case(setup: Setup, function: Function, gated: bool) -> tuple[Value, Tensor]:
    n = setup.value.box.shape[-1]
    up, gate, down = (
        Affine(
            name, ("x",), random(i, *shape) / shape[1] ** 0.5, 0.1 * random(i + 3, shape[0]), 1, (shape[0],)
        )
        for i, (name, shape) in enumerate((("up", (10, n)), ("gate", (10, n)), ("down", (n, 10))))
    )
    bent = affine(gate, setup.value)
    act = elementwise("act", function, bent)
    true = ACTIVATIONS[function](gate(setup.x))
    if gated:
        act = product("post", act, affine(up, setup.value))
        true = true * up(setup.x)
    return affine(down, act), down(true)


def solu_case(setup: Setup, normed: bool) -> tuple[Value, Tensor]:
    n = setup.value.box.shape[-1]
    up, down = (
        Affine(
            name,
            ("x",),
            2.0 * random(i, *shape) / shape[1] ** 0.5,
            0.1 * random(i + 3, shape[0]),
            1,
            (shape[0],),
        )
        for i, (name, shape) in enumerate((("up", (8, n)), ("down", (n, 8))))
    )
    made, true = solu(Solu("y", ("x",)), affine(up, setup.value)), Solu("y", ("x",))(up(setup.x))
    if normed:
        step = Norm("z", ("y",), 1.0 + 0.3 * random(5, 8), None, 1e-5, True)
        made, true = norm(step, made), step(true)
    return affine(down, made), down(true)


def attention_case(setup: Setup, causal: bool, cap: float | None = None) -> tuple[Value, Tensor]:
    n = setup.value.box.shape[-1]
    c = 3
    q, k, v = (
        Affine(name, ("x",), 0.8 * random(i + 20, 2 * c, n) / n**0.5, None, 1, (2, c))
        for i, name in enumerate("qkv")
    )
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    step = Scores("s", ("q", "k"), 0.7, 0.1 * random(30, 2, 3, 3), mask)
    made = scores(step, affine(q, setup.value), affine(k, setup.value), slice(0, None), None)
    true = step(q(setup.x), k(setup.x))
    if cap is not None:
        made, true = capped(Softcap("t", ("s",), cap), made), Softcap("t", ("s",), cap)(true)
    z = mix("z", softmax(made), affine(v, setup.value))
    return z, Mix("z", ("p", "v"))(Softmax("p", ("s",), mask)(true), v(setup.x)).flatten(-2)


CASES: dict[str, Callable[[Setup], tuple[Value, Tensor]]] = {
    "root mean square": lambda setup: norm_case(setup, 1, False, 6),
    "layer norm": lambda setup: norm_case(setup, 1, True, 6),
    "norms of heads": lambda setup: norm_case(setup, 2, False, 6),
    "layer norms of heads": lambda setup: norm_case(setup, 2, True, 6),
    "gelu": lambda setup: network_case(setup, "gelu", False),
    "relu": lambda setup: network_case(setup, "relu", False),
    "relu2": lambda setup: network_case(setup, "relu2", False),
    "jump": lambda setup: network_case(setup, "jump", False),
    "tanh": lambda setup: network_case(setup, "tanh", False),
    "gated silu": lambda setup: network_case(setup, "silu", True),
    "gated gelu_tanh": lambda setup: network_case(setup, "gelu_tanh", True),
    "solu": lambda setup: solu_case(setup, False),
    "normed solu": lambda setup: solu_case(setup, True),
    "attention": lambda setup: attention_case(setup, False),
    "causal attention": lambda setup: attention_case(setup, True),
    "capped attention": lambda setup: attention_case(setup, False, 1.5),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("degrees", [(), (1,), (3,), (2, 2), (8,)])
@pytest.mark.parametrize("error", [0.0, 1e-6, 0.02])
def test_what_a_step_makes_of_an_error_lies_in_the_new_ellipsoid(
    name: str, degrees: tuple[int, ...], error: float
) -> None:
    for seed in range(4):
        setup = Setup(10 * seed, degrees, 6, error, far=0.1 if error == 0.02 else 0.4)
        if not degrees:
            setup.alpha, setup.x = setup.alpha[:1], setup.x[:1]
        made, true = CASES[name](setup)
        if bool(made.reach.isfinite().all()):
            assert setup.holds(made, true)


def zero_like(place: int) -> Callable[..., Tensor]:
    return lambda *given, **named: torch.zeros_like(given[place])


def no_defect(self: Grid, most: Tensor, plain: Tensor | None = None) -> Tensor:
    return torch.zeros(most.shape[2:], dtype=most.dtype)


def no_apart(self: Finer, runs: Tensor, fine_runs: Tensor) -> Tensor:
    return torch.zeros_like(runs[:, 0])


def still(module: Any, rule: str) -> Any:
    """A rule that says that derivatives do not change on the piece."""
    real = getattr(module, rule)

    def changed(*given: Any) -> Any:
        slope, slopes, _, defect = real(*given)
        return slope, slopes, torch.zeros_like(slope), defect

    return patch.object(module, rule, changed)


def held_still(out: str, value: Value) -> Value:
    """A jump that is everywhere what it is at the centre."""
    constant = ACTIVATIONS["jump"](value.center)[:, None].expand_as(value.runs)
    return Value(out, value.piece, constant, {}, 0.0 * value.box, value.heads)


BLIND = [patch.object(Grid, "defect", no_defect), patch.object(Finer, "apart", no_apart)]
MUTANTS: dict[str, tuple[str, float, list[Any]]] = {
    "no defect in a norm": ("root mean square", 0.0, BLIND),
    "no defect of activations": ("gelu", 0.0, BLIND),
    "no defect of gates": ("gated silu", 0.0, BLIND),
    "no defect in attention": ("attention", 0.0, BLIND),
    "no defect under a cap": ("capped attention", 0.0, BLIND),
    "no defect of solu": ("solu", 0.0, BLIND),
    "weights of solu stay": (
        "solu",
        1e-2,
        [patch.object(solus, "weight_range", lambda p, r, lift: (p, 0.0 * p)), *BLIND],
    ),
    "products of p and v": ("attention", 0.0, [patch.object(Grid, "defect", no_defect)]),
    "kinks do not bend": ("relu", 0.3, [still(tokens, "_kinked")]),
    "features do not jump": ("jump", 0.3, [patch.object(tokens, "_jumped", held_still)]),
    "curvature is not read": ("gelu", 1e-2, [patch.object(tokens, "second", zero_like(1)), *BLIND]),
    "other tokens do not err": (
        "attention",
        1e-3,
        [patch.object(mixing, "_crossed", lambda *a: torch.zeros(1, 3, 6, 6, dtype=DTYPE)), *BLIND],
    ),
    "scores do not err": (
        "attention",
        1e-3,
        [
            patch.object(
                attention, "_quadratic", lambda M, w: torch.zeros(1, w.shape[1], 2, 3, 3, dtype=DTYPE)
            ),
            *BLIND,
        ],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_switched_off_is_missed(name: str) -> None:
    case, error, patches = MUTANTS[name]
    with ExitStack() as stack:
        for part in patches:
            stack.enter_context(part)
        held = []
        for seed in range(6):
            setup = Setup(10 * seed, (2,), 6, error, far=0.01 if error == 0.3 else 0.25)
            made, true = CASES[case](setup)
            held.append(setup.holds(made, true))
    assert not all(held)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_the_interpolant_of_a_root_is_as_near_as_its_square_says(degree: int) -> None:
    grid = Grid((degree,), torch.zeros(1, dtype=DTYPE))
    alpha = torch.linspace(-1.0, 1.0, 201, dtype=DTYPE)
    basis = torch.cos(torch.acos(alpha)[:, None] * grid.exponents[0][None])
    for seed in range(20):
        linear, size = 0.5 * random(seed, 1).item(), 1.0 + random(seed + 50, 1).abs().item()
        q = size * (1.5 + linear * grid.points[:, 0])[None, :, None]
        r = q.rsqrt()
        least = torch.full((1, 1), size * (1.5 - abs(linear)) * 0.999, dtype=DTYPE)
        bound = norms._root_defect(grid, r, q, least).item()
        P = basis @ grid.coefficients(r)[0][0, :, 0]
        gap = (P - (size * (1.5 + linear * alpha)).rsqrt()).abs().max().item()
        assert gap <= bound
        assert bound <= 4.0 * gap + 1e-9
