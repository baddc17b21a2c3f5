"""Input sets: where a claim is to hold."""

from prooflens.regions.hulls import Hull, Segment, Span, Steer, direction
from prooflens.regions.named import Ball, Paraphrases, listed
from prooflens.regions.pixels import Pixels
from prooflens.regions.region import Constraints, Region

__all__ = [
    "Ball",
    "Constraints",
    "Hull",
    "Paraphrases",
    "Pixels",
    "Region",
    "Segment",
    "Span",
    "Steer",
    "direction",
    "listed",
]
