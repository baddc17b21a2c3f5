"""The next token of a language model over its whole vocabulary: the largest ε that is proved, the smallest that breaks.

    python benchmarks/next_token.py [--model runs/smollm2] [--layers 30] [--device cuda] [--memory 100] [--json FILE]

One JSON line per prompt, short prompts first; prompts that FILE holds for this model and depth are left out, and after
`--minutes` no new one is begun. A proof is one walk of `taylor` (`bound_hidden`) and the vocabulary by its box and its
linear part; no attack takes part in that search. The other search, before it, breaks the answer with PGD on the nearest
tokens and pulls every witness in along its ray; what counts was run through the whole model in float64.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from measuring import Line, Meter, known, tell, told
from prooflens import Ball, Transformer, load
from prooflens.engines import FormBounds, Forms, Guarantee
from prooflens.engines.attack import AttackBudget, Witness, attack_claims
from prooflens.engines.bounds import Tail
from prooflens.engines.hidden import HiddenBounds
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.engines.rivals import is_tail
from prooflens.engines.taylor import Taylor
from prooflens.engines.vocabulary import bound_outputs
from prooflens.memory import keep_freed
from prooflens.problem import Problem
from prooflens.queries import Argmax, Claim
from prooflens.results.outputs import Names, winner_of
from prooflens.verdicts.decide import is_proved
from prooflens.verdicts.settings import parse_budget
from texts import IOI
from thresholds import FAR, largest

PROMPTS = (
    *IOI,
    "The capital of France is",
    "The opposite of hot is",
    "Once upon a time there was a",
    "The sun rises in the",
    "Two plus two equals",
    "She opened the door and",
    "The first president of the United States was",
    "Water boils at one hundred degrees",
    "He plays the guitar and the",
    "My favourite colour is",
    "The cat sat on the",
    "In the morning I drink a cup of",
    "The train was late, so we",
    "Romeo and",
    "The largest planet in the solar system is",
)

SHARES = 16
"""So many points of a ray are run through the model at a time."""

CLOSER = 1.05
"""By this factor the next attack is weaker than what the last one broke."""

FURTHER = 8.0
"""… and stronger where the last one came to nothing."""

MOST_ATTACKS = 8

NEAR = 1.6
"""Prompts differ by about this factor: the first step from the last one's answer."""

BELOW = 0.8
"""Proofs are not begun nearer than this to what is broken."""


@dataclass(frozen=True)
class OneWalk:
    """`taylor` by its enclosure of the vector that the head reads, and nothing else: what that leaves open stays so."""

    inner: Taylor
    name: str = "taylor"
    guarantee: Guarantee = Guarantee.PROVED

    def refuses(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> str | None:
        return self.inner.refuses(problem, forms, options)

    def bound_hidden(self, problem: Problem, options: EngineOptions = NO_OPTIONS) -> HiddenBounds:
        return self.inner.bound_hidden(problem, options)

    def bound_forms(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> FormBounds:
        nothing = problem.region.center.new_full((forms.size,), torch.inf)
        return FormBounds(-nothing, nothing)


@dataclass
class Proofs:
    """Proofs of one answer at any ε."""

    problem: Problem
    claim: Claim
    engine: OneWalk
    options: EngineOptions
    tails: dict[float, Tail | None] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    gib: float = 0.0

    def used(self, eps: float) -> float:
        """The largest share of a candidate's margin that its bound gives away; less than 1 is a proof for all tokens.

        The tail says yes or no: what its first stage decides is not made tighter.
        """
        problem = at(self.problem, eps)
        with Meter(problem.model.device) as meter:
            found = bound_outputs(self.engine, problem, self.claim.functionals, self.options)
        self.seconds.append(meter.seconds)
        self.gib = max(self.gib, meter.gib)
        self.tails[eps] = found.tail
        proved = is_proved(self.claim, found)
        named = [i for i, functional in enumerate(self.claim.functionals) if not is_tail(functional)]
        share = float((1.0 - found.lower / self.claim.clean.cpu())[named].max())
        print(f"  ε = {eps:.3g}: {share:.3g} used, {meter.seconds:.1f} s", file=sys.stderr, flush=True)
        return min(share, math.nextafter(1.0, 0.0)) if proved else max(share, 1.0)

    def tail(self, eps: float) -> Line | None:
        """How the tokens without a margin of their own were decided there."""
        found = self.tails[eps]
        return None if found is None else {"total": found.total, "refined": found.refined}


def at(problem: Problem, eps: float) -> Problem:
    return replace(problem, region=Ball(eps).around(problem.region.center))


@dataclass
class Breaks:
    """Attacks on one answer at any ε."""

    problem: Problem
    claim: Claim
    budget: AttackBudget
    attacks: int = 0

    def radius(self, start: float) -> float | None:
        """The smallest ε that was broken: from a small one up by what the margin loses there, then down."""
        clean = float(self.claim.clean.min())
        eps, broken, corner = start, None, None
        while self.attacks < MOST_ATTACKS:
            self.attacks += 1
            siege = attack_claims(
                at(self.problem, eps), [self.claim], self.budget, starts=[corner], fast=True
            )
            corner, witness = siege.alpha[:1], siege.witnesses[0]
            lost = clean - float(siege.values[0])
            print(f"  ε = {eps:.3g}: attack takes {lost / clean:.3g}", file=sys.stderr, flush=True)
            if witness is not None:
                broken = self.pulled_in(witness)
                eps = broken / CLOSER
            elif broken is not None:
                break
            else:
                eps *= min(1e3, max(2.0 * CLOSER - 1.0, CLOSER * clean / lost)) if lost > 0 else FURTHER
        return broken

    def pulled_in(self, witness: Witness) -> float:
        """How far the nearest point of the witness's ray that breaks the answer is from the centre."""
        center = self.problem.region.center
        move = witness.x - center
        low, high = 0.0, 1.0
        for _ in range(2):
            shares = torch.linspace(low, high, SHARES + 1, dtype=torch.float64).to(center)[1:]
            points = center + shares[:, None, None] * move
            with torch.no_grad():
                _, logits = self.problem.values(points, (), True)
            wrong = (~self.claim.holds_on({}, logits)).nonzero()[:, 0].tolist()
            high = float(shares[wrong[0]]) if wrong else high
            low = max(low, high - float(shares[-1]) / SHARES)
        # The distance rounds by half a unit in the last place.
        return math.nextafter(float((center + high * move - center).abs().max()), math.inf)


def measure(model: Transformer, text: str, start: float, step: float, options: argparse.Namespace) -> Line:
    """One prompt: both ends."""
    prompt = model.prompt(text)
    problem = Problem(model, Ball(start).around(prompt.x.to(model.device)))
    (claim,) = Argmax().bind(problem.setting((), output=True))
    line: Line = {
        "model": options.model,
        "layers": model.architecture.n_layers,
        "prompt": text,
        "tokens": len(prompt),
        "answer": Names(model)(winner_of(claim)),
        "clean margin": float(claim.clean.min()),
    }
    if claim.tie is not None:
        return line | {"tie": claim.tie}
    broken = None
    if not options.no_attack:
        breaks = Breaks(problem, claim, options.budget)
        with Meter(model.device) as meter:
            broken = breaks.radius(start)
        line |= {
            "broken ε": broken,
            "attacks": breaks.attacks,
            "seconds of attacks": round(meter.seconds, 2),
        }
    limits = EngineOptions(options.memory * 2**30)
    proofs = Proofs(problem, claim, OneWalk(Taylor(thorough=False)), limits)
    first = start if broken is None else min(start, BELOW * broken)
    bracket = largest(proofs.used, first, options.tolerance, options.proofs, step)
    proved = bracket.good
    if broken is not None and proved is not None and broken <= proved:
        raise AssertionError(f"{text!r}: the answer is proved at {proved!r} and broken at {broken!r}")
    return line | {
        "proved ε": proved,
        "not proved ε": bracket.bad,
        "proved / broken": None if proved is None or broken is None else proved / broken,
        "tail": None if proved is None else proofs.tail(proved),
        "proofs": len(bracket.looks),
        "seconds per proof": round(sorted(proofs.seconds)[len(proofs.seconds) // 2], 2),
        "peak GiB": round(proofs.gib, 2),
    }


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """All prompts that are not done yet; each search starts at the last one's answer, below what is broken."""
    end = time.perf_counter() + 60.0 * options.minutes
    model = load(options.model).to(options.device)
    if options.layers is not None:
        model = model.cut(options.layers)
    done = told(options.json)
    start, step = options.start, FAR
    about = {"model": options.model, "layers": model.architecture.n_layers}
    for text in sorted(options.prompt or PROMPTS, key=lambda text: len(model.prompt(text)))[
        : options.samples
    ]:
        if held := [line for line in done if known([line], **about, prompt=text)]:
            start, step = after(held[0], start, step)
            continue
        if time.perf_counter() > end:
            print("time is up; the same command goes on here", file=sys.stderr)
            return
        print(text, file=sys.stderr, flush=True)
        line = measure(model, text, start, step, options)
        start, step = after(line, start, step)
        yield line


def after(line: Line, start: float, step: float) -> tuple[float, float]:
    """Where the next search starts, and how boldly."""
    proved = line.get("proved ε")
    return (proved, NEAR) if isinstance(proved, float) else (start, step)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", type=int, help="cut after so many layers")
    parser.add_argument("--prompt", action="append", help="in place of the benchmark's 20; may be repeated")
    parser.add_argument("--samples", type=int, help="only so many prompts")
    parser.add_argument(
        "--start", type=float, default=2e-5, help="where the search of the first prompt starts"
    )
    parser.add_argument("--tolerance", type=float, default=1.15, help="the step within which an end is known")
    parser.add_argument("--proofs", type=int, default=5, help="most proofs per prompt")
    parser.add_argument("--budget", type=parse_budget, default=AttackBudget(0, 4, 20), help="of one attack")
    parser.add_argument("--no-attack", action="store_true", help="only what is proved")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=8, help="GiB for the engine")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no prompt after so many")
    parser.add_argument("--json", type=Path, help="append the lines to this file, and go on where it ends")
    options = parser.parse_args()
    keep_freed()
    for line in lines(options):
        tell(line, options.json)


if __name__ == "__main__":
    main()
