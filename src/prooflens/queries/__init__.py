"""What is asked of attention: queries and their functionals, and the simplex programs over weight boxes.

`parse_query("2.4:top1@-1").bind(setting)` gives claims; an engine bounds `claim.functionals` over a region and
`verdicts.decide` says whether the bounds show it; weight boxes do, through `claim.program`.
"""

from prooflens.queries.attention import Entropy, Mass, Ranking, RowQuery, Specialised, TopK
from prooflens.queries.base import Claim, Condition, Query, Sense, Setting
from prooflens.queries.circuit import Argmax, Beats, Circuit
from prooflens.queries.distributions import Divergence, Probability
from prooflens.queries.entropy import entropy_range
from prooflens.queries.functionals import (
    Atom,
    Functional,
    LargestLogit,
    Logit,
    LogSumExp,
    RowEntropy,
    Score,
    Standing,
)
from prooflens.queries.lens import AttributionQuery, InsideQuery, Lens, SiteComparison
from prooflens.queries.masks import causal_mask, full_mask, padding_mask
from prooflens.queries.measures import DistributionQuery
from prooflens.queries.parse import parse_metric, parse_query
from prooflens.queries.programs import functional_bounds, score_bounds
from prooflens.queries.remainder import remainder
from prooflens.queries.roles import resolve
from prooflens.queries.rows import Role, Row, parse_heads
from prooflens.queries.simplex import Box
from prooflens.queries.sites import OutputLevel, SiteQuery, TopFeature
from prooflens.queries.tables import Linearisation, MarginTable, linearise, margin_table
from prooflens.queries.weights import differences_from_scores, weight_box

__all__ = [
    "Argmax",
    "Atom",
    "AttributionQuery",
    "Beats",
    "Box",
    "Circuit",
    "Claim",
    "Condition",
    "DistributionQuery",
    "Divergence",
    "Entropy",
    "Functional",
    "InsideQuery",
    "LargestLogit",
    "Lens",
    "Linearisation",
    "LogSumExp",
    "Logit",
    "MarginTable",
    "Mass",
    "OutputLevel",
    "Probability",
    "Query",
    "Ranking",
    "Role",
    "Row",
    "RowEntropy",
    "RowQuery",
    "Score",
    "Sense",
    "Setting",
    "SiteComparison",
    "SiteQuery",
    "Specialised",
    "Standing",
    "TopFeature",
    "TopK",
    "causal_mask",
    "differences_from_scores",
    "entropy_range",
    "full_mask",
    "functional_bounds",
    "linearise",
    "margin_table",
    "padding_mask",
    "parse_heads",
    "parse_metric",
    "parse_query",
    "remainder",
    "resolve",
    "score_bounds",
    "weight_box",
]
