"""Speed and memory at the size of GPT-2 small (124M parameters, d = 768, 12 layers) with random weights.

python benchmarks/gpt2_sized.py [--tokens 8] [--eps 0.001]

GPT-2 itself needs a hub. This builds transformers' GPT-2 with its default configuration and random weights, loads it as
any module is loaded, checks the logits against transformers' own, and bounds all top-1 margins of layer 0.
"""

import argparse
import resource
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from prooflens import Ball, load
from prooflens.engines import get_engine
from prooflens.engines.functionals import bound_claims
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.verdicts.decide import is_proved


def peak() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB at most so far"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--eps", type=float, default=0.001)
    options = parser.parse_args()
    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config()).eval()
    ids = torch.randint(50257, (options.tokens,))
    start = time.perf_counter()
    model = load(module)
    print(f"load: {time.perf_counter() - start:.2f} s, {model.n_parameters:,} parameters, {peak()}")
    x = model.embed(ids)
    start = time.perf_counter()
    with torch.no_grad():
        ours, theirs = model(x), module(ids[None]).logits[0].double()
    gap = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"forward, both: {time.perf_counter() - start:.2f} s, largest relative difference {gap:.1e}")
    problem = Problem(model, Ball(options.eps).around(x))
    claims = parse_query("top1").bind(problem.setting([0]))
    parts, together = bound_claims(get_engine("layer0"), problem, claims)
    held = sum(is_proved(claim, part) for claim, part in zip(claims, parts, strict=True))
    print(
        f"layer0: {together.seconds:.2f} s for {len(together.lower)} margins, {held} of {len(claims)} proved, {peak()}"
    )


if __name__ == "__main__":
    main()
