"""What a root misses, kept by where it comes from: members of ellipsoids, moved by the very maps, stay inside."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import total
from prooflens.engines.taylor import remainder_sources
from prooflens.engines.taylor.remainder_sources import (
    KEPT,
    PropagatedSource,
    RemainderSource,
    kept_apart,
    narrowing,
    propagate,
    reached,
)
from tests.engines.support import outside


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ellipsoids(seed: int, tokens: int, d: int) -> tuple[Tensor, Tensor]:
    """Shapes, and points on their boundaries, 40 per token."""
    L = normal(seed, tokens, d, d)
    xi = normal(seed + 1, 40, tokens, d)
    xi = xi / torch.linalg.vector_norm(xi, dim=-1, keepdim=True)
    return L @ L.mT, torch.einsum("tij,ntj->nti", L, xi)


def everything(T: int, S: int) -> Tensor:
    """A mask that hides nothing."""
    return torch.ones(T, S, dtype=torch.bool)


@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_members_stay_inside_from_root_to_root(room: int) -> None:
    """Four roots with different numbers of tokens, each missing something of its own."""
    d, tokens = 3, [3, 4, 4, 2]
    shape, e = ellipsoids(0, tokens[0], d)
    origins = [RemainderSource(shape)]
    for step, (S, T) in enumerate(itertools.pairwise(tokens)):
        A = normal(50 + step, T, S, d, d)
        missed, own = ellipsoids(100 + step, T, d)
        carried, noise = propagate(origins, A, torch.zeros(T, S).double(), everything(T, S))
        there = [reached(J, shape, live) for shape, J, live in carried]
        origins = kept_apart(carried, there, missed, room)
        e = torch.einsum("tsij,nsj->nti", A, e) + own
        whole = total([*there, missed])
        for t in range(T):
            assert outside(whole[t], e[:, t]) <= 1e-12
        assert len(origins) == max(1, min(room, step + 1) + (room > 0))
        assert float(noise.max()) < 1e-11


def test_what_cancels_between_tokens_cancels() -> None:
    """Two tokens that miss the same thing: their difference misses nothing, unless only their shapes go on."""
    d = 2
    eye = torch.eye(d, dtype=torch.float64)
    both = torch.stack((eye, eye))[:, None]
    apart = torch.stack((eye, -eye))[None]
    sizes = []
    for room in (0, 2):
        carried, _ = propagate(
            [RemainderSource(eye[None])], both, torch.zeros(2, 1).double(), everything(2, 1)
        )
        there = [reached(J, shape, live) for shape, J, live in carried]
        origins = kept_apart(carried, there, 1e-20 * torch.stack((eye, eye)), room)
        carried, _ = propagate(origins, apart, torch.zeros(1, 2).double(), everything(1, 2))
        there = [reached(J, shape, live) for shape, J, live in carried]
        sizes.append(sum(float(M.diagonal(dim1=1, dim2=2).sum()) for M in there))
    assert sizes[0] > 7.9
    assert sizes[1] < 1e-9


def test_errors_of_the_jacobians_are_counted() -> None:
    """A Jacobian that is off by its error moves members by no more than the noise."""
    d, S, T = 3, 2, 2
    shape, x = ellipsoids(3, 2, d)
    before, A = normal(4, S, 2, d, d), normal(5, T, S, d, d)
    error = torch.full((T, S), 0.01, dtype=torch.float64)
    off = normal(6, T, S, d, d)
    off = 0.01 * off / torch.linalg.matrix_norm(off)[..., None, None]
    for origin, moved in (
        (RemainderSource(shape), x),
        (RemainderSource(shape, before, everything(S, 2)), torch.einsum("srij,nrj->nsi", before, x)),
    ):
        found, noise = propagate([origin], A, error, everything(T, S))
        assert isinstance(found[0], PropagatedSource)
        real = torch.einsum("tsij,nsj->nti", A + off, moved)
        computed = torch.einsum("trij,nrj->nti", found[0].J, x)
        assert bool((torch.linalg.vector_norm(real - computed, dim=-1).amax(0) <= noise).all())
        assert float(noise.min()) > 1e-3


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-41, 1e20])
def test_what_single_precision_loses_is_counted(size: float) -> None:
    """From a root to the next by a Jacobian as it is kept: members move by no more than what is counted at both."""
    d, S, T = 3, 2, 2
    shape, x = ellipsoids(3, 2, d)
    before, A = size * normal(4, S, 2, d, d), normal(5, T, S, d, d)
    off = torch.einsum("srij,nrj->nsi", before - before.to(KEPT), x)
    lost = narrowing(before, shape)
    assert bool((torch.linalg.vector_norm(off, dim=-1).amax(0) <= lost).all())
    assert 0.0 < float(off.abs().max()) <= float(lost.max()) <= max(2.0**-20 * size, 1e-36) * 100.0
    error = torch.zeros(T, S).double()
    kept = RemainderSource(shape, before.to(KEPT), everything(S, 2))
    (found,), noise = propagate([kept], A, error, everything(T, S))
    assert found.J.dtype is torch.float64
    real = torch.einsum("tsij,srjk,nrk->nti", A, before, x)
    far = torch.linalg.vector_norm(real - torch.einsum("trij,nrj->nti", found.J, x), dim=-1).amax(0)
    assert bool((far <= noise + torch.linalg.matrix_norm(A, ord=2) @ lost).all())


def test_of_numbers_that_are_too_large_for_single_precision_nothing_is_known() -> None:
    shape, _ = ellipsoids(3, 2, 3)
    J = normal(4, 2, 2, 3, 3)
    J[1, 0, 0, 0] = 1e39
    assert narrowing(J, shape).isinf().tolist() == [False, True]


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": torch.tril,
    "flipped": torch.triu,
    "full": torch.clone,
    "none": torch.zeros_like,
}


@pytest.mark.parametrize("wide", [1, 4, 6, 100])
@pytest.mark.parametrize("mask", MASKS)
def test_what_a_mask_hides_is_left_out(monkeypatch: pytest.MonkeyPatch, wide: int, mask: str) -> None:
    """However many tokens are moved on at once, each block is the sum over all tokens between."""
    monkeypatch.setattr(remainder_sources, "WIDE", wide)
    T, S, R, d = 5, 4, 3, 2
    keep = MASKS[mask]
    reads, depends = keep(everything(T, S)), keep(everything(S, R))
    A, before = (
        normal(0, T, S, d, d) * reads[..., None, None],
        normal(1, S, R, d, d) * depends[..., None, None],
    )
    shape, _ = ellipsoids(2, R, d)
    (found,), _ = propagate([RemainderSource(shape, before, depends)], A, torch.zeros(T, S).double(), reads)
    torch.testing.assert_close(found.J, torch.einsum("tsij,srjk->trik", A, before), rtol=1e-13, atol=1e-13)
    assert not bool(((found.J != 0).flatten(2).any(2) & ~found.live).any())
    there = reached(found.J, shape, found.live)
    apart = [found.J[:, r] @ shape[r] @ found.J[:, r].mT for r in range(R)]
    torch.testing.assert_close(there, total(apart), rtol=1e-9, atol=1e-30)
