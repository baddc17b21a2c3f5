"""A tier of the soundness run that every change goes through, and planted counterexamples."""

import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch

from prooflens.engines import FormBounds, Forms, Guarantee, engine_names, get_engine
from prooflens.engines.attack import break_claims
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.counting import counter
from prooflens.engines.counting.ordering import ascending
from prooflens.engines.functionals import bound_claims, refusal
from prooflens.engines.protocol import EngineBase, EngineOptions
from prooflens.errors import EngineError
from prooflens.evaluation.soundness import (
    FAMILIES,
    NETWORKS,
    SOLU,
    Case,
    SoundnessReport,
    modest,
    random_case,
    random_model,
    run,
    try_case,
    try_forms,
    try_planted,
)
from prooflens.evaluation.soundness.effects import random_edits
from prooflens.evaluation.soundness.planted import planted_case
from prooflens.evaluation.soundness.run import FORMS_BUDGET
from prooflens.problem import Problem
from prooflens.report.soundness import write_soundness
from prooflens.verdicts.decide import decide
from tests.engines.cases import tiny_model

pytestmark = pytest.mark.slow

PROVED = [name for name in engine_names() if get_engine(name).guarantee is Guarantee.PROVED]
FAST = ["interval", "layer0"]
FEWER = {"alpha-crown": 4, "pz": 3, "pz-norm": 3, "pz-simplex": 3}
"""Engines that share their rules with another one (`crown`, `cpz`) are asked about one case in so many."""
SMALL = 12
"""Numbers in an input that engines which search, or carry sets through the model, are asked about."""
DEEP = (58, 20, 82, 357, 93, 94, 146, 188, 247, 291, 306, 367, 748, 1006, 1148, 2885)
"""Cases of deep models, one of every family, with small inputs of more factors than are asked in pieces."""


@cache
def small_cases() -> tuple[Case, ...]:
    """The first case of every family, from seed 7 on, with two tokens or more of few numbers; one is deep."""
    found = {"deep": random_case(28)}
    for case in map(random_case, range(7, 500)):
        x = case.problem.region.center
        if len(x) > 1 and x.numel() <= SMALL and case.problem.model.architecture.n_layers < 3:
            found.setdefault(case.family, case)
    assert found["deep"].problem.model.architecture.n_layers == 5
    assert set(found) == {"deep", NETWORKS, SOLU, *FAMILIES}
    return tuple(found.values())


@pytest.mark.parametrize(("start", "cases"), [(8, 6), (14, 15), (29, 15)])
def test_no_proved_bound_is_broken(start: int, cases: int) -> None:
    """`exact` is asked in the first cases."""
    engines = ["exact", *FAST] if start == 8 else FAST
    report = run(cases, seed=start, engines=engines, budget=AttackBudget(100, 3, 15))
    assert report.violations == []
    assert report.cases == {"claims": cases}
    assert report.bounds > 10 * cases
    assert report.proved > 0


@pytest.mark.parametrize("engine", [name for name in PROVED if name not in ("exact", *FAST)])
def test_no_bound_of_a_slower_engine_is_broken(engine: str) -> None:
    report = SoundnessReport()
    for case in small_cases()[:: FEWER.get(engine, 1)]:
        try_case(case, [modest(engine)], AttackBudget(50, 2, 10), report)
    assert report.violations == []
    assert report.bounds > 20


def test_no_bound_of_many_forms_is_broken() -> None:
    report = run(12, seed=900, engines=["layer0", "interval", "crown"], kinds=["forms"])
    for case in small_cases()[:4]:
        try_forms(case, [get_engine("zonotope")], FORMS_BUDGET, report)
    assert report.violations == []
    assert report.bounds > 4_000
    assert {"margin", "output margin", "sum of rows"} <= {query for _, _, query in report.attacked}


def test_no_readout_and_no_effect_is_broken() -> None:
    report = run(4, seed=4_000, engines=["interval", "crown"], kinds=["reads", "effects"])
    assert report.violations == []
    assert report.cases == {"reads": 4, "effects": 4}
    queries = {query for _, _, query in report.attacked}
    assert {"readout", "readout margin", "effect on weighted output"} <= queries


def test_families_can_be_chosen() -> None:
    report = run(3, seed=40, engines=["interval"], kinds=["forms"], families=[SOLU, "qwen3"])
    assert report.cases == {"forms": 3}
    assert {family for family, _, _ in report.attacked} <= {SOLU, "qwen3"}
    with pytest.raises(EngineError, match="no family 'gpt5' to draw"):
        run(1, families=["gpt5"])
    with pytest.raises(EngineError, match="of no family: leave out"):
        run(1, kinds=["counts"], families=[SOLU])


def test_a_model_of_one_part_is_edited() -> None:
    kind = {"has_network": False, "n_heads": 1, "n_layers": 1}
    model = tiny_model(0, **kind)
    for seed in range(20):
        assert random_edits(model, random.Random(seed), 1)


def test_every_family_is_tried() -> None:
    first, report = dict[str, Case](), SoundnessReport()
    for case in map(random_case, range(500, 660)):
        first.setdefault(case.family, case)
    for case in first.values():
        try_forms(case, [get_engine("interval")], AttackBudget(20, 1, 2), report)
    assert {family for family, _, _ in report.attacked} == {NETWORKS, SOLU, *FAMILIES}


def test_deep_models_of_every_family_are_drawn_and_asked_at_every_layer() -> None:
    cases = [random_case(seed) for seed in range(900)]
    layers = [case.problem.model.architecture.n_layers for case in cases]
    assert set(layers) == {1, 2, 3, 4, 5, 6}
    assert 230 < sum(n > 2 for n in layers) < 370
    assert {case.family for case, n in zip(cases, layers, strict=True) if n > 4} == {
        NETWORKS,
        SOLU,
        *FAMILIES,
    }
    assert {row.layer for case in cases for claim in case.claims for row in claim.rows} == set(range(6))


def test_bounds_of_deep_models_are_proved_and_hold() -> None:
    """Of every family one model of four layers or more, asked about behind the second."""
    cases, report = [random_case(seed) for seed in DEEP], SoundnessReport()
    assert sorted(case.family for case in cases) == sorted((*FAMILIES, SOLU))
    for case in cases:
        layers = {row.layer for claim in case.claims for row in claim.rows}
        assert case.problem.model.architecture.n_layers > 3
        assert min(layers) > 1
        try_case(case, [get_engine("taylor")], AttackBudget(30, 1, 8), report)
    for case in cases[::4]:
        try_forms(case, [get_engine("taylor")], AttackBudget(20, 1, 5), report)
    assert report.violations == []
    assert report.bounds > 500
    assert report.proved > 0


class _Liar(EngineBase):
    """An engine that claims a little more than is true."""

    name = "liar"
    guarantee = Guarantee.PROVED

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        return get_engine("layer0").refuses(problem, forms, options)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        honest = get_engine("layer0").bound_forms(problem, forms, options)
        middle = (honest.lower + honest.upper) / 2
        return FormBounds(middle + 0.9 * (honest.lower - middle), middle + 0.9 * (honest.upper - middle))


def test_a_false_bound_is_caught() -> None:
    report = SoundnessReport()
    for seed in range(20):
        case = random_case(seed)
        if any(row.layer for claim in case.claims for row in claim.rows) or any(
            not c.rows for c in case.claims
        ):
            continue
        try_case(case, [_Liar()], AttackBudget(100, 3, 15), report)
    assert len({v.seed for v in report.violations}) > 3


def test_a_false_bound_of_a_form_is_caught() -> None:
    report = SoundnessReport()
    for seed in range(25):
        try_forms(random_case(seed), [_Liar()], AttackBudget(64, 2, 10), report)
    assert len({v.seed for v in report.violations}) > 3


class _Believer(_Liar):
    """An engine that proves everything."""

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        return None

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        ones = torch.ones(forms.size, dtype=torch.float64)
        return FormBounds(ones, 2 * ones)


def test_a_certified_planted_counterexample_is_a_violation() -> None:
    report = SoundnessReport()
    for seed in range(2):
        try_planted(seed, [_Believer(), get_engine("interval")], report)
    assert [v.engine for v in report.violations] == ["liar", "liar"]
    assert report.planted == {"liar": 2, "interval": 2}


def test_the_dashboard_counts_what_was_tried(tmp_path: Path) -> None:
    kept: list[int] = []
    report = run(2, seed=3, engines=["interval"], kinds=["forms"], keep=lambda r: kept.append(r.bounds))
    write_soundness(report.to_dict(), tmp_path / "new", "prooflens soundness <b>")
    found = json.loads((tmp_path / "new" / "soundness.json").read_text())
    page = (tmp_path / "new" / "soundness.html").read_text()
    assert kept == [report.bounds]
    assert found["bounds_attacked"] == sum(row["bounds"] for row in found["attacked"]) == report.bounds
    assert "prooflens soundness &lt;b&gt;" in page
    assert "<b>" not in (tmp_path / "new" / "soundness.svg").read_text()


def test_unknown_kinds_are_named() -> None:
    with pytest.raises(EngineError, match="kinds are claims, forms, planted, counts"):
        run(1, kinds=["clams"])


def test_a_run_that_would_attack_nothing_is_refused() -> None:
    for options in ({"cases": 0}, {"cases": 1, "seconds": -1.0}):
        with pytest.raises(EngineError, match="attacks nothing"):
            run(**options)
    with pytest.raises(EngineError, match="no proof to attack"):
        run(1, engines=["attack"])


@pytest.mark.parametrize("about_output", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_planted_counterexamples_are_not_certified(seed: int, about_output: bool) -> None:
    planted = planted_case(seed, about_output)
    problem, claim = planted.problem, planted.claim
    scores, logits = problem.values(
        problem.region.point(planted.alpha), [] if about_output else [1], about_output
    )
    rows = {row: scores[row.layer][row.head, row.position] for row in claim.rows}
    assert claim.clean_holds
    assert not bool(claim.holds_on(rows, logits))
    assert break_claims(problem, [claim], AttackBudget(200, 5, 20), seed) == [None]
    for name in PROVED:
        engine = modest(name)
        if refusal(engine, problem, claim.functionals) is None:
            (bounds,), _ = bound_claims(engine, problem, [claim])
            assert decide(claim, bounds) is None, name


def test_cases_are_reproducible() -> None:
    first, second = random_case(7), random_case(7)
    assert first.problem.model.sha256 == second.problem.model.sha256
    assert torch.equal(first.problem.region.center, second.problem.region.center)
    assert [str(c) for c in first.claims] == [str(c) for c in second.claims]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_attend_unevenly(family: str) -> None:
    model = random_model(family, random.Random(3))
    x = torch.randn(
        4, model.architecture.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    assert float(model.pattern(x, 0).max()) > 0.3


def test_a_report_is_json_ready() -> None:
    report = run(2, seed=0, engines=FAST, budget=AttackBudget(10, 1, 1))
    assert isinstance(report.to_dict()["bounds_attacked"], int)
    assert json.loads(json.dumps(report.to_dict()))["cases"] == {"claims": 2}


def test_counts_over_vocabularies_are_tried_and_a_wrong_count_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = run(45, seed=0, engines=["interval"], kinds=["counts"])
    assert report.cases["counts"] == 45
    assert report.bounds > 100
    assert report.violations == []
    monkeypatch.setattr(counter, "ascending", lambda values: ascending(-values))
    assert run(15, seed=0, engines=["interval"], kinds=["counts"]).violations
