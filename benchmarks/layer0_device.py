"""Engine `layer0` on the cpu and, where there is one, on a cuda device: seconds for all top-1 claims, both sides.

python benchmarks/layer0_device.py --model FOLDER --eps 0.005 [--model FOLDER --eps 0.001]...

Models are loaded with `prooflens.load`; the region is a ball around example 0 (see slice_model.py). The bounds of both
devices must have a common point, and every corner must be inside both.
"""

import argparse
import statistics

import torch

from prooflens import Ball, load
from prooflens.engines import forms_of, get_engine
from prooflens.engines.protocol import Stopwatch
from prooflens.problem import Problem
from prooflens.queries import parse_query


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--eps", action="append", type=float, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    engine = get_engine("layer0")
    print(f"{'model':16} {'eps':>8} {'device':6} {'forms':>6} {'proved':>7} {'seconds':>8} {'peak GiB':>8}")
    for name, eps in zip(options.model, options.eps, strict=True):
        model = load(name)
        bounds = []
        for device in devices:
            here = model.to(device)
            problem = Problem(here, Ball(eps).around(here.example()))
            claims = parse_query("top1").bind(problem.setting([0]))
            forms = forms_of([f for claim in claims for f in claim.functionals])
            times = []
            for _ in range(options.repeats):
                watch = Stopwatch(here.device)
                found = engine.bound_forms(problem, forms)
                times.append(watch.seconds())
            proved, start = 0, 0
            for claim in claims:
                stop = start + len(claim.functionals)
                proved += bool((found.lower[start:stop] > 0).all())
                start = stop
            peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
            print(
                f"{model.name:16} {eps:8g} {device:6} {forms.size:6} {proved:3}/{len(claims):3} "
                f"{statistics.median(times):8.3f} {peak:8.2f}"
            )
            bounds.append((found.lower.cpu(), found.upper.cpu()))
        if len(bounds) == 2:
            (low, high), (low2, high2) = bounds
            assert bool((torch.maximum(low, low2) <= torch.minimum(high, high2)).all())
            gap = torch.maximum((low - low2).abs().max(), (high - high2).abs().max())
            print(f"{'':16} largest difference between devices: {float(gap):.2e}")


if __name__ == "__main__":
    main()
