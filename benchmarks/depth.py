"""`taylor` at depth, with an attack beside every figure.

python benchmarks/depth.py MODEL --layer 1 --eps 0.0005 0.001 [--query top1 mass>=0.2 entropy] [--text "…"]
    [--calibrate 0.75 0.80] [--device cuda] [--rows 24] [--json out.json]

MODEL is a short name, or a folder made by `slice_model.py` (its embedded example is then the prompt). For every ε: how
many (head, position) queries are proved, how many the attack leaves standing, the mean width of the bounds, time and
peak memory. Proved claims are attacked with ten times the paper's budget; one that breaks is an error. A range
(`entropy`) has the mean width that an attack attains instead. With `--calibrate`, ε is where MC + PGD leaves such a
share of the claims standing.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from measuring import Line, Meter, known, tell, told
from prooflens import Ball, Region, load
from prooflens.engines import Bounds, Guarantee, forms_of
from prooflens.engines.attack import break_claims
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.functionals import bound_claims
from prooflens.engines.protocol import EngineOptions
from prooflens.engines.taylor import Taylor, bound_part, factors
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.remainder_bounds import Supports
from prooflens.engines.taylor.segments import segments_of
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.evaluation.studies.measure import attained_entropies
from prooflens.memory import keep_freed
from prooflens.models import OUTPUT, Transformer, scores_name
from prooflens.problem import Problem
from prooflens.queries import Claim, parse_query
from prooflens.verdicts.decide import is_proved
from thresholds import share_between

PAPER = AttackBudget(samples=500, restarts=5, steps=50)
LIGHT = AttackBudget(samples=64, restarts=1, steps=10)
TENFOLD = AttackBudget(samples=5000, restarts=50, steps=50)


def region_of(model: Transformer, text: str | None, eps: float, device: str) -> Region:
    prompt = model.example() if text is None else model.prompt(text)
    region = Ball(eps).around(prompt)
    assert region.radius is not None
    return Region(region.center.to(device), radius=region.radius.to(device), label=region.label)


def jacobian_seconds(problem: Problem, layer: int) -> float:
    """One full Jacobian of the layer's scores by `torch.func`, row by row of a chunked reverse pass."""

    def scores(x: torch.Tensor) -> torch.Tensor:
        return problem.model.scores(x, layer).flatten()

    start = time.perf_counter()
    made = torch.func.jacrev(scores, chunk_size=64)(problem.region.center)
    float(made.sum())
    return time.perf_counter() - start


def sizes(problem: Problem, layer: int, memory: int) -> dict[str, float]:
    """Mean e/τ of every value up to a layer's scores; of the last layer, up to the output.

    e is how far a value moves beyond first order, τ its linear reach.
    """
    found: dict[str, float] = {}

    def visit(chain: Chain) -> None:
        found.update(
            (name, round(float((value.e / value.tau).mean()), 3)) for name, value in chain.values.items()
        )

    last = layer == problem.model.architecture.n_layers - 1
    program = problem.model.program(problem.n_tokens, OUTPUT if last else scores_name(layer))
    with torch.no_grad():
        walk = TaylorWalk(memory, kept=frozenset(), visit=visit)
        walk.forward(segments_of(program), problem.region.center, factors(problem.region))
    return found


def probe(model: Transformer, options: argparse.Namespace, eps: float) -> Iterator[Line]:
    """All layers of --layer in one walk by ellipsoids: proved and attacked claims of each, and e/τ of its queries."""
    problem = Problem(model, region_of(model, options.text, eps, options.device))
    wanted = sorted(options.layer)
    claims = {layer: asked(problem, options, layer, options.query[0]) for layer in wanted}
    forms = {layer: forms_of([f for c in claims[layer] for f in c.functionals]) for layer in wanted}
    found: dict[int, tuple[list[bool], list[torch.Tensor], float, float]] = {}
    start = time.perf_counter()

    def visit(chain: Chain) -> None:
        layer = chain.segment.layer
        if layer is None or layer not in forms or chain.scores is None:
            return
        part = bound_part(walk, problem, forms[layer], Supports())
        sizes = [len(c.functionals) for c in claims[layer]]
        ends = zip(part.lower.cpu().split(sizes), part.upper.cpu().split(sizes), strict=True)
        bounds = [Bounds(low, high, Guarantee.PROVED, "taylor", 0.0) for low, high in ends]
        holds = [is_proved(claim, known) for claim, known in zip(claims[layer], bounds, strict=True)]
        q = chain.values[chain.scores.names[0]]
        ratio = float((q.e / q.tau).mean())
        found[layer] = holds, list((-part.corner).cpu().split(sizes)), ratio, time.perf_counter() - start

    program = model.program(problem.n_tokens, [scores_name(wanted[-1])], None)
    walk = TaylorWalk(options.memory * 2**30, kept=frozenset(), visit=visit)
    with torch.no_grad():
        walk.forward(segments_of(program), problem.region.center, factors(problem.region))
    for layer, (holds, corners, ratio, took) in found.items():
        budgets = (LIGHT, LIGHT) if options.quick else (TENFOLD, PAPER)
        left = None if options.no_attack else standing(problem, claims[layer], holds, corners, budgets)
        yield {
            "model": options.model,
            "layer": layer,
            "eps": eps,
            "claims": len(holds),
            "proved": sum(holds),
            "attack leaves": left,
            "heads": [c.rows[0].head for c, held in zip(claims[layer], holds, strict=True) if held],
            "e / τ of queries": round(ratio, 3) if math.isfinite(ratio) else None,
            "seconds up to here": round(took, 1),
        }


def standing(
    problem: Problem,
    claims: Sequence[Claim],
    proved: Sequence[bool],
    starts: Sequence[torch.Tensor | None],
    budgets: tuple[AttackBudget, AttackBudget],
) -> int:
    """How many claims an attack leaves, also from the engine's corners; budgets for those proved and for the others."""
    left = 0
    for kind, budget in zip((True, False), budgets, strict=True):
        chosen = [i for i, holds in enumerate(proved) if holds is kind]
        if not chosen:
            continue
        found = break_claims(
            problem, [claims[i] for i in chosen], budget, seed=0, starts=[starts[i] for i in chosen]
        )
        if kind and any(witness is not None for witness in found):
            raise AssertionError("a claim was proved and is broken")
        left += sum(witness is None for witness in found)
    return left


def asked(problem: Problem, options: argparse.Namespace, layer: int, query: str) -> list[Claim]:
    """The claims of one layer that hold on the clean input."""
    claims = parse_query(query).bind(problem.setting([layer]))
    claims = [claim for claim in claims if claim.functionals and claim.clean_holds]
    if options.last:
        claims = [c for c in claims if c.rows[0].position == problem.n_tokens - 1]
    if options.rows:
        order = torch.randperm(len(claims), generator=torch.Generator().manual_seed(0)).tolist()
        claims = [claims[i] for i in sorted(order[: options.rows])]
    return claims


def rounded(eps: float) -> float:
    return float(f"{eps:.3g}")


class Standing:
    """Which claims MC + PGD leaves standing as ε changes.

    What broke stays broken on larger balls; what stood on a larger one is not attacked again.
    """

    def __init__(self, model: Transformer, options: argparse.Namespace, layer: int, query: str) -> None:
        self.model, self.options, self.layer, self.query = model, options, layer, query
        self.broken: dict[int, float] = {}
        self.stood: dict[int, float] = {}

    def share(self, eps: float) -> float:
        """The share of all claims at an ε."""
        options, eps = self.options, rounded(eps)
        problem = Problem(self.model, region_of(self.model, options.text, eps, options.device))
        claims = asked(problem, options, self.layer, self.query)
        left = [i for i in range(len(claims)) if self.broken.get(i, math.inf) > eps]
        tried = [i for i in left if self.stood.get(i, 0.0) < eps]
        found = break_claims(problem, [claims[i] for i in tried], PAPER, seed=0) if tried else []
        for i, witness in zip(tried, found, strict=True):
            if witness is None:
                self.stood[i] = eps
            else:
                self.broken[i] = eps
        standing = sum(self.broken.get(i, math.inf) > eps for i in left)
        print(f"  ε = {eps:.4g}: {standing} of {len(claims)} stand", file=sys.stderr, flush=True)
        return standing / len(claims)


def calibrated(model: Transformer, options: argparse.Namespace, layer: int, query: str) -> Line:
    """An ε at which so many claims stand."""
    low, high = options.calibrate
    eps, share = share_between(Standing(model, options, layer, query).share, options.eps[0], low, high)
    return {
        "model": options.model,
        "layer": layer,
        "query": query,
        "calibrated": [low, high],
        "eps": rounded(eps),
        "share that MC + PGD leaves": round(share, 4),
    }


def attained_widths(problem: Problem, claims: Sequence[Claim], together: Bounds) -> Line:
    """Ranges beside what an attack attains, which must lie inside."""
    smallest, largest = attained_entropies(problem, claims, PAPER)
    slack = 1e-12  # of the attained values: their own rounding
    if bool(((smallest < together.lower - slack) | (largest > together.upper + slack)).any()):
        raise AssertionError("a range was proved and is left")
    attained = float((largest - smallest).clamp(min=0.0).mean())
    width = float((together.upper - together.lower).mean())
    return {"mean width of attack": attained, "width / attack": round(width / attained, 3)}


def measure(model: Transformer, options: argparse.Namespace, layer: int, eps: float, query: str) -> Line:
    problem = Problem(model, region_of(model, options.text, eps, options.device))
    claims = asked(problem, options, layer, query)
    ranges = any(claim.wants_range for claim in claims)
    engine, limits = Taylor(thorough=not options.fast), EngineOptions(options.memory * 2**30)
    with Meter(problem.model.device) as meter:
        parts, together = bound_claims(engine, problem, claims, options=limits)
    proved = [is_proved(claim, part) for claim, part in zip(claims, parts, strict=True)]
    left: int | None = None
    if not (options.no_attack or ranges):
        budgets = (PAPER if options.quick else TENFOLD, PAPER)
        left = standing(problem, claims, proved, [part.lower_corner for part in parts], budgets)
    row: Line = {
        "model": options.model,
        "layer": layer,
        "query": query,
        "eps": eps,
        "claims": len(claims),
        "proved": sum(proved),
        "attack leaves": left,
        "mean width": float((together.upper - together.lower).mean()),
        "seconds": round(meter.seconds, 2),
        "peak GiB": round(meter.gib, 2),
    }
    if ranges and not options.no_attack:
        row |= attained_widths(problem, claims, together)
    if options.sizes:
        row["e / τ"] = sizes(problem, layer, options.memory * 2**30)
    if options.jacobian:
        row |= in_jacobians(engine, limits, problem, claims, layer)
    return row


def in_jacobians(
    engine: Taylor, limits: EngineOptions, problem: Problem, claims: Sequence[Claim], layer: int
) -> Line:
    """What all claims cost, in full Jacobians of the layer's scores: medians of warm runs, in turn."""
    took, jacobians = [], []
    for _ in range(5):
        with Meter(problem.model.device) as meter:
            bound_claims(engine, problem, claims, options=limits)
        took.append(meter.seconds)
        jacobians.append(jacobian_seconds(problem, layer))
    warm, one = statistics.median(took[1:]), statistics.median(jacobians[1:])
    return {
        "warm seconds": round(warm, 3),
        "one Jacobian, s": round(one, 3),
        "Jacobians": round(warm / one, 1),
    }


def lines(model: Transformer, options: argparse.Namespace) -> Iterator[Line]:
    """What was asked for and is not in the file yet."""
    done = told(options.json)
    if options.probe:
        for eps in options.eps:
            yield from probe(model, options, eps)
        return
    for layer, query in itertools.product(options.layer, options.query):
        about = {"model": options.model, "layer": layer, "query": query}
        radii = options.eps
        if options.calibrate:
            kept = [line for line in done if known([line], **about, calibrated=options.calibrate)]
            line = kept[0] if kept else calibrated(model, options, layer, query)
            if not kept:
                yield line
            radii = [line["eps"]]
        for eps in radii:
            if not any("claims" in line and known([line], **about, eps=eps) for line in done):
                yield measure(model, options, layer, eps, query)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--layer", type=int, nargs="+", default=[1])
    parser.add_argument("--eps", type=float, nargs="+", default=[0.0005, 0.001])
    parser.add_argument("--query", nargs="+", default=["top1"], help="as in docs/queries.md")
    parser.add_argument(
        "--calibrate",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="search, from the first ε on, the one at which the attack leaves such a share standing, and measure there",
    )
    parser.add_argument("--text", help="the prompt; without it, the model's embedded example")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=8, help="GiB for the engine")
    parser.add_argument("--rows", type=int, help="only so many random queries")
    parser.add_argument("--last", action="store_true", help="only queries of the last position")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="attack proved claims with the paper's budget only; with --probe, with 64 samples and 10 steps",
    )
    parser.add_argument(
        "--probe", action="store_true", help="all layers of --layer in one walk, by ellipsoids"
    )
    parser.add_argument(
        "--fast", action="store_true", help="ellipsoids only: no eigenvalues for open functionals"
    )
    parser.add_argument("--sizes", action="store_true", help="also e/τ of every value that a site reads")
    parser.add_argument("--no-attack", action="store_true", help="only what is proved")
    parser.add_argument("--jacobian", action="store_true", help="time one full Jacobian beside it")
    parser.add_argument(
        "--json",
        type=Path,
        help="append the rows to this file, one JSON document a line; those that it holds are left out",
    )
    options = parser.parse_args()
    keep_freed()
    model = load(options.model).to(options.device)
    for line in lines(model, options):
        tell(line, options.json)


if __name__ == "__main__":
    main()
