"""Groups of options: a command takes a dataclass, and each of its fields is an option of the command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses: every field becomes a parameter that typer sees, with its type and default.

    Args:
        command: a function whose parameters are options of typer, or dataclasses of such options.

    Returns:
        A function with one parameter per option, that makes the dataclasses and calls the command.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = list(_parameters(command, hints, groups))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameters(
    command: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    """One keyword parameter per option: a group's fields stand where the group does."""
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=inner[field.name],
            )


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
