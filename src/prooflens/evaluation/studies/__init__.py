"""The paper's experiments, one function per table or figure. Importing this package enters them all."""

from importlib import import_module

from prooflens.evaluation.studies.base import (
    Result,
    Sheet,
    Study,
    StudyError,
    StudyRow,
    StudySettings,
    get_study,
    study_names,
)

__all__ = ["Result", "Sheet", "Study", "StudyError", "StudyRow", "StudySettings", "get_study", "study_names"]

MODULES = (
    "synthetic",
    "depth",
    "widths",
    "reference",
    "outputs",
    "pretrained",
    "probes",
    "neighbourhoods",
    "pruning",
)
"""In the order in which studies are listed and run."""

for _name in MODULES:
    import_module(f"prooflens.evaluation.studies.{_name}")
