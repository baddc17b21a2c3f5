"""A report says at its top why rows are open, and shows the unit of every row."""

from __future__ import annotations

from pathlib import Path

import prooflens as pl
from prooflens.models import Transformer
from prooflens.report.data import collect
from prooflens.report.page import render


def test_what_is_open_stands_in_the_header(toy: Transformer, tmp_path: Path) -> None:
    run = tmp_path / "RUN"
    found = pl.certify(toy, toy.example(), pl.Ball(0.06), layer=1, budget="8/1/1", time="1ms", out=run)
    for source in (found, run):
        data = collect(source)
        assert data.advice == (found.advice,)
        page = render(data)
        assert "what is open" in page
        assert "not asked: interval (about" in page
        assert "score margin" in page


def test_nothing_is_said_where_nothing_is_open(toy: Transformer) -> None:
    found = pl.certify(toy, toy.example(), pl.Ball(1e-4), "0.1", budget="8/1/1")
    assert found.advice is None
    assert "what is open" not in render(collect(found))
