"""What binds a proof on a GPU: the share of its seconds in which a kernel runs, and the longest kernels.

python benchmarks/kernels.py MODEL --layer 1 --eps 0.0005 [--text "…"] [--last] [--walk] [--device cuda] [--json FILE]

One call of `taylor` (or with --walk one walk by ellipsoids to that layer, what `depth.py --probe` does) is made once to
warm up, once for wall seconds and once under torch.profiler. Where the kernels' seconds are near the wall seconds the
call is bound by kernels, where they are a small part of it by their launches. On a cpu the same is said of torch's
operations.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from depth import asked, region_of
from measuring import tell
from prooflens import load
from prooflens.engines.functionals import bound_claims
from prooflens.engines.protocol import EngineOptions
from prooflens.engines.taylor import Taylor, factors
from prooflens.engines.taylor.segments import segments_of
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models import scores_name
from prooflens.problem import Problem


def work(options: argparse.Namespace) -> Callable[[], object]:
    """The call that is measured."""
    model = load(options.model).to(options.device)
    problem = Problem(model, region_of(model, options.text, options.eps, options.device))
    memory = options.memory * 2**30
    if options.walk:
        program = problem.model.program(problem.n_tokens, [scores_name(options.layer)], None)

        def walk() -> None:
            with torch.no_grad():
                found = TaylorWalk(memory, kept=frozenset(), visit=lambda chain: None)
                found.forward(segments_of(program), problem.region.center, factors(problem.region))

        return walk
    claims = asked(problem, options, options.layer, "top1")
    return lambda: bound_claims(Taylor(), problem, claims, options=EngineOptions(memory))


def seconds(call: Callable[[], object], device: str) -> float:
    """Wall seconds of one call, up to its last kernel."""
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--eps", type=float, default=0.0005)
    parser.add_argument("--text", help="the prompt; without it, the model's embedded example")
    parser.add_argument("--last", action="store_true", help="only queries of the last position")
    parser.add_argument("--rows", type=int, help="only so many random queries")
    parser.add_argument("--walk", action="store_true", help="one walk by ellipsoids to the layer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=8, help="GiB for the engine")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    options = parser.parse_args()
    call = work(options)
    cold, warm = (seconds(call, options.device) for _ in range(2))
    kind = ProfilerActivity.CPU if options.device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[kind], acc_events=True) as seen:
        seconds(call, options.device)
    events = seen.key_averages()

    def busy(event: object) -> float:
        name = "self_cpu_time_total" if options.device == "cpu" else "self_device_time_total"
        return float(getattr(event, name)) / 1e6

    kernels = sum(busy(event) for event in events)
    tell(
        {
            "model": options.model,
            "layer": options.layer,
            "eps": options.eps,
            "what": "walk" if options.walk else "call",
            "device": options.device,
            "cold seconds": round(cold, 2),
            "warm seconds": round(warm, 2),
            "kernel seconds": round(kernels, 2),
            "share": round(kernels / warm, 3),
            "kernels": sum(event.count for event in events if busy(event) > 0.0),
            "longest": {
                event.key[:48]: round(busy(event), 2) for event in sorted(events, key=busy, reverse=True)[:6]
            },
        },
        options.json,
    )


if __name__ == "__main__":
    main()
