"""Prove that an attention mechanism holds on a whole neighbourhood of an input."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from prooflens.notebook import draw_with
from prooflens.version import __version__

if TYPE_CHECKING:
    from prooflens.enumeration import family, family_discover, family_effects
    from prooflens.families import (
        ALL,
        COLOURS,
        NAMES,
        NUMBERS,
        OBJECTS,
        PLACES,
        Prompts,
        Swaps,
        Template,
    )
    from prooflens.models import Transformer, load, pull, read_at
    from prooflens.models.attribution import attribution
    from prooflens.models.dictionaries import Dictionary
    from prooflens.models.edits import edit
    from prooflens.models.nearest import yardstick
    from prooflens.models.parts import Edit
    from prooflens.models.tails import start_at
    from prooflens.regions import (
        Ball,
        Constraints,
        Hull,
        Paraphrases,
        Pixels,
        Region,
        Segment,
        Span,
        Steer,
        direction,
    )
    from prooflens.report import report
    from prooflens.results import Radii, Results
    from prooflens.results.families import FamilyResults
    from prooflens.results.outputs import OutputResults
    from prooflens.verdicts.accuracy import accuracy
    from prooflens.verdicts.certify import certify
    from prooflens.verdicts.circuit import circuit
    from prooflens.verdicts.discover import discover
    from prooflens.verdicts.effect import effect, effects
    from prooflens.verdicts.features import features
    from prooflens.verdicts.output import output, output_radius
    from prooflens.verdicts.plan import plan
    from prooflens.verdicts.radius import radius
    from prooflens.verdicts.vocabulary import copied_tokens, duplicate_tokens, profile
    from prooflens.verdicts.way import steer, way


_HOMES = {
    "Transformer": "prooflens.models",
    "load": "prooflens.models",
    "pull": "prooflens.models",
    "read_at": "prooflens.models",
    "Dictionary": "prooflens.models.dictionaries",
    "Edit": "prooflens.models.parts",
    "attribution": "prooflens.models.attribution",
    "edit": "prooflens.models.edits",
    "start_at": "prooflens.models.tails",
    "steer": "prooflens.verdicts.way",
    "family": "prooflens.enumeration",
    "family_discover": "prooflens.enumeration",
    "family_effects": "prooflens.enumeration",
    "FamilyResults": "prooflens.results.families",
    "ALL": "prooflens.families",
    "COLOURS": "prooflens.families",
    "NAMES": "prooflens.families",
    "NUMBERS": "prooflens.families",
    "OBJECTS": "prooflens.families",
    "PLACES": "prooflens.families",
    "Prompts": "prooflens.families",
    "Swaps": "prooflens.families",
    "Template": "prooflens.families",
    "Ball": "prooflens.regions",
    "Constraints": "prooflens.regions",
    "Paraphrases": "prooflens.regions",
    "Pixels": "prooflens.regions",
    "Region": "prooflens.regions",
    "Hull": "prooflens.regions",
    "Segment": "prooflens.regions",
    "Span": "prooflens.regions",
    "Steer": "prooflens.regions",
    "direction": "prooflens.regions",
    "OutputResults": "prooflens.results.outputs",
    "output": "prooflens.verdicts.output",
    "output_radius": "prooflens.verdicts.output",
    "accuracy": "prooflens.verdicts.accuracy",
    "certify": "prooflens.verdicts.certify",
    "circuit": "prooflens.verdicts.circuit",
    "effect": "prooflens.verdicts.effect",
    "effects": "prooflens.verdicts.effect",
    "discover": "prooflens.verdicts.discover",
    "features": "prooflens.verdicts.features",
    "plan": "prooflens.verdicts.plan",
    "radius": "prooflens.verdicts.radius",
    "yardstick": "prooflens.models.nearest",
    "copied_tokens": "prooflens.verdicts.vocabulary",
    "duplicate_tokens": "prooflens.verdicts.vocabulary",
    "profile": "prooflens.verdicts.vocabulary",
    "way": "prooflens.verdicts.way",
    "report": "prooflens.report",
    "Results": "prooflens.results",
    "Radii": "prooflens.results",
}

__all__ = [
    "ALL",
    "COLOURS",
    "NAMES",
    "NUMBERS",
    "OBJECTS",
    "PLACES",
    "Ball",
    "Constraints",
    "Dictionary",
    "Edit",
    "FamilyResults",
    "Hull",
    "OutputResults",
    "Paraphrases",
    "Pixels",
    "Prompts",
    "Radii",
    "Region",
    "Results",
    "Segment",
    "Span",
    "Steer",
    "Swaps",
    "Template",
    "Transformer",
    "__version__",
    "accuracy",
    "attribution",
    "certify",
    "circuit",
    "copied_tokens",
    "direction",
    "discover",
    "duplicate_tokens",
    "edit",
    "effect",
    "effects",
    "family",
    "family_discover",
    "family_effects",
    "features",
    "load",
    "output",
    "output_radius",
    "plan",
    "profile",
    "pull",
    "radius",
    "read_at",
    "report",
    "start_at",
    "steer",
    "way",
    "yardstick",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import prooflens` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'prooflens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


def _picture(found: Any) -> str:
    """A picture of results for notebooks, drawn by what draws reports."""
    from prooflens.report.inline import picture

    return picture(found)


draw_with(_picture)


class _Package(ModuleType):
    """`prooflens.verdicts.certify` is the function, although the module it is in has the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
