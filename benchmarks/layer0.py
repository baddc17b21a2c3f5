"""How tight and how fast `layer0` is: beside the attack, intervals, the exact answer and auto_LiRPA.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/layer0.py [--quick] [--part toy …] [--json PATH]

Parts: toy (with the d = 16 sweep), still_open (what `exact` says of what is left there), tiny (against `exact`),
minilm, mpnet, smollm2, and peers (needs ../shared/models/peer-* beside the checkout). What is not at hand is left out
with a message. Every part runs in a process of its own, so that its peak memory is its own.

Rates: how many queries are proved by `layer0`; how many the attack leaves standing (an upper bound of what can be
proved; every query is attacked, proved or not, from the engine's corners too, with the budgets of Tab. mc_budgets,
proved ones of pretrained models with a smaller one); how many `interval` proves. Brackets hold 95 % Clopper–Pearson
intervals.
"""

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layer0_questions import Question, attained_spread, attained_spread_of_margins, rates
from peer_models import PEERS, peer_model
from prooflens import Transformer, load
from prooflens.engines import forms_of
from prooflens.engines.attack import BUDGETS, break_claims
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.exact import Exact
from prooflens.errors import ProoflensError
from prooflens.evaluation.studies.prompts import SENTENCES
from prooflens.models import Architecture
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.statistics import Rate
from prooflens.verdicts.decide import is_proved
from tables import Table
from texts import IOI

PEER_WIDTHS = {
    ("peer-tiny", 0.01): ("0.0219", "0.0228 [8], < 0.1 s", "0.0226, 6 s"),
    ("peer-tiny", 0.02): ("0.0438", "0.0475 [7], < 0.1 s", "0.0466, 6 s"),
    ("peer-tiny", 0.05): ("0.110", "0.134 [4], < 0.1 s", "0.128, 6 s"),
}
"""Layer 0 with auto_LiRPA 0.7.1, from ../shared/design/peers.md: sampled, CROWN, α-CROWN with 5 iterations."""

TARGETS = (0.75, 0.25)
"""The shares of queries that the attack is to leave standing on pretrained models; ε is chosen for them."""

SWEEP = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05)
"""The ε of Tab. attention_stability."""

ON_PROVED = AttackBudget(500, 2, 20)
"""The attack on claims of pretrained models that are proved already; those that are not get the paper's budget."""

NEAREST = AttackBudget(0, 1, 1)
"""The attack of the search for ε: the engine's own corners and one step from there."""


@dataclass(frozen=True)
class Effort:
    """How much is done."""

    quick: bool

    def budget(self, name: str) -> AttackBudget:
        """A budget of Tab. mc_budgets, or a hundredth of its samples and a fifth of its restarts."""
        full = BUDGETS[name]
        return AttackBudget(full.samples // 100, full.restarts // 5, 20) if self.quick else full

    @property
    def samples(self) -> slice:
        """All of them, or the first two."""
        return slice(2 if self.quick else None)


def seconds(job: Callable[[], object]) -> float:
    """How long a job takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def peak_memory() -> str:
    """The most memory that this process has held."""
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def toy(effort: Effort) -> list[Table]:
    """`toy`: 5 samples, 40 queries; `toy-d16`: 10 samples, 160 queries; layer 0, top-1."""
    tables = []
    for name, samples, sweep in (
        ("toy", 5, (0.01, 0.02)),
        ("toy-d16", 10, SWEEP),
    ):
        model = load(name)
        rows = []
        for eps in sweep:
            chosen = range(samples)[effort.samples]
            questions = [Question.of(model, model.example(i).x, eps) for i in chosen]
            rows.append([f"{eps:g}", *rates(questions, effort.budget("synthetic"))])
        tables.append(
            Table(f"{name}, layer 0, top-1", ["ε", "layer0 proves", "attack leaves", "interval proves"], rows)
        )
    return tables


def still_open(effort: Effort) -> list[Table]:
    """Queries of `toy-d16` that `layer0` does not prove and an attack does not break: what `exact` says of them."""
    model, rows = load("toy-d16"), []
    for eps in SWEEP:
        for sample in range(10)[effort.samples]:
            question = Question.of(model, model.example(sample).x, eps)
            parts = question.bounds("layer0")
            starts = [part.lower_corner for part in parts]
            found = break_claims(question.problem, question.claims, ON_PROVED, seed=0, starts=starts)
            for claim, part, witness in zip(question.claims, parts, found, strict=True):
                if witness is None and not is_proved(claim, part):
                    forms = forms_of(claim.functionals).select((part.lower <= 0).nonzero()[:, 0])
                    reason = Exact().refuses(question.problem, forms)
                    answer = (
                        reason or f"{float(Exact().bound_forms(question.problem, forms).lower.min()):.4f}"
                    )
                    rows.append(
                        [f"{eps:g}", f"{claim}, sample {sample}", f"{float(part.lower.min()):.4f}", answer]
                    )
    header = ["ε", "query", "least margin by layer0", "by exact"]
    return [Table("toy-d16, what is left open", header, rows)]


def random_encoder(seed: int) -> Transformer:
    """One head of width 4 with random weights."""
    architecture = Architecture("encoder", 1, 1, 4, 8, "relu", pool="mean", d_out=2)
    generator = torch.Generator().manual_seed(seed)
    shapes = optional_shapes(architecture) | required_shapes(architecture)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    return Transformer(architecture, weights, name=f"random {seed}")


def tiny(effort: Effort) -> list[Table]:
    """S = 2, d = 4: 8 samples at 3 radii against the exact answer."""
    rows = []
    for eps in (0.1, 0.2, 0.3):
        exact = proved = standing = agree = 0
        for seed in range(8):
            model = random_encoder(seed)
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
            question = Question.of(model, x, eps)
            functionals = [f for claim in question.claims for f in claim.functionals]
            solved = Exact(tolerance=1e-9).solve(question.problem, forms_of(functionals))
            truth = bool((solved.lower > 0).all())
            assert truth or bool((solved.attained_lower <= 0).any()), "the exact engine did not finish"
            parts = question.bounds("layer0")
            found = question.count(parts) == len(question.claims)
            left = question.standing(parts, effort.budget("synthetic")) == len(question.claims)
            exact, proved, standing = exact + truth, proved + found, standing + left
            agree += truth == found
        rows.append([f"{eps:g}", f"{exact}/8", f"{proved}/8", f"{standing}/8", f"{agree}/8"])
    header = ["ε", "truly stable (exact)", "layer0 proves", "attack leaves", "layer0 = exact"]
    return [Table("S = 2, d = 4, all rows at once", header, rows)]


def find_eps(model: Transformer, inputs: Sequence[Tensor], target: float) -> float:
    """The ε, to two digits, at which the engine's corners leave about this share of the claims standing."""
    low, high = 1e-5, 1.0
    while high / low > 1.06:
        eps = (low * high) ** 0.5
        questions = [Question.of(model, x, eps) for x in inputs]
        left = sum(q.standing(q.bounds("layer0"), NEAREST) for q in questions)
        share = left / sum(len(q.claims) for q in questions)
        low, high = (eps, high) if share > target else (low, eps)
    return float(f"{(low * high) ** 0.5:.2g}")


def pretrained(name: str, effort: Effort) -> list[Table]:
    """All heads and positions of layer 0 of a pretrained model, at ε that leave about the TARGETS standing."""
    model = load(name)
    loaded = peak_memory()
    texts = (IOI if name == "smollm2" else SENTENCES)[effort.samples]
    inputs = [model.prompt(text).x for text in texts]
    radii = [find_eps(model, inputs[:2], target) for target in TARGETS]
    asked = [[Question.of(model, x, eps) for x in inputs] for eps in radii]
    times = [[seconds(partial(q.bounds, "layer0")) for q in questions] for questions in asked]
    memory = peak_memory()
    rows = []
    for eps, questions, took in zip(radii, asked, times, strict=True):
        mean_and_most = f"{sum(took) / len(took):.2f} s, {max(took):.2f} s"
        rows.append([f"{eps:g}", *rates(questions, effort.budget("layer0"), ON_PROVED), mean_and_most])
    header = ["ε", "layer0 proves", "attack leaves", "interval proves", "layer0 per sample: mean, most"]
    title = (
        f"{name}, layer 0, top-1, all heads and positions, {len(texts)} inputs of {len(inputs[0])} tokens; "
        f"peak memory {memory}, {loaded} of it to load the model"
    )
    tables = [Table(title, header, rows)]
    return tables + (other_queries(model, inputs, radii[0], effort) if name == "minilm" else [])


def other_queries(model: Transformer, inputs: Sequence[Tensor], eps: float, effort: Effort) -> list[Table]:
    """Evidence mass and entropy, at the same ε."""
    proved = standing = trials = 0
    times, widths, spreads = [], [], []
    for x in inputs:
        mass = Question.of(model, x, eps, "mass>=0.2")
        start = time.perf_counter()
        parts = mass.bounds("layer0")
        times.append(time.perf_counter() - start)
        proved, trials = proved + mass.count(parts), trials + len(mass.claims)
        standing += mass.standing(parts, effort.budget("layer0"), ON_PROVED)
        entropy = Question.of(model, x, eps, "entropy")
        start = time.perf_counter()
        parts = entropy.bounds("layer0")
        times.append(time.perf_counter() - start)
        widths.append(torch.cat([part.upper - part.lower for part in parts]))
        spreads.append(attained_spread(entropy, parts, effort.budget("layer0").samples))
    width, spread = torch.cat(widths), torch.cat(spreads)
    return [
        Table(
            f"{model.name}, layer 0, other queries at ε = {eps:g}",
            ["query", "layer0", "attack", "slowest sample"],
            [
                [
                    "mass>=0.2",
                    str(Rate(proved, trials)),
                    str(Rate(standing, trials)),
                    f"{max(times[::2]):.2f} s",
                ],
                [
                    "entropy, mean width",
                    f"{float(width.mean()):.4f} nat (proved)",
                    f"{float(spread.mean()):.4f} nat (attained)",
                    f"{max(times[1::2]):.2f} s",
                ],
            ],
        )
    ]


def peers(effort: Effort) -> list[Table]:
    """Margins a_j − a_j* of layer 0 on the models that auto_LiRPA was measured on."""
    rows = []
    for name, sweep in (("peer-tiny", (0.01, 0.02, 0.05)), ("peer-d128", (0.002, 0.005, 0.01))):
        if not (PEERS / name).is_dir():
            print(f"{name} is not beside the checkout: left out")
            continue
        model, x = peer_model(PEERS / name)
        for eps in sweep:
            question = Question.of(model, x, eps)
            parts = question.bounds("layer0")
            took = min(seconds(partial(question.bounds, "layer0")) for _ in range(5))
            width = torch.cat([part.upper - part.lower for part in parts])
            left = question.standing(parts, effort.budget("layer0"))
            sampled, crown, alpha_crown = PEER_WIDTHS.get((name, eps), ("–", "–", "–"))
            rows.append(
                [
                    name,
                    f"{eps:g}",
                    f"{float(attained_spread_of_margins(question, parts).mean()):.4g}",
                    f"{float(width.mean()):.4g} [{question.count(parts)} of {len(question.claims)}], {took:.3f} s",
                    str(left),
                    sampled,
                    crown,
                    alpha_crown,
                ]
            )
    header = ["model", "ε", "attained width", "layer0 width [certified], time", "attack leaves"]
    return [Table("Peers, layer 0 margins", [*header, "sampled*", "CROWN*", "α-CROWN*"], rows)]


def minilm(effort: Effort) -> list[Table]:
    return pretrained("minilm", effort)


def mpnet(effort: Effort) -> list[Table]:
    return pretrained("mpnet", effort)


def smollm2(effort: Effort) -> list[Table]:
    return pretrained("smollm2", effort)


PARTS: dict[str, Callable[[Effort], list[Table]]] = {
    part.__name__: part for part in (tiny, peers, still_open, toy, minilm, smollm2, mpnet)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two samples and a small attack")
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this part; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads\n", flush=True)
    results: dict[str, Any] = {}
    for name in options.part or PARTS:
        start = time.perf_counter()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                tables = pool.submit(PARTS[name], Effort(options.quick)).result()
            except ProoflensError as error:
                print(f"{name} left out: {error}\n", flush=True)
                continue
        for table in tables:
            print(table)
        took = time.perf_counter() - start
        print(f"({name}: {took:.0f} s)\n", flush=True)
        results[name] = {"tables": [asdict(table) for table in tables], "seconds": took}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
