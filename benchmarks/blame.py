"""Which site is to blame: what each site adds to a bound of `taylor`, by layer, against the linear part.

python benchmarks/blame.py MODEL --eps 0.0005 [--layer 1] [--text "…"] [--device cuda] [--json FILE]

The functionals are top-1 margins of a layer or, without `--layer`, coordinates of what the model's head reads. Two
readings: what the ellipsoids of each site say of the covectors (`ellipsoids`), and what is left once all second orders
stand in one matrix (`beyond`). Sums over the functionals, of site by linear part, in the order of the model;
`charts.py FILE OUT.svg --key ellipsoids` draws them.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from depth import region_of
from measuring import Line, tell
from prooflens import load
from prooflens.engines import Forms, forms_of
from prooflens.engines.hidden import headless, output_forms
from prooflens.engines.protocol import EngineOptions
from prooflens.engines.taylor import Taylor, bound_part
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.hessian import HigherOrderBound
from prooflens.engines.taylor.remainder_bounds import Supports
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
        return {name: float(found.sum() / self.linear.sum()) for name, found in self.sites.items()}


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
        return linear_range(slope)

    for name, made in (("site", booked_site), ("mixing", booked_mixing), ("linear_range", booked_range)):
        setattr(reading, name, made)
    return reading


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
    parser.add_argument("--json", type=Path, help="append the rows to this file, one JSON document a line")
    options = parser.parse_args()
    model = load(options.model).to(options.device)
    for eps in options.eps:
        problem, forms = asked(
            Problem(model, region_of(model, options.text, eps, options.device)), options.layer, options.count
        )
        row: Line = {"model": options.model, "layer": options.layer, "eps": eps, "functionals": forms.size}
        with torch.no_grad():
            walk = Taylor().walk(problem, forms, EngineOptions(options.memory * 2**30))
            for name, reading in (("ellipsoids", Deep()), ("beyond", HigherOrderBound())):
                ledger = Ledger()
                bound_part(walk, problem, forms, spied(reading, ledger))
                shares = reversed(ledger.shares().items())
                row[name] = {site: float(f"{share:.3g}") for site, share in shares}
        tell(row, options.json)


if __name__ == "__main__":
    main()
