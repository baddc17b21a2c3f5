"""Random questions: small models of every family, regions of every kind, queries of every kind. A seed is a case."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from prooflens.models import Architecture, Transformer
from prooflens.models.architecture import Activation, HeadNorm, NormKind, NormPlace
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.problem import Problem
from prooflens.queries import Claim, parse_query, resolve
from prooflens.regions import Ball, Constraints, Hull, Region, Segment, Span

FIRST = ("encoder", "bert", "mpnet", "gpt2", "llama")
NAMED = ("pythia", "bloom", "neo", "qwen3", "olmo2", "gemma2", "gemma3", "bare", "window")
"""Families of steps that came later: side by side, ALiBi, windows, norms of queries and keys, caps, no norm."""
MIXED, NETWORKS = "mixed", "networks"
"""Models that draw every step by itself, with attention and without."""
SOLU = "solu"
"""GPT-2 with SoLU networks, their neurons normed or not."""
LATER = (*NAMED, MIXED)
FAMILIES = FIRST + LATER
DRAWN = (*FAMILIES, NETWORKS, SOLU)
"""Every family that seeds draw."""

DEPTHS = (3, 4, 5, 6)
"""Layers of the deep models that one seed in three draws. All other seeds mean what they meant before: one or two."""

MOST_CLAIMS = 6
"""Claims per case: many small cases try more than few large ones."""


@dataclass(frozen=True, eq=False)
class Case:
    """One random question: a model, a region, claims about one layer or the output, drawn when they are asked for.

    Attributes:
        seed: the number of the case.
        family: the family of its model.
        problem: the model and the region.
        layer: the layer that claims are about.
        about_output: whether they are about the output instead.
        choose: what draws the claims.
    """

    seed: int
    family: str
    problem: Problem
    layer: int
    about_output: bool
    choose: random.Random = field(repr=False)

    @cached_property
    def _asked(self) -> tuple[tuple[str, ...], tuple[Claim, ...]]:
        return _random_claims(self.problem, self.layer, self.about_output, self.choose)

    @property
    def queries(self) -> tuple[str, ...]:
        """What is asked, one word per claim."""
        return self._asked[0]

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What is claimed."""
        return self._asked[1]


def family_of(seed: int) -> str:
    """The family of a seed's model.

    Args:
        seed: the number of the case.
    """
    turn, place = divmod(seed, len(FIRST))
    if turn % 4 == 3:
        return {15: NETWORKS, 11: SOLU}.get(turn % 16, MIXED)
    return FIRST[place] if turn % 2 == 0 else NAMED[(seed // 2) % len(NAMED)]


def random_case(seed: int) -> Case:
    """A reproducible question from a seed."""
    choose = random.Random(seed)
    family = family_of(seed)
    deep = random.Random(f"depth of case {seed}")
    depth = deep.choice(DEPTHS) if deep.random() < 1 / 3 else None
    model = random_model(family, choose, depth)
    n_tokens = choose.randint(1, 5)
    x = torch.randn(
        n_tokens,
        model.architecture.d_model,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    padding = None
    if n_tokens > 2 and choose.random() < 0.2:
        padding = torch.arange(n_tokens) < n_tokens - 1
    # What is missed grows with every layer: deep models are asked about smaller regions, so that something is proved.
    share = 1.0 if depth is None else 10.0 ** deep.uniform(-3.0, 0.0)
    region = _random_region(x, choose, share)
    between = random.Random(f"way of case {seed}")
    if between.random() < 1 / 6:
        region = _random_way(x, between, share)
    problem = Problem(model, region, padding)
    layer = choose.randrange(model.architecture.n_layers)
    about_output = choose.random() < 0.2 or not model.architecture.has_attention
    return Case(seed, family, problem, layer, about_output, choose)


def random_model(family: str, choose: random.Random, depth: int | None = None) -> Transformer:
    """A small random model of a family, attention far from uniform, norms and biases away from 1 and 0.

    It has one or two layers, or as many as `depth` says.
    """
    heads = choose.choice((1, 2, 4))
    d = heads * choose.choice((2, 4))
    shallow = choose.choice((1, 2))
    common = {
        "n_layers": depth or shallow,
        "n_heads": heads,
        "d_model": d,
        "d_ff": choose.choice((4, 8)),
        "d_out": 3,
    }
    shapes: dict[str, dict[str, object]] = {
        "encoder": {"activation": "relu", "pool": "mean"},
        "bert": {"activation": "gelu", "pool": "first", "pooler": True, "norm_eps": 1e-12},
        "mpnet": {"activation": "gelu", "pool": "mean", "relative_buckets": 32},
        "gpt2": {"activation": "gelu_tanh", "pool": "last", "norm_place": "pre", "causal": True},
        "llama": {
            "activation": "silu",
            "pool": "last",
            "norm_place": "pre",
            "norm_kind": "rms",
            "causal": True,
            "gated": True,
            "rope_theta": 100.0,
            "n_kv_heads": choose.choice([g for g in (1, 2, 4) if heads % g == 0]),
        },
    }
    if family in (MIXED, NETWORKS):
        own = _drawn(choose, heads, attends=family == MIXED)
    elif family == SOLU:
        own = shapes["gpt2"] | {"activation": "solu", "network_norm": choose.random() < 0.5}
        own |= {"parallel": choose.random() < 0.3}
    else:
        own = shapes[family] if family in FIRST else _named(choose)[family]
    architecture = Architecture.from_dict({"family": family, **common, **own})
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    weights = {}
    for name, shape in sorted((optional_shapes(architecture) | required_shapes(architecture)).items()):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = choose.choice((0.5, 1.0, 2.0)) * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        weights[name] = noise * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if architecture.norm_kind == "rms":  # no model has a bias there, and `layer0` has no rule for one
        weights = {
            name: w for name, w in weights.items() if not name.endswith(("q_norm.bias", "k_norm.bias"))
        }
    return Transformer(architecture, weights, name=f"random {family}")


def _drawn(choose: random.Random, heads: int, attends: bool) -> dict[str, object]:
    """Every step drawn by itself; a block has attention or not."""
    maybe = choose.random
    place = choose.choice(get_args(NormPlace))
    bent = not attends or maybe() < 0.85
    own: dict[str, object] = {
        "norm_place": place,
        "norm_kind": choose.choice(get_args(NormKind)),
        "activation": choose.choice(get_args(Activation)),
        "pool": choose.choice(("mean", "first", "last")),
        "causal": maybe() < 0.5,
        "gated": maybe() < 0.5,
        "first_norm": maybe() < 0.8,
        "has_attention": attends,
        "has_network": bent,
    }
    if not attends:
        return own
    turning: dict[str, dict[str, object]] = {
        "none": {},
        "powers": {"rope_theta": 100.0},
        "given": {"rope_given": True, "rope_scale": choose.choice((1.0, 1.1))},
        "local": {"rope_given": True, "rope_local": True},
    }
    biases: dict[str, dict[str, object]] = {
        "none": {},
        "alibi": {"alibi": True},
        "relative": {"relative_buckets": 8},
    }
    own |= turning[choose.choice(sorted(turning))] | biases[choose.choice(sorted(biases))]
    normed = choose.choice(("none", *get_args(HeadNorm)))
    return own | {
        "parallel": bent and place != "post" and maybe() < 0.3,
        "shared_norm": maybe() < 0.5,
        "window": choose.choice((None, 1, 2)),
        "window_layers": choose.choice(((0, 2, 4), (1, 3, 5))),
        "n_kv_heads": choose.choice([g for g in (1, 2, 4) if heads % g == 0]),
        "qk_norm": normed,
        "score_cap": choose.choice((None, None, 0.5, 2.0, 30.0)),
        "attention_scale": choose.choice((None, 0.3, 1.0)),
        "scale_by_layer": maybe() < 0.2,
        "head_positions": normed == "none" and maybe() < 0.4,
        "context": 8,
    }


def _named(choose: random.Random) -> dict[str, dict[str, object]]:
    """Families of the later steps, each with its own and some drawn ones."""
    decoder: dict[str, object] = {"pool": "last", "norm_place": "pre", "causal": True}
    gated = decoder | {"activation": "silu", "norm_kind": "rms", "gated": True, "rope_theta": 100.0}
    local: dict[str, object] = {"window": choose.choice((1, 2)), "window_layers": (0, 2)}
    some: dict[str, dict[str, object]] = {
        "parallel": {"parallel": True, "shared_norm": choose.random() < 0.5},
        "local": local,
        "scale": {"attention_scale": choose.choice((0.3, 1.0)), "scale_by_layer": choose.random() < 0.5},
        "alibi": {"alibi": True},
    }
    drawn: dict[str, object] = {}
    for name in choose.sample(sorted(some), choose.randint(0, 2)):
        drawn |= some[name]
    turning: dict[str, object] = {"rope_given": True, "rope_scale": choose.choice((1.0, 1.1))}
    return {
        "pythia": decoder | {"activation": "gelu", "parallel": True} | turning | drawn,
        "bloom": decoder | {"activation": "gelu_tanh", "alibi": True} | drawn,
        "neo": decoder | {"activation": "gelu_tanh", "attention_scale": 1.0} | local | drawn,
        "qwen3": gated | {"qk_norm": "head"} | drawn,
        "olmo2": gated | {"norm_place": "output", "qk_norm": "whole"} | drawn,
        "gemma2": gated
        | {"norm_place": "sandwich", "score_cap": choose.choice((1.0, 5.0)), "activation": "gelu_tanh"}
        | drawn,
        "gemma3": gated
        | {"norm_place": "sandwich", "qk_norm": "head", "rope_theta": None, "rope_local": True}
        | turning
        | local,
        "bare": decoder | {"activation": "relu", "norm_place": "none", "has_network": False},
        "window": {
            "activation": "gelu",
            "pool": "mean",
            "norm_place": "pre",
            "gated": True,
            "first_norm": False,
        }
        | {"rope_given": True, "rope_local": True}
        | local,
    }


def _random_region(x: Tensor, choose: random.Random, share: float) -> Region:
    eps = 10.0 ** choose.uniform(-4.0, -0.3) * share
    kind = choose.choice(("ball", "ball", "tokens", "radii", "generators", "constrained"))
    if kind == "ball":
        return Ball(eps).around(x)
    if kind == "tokens":
        return Ball(eps, tokens=[choose.randrange(len(x))]).around(x)
    if kind == "radii":
        return Ball([eps * choose.choice((0.0, 0.5, 1.0)) if t else eps for t in range(len(x))]).around(x)
    n = choose.randint(1, 4)
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    G = torch.randn(n, *x.shape, generator=generator, dtype=torch.float64) * eps
    if kind == "generators":
        return Region(x, generators=G)
    return Region(x, generators=G, constraints=Constraints.of(n, torch.ones(1, n), torch.zeros(1)))


def _random_way(x: Tensor, choose: random.Random, share: float) -> Region:
    """The way to another input, the hull of several, or a span; the tokens in front may stay where they are."""
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    first, far = choose.randrange(len(x)), 10.0 ** choose.uniform(-2.0, 0.3) * share
    others = []
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        move = torch.randn(x.shape, generator=generator, dtype=torch.float64) * far
        move[:first] = 0.0
        others.append(x + move)
    if choose.random() < 0.25:
        return Span(x, [other - x for other in others], choose.uniform(0.2, 1.0)).region()
    return Segment(x, others[0]).region() if len(others) == 1 else Hull([x, *others]).region()


def _random_claims(
    problem: Problem, layer: int, about_output: bool, choose: random.Random
) -> tuple[tuple[str, ...], tuple[Claim, ...]]:
    if about_output:
        setting = problem.setting([], output=True)
        claims = parse_query("argmax").bind(setting)
        return ("argmax",) * len(claims), tuple(claims)
    S = problem.n_tokens
    setting = problem.setting([layer])
    texts = ["top1", "entropy", f"mass>={choose.uniform(0.05, 0.6):.3f}"]
    if S > 2:
        texts += ["top2", "rank2", f"spec{{0}}>{{{choose.randrange(1, S)}}}"]
        texts += [f"top1={{{choose.randrange(S)}}}", "top1={self}"]
    if problem.model.architecture.n_heads > 1:
        texts.append(f"{layer}.0:top1@-1 & {layer}.1:mass>=0.2@-1")
    queries, claims = [], []
    for text in choose.sample(texts, min(3, len(texts))):
        for query in resolve(parse_query(text), {}, S):
            bound = query.bind(setting)
            queries += [text.split(">=")[0].split("{")[0].split(":")[-1]] * len(bound)
            claims += bound
    kept = sorted(choose.sample(range(len(claims)), min(MOST_CLAIMS, len(claims))))
    return tuple(queries[i] for i in kept), tuple(claims[i] for i in kept)
