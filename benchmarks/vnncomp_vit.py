"""VNN-COMP 2023, benchmark ViT: which of its 242 hard images does an engine verify at 1/255?

python benchmarks/vnncomp_vit.py FOLDER [--images images.npz] [--engine taylor crown] [--device cuda] [--count 242]
python benchmarks/vnncomp_vit.py FOLDER --sample 12 --engine attack auto beta-crown … --out rows.jsonl

FOLDER holds the network in prooflens' own layout (`benchmarks/vnncomp_network.py`); `images.npz` its pixels and labels.
The claim: no image within 1/255 in every pixel, clipped to [0, 1], has another class. One line of JSON per image and
engine, then the counts. Beside the engines' names, `auto` is the portfolio as `pl.output` asks it (its attacks count in
its time), `attack` tries to break the claim with the paper's budget for outputs, and `autolirpa-alpha` is auto_LiRPA's
α-CROWN. With --attack proved claims are attacked as well. --sample draws images by a seed, and --out takes up where a
run was stopped. `seconds` are of the clock, `processor` those of the process.
auto_LiRPA proves nothing for us (docs/engines.md): `positive` says that its lower bounds are above 0, and is counted.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import prooflens as pl
from measuring import Line, known, tell, told
from prooflens.engines import get_engine
from prooflens.engines.attack import BUDGETS, attack_claims, break_claims
from prooflens.engines.autolirpa import ALPHA, AutoLirpa
from prooflens.engines.functionals import bound_functionals
from prooflens.engines.protocol import EngineOptions
from prooflens.problem import Problem
from prooflens.queries import Argmax, Claim
from prooflens.results import Verdict
from prooflens.verdicts.decide import is_proved

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
BUDGET = BUDGETS["bert-output"]


def chosen(size: int, options: argparse.Namespace) -> Sequence[int]:
    """Return the numbers of the images that are asked about; a smaller sample is the beginning of a larger one."""
    if options.sample:
        drawn = list(range(size))
        random.Random(options.seed).shuffle(drawn)
        return drawn[: options.sample]
    return range(options.first, min(options.first + options.count, size))


def ask(name: str, problem: Problem, claim: Claim, place: pl.Pixels, seconds: float) -> Line:
    """Ask one engine about one image: whether it proves or breaks the claim, and its lower bound."""
    limit = EngineOptions(deadline=time.monotonic() + seconds)
    if name == "auto":
        found = pl.output(problem.model, problem.region.center, place, time=seconds).outcomes[0]
        row = {"proved": found.verdict is Verdict.HOLDS, "broken": found.verdict is Verdict.FAILS}
        return row | {"by": found.engine, "lower": float(found.bounds.lower.min())}
    if name == "attack":
        result = attack_claims(problem, [claim], BUDGET, options=limit)
        return {"broken": result.witnesses[0] is not None, "attained": float(result.values[0])}
    engine = AutoLirpa(method=ALPHA) if name == "autolirpa-alpha" else get_engine(name)
    bounds = bound_functionals(engine, problem, claim.functionals, options=limit)
    lower = float(bounds.lower.min())
    return {"proved": is_proved(claim, bounds), "positive": lower > 0.0, "lower": lower}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=Path, default=Path("images.npz"))
    parser.add_argument("--engine", nargs="+", default=["taylor"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=242)
    parser.add_argument("--sample", type=int, help="draw so many images")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--eps", type=float, default=1 / 255)
    parser.add_argument("--attack", action="store_true", help="attack what is proved")
    parser.add_argument("--time", type=float, default=100.0, help="seconds an image and engine may take")
    parser.add_argument("--unless", type=Path, help="leave out images that these rows have as proved")
    parser.add_argument("--out", type=Path, help="add rows to this file; what it has is not asked again")
    options = parser.parse_args()
    done = {row["image"] for row in told(options.unless) if row.get("proved")}
    before = told(options.out)
    model = pl.load(options.folder).to(options.device)
    held = np.load(options.images)
    verified: Counter[str] = Counter()
    falsified: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for number in chosen(len(held["pixels"]), options):
        image = int(held["cifar_index"][number])
        if image in done:
            continue
        place = pl.Pixels(torch.tensor(held["pixels"][number]).double() / 255, options.eps, MEAN, STD)
        problem = Problem(model, place.of(model).to(device=options.device))
        (claim,) = Argmax().bind(problem.setting((), output=True))
        for name in options.engine:
            if known(before, image=image, engine=name):
                continue
            start, busy = time.perf_counter(), time.process_time()
            row: Line = {"image": image, "engine": name, **ask(name, problem, claim, place, options.time)}
            row["clean"] = float(claim.clean.min())
            row["seconds"], row["processor"] = time.perf_counter() - start, time.process_time() - busy
            # What came after the limit does not count.
            row["in_time"] = row["seconds"] <= 1.02 * options.time
            if row.get("proved") and options.attack:
                row["broken"] = break_claims(problem, [claim], BUDGET)[0] is not None
            # Of an engine that only estimates, its own word is counted.
            verified[name] += bool(row.get("positive", row.get("proved"))) and bool(row["in_time"])
            falsified[name] += bool(row.get("broken"))
            asked[name] += 1
            tell(row, options.out)
    tell({"verified": dict(verified), "falsified": dict(falsified), "of": dict(asked)}, None)


if __name__ == "__main__":
    main()
