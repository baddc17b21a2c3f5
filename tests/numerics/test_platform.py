"""The probes accept float64 as it is, and refuse arithmetic that proofs do not cover."""

import pytest
import torch
from torch import Tensor

from prooflens.engines import get_engine
from prooflens.engines.functionals import bound_functionals
from prooflens.errors import EngineError
from prooflens.numerics import check_arithmetic, platform
from prooflens.problem import Problem
from prooflens.queries import parse_query
from tests.engines.cases import tiny_problem

CPU = torch.device("cpu")


def test_float64_here_is_accepted() -> None:
    check_arithmetic(CPU)


def _bounded(problem: Problem) -> None:
    claim = parse_query("top1").bind(problem.setting([0]))[0]
    bound_functionals(get_engine("interval"), problem, claim.functionals)


def test_flushed_numbers_are_refused() -> None:
    problem = tiny_problem(0, 3, 0.01)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush small numbers")
    try:
        with pytest.raises(EngineError, match="set_flush_denormal"):
            _bounded(problem)
    finally:
        torch.set_flush_denormal(False)
    _bounded(problem)


def fixed_point(A: Tensor, B: Tensor) -> Tensor:
    """Emulated float64: each row of A and column of B in units of 2⁻⁵⁵ of its largest entry, then exact."""

    def cut(M: Tensor, dim: int) -> Tensor:
        unit = 2.0**-55 * M.abs().amax(dim, keepdim=True).clamp(min=1.0)
        return (M / unit).round() * unit

    return _product(cut(A, 1), cut(B, 0))


def single(A: Tensor, B: Tensor) -> Tensor:
    return _product(A.float(), B.float()).double()


def strassen(A: Tensor, B: Tensor) -> Tensor:
    """One level of the recursion: sums of blocks lose entries that are small beside their neighbours."""
    n = len(A) // 2
    a, b, c, d = A[:n, :n], A[:n, n:], A[n:, :n], A[n:, n:]
    e, f, g, h = B[:n, :n], B[:n, n:], B[n:, :n], B[n:, n:]
    m1, m2, m3 = _product(a + d, e + h), _product(c + d, e), _product(a, f - h)
    m4, m5, m6, m7 = _product(d, g - e), _product(a + b, h), _product(c - a, e + f), _product(b - d, g + h)
    return torch.cat((torch.cat((m1 + m4 - m5 + m7, m3 + m5), 1), torch.cat((m2 + m4, m1 - m2 + m3 + m6), 1)))


_product = torch.Tensor.__matmul__


@pytest.mark.parametrize("product", [fixed_point, single, strassen])
def test_other_products_are_refused(product: object, monkeypatch: pytest.MonkeyPatch) -> None:
    platform._multiplies_entrywise.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor,
            "__matmul__",
            lambda A, B: product(A, B) if A.is_floating_point() and bool((A < 0).any()) else _product(A, B),  # type: ignore[operator]
        )
        refused = not platform._multiplies_entrywise(CPU)
    platform._multiplies_entrywise.cache_clear()
    assert refused
