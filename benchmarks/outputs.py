"""The tables of docs/outputs.md: what is proved about what models say, beside attack, estimates and the paper.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/outputs.py [--quick] [--part bert …] [--engine crown …] [--json PATH]

Parts: bert (bert-tiny-sst2, the first test sentences cut to eight tokens), sweep (K_J of the estimated method there),
toy, peers (needs ../shared/models/peer-tiny beside the checkout), minilm (the sentence embedding), smollm2 (next token
over the full vocabulary, after L layers; how far the whole model is proved is searched by next_token.py). `--engine`
names the engines of every part; unknown ones are left out. `--eps`, `--samples` and `--layers` take less of a part.
Seconds are of the wall clock; engines run on `--threads`.
"""

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from next_token import PROMPTS
from peer_models import PEERS, peer_model
from prooflens import Ball, Transformer, load, output, output_radius
from prooflens.engines import Engine, Guarantee, engine_names, get_engine
from prooflens.engines.attack import BUDGETS, Attack, AttackBudget, attack_claims
from prooflens.engines.functionals import bound_functionals
from prooflens.engines.hidden import output_forms
from prooflens.engines.jacobian import Jacobian
from prooflens.evaluation.studies.outputs import Remembering
from prooflens.evaluation.studies.prompts import sst2_sentences
from prooflens.memory import keep_freed
from prooflens.models.prompt import Prompt
from prooflens.problem import Problem
from prooflens.queries import Argmax, Claim
from prooflens.statistics import Rate
from prooflens.verdicts.decide import decide
from tables import Table

TEN_BY_FIFTY = AttackBudget(0, 10, 50)
QUICK_ATTACK = AttackBudget(32, 2, 16)
COLUMNS = (32, 64, 128, 256, 512, 1024)
PAPER_SWEEP = (96.7, 96.7, 90.0, 90.0, 90.0, 90.0)
PAPER_BERT = {5e-4: (98.0, 99.0), 1e-3: (97.0, 98.0), 2e-3: (95.0, 98.0)}
PAPER_TOY = {0.01: (0.49, 0.88), 0.02: (2.9, 7.6), 0.05: (6.1, 127.5), 0.1: (8.9, 2767.0)}
PEER_LOGITS = {
    0.01: (".0565", ".109", ".0795"),
    0.02: (".119", ".552", ".267"),
    0.05: (".419", "1.8e4", "crash"),
}
"""auto_LiRPA on peer-tiny's logits (../shared/design/peers.md): sampled, CROWN, α-CROWN with 5 iterations."""


@dataclass(frozen=True)
class Effort:
    """How much is done, by whom."""

    quick: bool
    engines: tuple[str, ...]
    eps: tuple[float, ...] = ()
    samples: int | None = None
    layers: tuple[int, ...] = ()
    device: str = "cpu"

    def radii(self, usual: Iterable[float]) -> tuple[float, ...]:
        """The ε that were asked for, or the usual ones."""
        return self.eps or tuple(usual)

    def model(self, name: str) -> str:
        """A model by its short name, or its folder in runs/ if it was brought there."""
        folder = Path("runs") / name
        return str(folder) if folder.is_dir() else name

    def count(self, usual: int) -> int:
        """How many samples."""
        return self.samples or (min(usual, 3) if self.quick else usual)


@dataclass
class Line:
    """What an engine did on some problems."""

    proved: int = 0
    false: int = 0
    margins: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def asked(model: Transformer, prompt: Prompt, eps: float) -> tuple[Problem, Claim]:
    """The claim that the answer stays."""
    problem = Problem(model, Ball(eps).around(prompt))
    (claim,) = Argmax().bind(problem.setting((), output=True))
    return problem, claim


def run(engine: Engine, cases: Sequence[tuple[Problem, Claim]], standing: Sequence[bool]) -> Line:
    """Bound every claim; what is certified gets the strongest attack, and a broken proof is an error."""
    line = Line()
    for (problem, claim), stands in zip(cases, standing, strict=True):
        start = time.perf_counter()
        found = bound_functionals(engine, problem, claim.functionals)
        line.seconds.append(time.perf_counter() - start)
        line.margins.append(float(found.lower.min()))
        if decide(claim, found) is None:
            continue
        line.proved += 1
        broken = not stands or attack_claims(problem, [claim], TEN_BY_FIFTY).witnesses[0] is not None
        line.false += broken
        if broken and engine.guarantee is Guarantee.PROVED:
            raise AssertionError(f"{engine.name}: a claim was proved and is broken")
    return line


def survivors(cases: Sequence[tuple[Problem, Claim]], budget: AttackBudget) -> list[bool]:
    """Which claims MC+PGD leaves standing."""
    return [attack_claims(problem, [claim], budget).witnesses[0] is None for problem, claim in cases]


def mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def bert(effort: Effort) -> Iterator[Table]:
    """Tab. output_verification."""
    model = load("bert-tiny-sst2")
    prompts = sst2_sentences(model, effort.count(100))
    rows = []
    for eps in effort.radii(PAPER_BERT):
        cases = [asked(model, prompt, eps) for prompt in prompts]
        standing = survivors(cases, BUDGETS["bert-output"])
        paper = PAPER_BERT.get(eps, ("–", "–"))
        rows.append(
            [
                f"{eps:g}",
                "MC+PGD (not a proof)",
                str(Rate(sum(standing), len(cases))),
                "",
                "",
                "",
                f"{paper[1]}",
            ]
        )
        for name in effort.engines:
            engine = get_engine(name)
            line = run(engine, cases, standing)
            label = name if engine.guarantee is Guarantee.PROVED else f"{name} (estimated)"
            rows.append(
                [
                    f"{eps:g}",
                    label,
                    str(Rate(line.proved, len(cases))),
                    f"{line.false}",
                    f"{mean(line.margins):.3g}",
                    f"{mean(line.seconds):.2f}",
                    f"{paper[0]} (sampled)",
                ]
            )
    head = [
        "ε",
        "engine",
        "answer stays, %",
        "broken by 10 × 50 PGD",
        "mean margin",
        "s per sample",
        "paper, %",
    ]
    yield Table(f"bert-tiny-sst2, {len(prompts)} test sentences, S = 8", head, rows)


def sweep(effort: Effort) -> Iterator[Table]:
    """Tab. k_j_sweep: the estimated method with K_J columns, and how often it is wrong."""
    model = load("bert-tiny-sst2")
    prompts = sst2_sentences(model, effort.count(100))
    for eps in effort.radii((2e-3, 0.02)):
        cases = [asked(model, prompt, eps) for prompt in prompts]
        standing = survivors(cases, BUDGETS["bert-output"])
        rows = [["MC+PGD", str(Rate(sum(standing), len(cases))), "", "", ""]]
        known: dict[int, Tensor] = {}
        for columns, paper in zip(COLUMNS, PAPER_SWEEP, strict=True):
            engine = Jacobian("jacobian", Guarantee.ESTIMATED, Remembering(columns, known=known))
            line = run(engine, cases, standing)
            rows.append(
                [
                    f"{columns}",
                    str(Rate(line.proved, len(cases))),
                    f"{line.false} of {line.proved}",
                    f"{mean(line.margins):.3g}",
                    f"{paper}",
                ]
            )
        head = [
            "K_J of 1,024",
            "certified (estimated), %",
            "false certificates",
            "mean margin",
            "paper, %",
        ]
        yield Table(
            f"bert-tiny-sst2, ε = {eps:g}, {len(prompts)} sentences: the estimated method", head, rows
        )


def widths(model: Transformer, inputs: Sequence[Prompt], engine: Engine, eps: float) -> tuple[float, float]:
    """Mean width of all outputs, and seconds per input."""
    found, start = [], time.perf_counter()
    for prompt in inputs:
        problem = Problem(model, Ball(eps).around(prompt))
        size = problem.read_output(model(prompt.x)).shape[-1]
        bounds = engine.bound_forms(problem, output_forms(torch.eye(size, dtype=torch.float64)))
        found.append(float((bounds.upper - bounds.lower).mean()))
    return mean(found), (time.perf_counter() - start) / len(inputs)


def toy(effort: Effort) -> Iterator[Table]:
    """Tab. main_app: mean width of the logits, and of the last token's vector after both layers."""
    model = load("toy")
    whole = replace(model.architecture, pool="none", d_out=None)
    kept = {name: tensor for name, tensor in model.weights.items() if not name.startswith("head.")}
    vector = replace(model, architecture=whole, weights=kept)
    inputs = [model.example(i) for i in range(effort.count(5))]
    radii = effort.radii(PAPER_TOY)
    for title, shown in (("logits", model), ("the last token's vector", vector)):
        rows = []
        for name in (*effort.engines, "attack"):
            engine = get_engine(name) if name != "attack" else Attack(budget=AttackBudget(2000, 10, 50))
            cells = [f"{widths(shown, inputs, engine, eps)[0]:.3g}" for eps in radii]
            rows.append([name if name != "attack" else "attained by attack", *cells])
        for label, place in (("paper: CPZ", 0), ("paper: PZ", 1)):
            rows.append(
                [label, *(f"{PAPER_TOY[eps][place]:g}" if eps in PAPER_TOY else "–" for eps in radii)]
            )
        head = ["engine", *(f"ε = {eps:g}" for eps in radii)]
        yield Table(f"toy, {len(inputs)} examples: mean width of {title} after 2 layers", head, rows)


def peers(effort: Effort) -> Iterator[Table]:
    """Logits of peer-tiny."""
    if not (PEERS / "peer-tiny").is_dir():
        print("peer-tiny is not beside the checkout: left out")
        return
    model, x = peer_model(PEERS / "peer-tiny")
    prompt = Prompt(x, tuple(f"x{i}" for i in range(len(x))))
    rows = []
    for eps in effort.radii(PEER_LOGITS):
        attained, _ = widths(model, [prompt], Attack(budget=AttackBudget(2000, 10, 50)), eps)
        cells = []
        for name in effort.engines:
            width, seconds = widths(model, [prompt], get_engine(name), eps)
            cells.append(f"{width:.4g}, {seconds:.1f} s")
        rows.append([f"{eps:g}", f"{attained:.4g}", *cells, *PEER_LOGITS.get(eps, ("–",) * 3)])
    head = ["ε", "attained by attack", *effort.engines, "sampled*", "CROWN*", "α-CROWN*"]
    yield Table("peer-tiny: mean width of the logits (*: auto_LiRPA)", head, rows)


def minilm(effort: Effort) -> Iterator[Table]:
    """Width of the sentence embedding's coordinates against what an attack attains, as ε shrinks."""
    whole = load(effort.model("minilm")).to(effort.device)
    rows = []
    for layers in effort.layers or (1, 2, 3, 6):
        model = whole.cut(layers)
        prompt = model.prompt("the film was long but moving")
        for eps in effort.radii((1e-2, 1e-3, 1e-4, 1e-5)):
            problem = Problem(model, Ball(eps).around(prompt))
            size = model.architecture.d_model
            chosen = torch.eye(size, dtype=torch.float64)[:: size // 8]
            tried = Attack(budget=AttackBudget(64, 2, 20), fast=True).bound_forms(
                problem, output_forms(chosen)
            )
            attained = tried.upper - tried.lower
            for name in effort.engines:
                start = time.perf_counter()
                found = get_engine(name).bound_forms(problem, output_forms(chosen))
                took = time.perf_counter() - start
                ratio = ((found.upper - found.lower) / attained).median()
                width = float((found.upper - found.lower).mean())
                rows.append(
                    [
                        f"{layers}",
                        f"{eps:g}",
                        name,
                        f"{width:.3g}",
                        f"{float(attained.mean()):.3g}",
                        f"{float(ratio):.3g}",
                        f"{took:.1f}",
                    ]
                )
    head = ["layers", "ε", "engine", "proved width", "attained", "median ratio", "s"]
    yield Table("minilm, sentence embedding: mean width of 8 of 384 coordinates", head, rows)


def smollm2(effort: Effort) -> Iterator[Table]:
    """Next token over the full vocabulary after L layers: proved and broken radii, or verdicts at `--eps`."""
    whole = load(effort.model("smollm2")).to(effort.device)
    radii, verdicts = [], []
    for layers in effort.layers or (1, 2, 4, 8, 30):
        model = whole.cut(layers)
        for text, name in itertools.product(PROMPTS[-effort.count(20) :], effort.engines):
            prompt = model.prompt(text)
            start = time.perf_counter()
            for eps in effort.eps:
                found = output(model, prompt, Ball(eps), engine=name, budget=QUICK_ATTACK)
                near, tail = found[1], found.tail
                verdicts.append(
                    [
                        f"{layers}",
                        text,
                        repr(found.whole.text),
                        name,
                        f"{eps:g}",
                        found.whole.verdict.value,
                        f"{near.clean:.4g}",
                        "–" if near.lower is None else f"{near.lower:.4g}",
                        "–" if tail is None else f"{tail.refined} of {tail.total}",
                        f"{time.perf_counter() - start:.0f}",
                        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f}",
                    ]
                )
                print(*verdicts[-1], sep=" | ", file=sys.stderr, flush=True)
                start = time.perf_counter()
            if effort.eps:
                continue
            (row,) = output_radius(
                model, prompt, engine=name, tolerance=0.5, between=(1e-8, 1.0), budget=QUICK_ATTACK
            ).rows
            took = time.perf_counter() - start
            broken = "–" if row["attack"] is None else f"{row['attack']:.2g}"
            radii.append(
                [
                    f"{layers}",
                    text,
                    f"{row['clean']:.3g}",
                    name,
                    f"{row['certified']:.2g}",
                    broken,
                    f"{took:.0f}",
                ]
            )
    if radii:
        head = ["layers", "prompt", "clean margin", "engine", "proved ε", "broken ε", "s"]
        yield Table("smollm2, next token over 49,152 tokens", head, radii)
    if verdicts:
        head = ["layers", "prompt", "answer", "engine", "ε", "verdict", "clean margin", "proved margin"]
        head += ["tail tokens refined", "s", "GB"]
        yield Table("smollm2, next token over 49,152 tokens", head, verdicts)


PARTS: dict[str, Callable[[Effort], Iterator[Table]]] = {
    part.__name__: part for part in (bert, sweep, toy, peers, minilm, smollm2)
}
USUAL = ("taylor", "cpz", "crown", "interval")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three samples")
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this part; may be repeated"
    )
    parser.add_argument("--engine", action="append", help="only this engine; may be repeated")
    parser.add_argument("--eps", action="append", type=float, help="only this radius; may be repeated")
    parser.add_argument("--samples", type=int, help="so many samples")
    parser.add_argument(
        "--layers", action="append", type=int, help="cut after so many layers; may be repeated"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the engines")
    parser.add_argument("--device", default="cpu", help="where minilm and smollm2 run")
    parser.add_argument("--json", type=Path, help="write the tables there as well")
    given = parser.parse_args()
    keep_freed()
    engines = tuple(name for name in given.engine or USUAL if name in engine_names())
    effort = Effort(
        given.quick, engines, tuple(given.eps or ()), given.samples, tuple(given.layers or ()), given.device
    )
    torch.set_num_threads(given.threads)
    tables = []
    for name in given.part or PARTS:
        for table in PARTS[name](effort):
            print(table, flush=True)
            tables.append(table)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(table) for table in tables], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
