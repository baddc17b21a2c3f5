"""Bounds of 64 attention scores: two 8-token sets, 64 dims, 512 shared factors, on one core.

    .venv/bin/python benchmarks/sets_inner_product.py

The low-rank form never writes a score's generators; beside it the same job with all of them written out as a matrix
(512 × 512 coefficients a pair) and bounded by Lemma quadratic_bound, and as a constrained polynomial zonotope
(`inner_product`, 131,840 generators), of which one pair is timed and multiplied by 64.
"""

import argparse
import time
from collections.abc import Callable

import torch

from prooflens.sets import (
    Interval,
    PolynomialZonotope,
    inner_product,
    inner_product_range,
    interval_enclosure,
    lemma_upper,
)


def seconds(job: Callable[[], object], repeats: int) -> float:
    """The fastest of several runs: the others waited for something else."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return min(times)


def materialised(cQ: torch.Tensor, GQ: torch.Tensor, cK: torch.Tensor, GK: torch.Tensor) -> Interval:
    lower, upper = [], []
    for q, gq in zip(cQ, GQ, strict=True):
        for k, gk in zip(cK, GK, strict=True):
            product = gq.T @ gk
            c, a, H = q @ k, gq.T @ k + gk.T @ q, product + product.T
            upper.append(lemma_upper(c, a, H))
            lower.append(-lemma_upper(-c, -a, -H))
    return Interval(torch.stack(lower).view(len(cQ), -1), torch.stack(upper).view(len(cQ), -1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--dims", type=int, default=64)
    parser.add_argument("--factors", type=int, default=512)
    parser.add_argument("--epsilon", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n, m, p = options.tokens, options.dims, options.factors
    cQ, cK = random(n, m), random(n, m)
    GQ, GK = options.epsilon * random(n, m, p), options.epsilon * random(n, m, p)
    quick = seconds(lambda: inner_product_range(cQ, GQ, cK, GK), 15)
    tight = seconds(lambda: inner_product_range(cQ, GQ, cK, GK, tight=True), 5)
    written = seconds(lambda: materialised(cQ, GQ, cK, GK), 2)
    ids = range(1, p + 1)
    q, k = (PolynomialZonotope(c[0], G[0], ids=ids) for c, G in ((cQ, GQ), (cK, GK)))
    as_set = n * n * seconds(lambda: interval_enclosure(inner_product(q, k)), 1)
    widths = [
        float(box.width.mean())
        for box in (
            inner_product_range(cQ, GQ, cK, GK),
            inner_product_range(cQ, GQ, cK, GK, tight=True),
            materialised(cQ, GQ, cK, GK),
        )
    ]
    print(f"{n * n} scores, {m} dims, {p} factors, one core")
    print(f"low rank, quick    {1e3 * quick:9.1f} ms   mean width {widths[0]:.2f}")
    print(f"low rank, tight    {1e3 * tight:9.1f} ms   mean width {widths[1]:.2f}")
    print(
        f"matrix written out {1e3 * written:9.1f} ms   mean width {widths[2]:.2f}   ratio {written / quick:.0f}"
    )
    print(f"generators written {1e3 * as_set:9.1f} ms   (one pair × {n * n})   ratio {as_set / quick:.0f}")


if __name__ == "__main__":
    main()
