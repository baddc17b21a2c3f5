"""The members nearest to zero, once more, in the checker's ball arithmetic: there a sign is proved or open.

The network is the checker's own (`checker.network`), in Arb balls over the reals. It multiplies one number at a time,
so a large model takes minutes a member: where one would take more time than there is, nothing is confirmed and the
results say so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from flint import arb

from prooflens.checker.claims import OUTPUTS, value
from prooflens.checker.network import Network
from prooflens.enumeration.claims import member_conditions, member_lenses, member_readouts
from prooflens.errors import ModelError
from prooflens.families import Family, Member
from prooflens.models import Transformer
from prooflens.models.reads import find_hook
from prooflens.models.sites import rotary_tables
from prooflens.queries import Condition, Functional, Query, Sense
from prooflens.results.record import functional_of
from prooflens.verdicts.sites import Readouts, Vectors

PRODUCT_SECONDS = 1e-7
"""About what one product of balls takes."""


UNKNOWN = Condition(Functional((), name="no bound"), Sense.POSITIVE)
"""Stands for what balls do not say."""


def network_of(model: Transformer) -> Network:
    """The checker's network with a model's weights.

    Args:
        model: the model.
    """

    def tables(n_tokens: int, d_head: int, theta: float) -> Any:
        made = rotary_tables(n_tokens, d_head, theta, torch.zeros(1, dtype=torch.float64))
        return tuple(table.numpy() for table in made)

    weights = {name: tensor.detach().cpu().double().numpy() for name, tensor in model.weights.items()}
    return Network.made(model.architecture.to_dict(), weights, tables)


def seconds_for(model: Transformer, layers: int, output: bool, n_tokens: int) -> float:
    """About how long a member takes: the weights of the blocks that are run, once per token.

    Args:
        model: the model.
        layers: how many blocks are run.
        output: whether the head is.
        n_tokens: the length of a member.
    """
    used = tuple(f"blocks.{layer}." for layer in range(layers))
    held = sum(tensor.numel() for name, tensor in model.weights.items() if name.startswith(used))
    return PRODUCT_SECONDS * (held * n_tokens + (model.head[0].numel() if output else 0))


def confirm(
    net: Network,
    family: Family,
    query: Query,
    members: Sequence[tuple[Member, bool]],
    seconds: float,
    vectors: Vectors | None = None,
) -> list[str]:
    """Say of members whether balls confirm what float64 says.

    Args:
        net: the checker's network.
        family: the family.
        query: the claim.
        members: members, and whether they satisfy the claim in float64.
        seconds: how long it may take; members that are left then are not asked.
        vectors: the directions and dictionaries that the claim names.

    Returns:
        For each `confirmed`, `contradicted`, `open` (a ball contains 0), or an empty text if there was no time.
    """
    begin, found = time.monotonic(), []
    for member, held in members:
        if time.monotonic() - begin > seconds:
            found.append("")
            continue
        pairs = _values(net, family.model, query, member)
        pairs += _inside(net, family.model, query, member, vectors)
        signs = [_sign(condition, ball) for condition, ball in pairs]
        truth = None if None in signs and False not in signs else False not in signs
        found.append("open" if truth is None else "confirmed" if truth is held else "contradicted")
    return found


def _values(net: Network, model: Transformer, query: Query, member: Member) -> list[tuple[Condition, arb]]:
    """The claim's functionals and their balls at a member."""
    conditions = member_conditions(query, member, model)
    if not conditions:
        return []
    functionals = [functional_of(condition.functional) for condition in conditions]
    terms = [term for functional in functionals for term in functional["terms"]]
    output = any(term[1] in OUTPUTS for term in terms)
    rows = [term for term in terms if term[1] not in OUTPUTS]
    ids = member.ids
    if model.architecture.causal and not output:  # nobody reads what stands behind the last position
        ids = ids[: 1 + max((term[4] for term in rows), default=0)]
    (at,) = net.run([net.embed(ids)], {term[2] for term in rows}, output)
    return [(c, value(functional, at)) for c, functional in zip(conditions, functionals, strict=True)]


def _inside(
    net: Network, model: Transformer, query: Query, member: Member, vectors: Vectors | None
) -> list[tuple[Condition, arb]]:
    """The functionals of a claim about values inside the model, and their balls at a member."""
    found = []
    for layer, conditions in member_lenses(query, member, model):
        (at,) = net.cut(layer + 1).run([net.embed(member.ids)], (), True)
        found += [(wanted, value(functional_of(wanted.functional), at)) for wanted in conditions]
    try:
        reads, pairs = member_readouts(query, member, model, vectors)
    except ModelError:  # no weight bounds what a part writes that reads no norm
        return [*found, (UNKNOWN, arb("nan"))]
    for pair in pairs:
        both: dict[int | str, Any] = {
            "logits": np.concatenate([_read(net, model, member, side)["logits"] for side in pair.sides])
        }
        found.append((pair.condition, value(functional_of(pair.condition.functional), both)))
    for read in reads:
        at = _read(net, model, member, read)
        found += [(wanted, value(functional_of(wanted.functional), at)) for _, wanted in read.wanted]
    return found


def _read(net: Network, model: Transformer, member: Member, read: Readouts) -> dict[Any, Any]:
    """Readouts of a member in balls."""
    layers = find_hook(model.architecture, read.hook).layer + 1
    ends = net.cut(layers).read_at(read.hook, read.position, read.weight.numpy(), read.bias.numpy())
    return ends.run([net.embed(member.ids)], (), True)[0]


def _sign(condition: Condition, ball: arb) -> bool | None:
    """Whether a functional has the sign that is wanted of it; None if its ball, or a rounded threshold, hides it."""
    strict = condition.sense is Sense.POSITIVE
    if ball > 0 or (ball >= 0 and not strict):
        return True
    broken = ball <= 0 if strict and condition.blur == 0.0 else ball < -condition.blur
    return False if broken else None
