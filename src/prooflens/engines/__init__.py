"""Engines: they bound scalars of a model over a region. Importing this package registers all of them.

`protocol` says what an engine is, `forms` what it is asked, and `bounds` what it answers. `functionals` and
`vocabulary` write everything else in terms of forms, once for all engines. `relaxations`, `tensor_sets` and
`first_layer` hold what engines share. Every other name here is an engine or a family of engines, and the docstring of
its package says what it proves.
"""

from prooflens.engines import (
    attack,
    autolirpa,
    chebyshev,
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
    "chebyshev",
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
