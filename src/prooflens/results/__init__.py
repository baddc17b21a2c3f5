"""What a caller gets: verdicts, radii and outputs as tables for notebooks, and how they are kept in run directories."""

from prooflens.results.frame import Frame, Subject
from prooflens.results.outcome import Outcome, Verdict
from prooflens.results.radii import Radii
from prooflens.results.tables import Results

__all__ = ["Frame", "Outcome", "Radii", "Results", "Subject", "Verdict"]
