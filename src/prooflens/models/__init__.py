"""One canonical transformer with named sites, and the adapters that build it."""

from prooflens.models.architecture import Architecture
from prooflens.models.load import EMBEDDED, load
from prooflens.models.program import INPUT, OUTPUT, Program, pattern_name, scores_name
from prooflens.models.prompt import Prompt, Roles
from prooflens.models.pull import pull
from prooflens.models.reads import read_at
from prooflens.models.transformer import Transformer

__all__ = [
    "EMBEDDED",
    "INPUT",
    "OUTPUT",
    "Architecture",
    "Program",
    "Prompt",
    "Roles",
    "Transformer",
    "load",
    "pattern_name",
    "pull",
    "read_at",
    "scores_name",
]
