"""The arithmetic of `taylor`: 2-norms by powers and by rows, against exact and computed eigenvalues."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prooflens.engines.relaxations.norms import SQUARINGS, frobenius, spectral, top_eigenvalue


def symmetric(n: int, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(3, n, rank, generator=generator, dtype=torch.float64)
    signs = torch.randn(rank, generator=generator, dtype=torch.float64)
    K = (A * signs) @ A.mT
    return 0.5 * (K + K.mT)


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 1e-110, 1e-90, 1e90, 1e140]),
)
def test_no_eigenvalue_is_larger(n: int, rank: int, seed: int, scale: float) -> None:
    K = symmetric(n, rank, seed) * scale
    largest = torch.linalg.eigvalsh(K).abs().amax(-1)
    found = spectral(K)
    assert (found >= largest * (1.0 - 1e-13)).all()
    assert (found <= largest * n ** (0.5 / 2**SQUARINGS) * (1.0 + 1e-6)).all()


@pytest.mark.parametrize("exponent", [0, -40, 40, 600, -400, -600, -1000])
def test_diagonals_are_exact(exponent: int) -> None:
    values = torch.tensor([[1.0, 0.5, -2.0], [0.0, 0.0, 0.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    K = torch.diag_embed(values * 2.0**exponent)
    found, exact = spectral(K), values.abs().amax(-1) * 2.0**exponent
    assert (found >= exact).all()
    assert (found <= exact * (1.0 + 1e-8)).all()


def test_many_equal_eigenvalues_do_not_count_many_times() -> None:
    K = torch.eye(500, dtype=torch.float64)
    assert 1.0 <= float(spectral(K)) < 1.0 + 1e-8


def test_what_is_not_finite_stays_so() -> None:
    K = torch.eye(4, dtype=torch.float64).repeat(3, 1, 1)
    K[1, 0, 0], K[2, 0, 1] = torch.inf, torch.nan
    found = spectral(K)
    assert float(found[0]) < 1.1
    assert float(found[1]) == torch.inf
    assert not bool(found[2] < torch.inf)


def test_powers_and_factorisations_agree() -> None:
    K = symmetric(60, 60, 5)
    K = K @ K.mT
    K = 0.5 * (K + K.mT)
    ratio = spectral(K) / top_eigenvalue(K)
    assert (ratio < 1.2).all()
    assert (ratio > 0.8).all()


def exact_norm_is_less(K: torch.Tensor, bound: float) -> bool:
    """Whether bound²I − K² is positive definite, by elimination in exact arithmetic: then ‖K‖₂ < bound."""
    entries = [[Fraction(float(x)) for x in row] for row in K]
    n = len(entries)
    square, none = Fraction(bound) * Fraction(bound), Fraction(0)
    rest = [
        [
            (square if i == j else none) - sum((entries[i][k] * entries[k][j] for k in range(n)), none)
            for j in range(n)
        ]
        for i in range(n)
    ]
    for k in range(n):
        if rest[k][k] <= 0:
            return False
        for i in range(k + 1, n):
            share = rest[i][k] / rest[k][k]
            rest[i] = [a - share * b for a, b in zip(rest[i], rest[k], strict=True)]
    return True


@given(
    st.integers(1, 6),
    st.integers(0, 10**6),
    st.sampled_from([0, -300, -399, -400, -401, -500, -530, 200, 500, 900]),
    st.integers(0, 60),
)
def test_norms_in_exact_arithmetic(n: int, seed: int, exponent: int, uneven: int) -> None:
    """Tiny, huge and uneven entries, seen through strides."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** (exponent - torch.randint(0, uneven + 1, (n, n), generator=generator).double())
    K = torch.randn(n, n, generator=generator, dtype=torch.float64) * sizes
    wide = torch.zeros(n, 2 * n, dtype=torch.float64)
    wide[:, ::2] = K + K.mT
    assert exact_norm_is_less(wide[:, ::2], float(spectral(wide[:, ::2])))


def test_norms_of_more_entries_than_most_sums_have() -> None:
    """Entries that each vanish beside the sum so far, but not together."""
    n = 6400
    A = torch.full((n, n), 0.999 * 2.0**-27, dtype=torch.float64)
    A[0, 0] = 1.0
    assert float(frobenius(A)) >= math.sqrt(1.0 + (n * n - 1) * (0.999 * 2.0**-27) ** 2)
