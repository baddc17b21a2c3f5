"""spec.yaml: every error names its field before anything runs; prompts from files and templates; keys of tasks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prooflens.sweep.spec import SpecError, parse_spec, read_spec
from prooflens.sweep.tasks import ModelFacts, plan
from tests.sweep.conftest import SPEC, TASKS


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"modles": ["toy"]}, "there is no field 'modles'"),
        ({"regions": {"eps": [0.1], "token": [1]}}, "there is no field 'regions.token'"),
        ({"models": []}, "models: "),
        ({"regions": {"eps": [0.1, -1]}}, r"regions\.eps\.1: "),
        ({"regions": {"eps": ["much"]}}, r"regions\.eps\.0: "),
        ({"queries": ["top1", "tpo1"]}, "queries: "),
        ({"queries": ["0.1:top1"]}, "queries: '0.1:top1' must be about one row"),
        ({"engine": "magic"}, "engine: "),
        ({"memory": "much"}, "memory: 'much' is no amount of memory"),
        ({"budget": "huge"}, "budget: there is no budget 'huge'"),
        ({"seed": "x"}, "seed: "),
        ({"prompts": ["a"]}, "give prompts, or samples"),
        ({"samples": None}, "give prompts, or samples"),
        ({"layers": [0], "heads": "0.1"}, "give layers or heads"),
        ({"regions": {}}, "regions: give eps, or radius"),
        ({"regions": {"eps": [0.1], "radius": {}}}, "regions: give eps, or radius"),
        ({"regions": {"radius": {"between": [1, 0.1]}}}, r"regions\.radius\.between: must be two radii"),
        ({"regions": {"radius": {"tolerance": 0}}}, r"regions\.radius\.tolerance: "),
        ({"regions": {"radius": {"steps": 3}}}, r"there is no field 'regions\.radius\.steps'"),
        ({"regions": {"radius": {}}, "queries": ["entropy"]}, "queries: entropy has no radius"),
        ({"regions": {"radius": {}}, "engine": "jacobian"}, "engine: jacobian only estimates"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=f"^here: {field}") as caught:
        parse_spec(SPEC | changes, "here")
    assert "\n" not in str(caught.value)


def written(folder: Path, prompts: str) -> Path:
    path = folder / "spec.yaml"
    path.write_text(f"models: toy\nregions: {{eps: 1e-3}}\nmemory: 2GiB\nprompts: {prompts}\n")
    return path


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ("[a, b]", ("a", "b")),
        ("{file: lines.txt}", ("one", "two words")),
        ("{jsonl: lines.jsonl, field: q}", ("x", "y")),
        ("{template: 'the {a} is {b}', slots: {a: [cat, dog], b: [1, 2]}}", None),
    ],
)
def test_prompts_are_read(tmp_path: Path, prompts: str, found: tuple[str, ...] | None) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo words\n")
    (tmp_path / "lines.jsonl").write_text('{"q": "x"}\n{"q": "y"}\n')
    spec = read_spec(written(tmp_path, prompts))
    assert spec.prompts == (found or ("the cat is 1", "the cat is 2", "the dog is 1", "the dog is 2"))
    assert spec.regions.eps == (0.001,)
    assert spec.memory == 2**31


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ("{file: none.txt}", r"prompts\.file"),
        ("{file: 3}", r"prompts\.file"),
        ("{file: a, slots: {}}", r"prompts\.slots"),
        ("{words: a}", "prompts: "),
        ("{jsonl: bad.jsonl}", r"prompts\.jsonl: record 1"),
        ("{template: 'the {a}', slots: {b: [1]}}", r"prompts\.slots: .* a$"),
        ("{template: 'the {a}', slots: {a: cat}}", r"prompts\.slots\.a"),
        ("{template: 'the {a'}", r"prompts\.template"),
        ("{template: 'the {a.b}', slots: {a.b: [cat]}}", r"prompts\.template"),
        ("{template: 'the {}', slots: {}}", r"prompts\.template"),
        ("[a, b", "is not YAML"),
    ],
)
def test_bad_prompts_name_the_field(tmp_path: Path, prompts: str, field: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"q": "x"}\n')
    with pytest.raises(SpecError, match=field):
        read_spec(written(tmp_path, prompts))


def test_tasks_are_keyed_by_all_they_ask() -> None:
    spec = parse_spec(SPEC | {"samples": [0, 1, 1]}, "here")
    facts = {"toy": ModelFacts.of("toy")}
    tasks = list(plan(spec, facts))
    assert len({task.key for task in tasks}) == len(tasks) == TASKS
    assert [task.key for task in tasks] == [task.key for task in plan(spec, facts)]
    first = tasks[0]
    changes: dict[str, Any] = {"eps": 0.5, "model_sha256": "0", "prompt": "0", "heads": (0,), "seed": 1}
    for name, value in changes.items():
        assert replace(first, **{name: value}).key != first.key


def test_a_search_is_one_task_per_layer() -> None:
    spec = parse_spec(SPEC | {"regions": {"radius": {"between": [1e-3, 1]}}}, "here")
    tasks = list(plan(spec, {"toy": ModelFacts.of("toy")}))
    assert [(task.prompt, task.layer) for task in tasks] == [
        (p, layer) for p in range(2) for layer in range(2)
    ]
    assert {task.eps for task in tasks} == {None}
    assert tasks[0].search is not None
    assert tasks[0].search.between == (1e-3, 1.0)


def test_heads_are_grouped_by_layer() -> None:
    spec = parse_spec(SPEC | {"heads": ["1.1", "0.0", "1.0"], "samples": [0]}, "here")
    tasks = list(plan(spec, {"toy": ModelFacts.of("toy")}))
    assert {task.layer: task.heads for task in tasks} == {0: (0,), 1: (0, 1)}
