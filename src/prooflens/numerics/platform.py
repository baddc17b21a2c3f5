"""Probes of float64 on a device: is the arithmetic what proofs assume?

γ_n bounds the error of a dot product *entry by entry*: |fl(x·y) − x·y| ≤ γ_n |x|·|y|. Products in TF32, split into
fixed point (emulated float64) or by Strassen's recursion satisfy at best a bound by norms. A row with entries of very
different size tells them apart: the small entry alone meets the large entry of the other factor, and must survive.
"""

from functools import lru_cache

import torch

from prooflens.errors import EngineError
from prooflens.numerics.rounding import UNIT_ROUNDOFF, gamma

PROBE_SIZES = {"cpu": 64, "cuda": 512}
"""The size of the probe's matrices; it is large on a GPU, where libraries choose other algorithms for large
products."""

SMALL = 2.0**-70
"""The relative size of small entries: below the resolution of a number that is scaled by the largest of its row."""


def check_arithmetic(device: torch.device) -> None:
    """Refuse a device whose float64 arithmetic is not what proofs assume.

    Args:
        device: where proofs are to run.

    Raises:
        EngineError: if float64 does not round to nearest, flushes small numbers to 0, or matrix products lose small
            entries.
    """
    one = torch.ones(1, dtype=torch.float64, device=device)
    u = UNIT_ROUNDOFF
    if bool(one + u != one) or bool(one + 3.0 * u != 1.0 + 4.0 * u) or bool(one - 0.75 * u != 1.0 - u):
        raise EngineError(f"float64 on {device} does not round to nearest: nothing can be proved there")
    if bool(one * 2.0**-1060 == 0.0):
        raise EngineError(
            f"float64 on {device} flushes small numbers to 0: call torch.set_flush_denormal(False) first"
        )
    if not _multiplies_entrywise(device):
        raise EngineError(
            f"matrix products on {device} lose small entries (emulated float64, TF32 or a fast algorithm): "
            "switch that off, or use another device"
        )


@lru_cache(maxsize=16)
def _multiplies_entrywise(device: torch.device) -> bool:
    """Say whether products of ordinary and of badly scaled matrices err by at most γ_n|A||B| in every entry.

    Half of the columns of A are tiny and meet the other half of B's rows alone: B is 0 where A is large.
    """
    n = PROBE_SIZES.get(device.type, 64)
    generator = torch.Generator().manual_seed(0)
    # Integers of 20 bits: the product is known exactly, and more than float32 holds.
    large, few, rest = (torch.randint(-(2**20), 2**20, (n, n), generator=generator) for _ in range(3))
    small = torch.rand(n, generator=generator) < 0.5
    A = torch.where(small, few * SMALL, large.double())
    B = torch.where(small[:, None], rest, 0).double()
    exact = ((few * small) @ rest).double() * SMALL
    error = ((A.to(device) @ B.to(device)).cpu() - exact).abs()
    return bool((error <= gamma(n + 4) * (A.abs() @ B.abs())).all())
