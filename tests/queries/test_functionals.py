"""Functionals: closed-form gradients against autograd, remainder bounds under attack, tables against loops."""

import pytest
import torch

from prooflens.errors import QueryError
from prooflens.queries import (
    Functional,
    Logit,
    LogSumExp,
    Row,
    RowEntropy,
    Score,
    differences_from_scores,
    linearise,
    margin_table,
    remainder,
)
from prooflens.queries.functionals import group_log_ratio, logit_margin, margin
from prooflens.queries.remainder import entropy_rest, log_sum_exp_rest

ROW, OTHER = Row(1, 0, 2), Row(0, 3, 1)
KEYS = (0, 2, 3, 5)


def random_scores(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FUNCTIONALS = [
    margin(ROW, 3, 0),
    group_log_ratio(ROW, (0, 2), (3, 5)),
    Functional(((1.0, RowEntropy(ROW, KEYS)),), -0.5, "entropy"),
    Functional(
        ((0.7, LogSumExp(ROW, KEYS)), (-0.7, Score(ROW, 2)), (-2.0, RowEntropy(OTHER, (1, 4)))), 0.1, "joint"
    ),
]


@pytest.mark.parametrize("functional", FUNCTIONALS, ids=str)
def test_gradients_equal_autograd(functional: Functional) -> None:
    scores = {row: random_scores(20, 6, seed=row.layer).requires_grad_() for row in (ROW, OTHER)}
    value = functional.value(scores)
    wanted = torch.autograd.grad(value.sum(), [scores[row] for row in functional.rows])
    got = functional.gradient(scores)
    for row, gradient in zip(functional.rows, wanted, strict=True):
        torch.testing.assert_close(got[row], gradient, rtol=1e-12, atol=1e-14)


def test_values_by_hand() -> None:
    scores = {ROW: torch.tensor([1.0, 9.0, 1.0, 1.0, 9.0, 1.0], dtype=torch.float64)}
    four = torch.tensor(4.0, dtype=torch.float64)
    assert float(margin(ROW, 1, 0).value(scores)) == 8.0
    torch.testing.assert_close(RowEntropy(ROW, KEYS).value(scores[ROW]), four.log())
    torch.testing.assert_close(LogSumExp(ROW, KEYS).value(scores[ROW]), 1 + four.log())
    assert float(group_log_ratio(ROW, (0, 2), (3, 5)).value(scores)) == 0.0
    assert float(logit_margin(1, 0).value({}, torch.tensor([2.0, 5.0]))) == 3.0
    assert logit_margin(1, 0).logit_gradient(3).tolist() == [-1.0, 1.0, 0.0]
    constant = Functional((), -0.3, "constant").value({ROW: random_scores(5, 6)})
    assert constant.shape == (5,)


def test_errors_of_functionals() -> None:
    with pytest.raises(QueryError, match=r"needs the scores of row 1\.0@2"):
        margin(ROW, 1, 0).value({})
    with pytest.raises(QueryError, match="needs logits"):
        logit_margin(1, 0).value({})
    with pytest.raises(QueryError, match="not finite"):
        Functional(((float("inf"), Score(ROW, 0)),))
    with pytest.raises(QueryError, match="needs score differences"):
        remainder(FUNCTIONALS[2], {ROW: random_scores(6)}, {})


@pytest.mark.parametrize("functional", FUNCTIONALS, ids=str)
@pytest.mark.parametrize("radius", [0.01, 0.3, 2.0])
def test_remainders_survive_random_corners_and_inner_points(functional: Functional, radius: float) -> None:
    """200 rows × 400 deviations, half of them corners of their box, half uniform."""
    clean = {row: random_scores(200, 6, seed=3 + row.layer) for row in (ROW, OTHER)}
    generator = torch.Generator().manual_seed(7)
    widths = {row: radius * torch.rand(200, 6, generator=generator, dtype=torch.float64) for row in clean}
    differences = {row: differences_from_scores(-width, width) for row, width in widths.items()}
    low, high = remainder(functional, clean, differences)
    assert (low <= 0).all()
    assert (high >= 0).all()
    unit = torch.rand(400, 2, 200, 6, generator=generator, dtype=torch.float64) * 2 - 1
    unit[:200] = unit[:200].sign()
    deviations = {row: unit[:, i] * widths[row] for i, row in enumerate(clean)}
    moved = functional.value({row: clean[row] + deviations[row] for row in clean})
    linear = sum((functional.gradient(clean)[row] * deviations[row]).sum(-1) for row in functional.rows)
    rest = moved - functional.value(clean) - linear
    rounding = 1e-14 * (1 + moved.abs())
    assert (rest >= low - rounding).all()
    assert (rest <= high + rounding).all()


def test_remainders_of_joint_deviations_use_the_differences() -> None:
    """A common shift of all scores changes nothing, and the pairwise form knows it."""
    clean = random_scores(6)
    together = torch.zeros(6, 6, dtype=torch.float64)
    for rest in (log_sum_exp_rest, entropy_rest):
        low, high = rest(clean, together)
        assert -1e-12 < float(low) <= 0 <= float(high) < 1e-12


def test_remainder_is_second_order_and_not_far_from_the_truth() -> None:
    """Halving the box quarters the bound; at a small box the best corner reaches at least a tenth of it."""
    clean = random_scores(100, 5, seed=11, scale=1.0)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 5)
    for atom, rest in (
        (LogSumExp(ROW, tuple(range(5))), log_sum_exp_rest),
        (RowEntropy(ROW, tuple(range(5))), entropy_rest),
    ):
        bounds = {}
        for radius in (0.02, 0.01):
            width = torch.full((5,), radius, dtype=torch.float64)
            low, high = rest(clean, differences_from_scores(-width, width).expand(100, 5, 5))
            bounds[radius] = torch.maximum(-low, high)
        ratio = (bounds[0.02] / bounds[0.01]).mean()
        assert 3.8 < float(ratio) < 4.3
        deviation = 0.01 * corners[:, None]
        true = atom.value(clean + deviation) - atom.value(clean) - (atom.gradient(clean) * deviation).sum(-1)
        assert float((true.abs().amax(0) / bounds[0.01]).median()) > 0.1


def test_a_dominant_key_makes_the_log_sum_exp_nearly_linear() -> None:
    """Where Hoeffding's bound is blind: p = (1 − 3e−9, …), deviations ±1."""
    clean = torch.tensor([20.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    one = torch.ones(4, dtype=torch.float64)
    _, high = log_sum_exp_rest(clean, differences_from_scores(-one, one))
    assert float(high) < 1e-7 < 2.0**2 / 8


def test_margin_table_equals_the_loop() -> None:
    functionals = [margin(Row(1, 0, 2), 3, 0), FUNCTIONALS[1], margin(Row(0, 1, 1), 0, 5), FUNCTIONALS[3]]
    table = margin_table(functionals)
    assert table.index.tolist() == [0, 2]
    stacked = random_scores(4, 2, 4, 6, 6)
    for column, index in enumerate(table.index.tolist()):
        row = functionals[index].rows[0]
        loop = functionals[index].value({row: stacked[:, row.layer, row.head, row.position]})
        torch.testing.assert_close(table.values(stacked)[:, column], loop)
    assert len(margin_table([]).index) == 0


def test_linearisation_is_the_gradient_in_coordinates() -> None:
    stacked = random_scores(2, 4, 6, 6).requires_grad_()
    rows = {row: stacked[row.layer, row.head, row.position] for row in (ROW, OTHER)}
    table = linearise(FUNCTIONALS, {row: scores.detach() for row, scores in rows.items()})
    for index, functional in enumerate(FUNCTIONALS):
        value = functional.value(rows)
        (wanted,) = torch.autograd.grad(value, stacked, retain_graph=True)
        torch.testing.assert_close(table.value[index], value.detach())
        for layer in range(2):
            torch.testing.assert_close(table.dense(layer, 4, 6)[index], wanted[layer], rtol=1e-12, atol=1e-14)
    assert linearise([], {}).index.shape == (0,)
    with pytest.raises(QueryError, match="about outputs"):
        linearise([Functional(((1.0, Logit(0)),), name="logit")], {})
