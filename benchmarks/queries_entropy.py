"""10^5 proved entropy ranges at S = 64, batched, beside a loop over rows; one core.

python benchmarks/queries_entropy.py [--rows 100000] [--size 64] [--loop-rows 500]
"""

import argparse
import math
import time

import torch

from prooflens.queries import entropy_range


def boxes(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes around random attention patterns, each weight up to 30 % below and above."""
    generator = torch.Generator().manual_seed(0)
    scores = 2.0 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    slack = 0.3 * torch.rand(2, rows, size, generator=generator, dtype=torch.float64)
    point = scores.softmax(-1)
    return point * (1 - slack[0]), (point * (1 + slack[1])).clamp_max(1.0)


def loop_range(lower: list[float], upper: list[float]) -> tuple[float, float]:
    """The same two bounds for one row in plain Python, without outward rounding: majorisation and the dual."""
    size = len(lower)
    most, least = 0.0, math.fsum(lower)
    previous = below = 0.0
    for k, (high, low) in enumerate(
        zip(sorted(upper, reverse=True), sorted(lower, reverse=True), strict=True), start=1
    ):
        most += high
        least -= low
        M = 1.0 if k == size else min(most, 1.0 - least, 1.0)
        m, previous = M - previous, M
        below -= m * math.log(m) if m > 0 else 0.0
    left, right = 0.0, 1.0
    for _ in range(60):
        middle = (left + right) / 2
        total = sum(min(h, max(x, middle)) for x, h in zip(lower, upper, strict=True))
        left, right = (middle, right) if total < 1.0 else (left, middle)
    x = [min(h, max(low, right)) for low, h in zip(lower, upper, strict=True)]
    entropy = -math.fsum(v * math.log(v) for v in x if v > 0)
    return below, entropy - (1 + math.log(right)) * (1 - math.fsum(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--loop-rows", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lower, upper = boxes(options.rows, options.size)
    entropy_range(lower[:64], upper[:64])

    times = []
    for _ in range(3):
        start = time.perf_counter()
        below, above = entropy_range(lower, upper)
        times.append(time.perf_counter() - start)
    batched = min(times)

    some = slice(0, options.loop_rows)
    start = time.perf_counter()
    looped = torch.tensor(
        [loop_range(low, high) for low, high in zip(lower[some].tolist(), upper[some].tolist(), strict=True)],
        dtype=torch.float64,
    )
    loop = (time.perf_counter() - start) * options.rows / options.loop_rows
    apart = float((looped - torch.stack([below[some], above[some]], -1)).abs().max())

    print(f"{options.rows} entropy ranges, S = {options.size}, one core")
    print(f"batched   {batched:8.3f} s   (best of 3; proved, rounded outward)")
    print(f"loop      {loop:8.3f} s   ({options.loop_rows} rows, scaled)")
    print(f"ratio     {loop / batched:8.1f} x")
    print(f"largest difference between the two {apart:.1e}")


if __name__ == "__main__":
    main()
