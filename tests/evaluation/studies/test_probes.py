"""Probes: prompts, roles, circuits and what is said about heads that split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prooflens.engines.protocol import EngineOptions, default_memory
from prooflens.evaluation.studies import StudyError, StudySettings, base, journal, probes, probing
from prooflens.evaluation.studies.journal import ProbeAnswer
from prooflens.evaluation.studies.measure import StudyCase
from prooflens.evaluation.studies.probes import (
    Pair,
    alike,
    circuits_of,
    failure_modes,
    furthest,
    role_of,
    told,
)
from prooflens.evaluation.studies.probing import Circuits, Probe, ProbeRun, share
from prooflens.evaluation.studies.prompts import (
    FIRST,
    OTHERS,
    Duplicate,
    Words,
    ioi_prompts,
    ioi_texts,
    repeated_sequences,
)
from prooflens.models import Transformer, load
from tests.evaluation.studies.conftest import Run, duplicates


@pytest.mark.parametrize("words", [FIRST, OTHERS])
def test_sixty_texts_in_equal_shares(words: Words) -> None:
    texts = ioi_texts(60, words)
    assert len(set(texts)) == 60
    counts = Counter(name for _, name in texts)
    assert set(counts) == set(words.names)
    assert max(counts.values()) - min(counts.values()) <= 2
    for some, most in ((words.places, 12), (words.things, 12)):
        shares = [sum(f" {word}" in text for text, _ in texts) for word in some]
        assert sum(shares) == 60
        assert max(shares) <= most
    assert all(text.split().count(name) + text.split().count(f"{name},") == 2 for text, name in texts)


def test_other_prompts_share_no_word() -> None:
    for name in ("names", "places", "things"):
        assert not set(getattr(FIRST, name)) & set(getattr(OTHERS, name))
    assert not set(ioi_texts(60)) & set(ioi_texts(60, OTHERS))


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.parametrize("words", [FIRST, OTHERS])
def test_names_are_found_in_a_real_vocabulary(words: Words, smollm2: Transformer) -> None:
    for place, (_, name) in zip(ioi_prompts(smollm2, 60, words), ioi_texts(60, words), strict=True):
        assert place.first < place.second
        assert {place.prompt.tokens[i].strip() for i in (place.first, place.second)} == {name}
    for place in repeated_sequences(smollm2, 3):
        assert place.prompt.ids is not None
        assert place.prompt.ids[0] == place.prompt.ids[-1]
        assert place.second == len(place.prompt) - 1


def test_roles() -> None:
    place = Duplicate(load("toy").example(0), 1, 3)
    assert [role_of(key, place) for key in (1, 3, 2, 0)] == ["duplicate", "itself", "previous", "first token"]
    roles = {0: Counter(previous=5, other=1), 1: Counter(previous=4, itself=2), 2: Counter(other=6)}
    assert alike(roles, 6) == {"previous": [0, 1]}
    assert circuits_of(roles, 6) == ((0, 1),)


def probe(strong: int, weak: int) -> Probe:
    roles = {0: Counter(previous=10), 1: Counter(previous=9, other=1)}
    held = {"0.0": [i < strong for i in range(10)], "0.1": [i < weak for i in range(10)]}
    return Probe(0, 10, roles, ((0, 1),), {1e-3: held}, {1e-3: held}, 0.0)


def test_heads_that_split() -> None:
    assert furthest(probe(10, 1)) == [Pair("previous", 0, 1, 1e-3)]
    (pair,) = furthest(probe(1, 10))
    assert (pair.strong, pair.weak) == (1, 0)
    text = told(Pair("previous", 0, 1, 1e-3), probe(10, 1))
    assert text.startswith("0.0 and 0.1 look at: previous, on 10 and 9 of 10 prompts. At ε = 0.001 10 of 10")
    assert "they split (95 % intervals)" in text
    assert "they are not told apart" in told(Pair("previous", 0, 1, 1e-3), probe(6, 5))


def test_a_pair_is_held_to_a_stricter_test_beside_others() -> None:
    """10 and 3 of 10: from 0.692 and up to 0.652 at 95 %; from 0.645 and up to 0.692 at 97.5 %."""
    pair, wide = Pair("previous", 0, 1, 1e-3), probe(10, 3)
    assert "they split" in told(pair, wide)
    assert "they are not told apart (97.5 % intervals)" in told(pair, wide, tests=2)


def test_pairs_are_asked_again_on_other_prompts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair and its ε come from the first prompts, whatever the others say."""
    monkeypatch.setattr(probes, "furthest", lambda found: [Pair("previous", 1, 0, max(found.proved))])
    result = run("wang_probe", model="toy", samples=2)
    rows = [row for row in result.rows if row.group.startswith("other prompts")]
    assert [row.label.split(" ")[0] for row in rows] == ["0.0", "0.1"]
    assert {(row.group, row.n) for row in rows} == {("other prompts, ε = 0.002", 2)}
    (first, again) = [note for note in result.notes if " look at: " in note]
    assert first.startswith("0.1 and 0.0 look at: previous")
    assert again.startswith("Other prompts: 0.1 and 0.0 look at: previous")
    assert result.notes[-1] == "So 0 of 1 pairs split where they were chosen, and 0 on the other prompts."
    assert set(result.data["roles on other prompts"]) == {"0.0", "0.1"}


def test_failure_modes_need_a_clean_start() -> None:
    clean = {
        "Q1 of 0.0": 10,
        "Q2 of 0.0": 10,
        "Q3 of 0.0": 10,
        "Q1 of 0.1": 10,
        "Q2 of 0.1": 2,
        "Q3 of 0.1": 10,
    }
    proved = {"Q1 of 0.0": 1, "Q2 of 0.0": 9, "Q3 of 0.0": 5, "Q1 of 0.1": 9, "Q2 of 0.1": 0, "Q3 of 0.1": 9}
    (text,) = failure_modes(clean, proved, proved, 10)
    assert text.startswith(
        "0.0 keeps Q2 and loses Q1 (proved: Q1 1, Q2 9, Q3 5 of 10; an attack leaves: Q1 1, "
    )
    (text,) = failure_modes(clean, proved, {**proved, "Q1 of 0.0": 8}, 10)
    assert text.startswith("there is no head"), "what is not proved is not lost"


def test_and_is_never_more_than_its_heads(run: Run) -> None:
    single = run("wang_probe", model="toy", samples=3)
    both = run("cross_head_circuit", model="toy", samples=3)
    assert {row.n for row in (*single.rows, *both.rows)} == {3}
    heads = {(row.group, row.label.split(" ")[0]): row.proved for row in single.rows}
    for row in both.rows:
        assert row.proved is not None
        assert row.attack is not None
        assert row.proved <= row.attack
        if row.label.endswith("AND"):
            names = row.label.split("}")[0].strip("{").split(", ")
            assert row.proved <= min(heads[row.group, name] or 0 for name in names)


def test_three_queries_per_head(run: Run) -> None:
    result = run("induction_probe", model="toy", samples=2)
    assert [row.label.split(" (")[0] for row in result.rows] == [
        f"Q{q} of 0.{h}" for h in (0, 1) for q in (1, 2, 3)
    ]
    assert {row.n for row in result.rows} == {2}
    for row in result.rows:
        clean = int(row.label.split("clean ")[1].split("/")[0])
        assert (row.proved or 0) <= (row.attack or 0) <= clean


@pytest.mark.slow
def test_processes_count_as_one_does(run: Run, tmp_path: Path) -> None:
    alone = run("wang_probe", model="toy", samples=3)
    forget()
    several = run("wang_probe", model="toy", samples=3, jobs=2, kept=tmp_path)
    assert not list(tmp_path.iterdir())
    assert [replace(row, seconds=None) for row in several.rows] == [
        replace(row, seconds=None) for row in alone.rows
    ]
    assert (several.notes, several.command) == (alone.notes, alone.command)


def test_a_deeper_layer_can_be_asked(run: Run) -> None:
    result = run("wang_probe", model="toy", layer=1, engine="cpz")
    assert all(row.engine == "cpz" and row.label.startswith("1.") for row in result.rows)
    assert result.key == "wang_probe-layer1"
    assert len({row.group for row in result.rows if row.group.startswith("ε")}) == 2
    assert [max(probes.radii_at(layer)) for layer in (0, 1, 2, 3)] == [2e-3, 1e-3, 1e-3, 3e-4]
    assert probes.probe.cache_info().currsize == 1


class StoppedError(Exception):
    """What the tests below stop a run with."""


def counted(monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> list[float]:
    """The ε of what is asked from now on; a run that asks for more than `most` is stopped."""
    asked: list[float] = []
    one = ProbeRun.one

    def counting(self: ProbeRun, place: Duplicate, eps: float, circuits: Circuits) -> ProbeAnswer:
        if most is not None and len(asked) == most:
            raise StoppedError
        asked.append(eps)
        return one(self, place, eps, circuits)

    monkeypatch.setattr(ProbeRun, "one", counting)
    return asked


def forget() -> None:
    """As in another process."""
    probes.probe.cache_clear()
    base._RESULTS.clear()


@pytest.mark.parametrize("most", [4, 7])
def test_a_run_goes_on_where_it_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int
) -> None:
    """Three prompts at two ε, and again at one: nine in all, of which the first run answers some."""
    monkeypatch.setattr(probes, "furthest", lambda found: [Pair("previous", 1, 0, max(found.proved))])
    whole = run("wang_probe", model="toy", samples=3)
    forget()
    with monkeypatch.context() as stopped:
        counted(stopped, most)
        with pytest.raises(StoppedError):
            run("wang_probe", model="toy", samples=3, kept=tmp_path)
    (file,) = (tmp_path / "answers").iterdir()
    file.write_text(file.read_text() + '{"key": "only begun')
    forget()
    asked = counted(monkeypatch)
    again = run("wang_probe", model="toy", samples=3, kept=tmp_path)
    assert len(asked) == 9 - most
    assert [replace(row, seconds=None) for row in again.rows] == [
        replace(row, seconds=None) for row in whole.rows
    ]
    assert again.notes[:-1] == whole.notes
    assert again.notes[-1].startswith(f"{most} answers are of an earlier run of the same code")
    assert not (tmp_path / "answers").exists(), "what is over needs no journal"


@pytest.mark.parametrize("other", [{"seed": 1}, {"engine": "crown"}, {"model": "toy-4layer"}, {"code": "x"}])
def test_other_settings_and_other_code_are_asked_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, object]
) -> None:
    with monkeypatch.context() as stopped:
        counted(stopped, 3)
        with pytest.raises(StoppedError):
            run("cross_head_circuit", **{"model": "toy", "samples": 2, "kept": tmp_path})
    forget()
    if "code" in other:
        monkeypatch.setattr(journal, "sources", lambda: other["code"])
    asked = counted(monkeypatch)
    settings = {"model": "toy", "samples": 2, "kept": tmp_path, **other}
    settings.pop("code", None)
    result = run("cross_head_circuit", **settings)
    assert len(asked) == 4
    assert not any("earlier run" in note for note in result.notes)


@pytest.mark.parametrize("line", ["[]", "{", '{"key": "a"}', '{"proved": {}}'])
def test_a_journal_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    kept = journal.Journal(tmp_path / "x.jsonl")
    answer = ProbeAnswer({"0.0": True}, {"0.0": True}, 0.5)
    kept.add("a", answer)
    assert kept.read() == {"a": answer}
    (tmp_path / "x.jsonl").write_text(line + "\n")
    with pytest.raises(StudyError, match=r"x\.jsonl holds no answers: delete it"):
        kept.read()


def test_other_weights_are_asked_anew(tmp_path: Path) -> None:
    asked = ProbeRun.of(StudySettings(model="toy", kept=tmp_path))
    items = [(place, eps, ()) for place in duplicates(asked.model, 2) for eps in (0.01, 0.02)]
    keys = asked._keys(items)
    assert len(set(keys)) == len(items)
    assert asked._keys(items) == keys
    other = replace(asked, model=load("toy-4layer").cut(1))
    assert not set(keys) & set(other._keys(items))
    assert not set(keys) & set(asked._keys([(place, eps, ((0, 1),)) for place, eps, _ in items]))


def test_processes_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert [share(device, jobs) for jobs in (1, 3)] == [default_memory(device), default_memory(device) // 3]
    given: list[tuple[object, ...]] = []

    def pool(jobs: int, context: object, start: object, arguments: tuple[object, ...]) -> None:
        given.append((jobs, *arguments))
        raise StoppedError

    monkeypatch.setattr(probing, "ProcessPoolExecutor", pool)
    asked = ProbeRun.of(StudySettings(model="toy", engine="taylor", jobs=4, kept=Path("unused")))
    items = {str(i): (place, 0.01, ()) for i, place in enumerate(duplicates(asked.model, 2))}
    with pytest.raises(StoppedError):
        next(asked._answers(items))
    ((jobs, alone, memory),) = given
    assert (jobs, memory) == (4, default_memory(device) // 4)
    assert isinstance(alone, StudySettings)
    assert (alone.jobs, alone.kept) == (1, None)
    assert asked.memory is None, "who is alone has the engine's default"
    monkeypatch.setattr(probing, "_ASKED", [])
    threads = torch.get_num_threads()
    probing._start(alone, share(device, 4))
    torch.set_num_threads(threads)
    limits: list[int | None] = []

    def answered(engine: str, cases: Sequence[StudyCase], options: EngineOptions) -> None:
        limits.append(options.memory)
        raise StoppedError

    monkeypatch.setattr(probing, "answered", answered)
    for one in (asked, probing._ASKED[0]):
        with pytest.raises(StoppedError):
            one.one(*items["0"])
    assert limits == [None, memory]


def test_processes_that_end_are_told_about(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose processes were killed says what to do, in one line; what is kept stays kept."""

    class Broken:
        def __init__(self, *arguments: object) -> None:
            """Nothing is started."""

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *error: object) -> None:
            return

        def submit(self, work: object, item: object) -> Future[ProbeAnswer]:
            future: Future[ProbeAnswer] = Future()
            future.set_exception(BrokenProcessPool("a process was killed"))
            return future

        def shutdown(self, cancel_futures: bool) -> None:
            assert cancel_futures

    monkeypatch.setattr(probing, "ProcessPoolExecutor", Broken)
    with pytest.raises(StudyError, match=r"one of 2 processes ended, .*: use fewer --jobs"):
        run("wang_probe", model="toy", samples=2, jobs=2)
