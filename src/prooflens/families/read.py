"""Families from the command line: slots as `A=names`, and YAML files.

template: "When{A} and{B} went to the{P},{B} gave a{O} to"
slots: {A: names, B: names, P: [" store", " park"], O: {file: objects.txt}}     # a built-in list, words, a file, ALL
differ: [[A, B]]
queries: ["8.0:top1={B.1}@{B.2}", "logit{A}>logit{B}"]

In place of template and slots: prompts: [...] or {file: …}; or swaps: {prompt: "…", at: {1: names, 7: ALL}}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prooflens.errors import PromptError
from prooflens.families.templates import ALL, Fillers, Prompts, Swaps, Template
from prooflens.families.words import BUILT_IN
from prooflens.json_files import read_yaml

FIELDS = ("template", "slots", "differ", "prompts", "swaps", "queries")


def parse_slot(text: str) -> tuple[str, Fillers]:
    """Read a slot of the command line.

    Args:
        text: `A=names` (a built-in list), `A=ALL`, `A=@words.txt` (a file with a word per line) or `A= Mary, John`.

    Raises:
        PromptError: if it is none of these.

    Example:
        >>> parse_slot("P= store, park")
        ('P', [' store', ' park'])
    """
    name, equals, given = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise PromptError(f"{text!r} is no slot: write it as in A=names, A=@words.txt or 'A= Mary, John'")
    return name.strip(), _fillers(name.strip(), given.split(",") if "," in given else given, Path())


def read_family(path: Path) -> tuple[Template | Swaps | Prompts, list[str]]:
    """Read a family, and the claims about it, from a YAML file.

    Args:
        path: the file; the module's docstring shows one. Files that it names stand beside it.

    Returns:
        The family, and its queries; none if the file has none.

    Raises:
        PromptError: if the file cannot be read, or has a field that there is not.
    """
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise PromptError(str(error)) from error
    if not isinstance(content, dict):
        raise PromptError(f"{path} must be a mapping with template and slots, prompts, or swaps")
    if unknown := [name for name in content if name not in FIELDS]:
        raise PromptError(f"{path}: there is no field {unknown[0]!r}; there are {', '.join(FIELDS)}")
    queries = content.get("queries", [])
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise PromptError(f"{path}: queries must be a list of texts")
    return _family(content, path), queries


def _family(content: Mapping[str, Any], path: Path) -> Template | Swaps | Prompts:
    kinds = [kind for kind in ("template", "prompts", "swaps") if kind in content]
    if len(kinds) != 1:
        raise PromptError(f"{path}: give one of template, prompts and swaps")
    folder, differ = path.parent, content.get("differ", ())
    if not isinstance(differ, list | tuple) or not all(isinstance(group, list | str) for group in differ):
        raise PromptError(f"{path}: differ must be a list of groups of slots, as in [[A, B]]")
    if kinds == ["prompts"]:
        return Prompts(_fillers("prompts", content["prompts"], folder))  # type: ignore[arg-type]
    if kinds == ["swaps"]:
        given = content["swaps"]
        if not isinstance(given, dict) or set(given) != {"prompt", "at"} or not isinstance(given["at"], dict):
            raise PromptError(f"{path}: swaps must be {{prompt: …, at: {{position: fillers}}}}")
        at = {place: _fillers(str(place), fillers, folder) for place, fillers in given["at"].items()}
        return Swaps(given["prompt"], at, differ)
    if not isinstance(content["template"], str) or not isinstance(content.get("slots"), dict):
        raise PromptError(f"{path}: template must be a text, and slots a mapping of its slots")
    slots = {str(name): _fillers(str(name), fillers, folder) for name, fillers in content["slots"].items()}
    return Template(content["template"], differ=differ, **slots)


def _fillers(slot: str, given: Any, folder: Path) -> Fillers:
    """A built-in list by name, `ALL`, a file, or words."""
    if isinstance(given, dict) and set(given) == {"file"}:
        return lines_of(folder / str(given["file"]))
    if isinstance(given, str):
        if given.startswith("@"):
            return lines_of(folder / given[1:])
        if given == "ALL":
            return ALL
        if given in BUILT_IN:
            return BUILT_IN[given]
        raise PromptError(
            f"slot {slot}: {given!r} is no list: there are {', '.join(BUILT_IN)}, ALL, @FILE, and words with commas"
        )
    if isinstance(given, Sequence) and all(isinstance(word, str) for word in given):
        return list(given)
    raise PromptError(f"slot {slot}: give a list of words, the name of a built-in list, ALL, or {{file: …}}")


def lines_of(path: Path, what: str = "word") -> list[str]:
    """Return the lines of a file; empty ones do not count.

    Args:
        path: the file.
        what: what a line holds, for messages.

    Raises:
        PromptError: if it cannot be read, or is empty.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {what}s from {path}: {error}") from error
    if not (found := [line for line in lines if line.strip()]):
        raise PromptError(f"{path} holds no {what}: write one per line")
    return found
