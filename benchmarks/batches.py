"""Many prompts in one call against one call each: prompts per second of processor, and whether the answers agree.

python benchmarks/batches.py [--models toy minilm smollm2] [--prompts 8] [--out benchmarks/measured/batches.jsonl]

Every head and position of layer 0 is asked for its top key on a ball. Both ways run in one process, one after the
other, on a model that is loaded already. A call for each prompt makes the float32 copy of the weights that the attack
searches with, and the spectral norms of the first layer, again and again.
"""

import argparse
import time
from pathlib import Path

import torch

import prooflens as pl
from measuring import Line, tell

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


def measure(name: str, count: int) -> Line:
    """Ask both ways, and compare."""
    model = pl.load(name)
    prompts = [model.example(i) for i in range(count)] if model.tokenizer is None else texts(count)
    region = pl.Ball(EPS[name])
    pl.certify(model, prompts[0], region, layer=0)  # what the first call of a process pays is not counted
    start = time.process_time()
    together = pl.certify(model, prompts, region, layer=0)
    shared = time.process_time() - start
    start = time.process_time()
    apart = [pl.certify(model, prompt, region, layer=0) for prompt in prompts]
    alone = time.process_time() - start
    verdicts = [verdict for one in apart for verdict in one.table.column("verdict").to_pylist()]
    if verdicts != together.table.column("verdict").to_pylist():
        raise AssertionError(f"{name}: the answers differ")
    return {
        "model": name,
        "prompts": count,
        "rows": len(together),
        "one_call": round(count / shared, 2),
        "one_each": round(count / alone, 2),
        "ratio": round(alone / shared, 2),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(EPS), default=list(EPS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/batches.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        tell(measure(name, options.prompts), options.out)


if __name__ == "__main__":
    main()
