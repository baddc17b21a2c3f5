"""VNN-COMP 2023, benchmark ViT: which of its 242 hard images does an engine verify at 1/255?

python benchmarks/vnncomp_vit.py FOLDER [--images images.npz] [--engine taylor crown] [--device cuda] [--count 242]

FOLDER holds the network in prooflens' own layout (`benchmarks/vnncomp_network.py`); `images.npz` its pixels and labels.
The claim: no image within 1/255 in every pixel, clipped to [0, 1], has another class. One line of JSON per image and
engine, then the counts. With --attack proved claims are attacked with the paper's budget for outputs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import prooflens as pl
from measuring import told
from prooflens.engines import get_engine
from prooflens.engines.attack import BUDGETS, break_claims
from prooflens.engines.functionals import bound_functionals
from prooflens.engines.protocol import EngineOptions
from prooflens.problem import Problem
from prooflens.queries import Argmax
from prooflens.verdicts.decide import is_proved

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=Path, default=Path("images.npz"))
    parser.add_argument("--engine", nargs="+", default=["taylor"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=242)
    parser.add_argument("--eps", type=float, default=1 / 255)
    parser.add_argument("--attack", action="store_true", help="attack what is proved")
    parser.add_argument("--time", type=float, default=100.0, help="seconds an image and engine may take")
    parser.add_argument("--unless", type=Path, help="leave out images that these rows have as proved")
    options = parser.parse_args()
    done = {row["image"] for row in told(options.unless) if row.get("proved")}
    model = pl.load(options.folder).to(options.device)
    held = np.load(options.images)
    counts: Counter[str] = Counter()
    for number in range(options.first, min(options.first + options.count, len(held["pixels"]))):
        if int(held["cifar_index"][number]) in done:
            continue
        image = torch.tensor(held["pixels"][number]).double() / 255
        region = pl.Pixels(image, options.eps, MEAN, STD).of(model)
        problem = Problem(model, region.to(device=options.device))
        (claim,) = Argmax().bind(problem.setting((), output=True))
        for name in options.engine:
            start = time.perf_counter()
            limit = EngineOptions(deadline=time.monotonic() + options.time)
            bounds = bound_functionals(get_engine(name), problem, claim.functionals, options=limit)
            found = is_proved(claim, bounds)
            row = {
                "image": int(held["cifar_index"][number]),
                "engine": name,
                "proved": found,
                "lower": float(bounds.lower.min()),
                "clean": float(claim.clean.min()),
                "seconds": time.perf_counter() - start,
            }
            if found and options.attack:
                row["broken"] = break_claims(problem, [claim], BUDGETS["bert-output"])[0] is not None
            counts[name] += found
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"verified": dict(counts), "of": options.count}) + "\n")


if __name__ == "__main__":
    main()
