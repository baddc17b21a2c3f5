"""`profile`: claims over all prompts against running every prompt, its file, its picture, its checker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker.findings import WrongError
from prooflens.checker.network import Network
from prooflens.checker.vocabulary import VocabularyChecker, recount
from prooflens.engines.counting import Slots
from prooflens.errors import QueryError
from prooflens.models import Transformer
from prooflens.models.files import write_model
from prooflens.models.sites import rotary_tables
from prooflens.report.vocabulary import draw_profiles
from prooflens.results.vocabulary import Profiles
from prooflens.statistics import clopper_pearson
from tests.conftest import Call
from tests.engines.counting.models import KINDS, VOCABULARY, model_of
from tests.engines.counting.test_counts import prompts_of

N = 4


def tables(n: int, d_head: int, theta: float) -> tuple[Any, Any]:
    cos, sin = rotary_tables(n, d_head, theta, torch.zeros(1, dtype=torch.float64))
    return cos.numpy(), sin.numpy()


def patterns(model: Transformer, head: int, slots: Slots | None = None) -> torch.Tensor:
    prompts = prompts_of(slots or Slots.of(N, VOCABULARY))
    return model.pattern(prompts, 0)[:, head, -1]


@pytest.mark.parametrize("kind", ["rotary", "bert"])
def test_claims_against_every_prompt(kind: str) -> None:
    model = model_of(kind, seed=21)
    claims = ["top1={-1}", "top1={self,0}", "spec{0>1}", "spec{2>self}"]
    (found,) = pl.profile(model, "0.1", length=N, claims=claims)
    s = patterns(model, 1)
    best = s.argmax(-1)
    truth = [best == 2, (best == 3) | (best == 0), s[:, 0] > s[:, 1], s[:, 2] > s[:, 3]]
    for count, true in zip(found.claims, truth, strict=True):
        assert count.exact
        assert count.lower == int(true.sum())
        assert count.prompts == VOCABULARY**N


@pytest.mark.parametrize("keys", [[3], [0, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_mass_lies_between_its_ends(keys: list[int], share: float) -> None:
    model = model_of("rotary", seed=22)
    text = f"mass>={share}@{{{','.join(map(str, keys))}}}"
    (found,) = pl.profile(model, (0, 0), length=N, claims=text)
    (count,) = found.claims
    true = int((patterns(model, 0)[:, keys].sum(-1) >= share - 1e-12).sum())
    assert count.lower <= true <= count.upper
    if len(keys) == N:
        assert count.lower == count.prompts


def test_mass_of_one_key_is_tight_where_two_keys_are() -> None:
    """With one key against one other, enough and necessary are the same."""
    model = model_of("rotary", seed=23)
    (found,) = pl.profile(model, "0.0", length=2, claims="mass>=0.7@{0}")
    s = model.pattern(prompts_of(Slots.of(2, VOCABULARY)), 0)[:, 0, -1, 0]
    assert found.claims[0].lower == found.claims[0].upper == int((s >= 0.7).sum())


def test_duplicates_token_by_token() -> None:
    model = model_of("rotary", seed=24)
    (found,) = pl.profile(model, "0.0", length=N, same=[(0, 3)])
    slots = Slots.of(N, VOCABULARY, [(0, 3)])
    prompts, best = prompts_of(slots), patterns(model, 0, slots).argmax(-1)
    for token, (low, high) in found.by_token(0).items():
        there = prompts[:, 3] == token
        assert low == high == int((best[there] == 0).sum()) / int(there.sum())


def test_some_query_tokens_are_drawn_once_and_counted_exactly() -> None:
    model = model_of("rotary", seed=25)
    few = pl.profile(model, "0.0", length=N, tokens=3, seed=1)
    assert not few.whole
    assert len(few[0].tokens) == 3
    assert few["0.0"].top[0].prompts == 3 * VOCABULARY ** (N - 1)
    whole = pl.profile(model, "0.0", length=N)
    rows = dict(zip(whole[0].tokens, whole[0].lower, strict=True))
    assert [rows[token] for token in few[0].tokens] == list(few[0].lower)
    assert pl.profile(model, length=N, tokens=99).whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": "1.0"}, "is no head of layer 0"),
        ({"heads": "0.7"}, "has heads 0.0 … 0.1, not 0.7"),
        ({"claims": "entropy<=1"}, "cannot be counted"),
        ({"claims": "top1={9}"}, "is no key that position 3 attends to"),
        ({"claims": "spec{1>-2}"}, "names a key twice"),
        ({"claims": "mass>=1.5@{1}"}, "between 0 and 1"),
        ({"tokens": 0}, "at least 1 query token"),
        ({"real": [True]}, "must have 4 entries"),
        ({"position": 4}, "positions 0 … 3, not 4"),
    ],
)
def test_bad_questions_are_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        pl.profile(model_of("rotary"), length=N, **options)  # type: ignore[arg-type]


def test_capped_masses_are_refused() -> None:
    with pytest.raises(QueryError, match="go through a cap"):
        pl.profile(model_of("softcap"), length=N, claims="mass>=0.5@{0}")


def test_the_picture_names_heads_and_shares() -> None:
    svg = draw_profiles(pl.profile(model_of("rotary"), length=N)).svg(alone=True)
    assert "0.1" in svg
    assert "self" in svg
    assert "%" in svg


def saved(folder: Path, kind: str, **options: object) -> tuple[Path, Path]:
    model = model_of(kind, seed=26)
    weights = folder / "weights"
    weights.mkdir()
    write_model(weights, model.architecture, model.weights)
    kept = pl.load(str(weights))
    document = folder / "counts.json"
    pl.profile(kept, length=N, **options).save(document)  # type: ignore[arg-type]
    return document, weights


@pytest.mark.parametrize("kind", KINDS)
def test_the_checker_agrees(tmp_path: Path, kind: str) -> None:
    document, weights = saved(tmp_path, kind)
    found = recount(document, weights, tables)
    assert found.ok, found
    assert len(found.findings) == 2 * 4


def test_the_checker_agrees_with_slots(tmp_path: Path) -> None:
    document, weights = saved(
        tmp_path, "bert", same=[(0, 3)], choices={1: [2, 3, 5]}, position=2, tokens=[1, 6]
    )
    found = recount(document, weights)
    assert found.ok, found


@pytest.mark.parametrize("field", ["lower", "upper", "sum", "prompts", "sha", "schema"])
def test_the_checker_sees_forged_numbers(tmp_path: Path, field: str) -> None:
    document, weights = saved(tmp_path, "rotary")
    held = json.loads(document.read_text())
    row, top = held["heads"][0]["recount"][1], held["heads"][0]["top"][2]
    if field == "lower":
        row["lower"][0] = str(int(row["upper"][0]) + 1)
    elif field == "upper":
        best = max(range(N), key=lambda i: int(row["lower"][i]))
        row["upper"][best] = str(int(row["lower"][best]) - 1)
    elif field == "sum":
        top["lower"] = top["upper"] = str(int(top["lower"]) + 5)
    elif field == "prompts":
        top["prompts"] = str(int(top["prompts"]) + 1)
    elif field == "sha":
        held["model_sha256"] = "0" * 64
    else:
        held["schema"] = "other"
    document.write_text(json.dumps(held))
    assert not recount(document, weights, tables).ok


def test_the_command_line(call: Call, tmp_path: Path) -> None:
    document, weights = saved(tmp_path, "rotary")
    out, plots = tmp_path / "again.json", tmp_path / "plots"
    arguments = ("vocabulary", str(weights), "--length", "4", "--heads", "0.0", "--claim", "top1={-1}")
    code, text, _ = call(*arguments, "-o", str(out), "--plot", str(plots))
    assert code == 0
    assert "top1={-1}" in text
    assert (plots / "vocabulary.svg").is_file()
    assert call("check", str(out), "--weights", str(weights))[0] == 0
    code, text, _ = call(*arguments, "--tokens", "2", "--same", "0,3", "--choose", "1:2,3", "--json")
    assert json.loads(text)["same"] == [[0, 3]]
    assert call("vocabulary", str(weights), "--length", "4", "--same", "a")[0] == 1
    assert call("check", str(document), "--weights", str(weights), "--json")[0] == 0


def test_statements_on_the_command_line(call: Call, tmp_path: Path) -> None:
    _, weights = saved(tmp_path, "rotary")
    code, text, _ = call("vocabulary", str(weights), "--length", "4", "--duplicates", "--json")
    assert code == 0
    rows = json.loads(text)["rows"]
    model = pl.load(str(weights))
    for row in rows:
        found = pl.duplicate_tokens(model, row["head"], length=4)
        assert row["holds"] == list(found.holds)
        assert len(row["holds"]) + row["fails"] + row["unknown"] == VOCABULARY
    code, text, _ = call("vocabulary", str(weights), "--length", "4", "--duplicates", "--tokens", "3")
    assert code == 0
    assert "refuted for" in text
    assert call("vocabulary", str(weights), "--length", "4", "--copies")[0] == 1
    assert len(pl.duplicate_tokens(model, "0.0", length=4, tokens=[1, 2]).tokens) == 2


def test_minilm_against_sampled_prompts(minilm: Transformer) -> None:
    """30,522 tokens, learned positions, an embedding norm and types: sampled shares lie in their intervals."""
    tokens = [2003, 7592]
    (found,) = pl.profile(minilm, "0.2", length=4, tokens=tokens)
    generator = torch.Generator().manual_seed(0)
    for token, lower, upper in zip(found.tokens, found.lower, found.upper, strict=True):
        ids = torch.randint(minilm.architecture.d_vocab or 0, (2000, 4), generator=generator)
        ids[:, -1] = token
        best = minilm.scores(ids, 0)[:, 2, -1].argmax(-1)
        for column, key in enumerate(found.keys):
            low, high = clopper_pearson(int((best == key).sum()), len(ids), confidence=1.0 - 1e-9)
            assert low <= upper[column] / found.each
            assert lower[column] / found.each <= high


def test_a_run_is_kept_queried_checked_and_reported(call: Call, tmp_path: Path) -> None:
    model = model_of("bert", seed=26)
    weights, run, page = tmp_path / "weights", tmp_path / "run", tmp_path / "page.html"
    weights.mkdir()
    write_model(weights, model.architecture, model.weights)
    asked = ("vocabulary", str(weights), "--length", str(N), "--claim", "spec{1>0}", "-o", str(run))
    assert call(*asked)[0] == 0
    assert call(*asked)[0] == 1  # there is a run already
    found = pl.profile(pl.load(str(weights)), length=N, claims=["spec{1>0}"])
    code, out, _ = call(
        "query", str(run), "select claim_text, lower_count from rows where head = '0.0'", "--json"
    )
    assert code == 0
    assert all(count.claim in out and str(count.lower) in out for count in found["0.0"].top)
    code, out, _ = call("check", str(run), "--weights", str(weights), "--json")
    assert code == 0, out
    assert json.loads(out)["summary"]["re-run"] == sum(len(one.top) for one in found)
    assert call("report", str(run), "-o", str(page))[0] == 0
    assert "Which key is attended most" in page.read_text()
    again = Profiles.from_dict(found.to_dict())
    assert again.to_dict()["heads"] == found.to_dict()["heads"]


@pytest.mark.parametrize("what", ["row", "share", "document", "recount"])
def test_the_checker_sees_forged_runs(tmp_path: Path, what: str) -> None:
    model = model_of("bert", seed=26)
    weights = tmp_path / "weights"
    weights.mkdir()
    write_model(weights, model.architecture, model.weights)
    net = Network.read(weights)
    document = pl.profile(pl.load(str(weights)), length=N).to_dict()
    counts = [(head["head"], count) for head in document["heads"] for count in head["top"]]
    rows = [
        {"row": i, "head": head, "claim_text": c["claim"], "lower_count": c["lower"], "upper_count": c["upper"],
         "prompts": c["prompts"], "lower": c["share"][0], "upper": c["share"][1]}
        for i, (head, c) in enumerate(counts)
    ]  # fmt: skip
    info = {"document": document, "model": {"name": document["model"]}}
    assert {word for word, _ in VocabularyChecker(net, info, {}, rows).judge_all().values()} == {"re-run"}
    if what == "row":
        rows[0]["lower_count"] = str(int(rows[0]["lower_count"]) + 1)
    elif what == "share":
        rows[0]["lower"] += 0.01
    elif what == "document":
        document["heads"][0]["top"][0]["lower"] = document["heads"][0]["top"][0]["prompts"]
    else:
        listed = document["heads"][0]["recount"][0]
        listed["upper"] = ["0"] * len(listed["upper"])
    try:
        words = VocabularyChecker(net, info, {}, rows).judge_all()
    except WrongError:
        return
    assert words[0][0] == "WRONG"
