"""Many prompts in one call against one call each: prompts per second of processor, and whether the answers agree.

python benchmarks/batches.py [--models toy minilm smollm2] [--prompts 8] [--engines auto attack] [--out FILE]
python benchmarks/batches.py --passes

Every head and position of layer 0 is asked for its top key on a ball. Both ways run in one process, in turn, on a model
that is loaded already; of several runs the least counts. In one call the attack makes its float32 copy of the weights
once, so are the spectral norms of the first layer, and the prompts, which have one length, are searched together.
`attack_seconds` is what of one call, and of a call each, went into attacks.

--passes measures what points beside each other gain: passes through the first layer and back per second of processor,
by how many points go together, beside how many points the attack on one prompt already has together.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

import prooflens as pl
from measuring import Line, tell
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.verdicts.stages import default_budget

EPS = {"toy": 0.02, "minilm": 2e-3, "smollm2": 3e-4}
WORDS = (
    ("the", "a", "my", "his"),
    ("cat", "dog", "son", "man"),
    ("sat", "lay", "ran", "fell"),
    ("mat", "rug"),
)


def texts(count: int) -> list[str]:
    """Sentences of one length in words."""
    every = [
        f"{a} {b} {c} on {a} {d}" for d in WORDS[3] for c in WORDS[2] for b in WORDS[1] for a in WORDS[0]
    ]
    return every[:count]


RUNS = 3
"""The least of so many runs counts: what else the machine does only adds."""


def measure(name: str, count: int, engine: str) -> Line:
    """Ask both ways, and compare."""
    model = pl.load(name)
    prompts = [model.example(i) for i in range(count)] if model.tokenizer is None else texts(count)
    region = pl.Ball(EPS[name])
    pl.certify(
        model, prompts[0], region, layer=0, engine=engine
    )  # what the first call of a process pays is not counted
    shared, alone, attacks = [], [], []
    for _ in range(RUNS):
        start = time.process_time()
        together = pl.certify(model, prompts, region, layer=0, engine=engine)
        shared.append(time.process_time() - start)
        start = time.process_time()
        apart = [pl.certify(model, prompt, region, layer=0, engine=engine) for prompt in prompts]
        alone.append(time.process_time() - start)
        attacks.append([attack_seconds([together]), attack_seconds(apart)])
    verdicts = [verdict for one in apart for verdict in one.table.column("verdict").to_pylist()]
    if verdicts != together.table.column("verdict").to_pylist():
        raise AssertionError(f"{name}: the answers differ")
    return {
        "model": name,
        "prompts": count,
        "rows": len(together),
        "engine": engine,
        "one_call": round(count / min(shared), 2),
        "one_each": round(count / min(alone), 2),
        "ratio": round(min(alone) / min(shared), 2),
        "attack_seconds": [round(min(way), 3) for way in zip(*attacks, strict=True)],
        "threads": torch.get_num_threads(),
    }


def attack_seconds(parts: list[pl.Results]) -> float:
    """What attacks took, by the record that claims keep of who was asked."""
    notes = {
        note.call: note.seconds
        for part in parts
        for outcome in part.outcomes
        for note in outcome.asked
        if note.engine == "attack" and note.seconds is not None
    }
    return sum(notes.values())


TOGETHER = (1, 8, 64, 256, 1024)
"""How many points go through the model at a time."""


def passes(name: str) -> Line:
    """Rates of passes there and back in float32, as the attack makes them, and how many points it has at a time."""
    model = pl.load(name)
    prompt = model.example(0) if model.tokenizer is None else model.prompt(texts(1)[0])
    problem = Problem(model, pl.Ball(EPS[name]).around(prompt))
    claims = parse_query("top1").bind(problem.setting([0]))
    budget = default_budget(problem)
    small = replace(
        problem, model=model.to(dtype=torch.float32), region=problem.region.to(dtype=torch.float32)
    )
    rates = {}
    for count in TOGETHER:
        x = small.region.center.expand(count, *small.region.center.shape).clone().requires_grad_()
        rounds = max(3, 1024 // count)
        for number in range(rounds + 1):
            if number == 1:  # the first is not counted
                start = time.process_time()
            scores, _ = small.values(x, [0], False)
            scores[0].sum().backward()
        rates[count] = round(rounds * count / (time.process_time() - start))
    attack = sum(bool(claim.functionals) for claim in claims) * budget.restarts
    return {"model": name, "passes_per_second": rates, "attack_together": attack}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(EPS), default=list(EPS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--engines", nargs="+", choices=["auto", "attack"], default=["auto", "attack"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/batches.jsonl"))
    parser.add_argument("--passes", action="store_true", help="rates by how many points go together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        if options.passes:
            tell(passes(name), options.out)
            continue
        for engine in options.engines:
            tell(measure(name, options.prompts, engine), options.out)


if __name__ == "__main__":
    main()
