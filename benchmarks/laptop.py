"""What a laptop is asked for: seconds and peak GiB of five questions, each in a process of its own.

python benchmarks/laptop.py [--only NAME …] [--label TEXT] [--memory 20GB] [--out benchmarks/measured/laptop.jsonl]

A line says what was asked, how many claims were proved, wall seconds and processor seconds of the proof (loading the
model is not counted; `load` is), and the largest size of the process. Run it before and after a change on one machine
and compare: `before / after` is printed for every question that the file has under another label.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from measuring import Line, tell, told
from prooflens import Ball, load
from prooflens.engines import get_engine
from prooflens.engines.functionals import bound_claims
from prooflens.engines.protocol import EngineOptions, Workspace
from prooflens.memory import keep_freed, parse_memory
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.verdicts.decide import is_proved

MARY = "When Mary and John went to the store, John gave a drink to"
CAT = "the cat sat on the mat"
QUESTIONS: dict[str, dict[str, object]] = {
    "smollm2-layer1": {"model": "smollm2", "text": MARY, "layers": [1], "last": True, "eps": 1e-4},
    "smollm2-layer2": {"model": "smollm2", "text": MARY, "layers": [2], "last": True, "eps": 2e-5},
    "minilm-layer1": {"model": "minilm", "text": CAT, "layers": [1], "eps": 5e-3},
    "minilm-six-layers": {"model": "minilm", "text": CAT, "layers": list(range(6)), "eps": 5e-4},
    "minilm-mass": {
        "model": "minilm",
        "text": CAT,
        "layers": [0],
        "eps": 2e-3,
        "query": "mass>=0.2",
        "engine": "layer0",
    },
    "minilm-entropy": {
        "model": "minilm",
        "text": CAT,
        "layers": [0],
        "eps": 2e-3,
        "query": "entropy",
        "engine": "layer0",
    },
}
"""Questions by name; the engine is `taylor` and the query top1 where nothing else is said."""


def ask(name: str, memory: int | None) -> Line:
    """Prove what can be proved of one question, and measure it."""
    question = QUESTIONS[name]
    keep_freed()
    start = time.perf_counter()
    model = load(str(question["model"]))
    loaded = time.perf_counter() - start
    problem = Problem(model, Ball(float(str(question["eps"]))).around(model.prompt(str(question["text"]))))
    engine, query = str(question.get("engine", "taylor")), str(question.get("query", "top1"))
    proved = asked = 0
    options = EngineOptions(memory=memory, workspace=Workspace())
    start, busy = time.perf_counter(), time.process_time()
    for layer in question["layers"]:  # type: ignore[attr-defined]
        claims = parse_query(query).bind(problem.setting([layer]))
        if question.get("last"):
            claims = [claim for claim in claims if claim.rows[0].position == problem.n_tokens - 1]
        claims = [claim for claim in claims if claim.functionals]
        with torch.no_grad():
            parts, _ = bound_claims(
                get_engine("layer0" if layer == 0 else engine),
                problem,
                claims,
                options=options,
            )
        asked += len(claims)
        proved += sum(is_proved(claim, part) for claim, part in zip(claims, parts, strict=True))
    return {
        "question": name,
        "proved": proved,
        "asked": asked,
        "seconds": round(time.perf_counter() - start, 2),
        "processor": round(time.process_time() - busy, 2),
        "load": round(loaded, 2),
        "gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--label", default="now", help="what is measured, as in `before` and `after`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/laptop.jsonl"))
    parser.add_argument("--memory", type=parse_memory, help="what engines may use, as in 8GB")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        print(json.dumps(ask(options.only[0], options.memory)))
        return
    for name in options.only:
        command = [sys.executable, __file__, "--inner", "--only", name]
        command += ["--memory", str(options.memory)] if options.memory else []
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
        line: Line = {"label": options.label, **json.loads(found.stdout.splitlines()[-1])}
        for other in told(options.out):
            if other["question"] == name and other["label"] != options.label:
                ratios = {
                    key: round(float(str(other[key])) / float(str(line[key])), 2)
                    for key in ("processor", "gib")
                }
                print(f"{name}: {other['label']} / {options.label} = {ratios}", file=sys.stderr)
        tell(line, options.out)


if __name__ == "__main__":
    main()
