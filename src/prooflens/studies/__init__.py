"""The paper's experiments, one function per table or figure. Importing this package enters them all."""

from prooflens.studies import depth as _depth
from prooflens.studies import pruning as _pruning
from prooflens.studies import synthetic as _synthetic
from prooflens.studies import widths as _widths
from prooflens.studies.base import Result, Row, Settings, Sheet, Study, StudyError, get_study, study_names

__all__ = ["Result", "Row", "Settings", "Sheet", "Study", "StudyError", "get_study", "study_names"]

del _depth, _pruning, _synthetic, _widths
