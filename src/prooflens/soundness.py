"""The soundness run: random models, regions and queries; then the attack tries to break every proved bound.

For every case and every proved engine of the registry:

1. a proved bound l ≤ f ≤ u of a functional becomes two claims, f − l ≥ 0 and u − f ≥ 0, and the attack tries to falsify
   them, starting at the engine's own corners too; a witness is a violation;
2. a claim that is proved to hold must survive an attack on itself;
3. proved bounds of different engines must have a common point (on small problems `exact` is one of them);
4. what is proved on a larger region must be proved on a smaller one.

`planted_case` builds models with a hidden counterexample that plain PGD misses; no engine may certify them.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prooflens.engines import Bounds, Engine, Guarantee, Problem, engine_names, get_engine
from prooflens.engines.alpha_crown import AlphaCrown
from prooflens.engines.attack import break_claims
from prooflens.engines.attack_search import Budget
from prooflens.engines.exact import Exact
from prooflens.engines.functionals import bound_claims, refusal
from prooflens.errors import ProoflensError
from prooflens.models import Architecture, Transformer
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.queries import Claim, Functional, parse_query
from prooflens.queries.base import Condition, Sense, make_claim
from prooflens.regions import Ball, Constraints, Region

FAMILIES = ("encoder", "bert", "mpnet", "gpt2", "llama")
GROWTH = 1.6
"""How much larger the region of the monotonicity check is."""

EXACT_FACTORS = 12
"""Problems with at most this many factors are also given to `exact`, if all their functionals are linear."""

MOST_CLAIMS = 6
"""Claims per case: many small cases try more than few large ones."""


@dataclass(frozen=True, eq=False)
class Case:
    """One random question: a model, a region, claims about one layer or the output."""

    seed: int
    family: str
    problem: Problem
    queries: tuple[str, ...]
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Violation:
    """A proved statement that is false. There must be none."""

    seed: int
    family: str
    engine: str
    what: str


@dataclass
class Report:
    """What a run tried and what it found."""

    cases: int = 0
    bounds: int = 0
    proved: int = 0
    attacked: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    tightest: dict[str, float] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "cases": self.cases,
            "bounds_attacked": self.bounds,
            "claims_proved": self.proved,
            "violations": [vars(v) for v in self.violations],
            "tightest_relative_gap": self.tightest,
            "attacked": {" / ".join(key): count for key, count in sorted(self.attacked.items())},
            "seconds": self.seconds,
        }


def run(
    cases: int,
    seed: int = 0,
    engines: Sequence[str] | None = None,
    budget: Budget | None = None,
    seconds: float = math.inf,
    progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Try so many random cases (or stop after so many seconds) with all proved engines."""
    report, start = Report(), time.perf_counter()
    chosen = [modest(name) for name in engines or engine_names()]
    proved = [engine for engine in chosen if engine.guarantee is Guarantee.PROVED]
    tell = progress or (lambda stage, share: None)
    for number in range(cases):
        elapsed = time.perf_counter() - start
        if elapsed > seconds:
            break
        tell(
            f"{report.bounds} bounds, {len(report.violations)} violations",
            max(number / cases, min(elapsed / seconds, 1.0)),
        )
        try_case(random_case(seed + number), proved, budget or Budget(200, 4, 20), report)
    report.seconds = time.perf_counter() - start
    return report


def modest(name: str) -> Engine:
    """An engine by name; those that search with few steps, since what they return when they stop is proved as well."""
    if name == "exact":
        return Exact(tolerance=1e-3, max_cells=64, max_slow_cells=4)
    return AlphaCrown(steps=3, inner_steps=1) if name == "alpha-crown" else get_engine(name)


def try_case(case: Case, engines: Sequence[Engine], budget: Budget, report: Report) -> None:
    """All engines on one case; what they prove is attacked."""
    report.cases += 1
    functionals = [f for claim in case.claims for f in claim.functionals]
    together: Bounds | None = None
    for engine in engines:
        if refusal(engine, case.problem, functionals) or not _affordable(engine, case):
            continue
        parts, bounds = bound_claims(engine, case.problem, case.claims)
        _attack_bounds(case, engine.name, bounds, budget, report)
        _note_gap(case, bounds, report)
        _attack_claims(case, engine.name, parts, budget, report)
        _check_growth(case, engine, parts, report)
        try:
            together = bounds if together is None else together.intersect(bounds)
        except ProoflensError as error:
            report.violations.append(Violation(case.seed, case.family, engine.name, str(error)))


def _affordable(engine: Engine, case: Case) -> bool:
    """Branch and bound works form by form, and a curved functional needs a form for every pair of keys."""
    linear = all(f.is_linear for claim in case.claims for f in claim.functionals)
    return engine.name != "exact" or (case.problem.region.n_factors <= EXACT_FACTORS and linear)


def _attack_bounds(case: Case, engine: str, bounds: Bounds, budget: Budget, report: Report) -> None:
    """Every finite bound as a claim of its own, attacked."""
    functionals = [f for claim in case.claims for f in claim.functionals]
    setting = case.problem.setting(_layers(case), output=_about_output(case))
    targets: list[Claim] = []
    starts: list[Tensor | None] = []
    for i, functional in enumerate(functionals):
        for side, corners in ((bounds.lower, bounds.lower_corner), (bounds.upper, bounds.upper_corner)):
            limit = float(side[i])
            if math.isnan(limit):
                report.violations.append(
                    Violation(case.seed, case.family, engine, f"NaN bound of {functional.name}")
                )
            elif math.isfinite(limit) and (functional.rows or functional.logits):
                sign = 1.0 if side is bounds.lower else -1.0
                shifted = Functional(
                    tuple((sign * w, atom) for w, atom in functional.terms),
                    sign * functional.constant - sign * limit,
                    f"{functional.name} {'≥' if sign > 0 else '≤'} {limit!r}",
                )
                rows = functional.rows
                targets.append(
                    make_claim(case.claims[0].query, setting, rows, [Condition(shifted, Sense.NONNEGATIVE)])
                )
                starts.append(None if corners is None else corners[i : i + 1])
    report.bounds += len(targets)
    for target, witness in zip(
        targets, break_claims(case.problem, targets, budget, case.seed, starts), strict=True
    ):
        excess = 0.0 if witness is None else float(-witness.values.min())
        # Shifting the constant by the bound and evaluating the sum round: a few units in the last place of its terms.
        if excess > 64 * 2.0**-53 * (1.0 + _size(target)):
            what = f"{target.functionals[0].name} broken by {excess:.3g}"
            report.violations.append(Violation(case.seed, case.family, engine, what))
    for query, claim in zip(case.queries, case.claims, strict=True):
        report.attacked[(case.family, engine, query)] += 2 * len(claim.functionals)


def _size(target: Claim) -> float:
    return abs(target.functionals[0].constant) + float(target.clean.abs().max())


def _note_gap(case: Case, bounds: Bounds, report: Report) -> None:
    """The least slack of a proved bound over what its engine's corners attain, relative to the range attained there."""
    region = case.problem.region
    corners = [c for c in (bounds.lower_corner, bounds.upper_corner) if c is not None]
    alpha = torch.cat((torch.zeros(1, region.n_factors).to(region.center), *corners))
    with torch.no_grad():
        scores, logits = case.problem.values(region.point(alpha), _layers(case), _about_output(case))
        values = [
            claim.values({row: scores[row.layer][:, row.head, row.position] for row in claim.rows}, logits)
            for claim in case.claims
        ]
    found = torch.cat(values, -1)
    slack = torch.minimum(found.amin(0) - bounds.lower, bounds.upper - found.amax(0))
    spread = found.amax(0) - found.amin(0)
    relative = (slack / spread)[spread > 0]
    if len(relative):
        report.tightest[bounds.engine] = min(
            report.tightest.get(bounds.engine, math.inf), float(relative.min())
        )


def _attack_claims(case: Case, engine: str, parts: Sequence[Bounds], budget: Budget, report: Report) -> None:
    held = [
        claim
        for claim, bounds in zip(case.claims, parts, strict=True)
        if _reads(claim) and not claim.wants_range and claim.decide(bounds.lower, bounds.upper) == "holds"
    ]
    report.proved += len(held)
    for claim, witness in zip(held, break_claims(case.problem, held, budget, case.seed + 1), strict=True):
        if witness is not None:
            report.violations.append(
                Violation(case.seed, case.family, engine, f"{claim} was proved and is broken")
            )


def _check_growth(case: Case, engine: Engine, parts: Sequence[Bounds], report: Report) -> None:
    """A larger region never turns `unknown` into `holds`."""
    problem = case.problem
    larger = Problem(problem.model, problem.region.scaled(GROWTH), problem.padding)
    if problem.region.constraints is not None:
        return
    grown, _ = bound_claims(engine, larger, case.claims)
    for claim, small, large in zip(case.claims, parts, grown, strict=True):
        if claim.wants_range or not claim.conditions:
            continue
        if (
            claim.decide(large.lower, large.upper) == "holds"
            and claim.decide(small.lower, small.upper) != "holds"
        ):
            what = f"{claim} is proved on the larger region only"
            report.violations.append(Violation(case.seed, case.family, engine.name, what))


def _reads(claim: Claim) -> bool:
    """Whether anything can move the claim: a mass over all keys is a constant."""
    return any(f.rows or f.logits for f in claim.functionals)


def _layers(case: Case) -> list[int]:
    return sorted({row.layer for claim in case.claims for row in claim.rows})


def _about_output(case: Case) -> bool:
    return any(f.logits for claim in case.claims for f in claim.functionals)


def random_case(seed: int) -> Case:
    """A reproducible question from a seed."""
    choose = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    model = random_model(family, choose)
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
    problem = Problem(model, _random_region(x, choose), padding)
    layer = choose.randrange(model.architecture.n_layers)
    about_output = choose.random() < 0.2
    queries, claims = _random_claims(problem, layer, about_output, choose)
    return Case(seed, family, problem, queries, claims)


def random_model(family: str, choose: random.Random) -> Transformer:
    """A small random model of a family, attention far from uniform, norms and biases away from 1 and 0."""
    heads = choose.choice((1, 2, 4))
    d = heads * choose.choice((2, 4))
    common = {
        "n_layers": choose.choice((1, 2)),
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
    architecture = Architecture.from_dict({"family": family, **common, **shapes[family]})
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    weights = {}
    for name, shape in sorted((optional_shapes(architecture) | required_shapes(architecture)).items()):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = choose.choice((0.5, 1.0, 2.0)) * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        weights[name] = noise * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return Transformer(architecture, weights, name=f"random {family}")


def _random_region(x: Tensor, choose: random.Random) -> Region:
    eps = 10.0 ** choose.uniform(-4.0, -0.3)
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
    if problem.model.architecture.n_heads > 1:
        texts.append(f"{layer}.0:top1@-1 & {layer}.1:mass>=0.2@-1")
    queries, claims = [], []
    for text in choose.sample(texts, min(3, len(texts))):
        for claim in parse_query(text).bind(setting):
            queries.append(text.split(">=")[0].split("{")[0].split(":")[-1])
            claims.append(claim)
    kept = sorted(choose.sample(range(len(claims)), min(MOST_CLAIMS, len(claims))))
    return tuple(queries[i] for i in kept), tuple(claims[i] for i in kept)
