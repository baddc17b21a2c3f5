"""Radii: certified ≤ true ≤ attack, monotone, shared grid, one token at a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prooflens as pl
from prooflens.engines.attack import AttackBudget
from prooflens.errors import ProoflensError
from prooflens.models import Transformer
from prooflens.results.outcome import Verdict
from prooflens.verdicts.radius_guess import guessed
from prooflens.verdicts.radius_search import RadiusSearch

SMALL = AttackBudget(100, 4, 20)


@pytest.fixture(scope="module")
def toy() -> Transformer:
    return pl.load("toy")


@pytest.fixture(scope="module")
def found(toy: Transformer) -> pl.Radii:
    return pl.radius(toy, toy.example(0), ["top1", "mass>=0.2"], heads="0", budget=SMALL)


@pytest.mark.slow
def test_proved_below_and_broken_above(toy: Transformer, found: pl.Radii) -> None:
    """At the certified radius every claim is proved, at the attacked one a witness breaks it."""
    assert len(found) == 16
    for row in found.rows[::5]:
        query = f"{row['layer']}.{row['head']}:{row['query']}@{row['position']}"
        assert 0 < row["certified"] < row["attack"]
        below = pl.certify(toy, toy.example(0), pl.Ball(row["certified"]), queries=query, budget=SMALL)
        assert below.verdict is Verdict.HOLDS
        above = pl.certify(
            toy,
            toy.example(0),
            pl.Ball(row["attack"]),
            queries=query,
            engine="attack",
            budget=AttackBudget(2000, 10, 50),
        )
        assert above.verdict is Verdict.FAILS


def test_layer_0_is_nearly_exact(found: pl.Radii) -> None:
    gaps = [row["attack"] / row["certified"] for row in found.sel(query="top1").rows]
    assert min(gaps) < 1.2
    assert max(gaps) < 1.5


def test_a_finer_grid_stays_inside(toy: Transformer, found: pl.Radii) -> None:
    fine = pl.radius(toy, toy.example(0), "0.1:top1@-1", tolerance=0.02, budget=SMALL)
    coarse = found.sel(head=1, position=3, query="top1")
    assert fine.certified <= coarse.attack
    assert coarse.certified <= fine.attack
    assert fine.certified >= coarse.certified / 1.1


def test_one_token_at_a_time(toy: Transformer, found: pl.Radii) -> None:
    alone = pl.radius(toy, toy.example(0), "0.1:top1@-1", per_token=True, budget=SMALL)
    assert alone.to_arrow().column("token").to_pylist() == [0, 1, 2, 3]
    together = found.sel(head=1, position=3, query="top1")
    assert all(row["attack"] >= together.certified for row in alone.rows)
    some = pl.radius(toy, toy.example(0), "0.1:top1@-1", tokens=[-1], per_token=True, budget=SMALL)
    assert some.rows[0]["token"] == 3
    assert some.certified == alone.sel(token=3).certified


def test_deeper_layers(toy: Transformer) -> None:
    found = pl.radius(toy, toy.example(0), "1.0:top1@[0,1]", budget=SMALL, tolerance=0.3)
    assert len(found) == 2
    for row in found.rows:
        assert 0 < row["certified"] < row["attack"]


def test_what_has_no_radius(toy: Transformer) -> None:
    prompt = toy.example(0)
    broken = pl.radius(toy, prompt, "0.0:mass>=0.99@0", budget=SMALL)
    assert (broken.certified, broken.attack) == (0.0, 0.0)
    model = pl.load("toy-induction")
    mask = pl.radius(model, model.example(0).x[:1], "0.0:top1@0", budget=SMALL)
    assert mask.certified is None
    assert "mask" in mask.reason
    never = pl.radius(toy, prompt, "0.0:top1@0", between=(1e-6, 1e-5), budget=SMALL)
    assert never.attack is None
    assert math.isclose(never.certified, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": "entropy"}, "has no radius"),
        ({"engine": "jacobian"}, "only estimates"),
        ({"engine": "taylr"}, "there is no engine"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"between": (1.0, 0.1)}, "between"),
    ],
)
def test_mistakes(toy: Transformer, options: dict[str, object], message: str) -> None:
    with pytest.raises(ProoflensError, match=message):
        pl.radius(toy, toy.example(0), **options)  # type: ignore[arg-type]


def test_tables(found: pl.Radii) -> None:
    assert {"layer", "head", "position", "query", "certified", "attack", "clean", "engine", "ms"} <= set(
        found.to_pandas().columns
    )
    assert "<table>" in found._repr_html_()
    assert found.summary == {"rows": 16, "certified": 16, "broken": 16}


def test_deep_radii_take_few_proofs_and_end_where_proofs_end(
    toy: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many steps as needed, no more: the next place of the grid is not proved, whatever the guesses were."""
    asked: list[float] = []
    plain = RadiusSearch._is_proved

    def counted(self: RadiusSearch, eps: float, members: list[int]) -> list[bool]:
        asked.append(eps)
        return plain(self, eps, members)

    monkeypatch.setattr(RadiusSearch, "_is_proved", counted)
    query, step = "1.0:top1@-1", 0.05
    found = pl.radius(toy, toy.example(0), query, budget=SMALL, tolerance=step, engine="crown")
    assert len(asked) <= 8
    assert found.certified in asked
    above = min(eps for eps in asked if eps > found.certified)
    assert above < found.certified * (1.0 + step) ** 1.01
    holds, not_ = (
        pl.certify(toy, toy.example(0), pl.Ball(eps), queries=query, engine="crown", budget=SMALL).verdict
        for eps in (found.certified, above)
    )
    assert holds is Verdict.HOLDS
    assert not_ is not Verdict.HOLDS


@given(
    end=st.integers(2, 60),
    true=st.integers(-1, 59),
    power=st.floats(0.5, 8.0),
    depth=st.integers(1, 4),
    silent=st.booleans(),
)
def test_guesses_end_at_the_last_place_that_is_proved(
    end: int, true: int, power: float, depth: int, silent: bool
) -> None:
    """Whatever margins proofs report, the search ends, and at the right place."""
    grid = [1e-6 * 1.1**k for k in range(60)]
    true = min(true, end - 1)
    good, bad = -1, end
    reached: dict[int, float] = {}
    while bad - good > 1:
        place = guessed(grid, good, bad, end, 1.0, reached, depth)
        assert good < place < bad
        fine = place <= true
        share = (grid[place] / grid[max(true, 0)]) ** power
        reached[place] = (max(1.0 - share, 1e-3) if fine else -1e-3 - share) if not silent else -math.inf
        good, bad = (place, bad) if fine else (good, place)
    assert good == true
    assert len(reached) <= 12


def test_the_default_time_is_that_of_the_layers(toy: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prooflens.verdicts.forecast.LAYER_SECONDS", 1e-3)
    found = pl.radius(toy, toy.example(0), "1.0:top1@-1", budget=SMALL)
    assert found.unfinished == 1
    assert found.certified == 0.0
    assert "the time ended" in found.rows[0]["reason"]
