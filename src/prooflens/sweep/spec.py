"""`spec.yaml`: what a sweep asks, validated before anything runs.

models: [toy]
samples: [0, 1]            # or prompts: a list, {file: …}, {jsonl: …, field: text}, {template: …, slots: {…}}
layers: [0, 1]             # or heads: "0.1,1.0"
positions: [-1]
queries: [top1, "mass>=0.2"]    # or about values inside: ["feature SAE.7 active@-1"], with vectors: {SAE: sae/}
regions: {eps: [0.001, 0.002], tokens: [1]}     # or {radius: {between: [1e-5, 1], tolerance: 0.1}}
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from prooflens.errors import ProoflensError
from prooflens.json_files import parse_json, read_yaml
from prooflens.memory import parse_memory
from prooflens.verdicts.radius import LARGEST, SMALLEST

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Token = int | Text


class SpecError(ProoflensError):
    """A sweep's specification that cannot be run; the message names the field."""


class _Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RadiusSpec(_Strict):
    """Where radii are searched: on a grid between two ends, with steps of a factor 1 + `tolerance`."""

    between: tuple[Positive, Positive] = (SMALLEST, LARGEST)
    tolerance: Positive = 0.1
    per_token: bool = False

    @field_validator("between")
    @classmethod
    def _in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] < value[1]:
            raise ValueError("must be two radii, the smaller one first")
        return value


class Regions(_Strict):
    """ε-balls around each prompt: a grid of radii or a search for them, and the tokens that move (None: all)."""

    eps: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    radius: RadiusSpec | None = None
    tokens: Annotated[tuple[Token, ...], Field(min_length=1)] | None = None

    @field_validator("eps", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, list | tuple) else [value]

    @model_validator(mode="after")
    def _one_of_both(self) -> Regions:
        if (self.eps is None) == (self.radius is None):
            raise ValueError(
                "give eps, or radius to search for it ({radius: {}} with the usual ends), and not both"
            )
        return self


class Spec(_Strict):
    """A sweep: every model × prompt × layer × ε is a task, which serves all its heads, positions and queries.

    Where radii are searched, a task is a model, a prompt and a layer.
    """

    models: Annotated[tuple[Text, ...], Field(min_length=1)]
    regions: Regions
    prompts: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    samples: Annotated[tuple[Natural, ...], Field(min_length=1)] | None = None
    layers: Annotated[tuple[Natural, ...], Field(min_length=1)] | None = None
    heads: Text | None = None
    positions: Annotated[tuple[Token, ...], Field(min_length=1)] | None = None
    queries: Annotated[tuple[Text, ...], Field(min_length=1)] = ("top1",)
    vectors: dict[Text, Text] | None = None
    engine: Text = "auto"
    device: Text | None = None
    memory: Natural | None = None
    budget: Text | None = None
    seed: int = 0

    @field_validator("models", "queries", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("heads", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return _or_value_error(parse_memory, value) if isinstance(value, str) else value

    @field_validator("queries")
    @classmethod
    def _about_rows(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from prooflens.queries import InsideQuery, RowQuery

        inside = [isinstance(query, InsideQuery) for query in map(_parsed, value)]
        for text in value if not all(inside) else ():
            query = _parsed(text)
            if any(inside):
                raise ValueError(
                    "values inside the model are asked in a sweep of their own, without attention"
                )
            if not isinstance(query, RowQuery) or query.heads is not None:
                raise ValueError(
                    f"{text!r} must be about one row of attention, its heads given by layers or heads"
                )
        return value

    @property
    def is_inside(self) -> bool:
        """Whether queries are about values inside the model: each names its own layer and token."""
        from prooflens.queries import InsideQuery

        return isinstance(_parsed(self.queries[0]), InsideQuery)

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        from prooflens.verdicts.stages import stages_of

        _or_value_error(stages_of, value)
        return value

    @field_validator("budget")
    @classmethod
    def _known_budget(cls, value: str | None) -> str | None:
        from prooflens.verdicts.settings import parse_budget

        _or_value_error(parse_budget, value)
        return value

    @model_validator(mode="after")
    def _one_of_each(self) -> Spec:
        if (self.prompts is None) == (self.samples is None):
            raise ValueError("give prompts, or samples for models without text, and not both")
        if self.layers is not None and self.heads is not None:
            raise ValueError("give layers or heads, not both")
        if self.is_inside and (self.layers or self.heads or self.positions):
            raise ValueError(
                "queries: values inside the model name their layers and tokens: give no layers, heads and positions"
            )
        if self.vectors and not self.is_inside:
            raise ValueError("vectors: no query names a direction or dictionary")
        ranged = [text for text in self.queries if getattr(_parsed(text), "comparison", "") is None]
        if self.regions.radius is not None and ranged:
            raise ValueError(
                f"queries: {ranged[0]} has no radius: give a threshold, as in 'neuron 5.12>0@-1'"
            )
        if self.regions.radius is not None and "entropy" in self.queries:
            raise ValueError("queries: entropy has no radius: give a threshold, as in 'entropy<=1.5'")
        if self.regions.radius is not None and not _proves(self.engine):
            raise ValueError(
                f"engine: {self.engine} only estimates: a certified radius needs one that proves"
            )
        return self


def read_spec(path: Path) -> Spec:
    """The specification in a YAML file; prompts of files and templates are read and written out."""
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise SpecError(str(error)) from error
    if not isinstance(content, dict):
        raise SpecError(f"{path} must be a mapping with models, prompts or samples, and regions")
    if isinstance(content.get("prompts"), dict):
        content["prompts"] = _expand(content["prompts"], path.parent)
    if isinstance(vectors := content.get("vectors"), dict):
        places = {
            name: str((path.parent / held).resolve()) for name, held in vectors.items() if _is_text(held)
        }
        content["vectors"] = vectors | places
    return parse_spec(content, str(path))


def parse_spec(content: dict[str, Any], origin: str) -> Spec:
    """A specification from its plain form; an error is one sentence that names the first wrong field.

    Args:
        content: the plain form.
        origin: where it is from, for errors.
    """
    try:
        return Spec.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise SpecError(f"{origin}: there is no field {field!r}") from error
        reason = first["msg"].removeprefix("Value error, ")
        raise SpecError(f"{origin}: {field}: {reason}" if field else f"{origin}: {reason}") from error


def _expand(source: dict[str, Any], folder: Path) -> list[Any]:
    """The prompts that a file, a JSONL file or a template stand for."""
    kinds = {"file": {"file"}, "jsonl": {"jsonl", "field"}, "template": {"template", "slots"}}
    kind = next((name for name in kinds if name in source), None)
    if kind is None:
        raise SpecError(f"prompts: give a list, or one of {', '.join(kinds)}")
    if extra := set(source) - kinds[kind]:
        raise SpecError(f"prompts.{sorted(map(str, extra))[0]}: there is no such field beside {kind!r}")
    if not isinstance(source[kind], str):
        raise SpecError(f"prompts.{kind}: must be a text")
    if kind == "template":
        return _filled(source["template"], source.get("slots"))
    try:
        lines = (folder / source[kind]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"prompts.{kind}: cannot read {source[kind]}: {error}") from error
    lines = [line for line in lines if line.strip()]
    if kind == "file":
        return list(lines)
    return [_from_json(line, source.get("field", "text"), number) for number, line in enumerate(lines, 1)]


def _from_json(line: str, field: Any, number: int) -> str:
    try:
        found = parse_json(line)[field]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SpecError(f"prompts.jsonl: record {number} is no JSON object with {field!r}") from error
    if not isinstance(found, str):
        raise SpecError(f"prompts.jsonl: {field!r} of record {number} is not a text")
    return found


def _filled(template: str, slots: Any) -> list[str]:
    """The template with every combination of its slots' words."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise SpecError(f"prompts.template: {error}") from error
    if unnamed := [name for name in fields if not name.isidentifier()]:
        raise SpecError(
            f"prompts.template: {{{unnamed[0]}}} is no slot: name it by one word, as in {{subject}}"
        )
    names = list(dict.fromkeys(fields))
    if not isinstance(slots, dict) or set(slots) != set(names):
        raise SpecError(
            f"prompts.slots: must give words for exactly the slots {', '.join(names) or '(none)'}"
        )
    words: list[Sequence[Any]] = [slots[name] for name in names]
    for name, choices in zip(names, words, strict=True):
        if not isinstance(choices, list) or not choices:
            raise SpecError(f"prompts.slots.{name}: must be a list of words")
    combinations = product(*words)
    return [template.format(**dict(zip(names, chosen, strict=True))) for chosen in combinations]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _parsed(text: str) -> Any:
    from prooflens.queries import parse_query

    return _or_value_error(parse_query, text)


def _proves(engine: str) -> bool:
    from prooflens.verdicts.settings import Settings

    return Settings.of(engine).proves


def _or_value_error(parse: Any, text: Any) -> Any:
    """Our errors as the ones that pydantic attributes to a field."""
    try:
        return parse(text)
    except ProoflensError as error:
        raise ValueError(str(error)) from error
