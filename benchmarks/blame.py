"""Which site is to blame: what each site adds to a bound of `taylor`, by layer, against the linear part.

python benchmarks/blame.py MODEL --eps 0.0005 [--layer 1] [--text "…"] [--device cuda] [--json FILE] [--samples 256]
    [--third]

The functionals are top-1 margins of a layer or, without `--layer`, coordinates of what the model's head reads. Two
readings: what the ellipsoids of each site say of the covectors (`ellipsoids`), and what is left once all second orders
stand in one matrix (`beyond`). Sums over the functionals, of site by linear part, in the order of the model;
`charts.py FILE OUT.svg --key ellipsoids` draws them.

With `--samples`, for margins of a layer, a ledger of looseness: the same terms at random corners of the ball and at the
corners of the linear parts, each at its largest (`attained`, `attained beyond`). What a site's bound is above them it
loses itself, up to what the samples miss. `together` is all that lies beyond second order at once, at its largest: what
that is below the sum of the sites is lost by adding them up.

With `--third`, also what is left with covectors that move and fourth orders as squares (`third`): `moving`, what the
covectors make of all remainders, and `squares`, what stands above the rest, both at the corner of each linear part, and
`constants`. `over the box` is all that a form has beside its linear part, second order among it. With `--joint` what
moves is one matrix whatever the number of factors; a CPU does without from 4,096 on.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from depth import region_of
from measuring import Line, tell
from prooflens import load
from prooflens.engines import Forms, forms_of
from prooflens.engines.hidden import headless, output_forms
from prooflens.engines.protocol import EngineOptions
from prooflens.engines.taylor import Taylor, bound_part, moving
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.hessian import Hessian, HigherOrderBound
from prooflens.engines.taylor.remainder_bounds import Supports
from prooflens.engines.taylor.segments import FeedForward
from prooflens.engines.taylor.third_order import ThirdOrder
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models import scores_name
from prooflens.problem import Problem
from prooflens.queries import parse_query


class Ledger:
    """What sites added, by name, and the linear parts."""

    def __init__(self) -> None:
        self.sites: dict[str, Tensor] = {}
        self.linear = torch.zeros(())

    def book(self, name: str, found: Tensor) -> Tensor:
        """Add what a site said of every functional."""
        self.sites[name] = self.sites.get(name, torch.zeros_like(found[:, 0])) + found.amax(1)
        return found

    def shares(self) -> dict[str, float]:
        """What sites added to all functionals, by all linear parts."""
        found = {name: float(found.sum() / self.linear.sum()) for name, found in self.sites.items()}
        return {name: share for name, share in found.items() if share}


class Deep(Supports):
    """Ellipsoids of every site, as far as the input."""

    deep = True
    may_stop = False


def spied(reading: Supports, ledger: Ledger) -> Supports:
    """The reading, with a ledger of what it says."""
    site, mixing, linear_range = reading.site, reading.mixing, reading.linear_range

    def booked_site(chain: Chain, name: str, v: Tensor, t: int) -> Tensor:
        return ledger.book(name, site(chain, name, v, t))

    def booked_mixing(chain: Chain, place: int, u: Tensor) -> Tensor:
        return ledger.book(f"blocks.{chain.segment.layer}.hook_resid_mid", mixing(chain, place, u))

    def booked_range(slope: Tensor) -> Tensor:
        ledger.linear = slope.abs().sum(-1)
        if not isinstance(reading, ThirdOrder):
            return linear_range(slope)
        for name, at_corner in at_corners(reading, slope).items():
            ledger.book(name, at_corner[:, None])
        found = linear_range(slope)
        ledger.book("over the box", found - ledger.linear[:, None])
        return found

    made = {"site": booked_site, "mixing": booked_mixing, "linear_range": booked_range}
    for name, function in made.items():
        setattr(reading, name, function)
    return reading


def at_corners(reading: ThirdOrder, slope: Tensor) -> dict[str, Tensor]:
    """What covectors that move, and squares above the rest, come to at the corners of the linear parts."""
    corner = torch.where(slope >= 0.0, 1.0, -1.0).to(slope)

    def at(J: Tensor) -> Tensor:
        s = corner[:, : J.shape[1]]
        return 0.5 * torch.einsum("fp,fpq,fq->f", s, J, s)

    moves, fourth, majorants = reading.moves, reading.fourth, reading.majorants
    assert moves is not None
    moved = moves.halves + moves.rest + (0.0 if moves.J is None else at(moves.J))
    squares = at(fourth.above.G + fourth.above.G.mT)
    if majorants.rows:
        squares = squares + at(majorants.squares(slice(None))[0])
    constants = fourth.rest + torch.as_tensor(majorants.rest)
    return {"moving": moved, "squares": squares, "constants": constants}


class Sampled(HigherOrderBound):
    """The very terms that a walk bounds, at points of the region: remainders of sites, less second order, or whole."""

    def __init__(self, problem: Problem, walk: TaylorWalk, alpha: Tensor) -> None:
        super().__init__()
        self.walk, self.alpha = walk, alpha
        last = walk.chains[-1].segment.layer
        assert last is not None
        program = problem.model.program(problem.n_tokens, [scores_name(last)], problem.padding)
        self.found = program.run(problem.region.point(alpha))
        self.moved = alpha * walk.chains[0].root.half_widths
        self.whole, self.beyond = Ledger(), Ledger()
        self.sum: Tensor | float = 0.0

    def _book(self, name: str, r: Tensor, second: Tensor) -> Tensor:
        for ledger, term in ((self.whole, r), (self.beyond, r - second)):
            ledger.book(name, term.abs().amax(0)[:, None].expand(-1, 2))
        self.sum = self.sum + (r - second)
        return torch.zeros_like(r[0])[:, None].expand(-1, 2)

    def _deviation(self, chain: Chain, name: str, t: int) -> Tensor:
        """How far a value of one token moves, at all points."""
        return self.found[name][:, t].flatten(1) - chain.values[name].u[t]

    def site(self, chain: Chain, name: str, v: Tensor, t: int) -> Tensor:
        """The remainder of a norm or a network at the points."""
        step = next(step for step in chain.segment.steps if step.out == name)
        source = step.source if isinstance(step, FeedForward) else step.inputs[0]
        site = chain.sites[name]
        r = self._deviation(chain, name, t) @ v.T - self._deviation(chain, source, t) @ site.pull(v, t).T
        x = self.moved @ chain.root.N[t].T
        return self._book(name, r, 0.5 * torch.einsum("ni,fij,nj->nf", x, site.quadratic(v, t)[0], x))

    def mixing(self, chain: Chain, place: int, u: Tensor) -> Tensor:
        """The remainder of a mixing at the points."""
        mix, t = chain.mix, chain.goes_on[place]
        assert mix is not None
        names, pulled = mix.attention, mix.pull(u, t)
        after = self.walk.chains[self.walk.chains.index(chain) + 1]
        r = (
            self._deviation(after, after.segment.root, place) - self._deviation(chain, names.stream, t)
        ) @ u.T
        r = r - self._deviation(chain, names.q, t) @ pulled["q"].flatten(1).T
        for name, heads, w in ((names.k, mix.scores.k, pulled["k"]), (names.v, mix.v, pulled["v"])):
            moves = torch.stack([self._deviation(chain, name, j) for j in range(len(heads.u))], 1)
            moves = moves.unflatten(2, (heads.source.heads, -1)).repeat_interleave(heads.share, 2)
            r = r - torch.einsum("njhc,fjhc->nf", moves, w)
        second = Hessian(chain.root.half_widths, len(u))
        second._add_mixing(mix, t, u)
        form = torch.einsum("np,fpq,nq->nf", self.alpha, second.second.G, self.alpha)
        return self._book(f"blocks.{chain.segment.layer}.hook_resid_mid", r, form)


def attained(problem: Problem, walk: TaylorWalk, forms: Forms, samples: int, linear: Tensor) -> Line:
    """What the terms of the bounds come to at random corners, and at both corners of every linear part."""
    corners = bound_part(walk, problem, forms, Supports()).corner
    drawn = torch.randint(0, 2, (samples, corners.shape[1]), generator=torch.Generator().manual_seed(0))
    alpha = torch.cat((2.0 * drawn.to(corners) - 1.0, corners, -corners))
    reading = Sampled(problem, walk, alpha)
    bound_part(walk, problem, forms, reading)
    row: Line = {}
    for name, ledger in (("attained", reading.whole), ("attained beyond", reading.beyond)):
        ledger.linear = linear
        row[name] = {site: float(f"{share:.3g}") for site, share in reversed(ledger.shares().items())}
    assert isinstance(reading.sum, Tensor)
    row["together"] = float(f"{float(reading.sum.abs().amax(0).sum() / linear.sum()):.3g}")
    return row


def asked(problem: Problem, layer: int | None, count: int) -> tuple[Problem, Forms]:
    """Margins of a layer, or coordinates of what the model's head reads."""
    if layer is None:
        eye = torch.eye(problem.model.architecture.d_model, dtype=torch.float64)
        return headless(problem), output_forms(eye[torch.linspace(0, len(eye) - 1, count).long()])
    claims = parse_query("top1").bind(problem.setting([layer]))
    forms = forms_of([f for claim in claims if claim.clean_holds for f in claim.functionals])
    return problem, forms.select(torch.linspace(0, forms.size - 1, min(count, forms.size)).long())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--eps", type=float, nargs="+", default=[0.0005])
    parser.add_argument("--layer", type=int, help="margins of this layer; without it, the output")
    parser.add_argument("--count", type=int, default=64, help="so many functionals")
    parser.add_argument("--text", help="the prompt; without it, the model's embedded example")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=12, help="GiB for the engine")
    parser.add_argument("--samples", type=int, default=0, help="so many corners for a ledger of looseness")
    parser.add_argument("--third", action="store_true", help="also what is left with covectors that move")
    parser.add_argument("--joint", action="store_true", help="make one matrix of what moves, also on a CPU")
    parser.add_argument("--json", type=Path, help="append the rows to this file, one JSON document a line")
    options = parser.parse_args()
    if options.joint:
        moving.JOINT_ON_CPU = sys.maxsize
    model = load(options.model).to(options.device)
    for eps in options.eps:
        problem, forms = asked(
            Problem(model, region_of(model, options.text, eps, options.device)), options.layer, options.count
        )
        row: Line = {"model": options.model, "layer": options.layer, "eps": eps, "functionals": forms.size}
        with torch.no_grad():
            walk = Taylor().walk(problem, forms, EngineOptions(options.memory * 2**30))
            readings: dict[str, Supports] = {"ellipsoids": Deep(), "beyond": HigherOrderBound()}
            if options.third:
                readings["third"] = ThirdOrder(walk.chains[0].root.half_widths, forms.size)
            for name, reading in readings.items():
                ledger = Ledger()
                bound_part(walk, problem, forms, spied(reading, ledger))
                shares = reversed(ledger.shares().items())
                row[name] = {site: float(f"{share:.3g}") for site, share in shares}
            if options.samples and options.layer is not None:
                row |= attained(problem, walk, forms, options.samples, ledger.linear)
        tell(row, options.json)


if __name__ == "__main__":
    main()
