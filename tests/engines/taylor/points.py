"""What a site of a chain misses at points of the region, by running the model."""

from torch import Tensor

from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.segments import FeedForward
from prooflens.engines.taylor.solu import SoluSite
from prooflens.models import scores_name
from prooflens.problem import Problem


def missed_at_points(
    problem: Problem, chain: Chain, name: str, t: int, v: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """The move of a site's input [n, d], and v·r for the covectors v [F, o] at its output, [n, F]."""
    site = chain.sites[name]
    assert isinstance(site, NetworkSite | NormSite | SoluSite)
    step = next(step for step in chain.segment.steps if step.out == name)
    source = step.source if isinstance(step, FeedForward) else step.inputs[0]
    run = problem.model.program(problem.n_tokens, [scores_name(2)]).run(problem.region.point(alpha))
    u = run[source][:, t] - chain.values[source].u[t]
    return u, (run[name][:, t] - chain.values[name].u[t]) @ v.T - u @ site.pull(v, t).T
