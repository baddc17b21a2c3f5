"""The members nearest to zero, once more, in the checker's ball arithmetic: there a sign is proved or open.

The network is the checker's own (`checker.network`), in Arb balls over the reals. It multiplies one number at a time,
so a large model takes minutes a member: where a member would take more than `MOST_PRODUCTS`, nothing is confirmed and
the results say so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from flint import arb

from prooflens.checker.claims import value
from prooflens.checker.network import Network
from prooflens.enumeration.claims import member_conditions
from prooflens.families import Family, Member
from prooflens.models import Transformer
from prooflens.models.sites import rotary_tables
from prooflens.queries import Query
from prooflens.results.record import functional_of

MOST_PRODUCTS = 3 * 10**7
"""Products of one member that are still confirmed."""

SECONDS = 60.0
"""How long confirming one claim may take; members that are left then are not confirmed."""


def network_of(model: Transformer) -> Network:
    """The checker's network with a model's weights."""

    def tables(n_tokens: int, d_head: int, theta: float) -> Any:
        made = rotary_tables(n_tokens, d_head, theta, torch.zeros(1, dtype=torch.float64))
        return tuple(table.numpy() for table in made)

    weights = {name: tensor.detach().cpu().double().numpy() for name, tensor in model.weights.items()}
    return Network.made(model.architecture.to_dict(), weights, tables)


def products(model: Transformer, layers: int, output: bool, n_tokens: int) -> int:
    """About how many products a member takes: the weights of the blocks that are run, once per token."""
    used = tuple(f"blocks.{layer}." for layer in range(layers))
    held = sum(tensor.numel() for name, tensor in model.weights.items() if name.startswith(used))
    return held * n_tokens + (model.head[0].numel() if output else 0)


def confirm(net: Network, family: Family, query: Query, members: Sequence[tuple[Member, bool]]) -> list[str]:
    """Say of members whether balls confirm what float64 says.

    Args:
        net: the checker's network.
        family: the family.
        query: the claim.
        members: members, and whether they satisfy the claim in float64.

    Returns:
        For each `confirmed`, `contradicted`, `open` (a ball contains 0), or an empty text if there was no time.
    """
    begin, found = time.monotonic(), []
    for member, held in members:
        if time.monotonic() - begin > SECONDS:
            found.append("")
            continue
        signs = [_sign(f, v) for f, v in _values(net, family.model, query, member)]
        truth = None if None in signs and False not in signs else False not in signs
        found.append("open" if truth is None else "confirmed" if truth is held else "contradicted")
    return found


def _values(
    net: Network, model: Transformer, query: Query, member: Member
) -> list[tuple[dict[str, Any], arb]]:
    """The claim's functionals and their balls at a member."""
    conditions = member_conditions(query, member, model)
    functionals = [functional_of(c.functional) | {"sense": c.sense.value} for c in conditions]
    terms = [term for functional in functionals for term in functional["terms"]]
    output = any(term[1] in ("logit", "largest") for term in terms)
    layers = {term[2] for term in terms if term[1] not in ("logit", "largest")}
    (at,) = net.run([net.embed(member.ids)], layers, output)
    return [(functional, value(functional, at)) for functional in functionals]


def _sign(functional: dict[str, Any], ball: arb) -> bool | None:
    """Whether a functional has the sign that is wanted of it; None if its ball does not say."""
    if functional["sense"] == ">0":
        return True if ball > 0 else False if ball <= 0 else None
    return True if ball >= 0 else False if ball < 0 else None
