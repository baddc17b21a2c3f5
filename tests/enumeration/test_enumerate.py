"""Families, run: counts, shares, margins and failures against every member by itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prooflens as pl
from prooflens.enumeration.tally import BINS, Histogram, Tally
from prooflens.enumeration.walk import Walk, part_file
from prooflens.errors import ProoflensError
from prooflens.families import Family, Member
from prooflens.models import Transformer
from tests.enumeration.words import reader

NAMES = [" Mary", " John", " Kate", " Tom", " Alice"]
TEMPLATE = pl.Template(
    "When{A} and{B} met the{P},{B} spoke to",
    A=NAMES,
    B=[*NAMES, " James", " Bob"],
    P=[" store", " park"],
    differ=[("A", "B")],
)
Truth = Callable[[Transformer, Member], float]


def pattern(model: Transformer, member: Member, layer: int, head: int, at: int) -> np.ndarray:
    found: np.ndarray = model.pattern(torch.tensor(member.ids), layer)[head, at].numpy()
    return found


def logits(model: Transformer, member: Member) -> np.ndarray:
    found: np.ndarray = model(torch.tensor(member.ids))[-1].numpy()
    return found


def last_b(member: Member) -> int:
    return member.roles["B"][1][0]


def top(model: Transformer, member: Member) -> float:
    row = np.log(pattern(model, member, 1, 2, last_b(member))[: last_b(member) + 1])
    key = member.roles["B"][0][0]
    return float(row[key] - np.delete(row, key).max())


def mass(model: Transformer, member: Member) -> float:
    row = pattern(model, member, 0, 1, len(member.ids) - 1)
    share = sum(row[i] for span in member.roles["B"] for i in span) + row[member.roles["A"][0][0]]
    return float(np.log(share / (1.0 - share)) - np.log(0.3 / 0.7))


def spec(model: Transformer, member: Member) -> float:
    row = pattern(model, member, 1, 0, len(member.ids) - 1)
    return float(np.log(row[member.roles["A"][0][0]]) - np.log(row[member.roles["P"][0][0]]))


def previous(model: Transformer, member: Member) -> float:
    at = member.roles["P"][0][0]
    row = np.log(pattern(model, member, 0, 3, at)[: at + 1])
    return float(row[at - 1] - np.delete(row, at - 1).max())


def beats(model: Transformer, member: Member) -> float:
    found, ids = logits(model, member), member.ids
    return float(found[ids[member.roles["A"][0][0]]] - found[ids[member.roles["B"][0][0]]])


def answer(model: Transformer, member: Member) -> float:
    found, token = logits(model, member), member.ids[member.roles["P"][0][0]]
    return float(found[token] - np.delete(found, token).max())


CLAIMS: dict[str, Truth] = {
    "1.2:top1={B.1.first}@{B.2.first}": top,
    "0.1:mass>=0.3@{A,B}@-1": mass,
    "1.0:spec{A}>{P}@-1": spec,
    "0.3:top1={-1}@{P}": previous,
    "logit{A}>logit{B}": beats,
    "argmax={P}": answer,
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tree", [True, False])
def test_counts_margins_and_shares_are_those_of_every_member_by_itself(kind: str, tree: bool) -> None:
    model = reader(kind)
    family = TEMPLATE.of(model)
    found = pl.family(model, TEMPLATE, list(CLAIMS), tree=tree, batch=17, nearest=4)
    everyone = list(family)
    assert len(family.shapes) == 2
    assert len(everyone) == found[0].members
    for row, truth in zip(found, CLAIMS.values(), strict=True):
        margins = {member.text: truth(model, member) for member in everyone}
        held = {member.text: margins[member.text] > 0 for member in everyone}
        assert (row.asked, row.held) == (len(everyone), sum(held.values()))
        assert row.word == "enumerated"
        assert row.interval is None
        assert {judged.text for judged in row.failures} == {text for text in held if not held[text]}
        for judged in (*row.failures, *row.worst, *row.nearest):
            assert judged.margin == pytest.approx(margins[judged.text], rel=1e-9, abs=1e-9)
        assert row.least == pytest.approx(min(margins.values()), abs=1e-9)
        assert row.smallest == pytest.approx(min(map(abs, margins.values())), abs=1e-9)
        for slot in family.slots:
            shares = found.shares(row.query, slot)
            for filler, (good, asked) in shares.items():
                here = [held[member.text] for member in everyone if member.fillers[slot] == filler]
                assert (good, asked) == (sum(here), len(here))
        for (a, b), table in row.by_pair.items():
            for i, j in np.ndindex(table.shape[1:]):
                words = family.filler(a, i), family.filler(b, j)
                here = [held[m.text] for m in everyone if (m.fillers[a], m.fillers[b]) == words]
                assert table[:, i, j].tolist() == [sum(here), len(here)]
        width, counts = row.histogram
        bins = [int(np.floor(margin / width)) + BINS for margin in margins.values()]
        assert counts.tolist() == np.bincount(bins, minlength=2 * BINS).tolist()


def test_a_bidirectional_model_counts_the_same() -> None:
    model = reader("bert")
    found = pl.family(model, TEMPLATE, ["1.2:top1={B.1.first}@{A}", "0.1:entropy<=1.9@{B.2.last}"])
    for row, (layer, head) in zip(found, [(1, 2), (0, 1)], strict=True):
        good = 0
        for member in TEMPLATE.of(model):
            if layer == 1:
                weights = pattern(model, member, layer, head, member.roles["A"][0][0])
                good += int(weights.argmax() == member.roles["B"][0][0])
            else:
                weights = pattern(model, member, layer, head, member.roles["B"][1][-1])
                good += int(-(weights * np.log(weights)).sum() <= 1.9)
        assert row.held == good


def test_small_families_are_proved_when_balls_confirm_every_member() -> None:
    template = pl.Template("When{A} met{B}", A=NAMES[:2], B=NAMES[2:4])
    found = pl.family(reader(), template, ["1.1:spec{A}>{B}@-1", "logit{A}>logit{B}"], nearest=4)
    assert [row.word for row in found] == ["proved", "proved"]
    assert all(judged.confirmed == "confirmed" for row in found for judged in row.nearest)
    few = pl.family(reader(), template, "1.1:spec{A}>{B}@-1", nearest=3)
    assert few[0].word == "enumerated"
    assert "3 confirmed" in few[0].note


def test_a_wrong_sign_is_contradicted_by_balls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin that float64 got wrong is not confirmed, and nothing is called proved."""
    add = Tally.add
    monkeypatch.setattr(Tally, "add", lambda self, m, held, who: add(self, -m, ~held, who))
    found = pl.family(reader(), pl.Template("When{A} met", A=NAMES[:3]), "1.1:spec{A}>{0}@-1")
    assert found[0].word == "enumerated"
    assert {j.confirmed for j in found[0].nearest} == {"contradicted"}


def test_a_model_too_large_for_balls_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prooflens.enumeration.confirm.PRODUCT_SECONDS", 1.0)
    row = pl.family(reader(), TEMPLATE, "1.0:spec{A}>{P}@-1")[0]
    assert "not confirmed" in row.note
    assert row.word == "enumerated"


def test_samples_are_estimates_whose_interval_holds_the_share() -> None:
    whole = pl.family(reader(), TEMPLATE, "1.0:spec{A}>{P}@-1")[0]
    row = pl.family(reader(), TEMPLATE, "1.0:spec{A}>{P}@-1", sample=300, seed=5)[0]
    assert row.word == "estimated"
    assert row.asked == 300
    assert row.interval is not None
    assert row.interval[0] <= whole.share <= row.interval[1]
    huge = pl.Swaps("When Mary and John met", dict.fromkeys(range(1, 5), pl.ALL) | {0: pl.ALL}).of(reader())
    assert huge.size == 60**5
    many = pl.Swaps("When" + " and" * 9, dict.fromkeys(range(10), pl.ALL))
    assert pl.family(reader(), many, "0.0:top1={self}@-1", sample=50)[0].verdict in ("fails", "estimated")
    with pytest.raises(ProoflensError, match="more than 10¹²"):
        pl.family(reader(), many, "0.0:top1={self}@-1")


def test_early_stops_at_the_first_failure() -> None:
    row = pl.family(reader(), TEMPLATE, "argmax={P}", early=True, batch=3)[0]
    assert row.stopped
    assert row.failed >= 1
    assert row.asked <= 3
    assert row.to_dict()["share"] is None


def test_what_was_not_run_whole_is_not_called_enumerated(tmp_path: Path) -> None:
    ask = "0.0:top1={self}@0"  # true by the mask alone
    part = pl.family(reader(), TEMPLATE, ask, out=tmp_path / "run", part=(1, 2))[0]
    assert (part.word, part.verdict) == ("incomplete", "incomplete")
    whole = pl.family(reader(), TEMPLATE, ask, out=tmp_path / "run", part=(2, 2))[0]
    assert (whole.word, whole.verdict, whole.least) == ("enumerated", "holds", float("inf"))


def test_batches_are_halved_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, judge, sizes = pl.family(reader(), TEMPLATE, list(CLAIMS)), Walk._judge, []

    def scarce(self: Walk, number: int, shape: Any, digits: np.ndarray) -> Any:
        sizes.append(len(digits))
        if len(digits) > 7:
            raise MemoryError
        return judge(self, number, shape, digits)

    monkeypatch.setattr(Walk, "_judge", scarce)
    found = pl.family(reader(), TEMPLATE, list(CLAIMS))
    assert max(sizes) > 7
    assert [(row.held, row.asked) for row in found] == [(row.held, row.asked) for row in whole]


def test_a_model_that_overflows_is_told() -> None:
    model = reader()
    huge = {name: 1e200 * model.weights[name] for name in ("blocks.1.q.weight", "blocks.1.k.weight")}
    weights = dict(model.weights) | huge
    with pytest.raises(ProoflensError, match="gives no number on"):
        pl.family(replace(model, weights=weights), TEMPLATE, "1.0:spec{A}>{P}@-1")


def test_all_failures_are_counted_and_the_first_ones_listed() -> None:
    row = pl.family(reader(), TEMPLATE, "argmax={P}", keep=2)[0]
    assert len(row.failures) == 2
    assert row.failed > 2


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pl.family(reader(), TEMPLATE, list(CLAIMS), batch=5)
    monkeypatch.setattr("prooflens.enumeration.walk.KEEP_SECONDS", 0.0)
    count, calls = Walk._count, []

    def interrupted(self: Walk, *given: Any) -> None:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        count(self, *given)

    monkeypatch.setattr(Walk, "_count", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pl.family(reader(), TEMPLATE, list(CLAIMS), batch=5, out=tmp_path / "run")
    kept = part_file(tmp_path / "run", (1, 1))
    assert kept.is_file()
    with pytest.raises(ProoflensError, match="about another"):
        pl.family(reader(), TEMPLATE, "argmax={P}", batch=5, out=tmp_path / "run")
    found = pl.family(reader(), TEMPLATE, list(CLAIMS), batch=5, out=tmp_path / "run")
    assert not kept.exists()
    assert (tmp_path / "run" / "run.json").is_file()
    for a, b in zip(found, whole, strict=True):
        assert (a.held, a.asked) == (b.held, b.asked)
        assert a.least == pytest.approx(b.least, rel=1e-9)
        assert [j.text for j in a.failures] == [j.text for j in b.failures]


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    whole = pl.family(reader(), TEMPLATE, list(CLAIMS))
    for part in (2, 1, 3):
        found = pl.family(reader(), TEMPLATE, list(CLAIMS), out=tmp_path / "run", part=(part, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    for a, b in zip(found, whole, strict=True):
        assert (a.held, a.asked) == (b.held, b.asked)
        assert (a.least, a.smallest) == pytest.approx((b.least, b.smallest), rel=1e-9)
        assert {j.text for j in a.failures} == {j.text for j in b.failures}
        assert all((a.by_slot[slot] == b.by_slot[slot]).all() for slot in a.by_slot)
        assert a.histogram[0] == b.histogram[0]
        assert (a.histogram[1] == b.histogram[1]).all()


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("0.0:top1@-1", "compares with a clean prompt"),
        ("0.0:rank2@-1", "compares with a clean prompt"),
        ("0.0:mass>=0.2@-1", "compares with a clean prompt"),
        ("argmax", "compares with a clean prompt"),
        ("0.0:entropy", "has no sign"),
        ("top1={A}@-1", "names no head"),
        ("9.0:top1={A}@-1", "there is no head"),
        ("0.0:top1={A.2}@-1", "stands 1 times"),
        ("0.0:top1={B}@-1", "names"),
        ("0.0:top1={C}@-1", "no token has the text 'C'"),
        ("logit{C}>logit{A}", "no slot {C}"),
        ("logit99>logit{A}", "no output 99"),
    ],
)
def test_claims_that_say_nothing_of_a_member_alone_are_told(query: str, told: str) -> None:
    with pytest.raises(ProoflensError) as error:
        pl.family(reader(), TEMPLATE, query)
    assert told in str(error.value)


def test_other_wrong_arguments_are_told(tmp_path: Path) -> None:
    ask = "0.0:top1={A}@-1"
    with pytest.raises(ProoflensError, match="no family of prompts"):
        pl.family(reader(), "When Mary met", ask)  # type: ignore[arg-type]
    with pytest.raises(ProoflensError, match="float64"):
        pl.family(reader().to(dtype=torch.float32), TEMPLATE, ask)
    with pytest.raises(ProoflensError, match="made for another model"):
        pl.family(reader("gpt2"), TEMPLATE.of(reader()), ask)
    with pytest.raises(ProoflensError, match="kept beside a run"):
        pl.family(reader(), TEMPLATE, ask, part=(1, 2))
    assert isinstance(TEMPLATE.of(reader()), Family)


def test_histograms_of_parts_add_up() -> None:
    margins = np.random.default_rng(0).standard_cauchy(500)
    whole, first, second = Histogram(), Histogram(), Histogram()
    whole.add(margins)
    first.add(margins[:50])
    second.add(margins[50:])
    first.merge(second)
    assert first.exponent == whole.exponent
    assert (first.counts == whole.counts).all()
    assert whole.counts[BINS:].sum() == (margins >= 0).sum()
