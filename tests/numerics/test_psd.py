"""`is_psd` must never say True of a matrix with a negative eigenvalue, checked in exact arithmetic."""

from fractions import Fraction

import flint
import mpmath
import pytest
import torch
from torch import Tensor

from prooflens.numerics import certified_shift, dominates, gershgorin_shift, is_psd, lambda_max_upper, psd


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def symmetric(*shape: int, seed: int = 0) -> Tensor:
    A = random(*shape, seed=seed)
    return A + A.mT


def planted(eigenvalues: list[float], seed: int = 0) -> Tensor:
    n = len(eigenvalues)
    Q = torch.linalg.qr(random(n, n, seed=seed)).Q
    A: Tensor = Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T
    return 0.5 * (A + A.T)


def exactly_positive_definite(M: Tensor) -> bool:
    """Sylvester's criterion in exact rationals: all leading minors positive (flint's fraction-free determinant)."""
    rows = [[flint.fmpq(*Fraction(float(x)).as_integer_ratio()) for x in row] for row in M]
    return all(flint.fmpq_mat([row[:k] for row in rows[:k]]).det() > 0 for k in range(1, len(rows) + 1))


def test_proves_a_definite_matrix_and_batches() -> None:
    A = random(5, 12, 12)
    M = A @ A.mT
    M = 0.5 * (M + M.mT) + torch.eye(12, dtype=torch.float64)
    assert is_psd(M).tolist() == [True] * 5
    M[3] -= 100.0 * torch.eye(12, dtype=torch.float64)
    assert is_psd(M).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("smallest", [-1e-3, -1e-9, -1e-12, -1e-13, -1e-14])
@pytest.mark.parametrize("seed", range(5))
def test_refuses_a_planted_negative_eigenvalue(smallest: float, seed: int) -> None:
    M = planted([smallest, *torch.linspace(0.1, 3.0, 19).tolist()], seed)
    assert not exactly_positive_definite(M) or smallest > -1e-13
    assert not bool(is_psd(M))


@pytest.mark.parametrize("exponent", range(-17, -8))
def test_true_is_always_confirmed_in_exact_arithmetic(exponent: int) -> None:
    """Near the edge, with either sign, on scales far apart: a True must survive exact determinants."""
    for seed in range(6):
        for sign in (1.0, -1.0):
            M = planted([sign * 10.0**exponent, *torch.linspace(0.5, 2.0, 7).tolist()], seed)
            scale = torch.exp2(
                torch.randint(-30, 30, (8,), generator=torch.Generator().manual_seed(seed)).double()
            )
            for candidate in (M, scale[:, None] * M * scale[None, :]):
                if bool(is_psd(candidate)):
                    assert exactly_positive_definite(candidate)


def test_is_not_too_timid() -> None:
    """The margin that is lost is of the order n²u, and it does not grow under diagonal scaling."""
    M = planted([1e-11, *torch.linspace(0.5, 2.0, 29).tolist()])
    scale = torch.exp2(torch.arange(-60, 60, 4).double())
    assert bool(is_psd(M))
    assert bool(is_psd(scale[:, None] * M * scale[None, :]))


def test_edges() -> None:
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert bool(is_psd(zero))
    assert bool(is_psd(zero[:0, :0]))
    mixed = zero.clone()
    mixed[:2, :2] = torch.tensor([[2.0, -1.0], [-1.0, 2.0]])
    assert bool(is_psd(mixed))
    singular = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert not bool(is_psd(singular)), "positive semidefinite, but without any margin there is no proof"
    assert not bool(is_psd(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)))
    assert not bool(is_psd(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)))
    assert not bool(is_psd(torch.tensor([[float("nan")]], dtype=torch.float64)))
    assert not bool(is_psd(torch.tensor([[1e-300, 1e-301], [1e-301, -1e-300]], dtype=torch.float64)))
    with pytest.raises(ValueError, match="symmetric"):
        is_psd(torch.tensor([[1.0, 0.5], [0.4, 1.0]], dtype=torch.float64))


@pytest.mark.parametrize("seed", range(4))
def test_lambda_max_upper_against_mpmath(seed: int) -> None:
    H = symmetric(10, 10, seed=seed)
    with mpmath.workdps(50):
        top = max(mpmath.eigsy(mpmath.matrix(H.tolist()), eigvals_only=True))
        bound = float(lambda_max_upper(H))
        assert mpmath.mpf(bound) >= top
        assert bound - float(top) < 1e-11 * abs(float(top))


def test_lambda_max_upper_scaled_negative_and_degenerate() -> None:
    H = symmetric(4, 9, 9, seed=3)
    s = random(9, seed=4).exp()
    bound = lambda_max_upper(H, s)
    root = s.rsqrt()
    truth = torch.linalg.eigvalsh(root[:, None] * H * root[None, :])[..., -1]
    assert bool((bound >= truth - 1e-13).all())
    assert bool((bound <= truth + 1e-9).all())
    negative = -planted([1.0, 2.0, 3.0])
    assert float(lambda_max_upper(negative)) == pytest.approx(-1.0, abs=1e-10)
    assert float(lambda_max_upper(torch.zeros(5, 5, dtype=torch.float64))) <= 1e-300
    rank_one = random(6, 1, seed=5) @ random(6, 1, seed=5).T
    assert float(lambda_max_upper(rank_one)) == pytest.approx(float(rank_one.trace()), rel=1e-9)


def test_shifts_dominate() -> None:
    H = symmetric(3, 8, 8, seed=6)
    s = random(3, 8, seed=7).exp()
    for d in (gershgorin_shift(H), certified_shift(H), certified_shift(H, s)):
        assert bool(dominates(d + 1e-9, H).all())
        for one, matrix in zip(d, H, strict=True):
            assert exactly_positive_definite(torch.diag(one + 1e-12) - matrix)
    assert not bool(dominates(torch.linalg.eigvalsh(H)[..., -1:].expand(3, 8) - 1e-6, H).any())


def test_scale_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        lambda_max_upper(symmetric(3, 3), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("n", [4, 5, 11])
def test_products_in_blocks_are_the_whole_product(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psd, "_BLOCK", 4)
    L = random(3, n, n, seed=n).tril()
    assert torch.allclose(psd._squared(L), L @ L.mT, rtol=1e-14, atol=1e-14)
    for smallest, seed in ((-1e-9, 1), (-1e-3, 2), (1e-3, 3)):
        M = planted([smallest, *torch.linspace(0.1, 3.0, n - 1).tolist()], seed)
        assert bool(is_psd(M)) == (smallest > 0)


def test_what_has_no_factor_is_not_proved() -> None:
    ones = torch.ones(2, 2, dtype=torch.float64)
    assert not bool(is_psd(ones - 0.5 * torch.eye(2, dtype=torch.float64)))
