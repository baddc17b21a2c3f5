"""Sets: intervals, zonotopes, polynomial zonotopes and constrained polynomial zonotopes, with proved operations."""

from prooflens.sets.absorb import absorb, release, restructure
from prooflens.sets.bilinear import inner_product_range, product_range
from prooflens.sets.compact import compact
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, PolynomialZonotope, fresh_ids
from prooflens.sets.constraints import constrain, intersect, tighten_independent
from prooflens.sets.enclose import interval_enclosure, split, zonotope_enclosure
from prooflens.sets.factors import constraint_residual, evaluate, merge_ids, sample, sample_factors
from prooflens.sets.interval import Interval
from prooflens.sets.linear import (
    affine_map,
    cartesian_product,
    disjoint,
    exact_difference,
    exact_sum,
    minkowski_sum,
    stack,
)
from prooflens.sets.plot import plot
from prooflens.sets.products import elementwise_product, inner_product, quadratic_map, scalar_product
from prooflens.sets.quadratic import lemma_upper, quadratic_lower, quadratic_range, quadratic_upper
from prooflens.sets.range_bounds import bernstein_upper, polynomial_range, polynomial_upper
from prooflens.sets.reduce import reduce_girard, reduce_keep, relax_exponents
from prooflens.sets.search import Support, constrained_enclosure, contains, is_empty, support
from prooflens.sets.zonotope import Zonotope

__all__ = [
    "ConstrainedPolynomialZonotope",
    "Interval",
    "PolynomialZonotope",
    "Support",
    "Zonotope",
    "absorb",
    "affine_map",
    "bernstein_upper",
    "cartesian_product",
    "compact",
    "constrain",
    "constrained_enclosure",
    "constraint_residual",
    "contains",
    "disjoint",
    "elementwise_product",
    "evaluate",
    "exact_difference",
    "exact_sum",
    "fresh_ids",
    "inner_product",
    "inner_product_range",
    "intersect",
    "interval_enclosure",
    "is_empty",
    "lemma_upper",
    "merge_ids",
    "minkowski_sum",
    "plot",
    "polynomial_range",
    "polynomial_upper",
    "product_range",
    "quadratic_lower",
    "quadratic_map",
    "quadratic_range",
    "quadratic_upper",
    "reduce_girard",
    "reduce_keep",
    "relax_exponents",
    "release",
    "restructure",
    "sample",
    "sample_factors",
    "scalar_product",
    "split",
    "stack",
    "support",
    "tighten_independent",
    "zonotope_enclosure",
]
