"""The checker's own proofs as one more engine of the soundness run, so that they are attacked as the engines' are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prooflens.checker.depth import Form, Walk, output_form, score_form
from prooflens.checker.edited import tables_of
from prooflens.checker.network import Network
from prooflens.engines import FormBounds, Forms, Guarantee
from prooflens.engines.protocol import NO_OPTIONS, EngineBase, EngineOptions
from prooflens.models.sites import rotary_tables
from prooflens.problem import Problem

UNREAD = (".attn.hook_z", ".hook_attn_out")
"""Hooks that the checker's walk does not pass."""


class SecondProof(EngineBase):
    """Bounds of `prooflens.checker.depth`: the better of its two readings of every form."""

    name: str = "checker"
    guarantee: Guarantee = Guarantee.PROVED

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Refuse what the checker refuses."""
        net = _network(problem)
        if problem.padding is not None and tables_of(net.weights):
            return "the checker knows no edits at tokens of a padded prompt"
        if (net.arch.get("read_hook") or "").endswith(UNREAD):
            return "the checker's walk does not pass this hook"
        return Walk.refuses(net) or None

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form, with the corners that its slope points to."""
        walk = _walk(problem)
        with np.errstate(all="ignore"):
            return _read([_form(walk, forms, number) for number in range(forms.size)], problem)

    def bound_effects(
        self,
        problem: Problem,
        edited: Problem,
        forms: Forms,
        options: EngineOptions = NO_OPTIONS,
        other: Forms | None = None,
    ) -> FormBounds:
        """Bound the difference of every form of the outputs of two models, both walked side by side.

        Args:
            problem: the model and the region.
            edited: the other model and the same region.
            forms: what is asked of the model.
            options: not read.
            other: what is asked of the other model; None for the same.
        """
        padded = problem.padding is not None and bool(tables_of(_network(edited).weights))
        # The checker proves no effects on two places, and no edits at tokens of a padded prompt.
        if padded or problem.model.architecture.beside_hook is not None:
            infinite = torch.full((forms.size,), torch.inf, dtype=torch.float64)
            return FormBounds(-infinite, infinite)
        first = _walk(problem, _network(edited))
        with np.errstate(all="ignore"):
            second, negative = first.beside(), (forms if other is None else other).negated()
            numbers = range(forms.size)
            pairs = [(_form(first, forms, n), _form(second, negative, n)) for n in numbers]
            return _read([one.plus(other) for one, other in pairs], problem)


def _walk(problem: Problem, other: Network | None = None) -> Walk:
    region = problem.region
    G = np.moveaxis(region.dense_generators().numpy(), 0, -1) if region.n_factors else None
    center = region.center.numpy()
    G = np.zeros((*center.shape, 1)) if G is None else G
    padding = None if problem.padding is None else problem.padding.numpy()
    return Walk(_network(problem), center, G, other=other, padding=padding)


def _read(forms: list[Form], problem: Problem) -> FormBounds:
    """The better of both readings of every form, and the corners that its slope points to."""
    found, corners = [], []
    for form in forms:
        low, high = zip(form.bounds(), form.tight_bounds(), strict=True)
        found.append((max(low), min(high)))
        corners.append(np.where(form.slope >= 0.0, 1.0, -1.0)[: problem.region.n_factors])
    lower, upper = torch.tensor(found, dtype=torch.float64).reshape(-1, 2).unbind(-1)
    corner = torch.tensor(np.array(corners), dtype=torch.float64)
    return FormBounds(lower, upper, -corner, corner)


def _network(problem: Problem) -> Network:
    model = problem.model
    weights = {name: tensor.numpy() for name, tensor in model.weights.items()}
    return Network.made(model.architecture.to_dict(), weights, _tables)


def _tables(n_tokens: int, width: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = rotary_tables(n_tokens, width, theta, torch.zeros(1, dtype=torch.float64))
    return cos.numpy(), sin.numpy()


def _form(walk: Walk, forms: Forms, number: int) -> Form:
    """One of the forms; the soundness run asks about one layer's scores or about outputs."""
    if forms.logits is not None:
        row: Tensor = forms.logits[number]
        read = {i: float(row[i]) for i in row.nonzero()[:, 0].tolist()}
        return output_form(walk, read or {0: 0.0})
    here = (forms.index == number).nonzero()[:, 0].tolist()
    places = [tuple(int(x[n]) for x in (forms.head, forms.position, forms.key)) for n in here]
    terms = [(float(forms.weight[n]), h, i, j) for n, (h, i, j) in zip(here, places, strict=True)]
    return score_form(walk, int(forms.layer[here[0]]), terms)
