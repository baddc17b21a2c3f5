"""One task: load the model, certify, write the shard. What goes wrong is the report, not an exception."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import pyarrow as pa

from prooflens.enumeration import family
from prooflens.errors import EngineError, ModelError
from prooflens.memory import is_shortage
from prooflens.models import Prompt, Transformer, load
from prooflens.models.dictionaries import read_vector
from prooflens.queries import Query, parse_query
from prooflens.queries.rows import find_tokens
from prooflens.regions import Ball
from prooflens.results import Radii, Results
from prooflens.sweep.store import SweepStore
from prooflens.sweep.tasks import AnyTask, FamilyTask, Task, fingerprint
from prooflens.verdicts.certify import certify
from prooflens.verdicts.chunks import CHUNK_NUMBERS
from prooflens.verdicts.radius import radius
from prooflens.verdicts.settings import Workspace, checked_device
from prooflens.verdicts.sites import Vectors, by_place

CHUNK_BYTES = 64 * CHUNK_NUMBERS
"""The memory limit at which chunks have their usual size: where none was given, half of it is the second try."""

PROVED, NOT_PROVED = "radius proved", "no radius proved"
"""What rows of radii are counted as."""


@dataclass(frozen=True)
class TaskReport:
    """How a task ended: the counts of its verdicts or proved radii, or the error."""

    task: AnyTask
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    kind: str = ""
    """The error's type."""
    out_of_memory: bool = False
    tries: int = 1


def perform(task: AnyTask, store: SweepStore) -> TaskReport:
    """Do a task and write its shard; out of memory is tried once more with half the memory."""
    started = time.perf_counter()
    if isinstance(task, FamilyTask):
        return replace(_count_part(task), seconds=time.perf_counter() - started)
    report = _attempt(task, task, store)
    if report.error is not None and report.out_of_memory:
        smaller = replace(task, memory=(task.memory or CHUNK_BYTES) // 2)
        report = replace(_attempt(task, smaller, store), tries=2)
    return replace(report, seconds=time.perf_counter() - started)


def _attempt(task: Task, asked: Task, store: SweepStore) -> TaskReport:
    """Settle what is asked and store it as the task."""
    try:
        found = run_task(asked)
        store.write_shard(task.key, task.label, found.table)
    except Exception as error:
        return _failed(task, error)
    return TaskReport(task, counts=_counts(found))


def _failed(task: AnyTask, error: Exception) -> TaskReport:
    message = " ".join(str(error).split()) or "no message"
    return TaskReport(task, error=message, kind=type(error).__name__, out_of_memory=is_out_of_memory(error))


def _count_part(task: FamilyTask) -> TaskReport:
    """Count one part of a family; the driver joins the parts."""
    try:
        model = _model(task.model, task.device)
        found = family(
            model, task.prompts, task.queries, out=task.out, part=task.part, join=False, **task.options
        )
    except Exception as error:
        return _failed(task, error)
    return TaskReport(task, counts={"members": found[0].asked})


def _counts(found: Results | Radii) -> dict[str, int]:
    """How many rows end in which way, each counted once."""
    if isinstance(found, Results):
        return {str(verdict): count for verdict, count in found.counts.items()}
    proved = found.summary["certified"]
    return {PROVED: proved, NOT_PROVED: len(found) - proved}


def run_task(task: Task) -> Results | Radii:
    """The verdicts of a task, or its radii."""
    model = _model(task.model, task.device)
    if model.sha256 != task.model_sha256:
        raise ModelError(f"{task.model} is not the model that the sweep was planned for: its weights changed")
    prompt = model.prompt(task.prompt) if isinstance(task.prompt, str) else model.example(task.prompt)
    tokens = None if task.tokens is None else find_tokens(task.tokens, len(prompt), prompt.tokens)
    if task.layer is None:
        return _inside(task, model, prompt, tokens)
    return _settled(
        task, model, prompt, tokens, task.queries, [f"{task.layer}.{head}" for head in task.heads]
    )


def _inside(task: Task, model: Transformer, prompt: Prompt, tokens: list[int] | None) -> Results | Radii:
    """Rows about values inside the model, each under the whole model's name and the query as the sweep asks it."""
    if changed := [name for name, path, known in task.vectors if fingerprint(path) != known]:
        raise ModelError(f"{changed[0]} is not what the sweep was planned with: its file changed")
    vectors = {name: read_vector(path) for name, path, _ in task.vectors}
    asked, tables = dict[str, str](), list[pa.Table]()
    for text in task.queries:
        for group in by_place(model, prompt, [parse_query(text)], vectors):
            asked |= {str(query): text for query in group}
    found: Results | Radii | None = None
    for group in by_place(model, prompt, [parse_query(text) for text in task.queries], vectors):
        found = _settled(task, model, prompt, tokens, group, None, vectors)
        names = [asked[query] for query in found.table.column("query").to_pylist()]
        held = found.table.set_column(found.table.column_names.index("query"), "query", pa.array(names))
        name = pa.repeat(pa.scalar(task.model), len(names))
        tables.append(held.set_column(held.column_names.index("model"), "model", name))
    assert found is not None
    return type(found)(pa.concat_tables(tables), found.subject)


def _settled(
    task: Task,
    model: Transformer,
    prompt: Prompt,
    tokens: list[int] | None,
    queries: Sequence[str | Query],
    heads: list[str] | None,
    vectors: Vectors | None = None,
) -> Results | Radii:
    """Verdicts or radii of some queries."""
    if task.search is not None:
        return radius(
            model,
            prompt,
            queries,
            heads,
            tokens=tokens,
            per_token=task.search.per_token,
            engine=task.engine,
            tolerance=task.search.tolerance,
            between=task.search.between,
            memory=task.memory,
            budget=task.budget,
            seed=task.seed,
            positions=task.positions,
            nearest=False,
            vectors=vectors,
            workspace=_workspace(task.model, task.device),
        )
    assert task.eps is not None
    return certify(
        model,
        prompt,
        Ball(task.eps, tokens),
        heads,
        queries=queries,
        engine=task.engine,
        memory=task.memory,
        budget=task.budget,
        seed=task.seed,
        positions=task.positions,
        vectors=vectors,
        workspace=_workspace(task.model, task.device),
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether less at a time may help: memory ran out, or an engine refused because it would."""
    refused = isinstance(error, EngineError) and "GiB" in str(error)
    return refused or is_shortage(error)


@lru_cache(maxsize=1)
def _model(name: str, device: str | None) -> Transformer:
    """Tasks of one model follow each other: one is kept."""
    model = load(name)
    return model if device is None else model.to(checked_device(device))


@lru_cache(maxsize=1)
def _workspace(name: str, device: str | None) -> Workspace:
    """What the tasks of one model share: its weights in float32, and norms of them."""
    return Workspace()
