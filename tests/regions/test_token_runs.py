"""Generators of one token each: products with their blocks equal those with the whole of G."""

import torch

from prooflens.regions import Region
from prooflens.regions.token_runs import TokenRuns


def blocks(tokens: list[int], S: int = 4, d: int = 3, seed: int = 0) -> torch.Tensor:
    made = torch.zeros(len(tokens), S, d, dtype=torch.float64)
    values = torch.randn(len(tokens), d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made[torch.arange(len(tokens)), torch.tensor(tokens)] = values
    return made


def test_products_are_those_with_all_generators() -> None:
    G = blocks([1, 1, 1, 3, 3, 0, 3])
    region = Region(torch.ones(4, 3, dtype=torch.float64), generators=G)
    assert region.runs is not None
    assert region.runs.tokens == (1, 3, 0, 3)
    v, alpha = torch.randn(5, 2, 4, 3, dtype=torch.float64), torch.rand(2, 7, dtype=torch.float64)
    assert torch.allclose(region.pullback(v), torch.einsum("...sd,psd->...p", v, G), rtol=1e-13, atol=1e-14)
    dense = region.center + torch.einsum("np,psd->nsd", alpha, G)
    assert torch.allclose(region.point(alpha), dense, rtol=1e-13, atol=1e-14)
    assert torch.equal(region.point(alpha[0]), region.point(alpha)[0])


def test_points_are_differentiable_in_the_factors() -> None:
    G = blocks([0, 0, 2, 2, 2])
    region = Region(torch.zeros(4, 3, dtype=torch.float64), generators=G)
    alpha = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64)
    (region.point(alpha) * weight).sum().backward()
    assert alpha.grad is not None
    assert torch.allclose(alpha.grad, region.pullback(weight), rtol=1e-13, atol=1e-14)


def test_generators_of_several_tokens_and_of_none_have_no_runs() -> None:
    both = blocks([0, 0, 1, 2, 3])
    both[0, 3] = 1.0
    assert TokenRuns.of(both) is None
    still = blocks([0, 0, 1, 2, 3])
    still[4] = 0.0
    assert TokenRuns.of(still) is None
    assert TokenRuns.of(blocks([0, 1, 0, 1, 0, 1])) is None, "more runs than tokens"
    assert TokenRuns.of(blocks([0, 0, 0])) is None, "no more factors than tokens"
