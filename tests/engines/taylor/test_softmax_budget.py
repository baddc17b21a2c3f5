"""What `taylor` keeps of softmax beyond polynomials, key by key: is every term below its share of the budget?

A sum over keys hides a term that is missing, and ellipsoids hide sums. Here budgets are exact (β = |b_lin| + |b_e|, and
W what the scores attain), scores are drawn at many sizes, and each key's own term is held against Z√t.
"""

import pytest
import torch
from torch import Tensor

from prooflens.engines.taylor.softmax_budget import Sizes, SoftmaxBudget, against_e, at_once, beyond, with_e

DRAWS = 10_000


def mean(s: Tensor, x: Tensor) -> Tensor:
    return (s * x).sum(-1, keepdim=True)


class Draw:
    """Random weights and scores of one query token each, for two heads."""

    def __init__(self, keys: int, ratio: float) -> None:
        generator = torch.Generator().manual_seed(keys)

        def normal() -> Tensor:
            return torch.randn(DRAWS, 2, keys, generator=generator, dtype=torch.float64)

        self.s = torch.softmax(2.0 * normal(), -1)
        size = torch.exp(2.0 * torch.randn(DRAWS, 1, 1, generator=generator, dtype=torch.float64)) / 4.0
        # The second head may be still.
        size = size.clamp(max=3.0) * torch.tensor([[1.0], [0.1]]).double()
        self.linear, self.e = (size * x for x in (normal(), ratio * normal()))
        self.linear, self.e = (x - mean(self.s, x) for x in (self.linear, self.e))
        self.b = self.linear + self.e
        size, e = self.linear.abs() + self.e.abs(), self.e.abs()
        W_head, W_e_head = mean(self.s, size.square()), mean(self.s, e.square())
        W, W_e = (x.sum(1, keepdim=True) for x in (W_head, W_e_head))
        self.at = SoftmaxBudget(self.s, e, size + 1e-300, W, W_head, W_e, W_e_head)
        self.t, self.t_e = self.s * size.square() / W, self.s * e.square() / W_e.clamp(min=1e-300)

    def alone(self, sizes: Sizes) -> Tensor:
        """How far a key's share of x g goes."""
        parts = ((sizes.g, self.t), (sizes.g_e, self.t_e))
        return self._total([Z * t.sqrt() for Z, t in parts if Z is not None])

    def against(self, sizes: Sizes) -> Tensor:
        """How far a key's share of x W_O δ goes."""
        found = [sizes.v * self.t.sqrt(), sizes.v_e * self.t_e.sqrt()]
        for Y, t in ((sizes.head, self.t), (sizes.head_e, self.t_e)):
            if Y is not None:
                found.append(self.s * Y * t.sum(-1, keepdim=True).sqrt())
        return self._total(found)

    def _total(self, parts: list[Tensor]) -> Tensor:
        return sum(parts[1:], parts[0])


def third_and_fourth(s: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Third and fourth order of N/(1 + q), and second and third order of e^b/(1 + q) − b."""
    m2, m3 = mean(s, b**2), mean(s, b**3)
    alone = b**3 / 6.0 - b * m2 / 2.0 + b**4 / 24.0 - b**2 * m2 / 4.0 - b * m3 / 6.0
    return alone, (b**2 - m2) / 2.0 + b**3 / 6.0 - b * m2 / 2.0 - m3 / 6.0


def assert_below(x: Tensor, limit: Tensor) -> None:
    assert bool((x.abs() <= limit * (1.0 + 1e-9) + 1e-13).all())


@pytest.mark.parametrize("keys", [2, 3, 6])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 30.0])
def test_every_key_stays_below_its_share(keys: int, ratio: float) -> None:
    draw = Draw(keys, ratio)
    s, b, linear, e = draw.s, draw.b, draw.linear, draw.e
    alone, against = third_and_fourth(s, b)
    alone_lin, against_lin = third_and_fourth(s, linear)
    both, m2 = mean(s, linear * e), mean(s, linear**2)
    sizes = with_e(draw.at)
    known = 0.5 * (linear**2 - m2) * e - linear * both
    assert_below(s * (alone - alone_lin - known), draw.alone(sizes))
    assert_below(s * (against - against_lin - (linear * e - both)), draw.against(sizes))
    assert_below(s * (against_lin + e + linear * e - both), draw.against(against_e(draw.at)))
    one_plus_q = mean(s, torch.exp(b))
    sizes = beyond(draw.at)
    assert_below(s * (torch.expm1(b) / one_plus_q - b - b**2 / 2.0 - alone), draw.alone(sizes))
    assert_below(s * (torch.exp(b) / one_plus_q - 1.0 - b - against), draw.against(sizes))
    sizes = at_once(draw.at)
    assert_below(s * (torch.expm1(b) / one_plus_q - b), draw.alone(sizes))
    assert_below(s * (torch.exp(b) / one_plus_q - 1.0), draw.against(sizes))
