"""Families of prompts, run: every member through the model in float64, or a sample of them.

claims      a query, compiled for the members of one shape
tally       counts as members come: by filler, by pair of slots, failures, the worst, the nearest to zero
walk        batches that fit, in order; what was counted can be kept and gone on with
confirm     the members nearest to zero in the checker's ball arithmetic
enumerate   `pl.family`
effects     `pl.family_effects`: every member through a model and through edits of it
discover    `pl.family_discover`: a circuit that is faithful on every member
"""

from prooflens.enumeration.discover import family_discover
from prooflens.enumeration.effects import family_effects
from prooflens.enumeration.enumerate import family

__all__ = ["family", "family_discover", "family_effects"]
