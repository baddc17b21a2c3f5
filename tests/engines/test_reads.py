"""Readouts of every hook of every family, by every engine that walks a program: what points attain lies inside."""

from __future__ import annotations

import random

import pytest
import torch

import prooflens as pl
from prooflens.engines.hidden import output_forms
from prooflens.errors import ModelError
from prooflens.evaluation.soundness import FAMILIES, modest, random_model
from prooflens.models.reads import hooks_of
from prooflens.problem import Problem
from prooflens.regions import Ball, Region, Segment

S = 4

ALWAYS = ("interval", "crown", "taylor", "chebyshev")
"""Engines that answer for every readout; `chebyshev` where few factors move."""


def drawn(family: str, seed: int) -> tuple[pl.Transformer, torch.Tensor, torch.Generator]:
    model = random_model(family, random.Random(f"{family} {seed}"), 2)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(S, model.architecture.d_model, generator=generator, dtype=torch.float64)
    return model, x, generator


def directions(width: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(3, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_readout_is_what_the_cache_holds(family: str) -> None:
    model, x, generator = drawn(family, 0)
    _, cache = model.run_with_cache(x)
    seen = 0
    for hook in hooks_of(model.architecture):
        if hook.name not in cache:
            continue
        W, b = directions(hook.width, generator), torch.randn(3, generator=generator, dtype=torch.float64)
        read = pl.read_at(model, hook.name, 2, W, b)
        expected = cache[hook.name][2].flatten()
        assert torch.allclose(read(x), W @ expected + b, rtol=1e-12, atol=1e-12)
        assert torch.allclose(read.headless(x), expected, rtol=1e-12, atol=1e-13)
        assert read.sha256 != model.sha256
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("engine", ["interval", "crown", "taylor", "zonotope", "cpz"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bounds_of_readouts_hold(family: str, engine: str) -> None:
    model, x, generator = drawn(family, 1)
    hooks = hooks_of(model.architecture)
    for hook in random.Random(f"{family} {engine}").sample(hooks, 2 if engine in ALWAYS else 1):
        read = pl.read_at(model, hook.name, 2, directions(hook.width, generator))
        check(read, Ball(0.01).around(x), engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_bounds_of_readouts_hold_on_segments(family: str) -> None:
    model, x, generator = drawn(family, 2)
    end = x.clone()
    end[1] += 0.2 * torch.randn(x.shape[1], generator=generator, dtype=torch.float64)
    for hook in random.Random(family).sample(hooks_of(model.architecture), 2):
        read = pl.read_at(model, hook.name, 2, directions(hook.width, generator))
        check(read, Segment(x, end).region(), "chebyshev")


def check(
    read: pl.Transformer, region: Region, engine: str, padding: torch.Tensor | None = None, points: int = 200
) -> None:
    """The engine answers, and no sampled point leaves its bounds; engines that carry sets may refuse."""
    problem = Problem(read, region, padding)
    forms = output_forms(torch.eye(3, dtype=torch.float64))
    refused = modest(engine).refuses(problem, forms)
    assert refused is None or engine not in ALWAYS, refused
    if refused is not None:
        return
    found = modest(engine).bound_forms(problem, forms)
    y = read(region.sample(points, 0, corners=0.7)[0], padding)
    slack = 1e-12 * (1.0 + y.abs().amax())
    assert bool((y >= found.lower.cpu() - slack).all())
    assert bool((y <= found.upper.cpu() + slack).all())
    assert bool(found.lower.isfinite().all() & found.upper.isfinite().all())


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_padding_and_large_inputs(family: str) -> None:
    """The edges of what is asked: a single token, a token that is padding, values fifty times the usual."""
    choose, generator = random.Random(f"edges {family}"), torch.Generator().manual_seed(3)
    model = random_model(family, choose, 2)
    a, hooks = model.architecture, hooks_of(model.architecture)
    for tokens, scale, padded in ((1, 1.0, False), (3, 50.0, False), (3, 1.0, True)):
        x = scale * torch.randn(tokens, a.d_model, generator=generator, dtype=torch.float64)
        hook = choose.choice(hooks)
        position = 0 if padded and a.causal else tokens - 1
        read = pl.read_at(model, hook.name, position, directions(hook.width, generator))
        padding = None
        if padded:
            padding = torch.tensor([True, True, False] if a.causal else [True, False, True])
        end = x + 0.05 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        for engine in ALWAYS:
            region = Segment(x, end).region() if engine == "chebyshev" else Ball(1e-3).around(x)
            check(read, region, engine, padding, points=60)


def test_wrong_readouts_are_one_line(toy: pl.Transformer) -> None:
    hook = "blocks.0.mlp.hook_pre"
    for call in (
        lambda: pl.read_at(toy, "blocks.0.attn.hook_pattern", 0, [0]),
        lambda: pl.read_at(toy, "blocks.9.hook_resid_post", 0, [0]),
        lambda: pl.read_at(toy, "hook_embed", 0, [0]),
        lambda: pl.read_at(toy, "blocks.0.hook_nothing", 0, [0]),
        lambda: pl.read_at(toy, hook, 0, [10**6]),
        lambda: pl.read_at(toy, hook, 0, torch.zeros(2, 3).double()),
        lambda: pl.read_at(toy, hook, -1, [0]),
        lambda: pl.read_at(toy, hook, 0, [0], bias=torch.zeros(2).double()),
        lambda: pl.read_at(toy, hook, 0, [0], names=["a", "b"]),
        lambda: pl.read_at(toy, hook, 99, [0])(toy.example()),
        lambda: pl.read_at(toy, hook, 0, torch.full((1, toy.architecture.d_ff), float("nan"))),
    ):
        with pytest.raises(ModelError) as error:
            call()
        assert "\n" not in str(error.value)
