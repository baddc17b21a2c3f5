"""Who answers: engines that bound scalars of a model over a region. Importing this package registers them all."""

from prooflens.engines import alpha_crown as _alpha_crown
from prooflens.engines import attack as _attack
from prooflens.engines import autolirpa as _autolirpa
from prooflens.engines import crown as _crown
from prooflens.engines import exact as _exact
from prooflens.engines import interval as _interval
from prooflens.engines import jacobian as _jacobian
from prooflens.engines import layer0 as _layer0
from prooflens.engines import polyzono as _polyzono
from prooflens.engines import taylor as _taylor
from prooflens.engines import zonotope as _zonotope
from prooflens.engines.base import (
    Bounds,
    Engine,
    FormBounds,
    Forms,
    Guarantee,
    Problem,
    engine_names,
    forms_of,
    get_engine,
)

__all__ = [
    "Bounds",
    "Engine",
    "FormBounds",
    "Forms",
    "Guarantee",
    "Problem",
    "engine_names",
    "forms_of",
    "get_engine",
]

del (
    _alpha_crown,
    _attack,
    _autolirpa,
    _crown,
    _exact,
    _interval,
    _jacobian,
    _layer0,
    _polyzono,
    _taylor,
    _zonotope,
)
