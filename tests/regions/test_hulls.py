"""Segments, hulls and spans: the sets that their names say, and errors of one line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prooflens as pl
from prooflens.errors import RegionError
from prooflens.regions import Hull, Segment, Span, direction


def points(n: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn(n, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_a_hull_holds_every_mixture_of_its_prompts_and_only_those(n: int, seed: int) -> None:
    corners = points(n, seed)
    region = Hull(corners).region()
    assert region.n_factors == n - 1
    shares = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shares = shares / shares.sum()
    inside = sum(share * corner for share, corner in zip(shares.tolist(), corners, strict=True))
    assert isinstance(inside, torch.Tensor)
    assert region.contains(inside, tolerance=1e-7)
    outside = corners[0] + 1.5 * (corners[1] - corners[0])
    assert not region.contains(outside, tolerance=1e-7)


def test_claims_are_made_at_the_first_prompt() -> None:
    a, b, c = points(3)
    for region in (Segment(a, b).region(), Hull([a, b, c]).region()):
        assert torch.allclose(region.reference, a)
        assert region.holds_reference
        assert region.to(dtype=torch.float64).anchor is not None
        assert torch.allclose(region.scaled(0.5).anchor_factors, region.anchor_factors)


def test_a_hull_of_two_is_the_segment() -> None:
    a, b = points(2)
    one, other = Segment(a, b).region(), Hull([a, b]).region()
    assert one.constraints is None
    assert other.constraints is None
    assert torch.equal(one.center, other.center)
    assert one.is_simplex is False
    assert Hull(points(3)).region().is_simplex


def test_a_span_moves_one_token_along_given_directions() -> None:
    (x,) = points(1)
    ways = [direction(x, -1, torch.eye(3)[i]) for i in range(2)]
    region = Span(x, ways, [0.1, 0.2]).region()
    assert region.n_factors == 2
    assert region.half_widths().tolist()[0] == [0.0, 0.0, 0.0]
    assert region.half_widths()[1].tolist() == pytest.approx([0.1, 0.2, 0.0])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Hull([points(1)[0]]).region(), "at least two prompts"),
        (lambda: Hull("a text").region(), "at least two prompts"),
        (lambda: Hull([points(1)[0], points(1)[0]]).region(), "the prompts are all the same"),
        (lambda: Segment(points(1)[0], torch.zeros(3, 3)).region(), "equally many tokens"),
        (lambda: Segment("a", points(1)[0]).region(), "a text is no point yet"),
        (lambda: Span(points(1)[0], []).region(), "needs directions"),
        (lambda: Span(points(1)[0], [torch.zeros(3, 3)]).region(), "needs directions"),
        (lambda: Span(points(1)[0], [points(1)[0]], -1.0).region(), "positive"),
        (lambda: Span(points(1)[0], [points(1)[0]], [1.0, 2.0]).region(), "2 radii for 1 directions"),
        (lambda: direction(points(1)[0], 5, torch.zeros(3)), "a token of 2"),
        (
            lambda: pl.Region(points(1)[0], generators=torch.zeros(1, 2, 3), anchor=torch.tensor([2.0])),
            "between −1 and 1",
        ),
    ],
)
def test_bad_input_is_one_line(make: object, match: str) -> None:
    with pytest.raises(RegionError, match=match) as error:
        make()  # type: ignore[operator]
    assert "\n" not in str(error.value)


def test_a_way_must_start_at_the_prompt(toy: pl.Transformer) -> None:
    a, b, c = (toy.example(i).x for i in range(3))
    with pytest.raises(RegionError, match="starts at another prompt"):
        pl.certify(toy, c, pl.Segment(a, b), layer=0)
