"""Who answers: engines that bound scalars of a model over a region. Importing this package registers them all.

`protocol` says what an engine is, `forms` what it is asked, `bounds` what it answers; `functionals` and `vocabulary`
make everything else of forms, once for all engines. `relaxations`, `tensor_sets` and `first_layer` are what engines
share. Every other name here is one engine, or a family of engines, and its first page says what it proves.
"""

from prooflens.engines import (
    attack,
    autolirpa,
    crown,
    exact,
    interval,
    jacobian,
    layer0,
    polyzono,
    taylor,
    zonotope,
)
from prooflens.engines.bounds import Bounds, FormBounds, Guarantee
from prooflens.engines.forms import Forms, forms_of
from prooflens.engines.protocol import Engine, engine_names, get_engine

__all__ = [
    "Bounds",
    "Engine",
    "FormBounds",
    "Forms",
    "Guarantee",
    "attack",
    "autolirpa",
    "crown",
    "engine_names",
    "exact",
    "forms_of",
    "get_engine",
    "interval",
    "jacobian",
    "layer0",
    "polyzono",
    "taylor",
    "zonotope",
]
