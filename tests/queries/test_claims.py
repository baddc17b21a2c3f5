"""Claims: what binding makes of queries, their programs against enumeration, ties, masks, circuits, outputs."""

import math
from collections.abc import Callable

import pytest
import torch
from flint import arb, ctx

from prooflens.errors import QueryError
from prooflens.queries import (
    Box,
    Circuit,
    Claim,
    Entropy,
    Row,
    Sense,
    Setting,
    TopK,
    causal_mask,
    entropy_range,
    full_mask,
    functional_bounds,
    padding_mask,
    parse_query,
    score_bounds,
    weight_box,
)
from prooflens.queries.simplex import group_difference, minimum_mass

from .boxes import candidate_vertices, random_boxes

ROW = Row(0, 0, 0)
BOXES = 1430  # seven sizes: 10,010 boxes


def setting_of(scores: list[float], **more: object) -> Setting:
    """One layer, one head; every query position has the same clean scores."""
    size = len(scores)
    matrix = torch.tensor(scores, dtype=torch.float64).expand(1, size, size)
    return Setting({0: matrix}, more.pop("mask", full_mask(size)), 1, 1, **more)  # type: ignore[arg-type]


def claim_of(text: str, scores: list[float], **more: object) -> Claim:
    (claim,) = parse_query(text).bind(setting_of(scores, **more))
    return claim


def sorted_boxes(count: int, size: int, seed: int) -> tuple[Box, torch.Tensor]:
    """Random boxes with the tokens ordered so that the clean point falls: one claim fits all of them."""
    lower, upper, point = random_boxes(count, size, seed)
    order = point.argsort(-1, descending=True)
    return Box(lower.gather(1, order), upper.gather(1, order)), point.gather(1, order)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("text", ["top1", "top2", "rank2", "rank3"])
def test_top_k_and_ranking_programs_against_enumeration(size: int, text: str) -> None:
    """The least log-ratio over all vertices; its sign is that of the least difference of weights."""
    box, _ = sorted_boxes(BOXES, size, seed=900 + size)
    claim = claim_of(f"{text}@0", [float(-j) for j in range(size)])
    program = claim.program({ROW: box})
    k = int(text[-1])
    ranked = text.startswith("rank")
    inside = range(min(k, size))
    pairs = [(i, j) for i in inside for j in range(i + 1 if ranked else k, size)]
    if not pairs:
        assert claim.conditions == ()
        return
    first, second = (torch.tensor(side) for side in zip(*pairs, strict=True))
    truth = torch.full((BOXES,), math.inf, dtype=torch.float64)
    apart = truth.clone()
    for vertex, fits in candidate_vertices(*box):
        ratio = (vertex[:, first].log() - vertex[:, second].log()).nan_to_num(nan=math.inf).amin(1)
        gap = (vertex[:, first] - vertex[:, second]).amin(1)
        truth = torch.where(fits, torch.minimum(truth, ratio), truth)
        apart = torch.where(fits, torch.minimum(apart, gap), apart)
    if not ranked:  # a ranking's conditions are a chain: the same sign, not the same least value
        assert (program <= truth + 1e-12).all()
    clear = apart.abs() > 1e-9
    assert torch.equal((program > 0)[clear], (apart > 0)[clear])
    if not ranked:
        # Weights of 1e-8 with an absolute rounding of 1e-15 have logarithms good to 1e-7.
        finite = truth.isfinite() & (box.upper > 1e-6).all(-1)
        torch.testing.assert_close(program[finite], truth[finite], rtol=0, atol=1e-8)


@pytest.mark.parametrize("size", range(2, 9))
def test_mass_specialisation_and_entropy_programs(size: int) -> None:
    box, point = sorted_boxes(500, size, seed=700 + size)
    scores = [float(-j) for j in range(size)]
    member = torch.zeros(size, dtype=torch.bool)
    member[0] = True
    other = torch.zeros(size, dtype=torch.bool)
    other[1] = True
    mass = claim_of("mass>=0.3@{0}@0", scores).program({ROW: box})
    direct = minimum_mass(member, *box) - 0.3
    clear = direct.abs() > 1e-9
    assert torch.equal((mass >= 0)[clear], (direct >= 0)[clear])
    spec = claim_of("spec{0}>{1}@0", scores).program({ROW: box})
    direct = group_difference(member, other, *box)
    clear = direct.abs() > 1e-9
    assert torch.equal((spec > 0)[clear], (direct > 0)[clear])
    lower, upper = claim_of("entropy@0", scores).bounds({ROW: box})
    below, above = entropy_range(*box)
    torch.testing.assert_close(torch.stack([lower[:, 0], upper[:, 0]]), torch.stack([below, above]))
    claims = [claim_of(text, scores) for text in ("entropy<=1.2@0", "0.1<=entropy<=1.2@0", "mass>=0.3@{0}@0")]
    concrete = {ROW: point.log()}
    for claim in claims:
        lower, upper = claim.bounds({ROW: box})
        values = claim.values(concrete)
        assert (lower <= values + 1e-12).all()
        assert (values <= upper + 1e-12).all()
        proved = claim.program({ROW: box}) >= 0
        assert claim.holds_on(concrete)[proved].all()


def test_conditions_and_truth_of_each_query() -> None:
    scores = [3.0, 2.0, 1.0, 0.0]
    points = {ROW: torch.tensor([scores, [2.0, 3.0, 1.0, 0.0], [3.0, 2.0, 0.0, 1.0]], dtype=torch.float64)}
    wanted = {
        "top1@0": [True, False, True],
        "top2@0": [True, True, True],
        "top3@0": [True, True, False],
        "rank2@0": [True, False, True],
        "rank3@0": [True, False, False],
        "rank4@0": [True, False, False],
        "mass>=0.5@0": [True, False, True],
        "spec{0,3}>{1,2}@0": [True, False, True],
        "0.0<=entropy<=1.0@0": [True, True, True],
        "entropy>=1.0@0": [False, False, False],
        "entropy@0": [True, True, True],
    }
    for text, truth in wanted.items():
        claim = claim_of(text, scores)
        assert claim.holds_on(points).tolist() == truth, text
        assert claim.clean_holds is truth[0]
        assert len(claim.clean) == len(claim.functionals) == len(claim.conditions)
    assert len(claim_of("top2@0", scores).conditions) == 4
    assert len(claim_of("rank3@0", scores).conditions) == 3


def test_every_bound_must_be_on_its_side() -> None:
    claim = claim_of("top1@0", [2.0, 1.0, 0.0])
    above = torch.full((2,), math.inf)
    assert claim.met(torch.tensor([0.1, 0.2]), above)
    assert claim.met_each(torch.tensor([0.0, 0.2]), above).tolist() == [False, True]
    assert not claim.met(torch.tensor([0.0, 0.2]), above)
    assert not claim.met(torch.tensor([float("nan"), 0.2]), above)
    assert claim_of("mass>=0.5@0", [2.0, 1.0, 0.0]).met(torch.tensor([0.0]), above[:1])
    entropy = claim_of("entropy@0", [2.0, 1.0, 0.0])
    assert entropy.conditions[0].sense is Sense.RANGE
    assert entropy.wants_range
    assert entropy.met(torch.tensor([0.1]), torch.tensor([0.4]))
    assert not entropy.met(torch.tensor([0.1]), torch.tensor([math.inf]))
    assert not entropy.met(torch.tensor([math.nan]), torch.tensor([0.4]))


@pytest.mark.parametrize(
    ("text", "tied"),
    [
        ("top1@0", None),
        ("top2@0", "keys 1 and 2 tie"),
        ("top3@0", None),
        ("rank2@0", "keys 1 and 2 tie"),
        ("rank3@0", "keys 1 and 2 tie"),
        ("rank1@0", None),
        ("mass>=0.5@0", None),
        ("entropy@0", None),
    ],
)
def test_ties_are_unknown_with_their_reason(text: str, tied: str | None) -> None:
    claim = claim_of(text, [5.0, 1.0, 1.0, 0.0])
    assert (claim.tie is None) == (tied is None)
    if tied:
        assert tied in str(claim.tie)


def test_ties_at_the_top() -> None:
    assert "tie" in str(claim_of("top1@0", [1.0, 1.0]).tie)
    assert "tie" in str(claim_of("mass>=0.2@0", [1.0, 1.0]).tie)
    assert claim_of("mass>=0.2@{0}@0", [1.0, 1.0]).tie is None
    assert claim_of("top2@0", [1.0, 1.0]).tie is None


def test_a_claim_that_fails_on_the_clean_input() -> None:
    claim = claim_of("mass>=0.9@{1}@0", [2.0, 1.0, 0.0])
    assert not claim.clean_holds
    assert claim.tie is None
    assert not claim.holds_on({ROW: torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)})


def test_masked_keys_are_no_challengers() -> None:
    """Position 1 of a causal row: key 2, though it scores highest, takes no part."""
    scores = [1.0, 0.0, 9.0]
    setting = setting_of(scores, mask=causal_mask(3))
    top = parse_query("top1").bind(setting)
    assert [len(claim.conditions) for claim in top] == [0, 1, 2]
    row = Row(0, 0, 1)
    (middle,) = parse_query("top1@1").bind(setting)
    hidden = {row: torch.tensor([1.0, 0.0, math.nan], dtype=torch.float64)}
    for text in ("top1@1", "mass>=0.6@1", "mass>=0.6@{0,2}@1", "entropy<=0.6@1", "rank3@1"):
        (claim,) = parse_query(text).bind(setting)
        assert bool(claim.holds_on(hidden)), text
    box = weight_box(hidden[row], hidden[row], mask=causal_mask(3)[1])
    assert float(middle.program({row: box})) == pytest.approx(1.0, abs=1e-12)


def test_single_token_rows_are_decided_by_the_mask() -> None:
    setting = setting_of([1.0, 0.0], mask=causal_mask(2))
    one = {ROW: Box(torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 0.0]).double())}
    for text in ("top1@0", "rank2@0", "mass>=0.9@0", "entropy<=0.1@0", "spec{0}>{1}@0"):
        (claim,) = parse_query(text).bind(setting)
        assert claim.clean_holds, text
        assert float(claim.program(one)) > 0, text
    (top,) = parse_query("top1@0").bind(setting)
    assert top.met(torch.zeros(0), torch.zeros(0))
    (future,) = parse_query("mass>=0.1@{1}@0").bind(setting)
    assert not future.clean_holds
    assert float(future.program(one)) < 0
    (backwards,) = parse_query("spec{1}>{0}@0").bind(setting)
    assert not backwards.clean_holds


def test_padding_rows_are_skipped_or_refused() -> None:
    setting = setting_of([1.0, 0.0, 0.0], mask=padding_mask(torch.tensor([True, True, False])))
    assert len(parse_query("top1").bind(setting)) == 2
    with pytest.raises(QueryError, match="padding"):
        parse_query("top1@2").bind(setting)


def two_heads() -> Setting:
    scores = torch.tensor([[3.0, 2.0, 0.0], [0.0, 1.0, 4.0]], dtype=torch.float64)
    return Setting(
        {0: scores[:, None].expand(2, 3, 3)}, full_mask(3), 1, 2, logits=torch.tensor([0.0, 2.0, 1.0])
    )


def test_a_circuit_is_the_and_of_its_parts() -> None:
    (claim,) = parse_query("0.0:top1@-1 & 0.1:top1@-1 & argmax").bind(two_heads())
    rows = (Row(0, 0, 2), Row(0, 1, 2))
    assert claim.rows == rows
    assert len(claim.conditions) == 6
    assert claim.clean_holds
    points = {
        rows[0]: torch.tensor([[3.0, 2.0, 0.0], [2.0, 3.0, 0.0], [3.0, 2.0, 0.0]]),
        rows[1]: torch.tensor([[0.0, 1.0, 4.0], [0.0, 1.0, 4.0], [4.0, 1.0, 0.0]]),
    }
    logits = torch.tensor([[0.0, 2.0, 1.0]]).expand(3, 3)
    assert claim.holds_on(points, logits).tolist() == [True, False, False]
    assert claim.holds_on(points, logits.flip(-1)).tolist() == [not i for i in range(3)]


def test_a_weighted_sum_is_one_joint_functional() -> None:
    """1·(a_0 − a_1) − 2·(a_0 − a_1 of the other head): clean value 1 + 2; its program adds the rows' programs."""
    (claim,) = parse_query("1 * 0.0:spec{0}>{1}@2 + -2 * 0.1:spec{0}>{1}@2 > 0").bind(two_heads())
    assert claim.clean.tolist() == [3.0]
    assert claim.functionals[0].rows == (Row(0, 0, 2), Row(0, 1, 2))
    width = torch.full((3,), 0.1, dtype=torch.float64)
    clean = two_heads().rows(claim.rows)
    boxes = {row: weight_box(scores - width, scores + width) for row, scores in clean.items()}
    lower, upper = claim.bounds(boxes)
    assert float(lower) < 3.0 < float(upper)
    assert float(claim.program(boxes)) == float(lower)
    for seed in range(50):
        noise = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
        moved = {row: clean[row] + width * noise[i] for i, row in enumerate(clean)}
        assert float(lower) <= float(claim.values(moved)) <= float(upper)
    for text in ("1 * 0.0:top1@2 > 0", "1 * 0.0:mass>=0.2 > 0", "1 * 0.0:entropy@2 > 0"):
        with pytest.raises(QueryError, match="needs one with a threshold"):
            parse_query(text).bind(two_heads())


def test_many_programs_at_once_equal_one_by_one() -> None:
    setting = two_heads()
    claims = [
        claim
        for text in ("top1", "rank3", "mass>=0.4", "entropy<=1.0")
        for claim in parse_query(text).bind(setting)
    ]
    width = torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = {row for claim in claims for row in claim.rows}
    boxes = {row: weight_box(setting.row(row) - width, setting.row(row) + width) for row in rows}
    together = Claim.programs(claims, boxes)
    assert together.shape == (5, len(claims))
    for index, claim in enumerate(claims):
        torch.testing.assert_close(together[:, index], claim.program(boxes), rtol=0, atol=1e-13)


def test_wider_score_boxes_never_help() -> None:
    """Rule 4 through the whole chain: score box, weight box, program."""
    setting = two_heads()
    claims = [
        claim
        for text in ("top2", "mass>=0.4", "0.2<=entropy<=1.0")
        for claim in parse_query(text).bind(setting)
    ]
    rows = {row for claim in claims for row in claim.rows}
    width = torch.linspace(0, 2, 40, dtype=torch.float64)[:, None]
    boxes = {row: weight_box(setting.row(row) - width, setting.row(row) + width) for row in rows}
    assert (Claim.programs(claims, boxes).diff(dim=0) <= 1e-13).all()


def test_score_boxes_bound_functionals_exactly() -> None:
    """Over a box of scores: monotone atoms reach their ends at corners; nothing is wider than going through weights."""
    setting = two_heads()
    texts = (
        "top1",
        "mass>=0.4",
        "spec{0}>{1,2}",
        "entropy",
        "1 * 0.0:spec{0}>{1}@2 + -2 * 0.1:entropy<=1@2 > 0",
    )
    claims = [claim for text in texts for claim in parse_query(text).bind(setting)]
    functionals = [f for claim in claims for f in claim.functionals]
    clean = setting.rows({row for f in functionals for row in f.rows})
    width = torch.tensor([0.3, 0.1, 0.7], dtype=torch.float64)
    boxes = {row: Box(scores - width, scores + width) for row, scores in clean.items()}
    low, high = score_bounds(functionals, boxes)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    moved = {row: scores + width * corners for row, scores in clean.items()}
    values = torch.stack([f.value(moved) for f in functionals], -1)
    assert (low <= values + 1e-15).all()
    assert (values <= high + 1e-15).all()
    for index, functional in enumerate(functionals):
        if len(functional.rows) == 1 and "entropy" not in functional.name:
            assert float(low[index]) == pytest.approx(float(values[:, index].min()), abs=1e-13)
            assert float(high[index]) == pytest.approx(float(values[:, index].max()), abs=1e-13)
    through = functional_bounds(functionals, {row: weight_box(*box) for row, box in boxes.items()})
    assert (through[0] <= low + 1e-12).all()
    assert (high <= through[1] + 1e-12).all()


def test_argmax() -> None:
    (claim,) = parse_query("argmax").bind(two_heads())
    assert claim.clean.tolist() == [1.0, 2.0]
    assert claim.rows == ()
    assert claim.holds_on({}, torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])).tolist() == [True, False]
    with pytest.raises(QueryError, match="about outputs"):
        claim.program({})
    tied = Setting({}, full_mask(1), 1, 1, logits=torch.tensor([1.0, 1.0]))
    assert "outputs 0 and 1 tie" in str(parse_query("argmax").bind(tied)[0].tie)


def test_programs_refuse_what_weights_do_not_say() -> None:
    claim = claim_of("top1@0", [2.0, 1.0])
    with pytest.raises(QueryError, match=r"needs a box of row 0\.0@0"):
        claim.program({})


def test_one_claim_per_head_and_position() -> None:
    claims = parse_query("top1").bind(two_heads(), heads="0.1")
    assert [claim.rows[0] for claim in claims] == [Row(0, 1, position) for position in range(3)]
    assert len(parse_query("top1").bind(two_heads())) == 6
    assert len(parse_query("0.0:top1").bind(two_heads(), heads="0.1")) == 3, "the query's own heads win"


def test_sums_round_their_constant_down_whatever_the_sign() -> None:
    """Σ w f of real numbers: the constant of the sum is never above −Σ w log(τ/(1−τ)), also for w < 0."""
    setting = Setting({0: torch.randn(2, 4, 4, dtype=torch.float64)}, full_mask(4), 1, 2)
    for tau in ("0.1", "0.3", "0.5", "0.7", "0.123"):
        for first, second in ((1.0, -1.0), (-0.7, 3.1), (-2.0, -5.3)):
            query = f"{first} * 0.0:mass>={tau}@0 + {second} * 0.1:mass>={tau}@1 > 0"
            (claim,) = parse_query(query).bind(setting)
            ctx.prec = 200
            odds = (arb(float(tau)) / (1 - arb(float(tau)))).log()
            true = -(arb(first) + arb(second)) * odds
            (functional,) = claim.functionals
            assert arb(functional.constant) < true
            assert float(true) - functional.constant < 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Entropy(math.nan), "finite number of nats"),
        (lambda: TopK(1.5), "a count of at least 1"),  # type: ignore[arg-type]
        (lambda: Circuit(["0.0:top1@0"]), "parse_query"),  # type: ignore[arg-type]
        (lambda: Circuit([parse_query("0.0:mass>=0.2@0")], [math.inf]), "finite numbers"),  # type: ignore[arg-type]
    ],
)
def test_queries_of_no_numbers(make: Callable[[], object], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        make()
