"""Along the way: what is proved holds at every point, and the first break is one."""

from __future__ import annotations

import pytest
import torch

import prooflens as pl
from prooflens.engines.chebyshev import Search
from prooflens.engines.protocol import EngineOptions
from prooflens.errors import EngineError, QueryError, RegionError
from prooflens.report.ways import way_picture


def test_proved_shares_hold_and_breaks_break(toy: pl.Transformer) -> None:
    a, b = toy.example(0).x, toy.example(1).x
    found = pl.way(toy, a, b, "top1", layer=1, resolution=1 / 32)
    assert len(found) == 8
    for row in found:
        last = row.breaks if row.breaks is not None else 1.0
        assert row.proved <= last
        assert last - row.proved <= 1 / 32 + 1e-12 or row.verdict == "unknown"
        for share, margin in zip(row.shares, row.margins, strict=True):
            for piece in row.pieces:
                if piece.start <= share <= piece.end:
                    assert piece.lower <= margin + 1e-9
                    assert margin <= piece.upper + 1e-9
        assert row.pieces[0].start == 0.0
        assert row.pieces[-1].end == 1.0


def test_certify_says_where_a_claim_breaks_first(toy: pl.Transformer) -> None:
    a, b = toy.example(0).x, toy.example(1).x
    results = pl.certify(toy, a, pl.Segment(a, b), layer=1)
    ways = {str(row.claim): row for row in pl.way(toy, a, b, "top1", layer=1)}
    failed = [outcome for outcome in results.outcomes if outcome.verdict == "fails"]
    assert failed
    for outcome in failed:
        assert outcome.witness is not None
        share = 0.5 * (float(outcome.witness.alpha[0]) + 1.0)
        first = ways[str(outcome.claim)].breaks
        assert first is not None
        if "breaks first" in outcome.reason:
            assert share == pytest.approx(first, abs=1 / 128)
    assert not any(outcome.verdict == "unknown" for outcome in results.outcomes)


def test_a_hull_of_two_gives_what_the_segment_gives(toy: pl.Transformer) -> None:
    a, b = toy.example(0).x, toy.example(2).x
    one = pl.certify(toy, a, pl.Segment(a, b), layer=1)
    other = pl.certify(toy, a, pl.Hull([a, b]), layer=1)
    assert [o.verdict for o in one.outcomes] == [o.verdict for o in other.outcomes]


def test_what_has_no_margin_is_refused(toy: pl.Transformer) -> None:
    a, b = toy.example(0).x, toy.example(1).x
    with pytest.raises(QueryError, match="no sign of linear functionals"):
        pl.way(toy, a, b, "entropy", layer=1)
    with pytest.raises(RegionError, match="resolution"):
        pl.way(toy, a, b, "top1", layer=1, resolution=0.0)


def test_a_way_keeps_to_its_time_and_says_what_it_left(
    toy: pl.Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time that ends after the first pieces: what is proved of them holds there, and the rest is open."""
    a, b = toy.example(0).x, toy.example(1).x
    whole = pl.way(toy, a, b, "top1", layer=1, resolution=1 / 256)
    walked: list[int] = []
    step = Search.step

    def counted(search: Search) -> bool:
        going = step(search)
        walked.append(search.walks)
        return going

    monkeypatch.setattr(Search, "step", counted)
    monkeypatch.setattr(EngineOptions, "late", property(lambda options: len(walked) >= 2))
    part = pl.way(toy, a, b, "top1", layer=1, resolution=1 / 256, time=1000)
    assert 0 < part.walks < whole.walks
    assert whole.advice is None
    assert part.advice is not None
    assert "--time" in part.advice
    assert part.advice in str(part)
    for mine, full in zip(part, whole, strict=True):
        assert mine.proved <= full.proved + 1e-12
        assert mine.pieces[0].start == 0.0
        assert mine.pieces[-1].end == 1.0
        assert not (mine.verdict == "holds" and full.verdict != "holds")
    walked.extend([0, 0])
    with pytest.raises(EngineError, match="give more"):
        pl.way(toy, a, b, "top1", layer=1, time=1000)


def test_the_picture_names_the_break(toy: pl.Transformer) -> None:
    a, b = toy.example(0).x, toy.example(1).x
    rows = pl.way(toy, a, b, "top1", layer=1)
    broken = next(row for row in rows if row.breaks is not None)
    text = way_picture(broken).svg(alone=True)
    assert "breaks at" in text
    assert "share of the way" in text
    assert isinstance(rows.to_dict()["rows"][0]["pieces"], list)


def test_next_tokens_hold_along_a_way(toy: pl.Transformer) -> None:
    a = toy.example(0).x
    near = a + 0.02 * (toy.example(1).x - a)
    found = pl.output(toy, a, pl.Segment(a, near))
    assert str(found.whole.verdict) == "holds"
    with torch.no_grad():
        answers = {
            int(toy(a + t * (near - a)).argmax()) for t in torch.linspace(0, 1, 20, dtype=torch.float64)
        }
    assert len(answers) == 1
