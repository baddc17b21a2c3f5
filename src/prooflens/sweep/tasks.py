"""Tasks: what is done as one piece, and the key it is stored under.

A task is one model, prompt, layer and ε; where radii are searched, one model, prompt and layer; about values inside the
model, one model, prompt and ε. It serves all heads,
positions and queries of that layer, which share the region and the walk through the layers before. Its key is the
sha256 of its canonical JSON, the model's fingerprint included: the same question has the same key in every run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prooflens.errors import ModelError
from prooflens.families import Prompts, Swaps, Template
from prooflens.models import load
from prooflens.queries import parse_heads
from prooflens.sweep.spec import RadiusSpec, Spec, Token


@dataclass(frozen=True)
class ModelFacts:
    """What planning needs to know of a model."""

    name: str
    sha256: str
    n_layers: int
    n_heads: int

    @classmethod
    def of(cls, name: str) -> ModelFacts:
        """Load a model and look."""
        model = load(name)
        return cls(name, model.sha256, model.architecture.n_layers, model.architecture.n_heads)


@dataclass(frozen=True)
class RadiusTask:
    """Between which radii, in steps of which factor, and whether one token moves at a time."""

    between: tuple[float, float]
    tolerance: float
    per_token: bool

    @classmethod
    def of(cls, asked: RadiusSpec) -> RadiusTask:
        """What a specification asks for."""
        return cls(asked.between, asked.tolerance, asked.per_token)


@dataclass(frozen=True)
class Task:
    """One model, prompt, layer and ε, or search for it; `prompt` is a text, or the number of an example input.

    Queries about values inside the model are one task, without a layer; `vectors` are the names, paths and
    fingerprints of the directions and dictionaries that they name.
    """

    model: str
    model_sha256: str
    prompt: str | int
    layer: int | None
    eps: float | None
    search: RadiusTask | None
    heads: tuple[int, ...]
    positions: tuple[Token, ...] | None
    tokens: tuple[Token, ...] | None
    queries: tuple[str, ...]
    engine: str
    device: str | None
    memory: int | None
    budget: str | None
    seed: int
    vectors: tuple[tuple[str, str, str], ...] = ()

    @property
    def key(self) -> str:
        """sha256 of the canonical JSON; tasks without vectors have the key that they had before there were any."""
        held = {name: value for name, value in asdict(self).items() if name != "vectors" or value}
        text = json.dumps(held, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def label(self) -> str:
        """The prompt as the column `prompt` has it."""
        return self.prompt if isinstance(self.prompt, str) else f"sample {self.prompt}"

    def to_dict(self) -> dict[str, Any]:
        """The task as JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class FamilyTask:
    """One part of a family of prompts; its counts are kept beside the run."""

    model: str
    prompts: Template | Swaps | Prompts
    queries: tuple[str, ...]
    part: tuple[int, int]
    out: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Which part it is."""
        return "{} of {}".format(*self.part)

    @property
    def device(self) -> str | None:
        """Where it runs."""
        found: str | None = self.options.get("device")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The task as JSON has it."""
        return {"model": self.model, "queries": list(self.queries), "part": list(self.part), "out": self.out}


AnyTask = Task | FamilyTask


def plan(spec: Spec, models: Mapping[str, ModelFacts]) -> Iterator[Task]:
    """The tasks of a sweep in order, each once: model by model, and prompt by prompt with all its layers and radii.

    Args:
        spec: the specification.
        models: what is known of each model, by name.
    """
    seen: set[str] = set()
    inside: dict[int | None, tuple[int, ...]] = {None: ()}
    chosen = {name: inside if spec.is_inside else _heads(spec, models[name]) for name in spec.models}
    vectors = tuple((name, path, fingerprint(path)) for name, path in sorted((spec.vectors or {}).items()))
    prompts = spec.prompts if spec.prompts is not None else spec.samples
    assert prompts is not None
    search = None if spec.regions.radius is None else RadiusTask.of(spec.regions.radius)
    for name in spec.models:
        for prompt in prompts:
            for layer, heads in chosen[name].items():
                for eps in spec.regions.eps or (None,):
                    task = Task(
                        model=name,
                        model_sha256=models[name].sha256,
                        prompt=prompt,
                        layer=layer,
                        eps=eps,
                        search=search,
                        heads=heads,
                        positions=spec.positions,
                        tokens=spec.regions.tokens,
                        queries=spec.queries,
                        engine=spec.engine,
                        device=spec.device,
                        memory=spec.memory,
                        budget=spec.budget,
                        seed=spec.seed,
                        vectors=vectors,
                    )
                    if task.key not in seen:
                        seen.add(task.key)
                        yield task


def fingerprint(path: str) -> str:
    """Return the sha256 of a direction's file, or of all files of a dictionary's folder.

    Args:
        path: the file or folder.

    Raises:
        ModelError: if there is none.
    """
    place, digest = Path(path).expanduser(), hashlib.sha256()
    try:
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:
            if file.is_file():
                digest.update(f"{file.name}\0".encode() + file.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _heads(spec: Spec, facts: ModelFacts) -> dict[int | None, tuple[int, ...]]:
    """The heads asked about, by layer."""
    text = spec.heads or ("all" if spec.layers is None else ",".join(map(str, spec.layers)))
    found: dict[int | None, tuple[int, ...]] = {}
    for layer, head in sorted(parse_heads(text, facts.n_layers, facts.n_heads)):
        found[layer] = (*found.get(layer, ()), head)
    return found
