"""Direct logit attribution: what a part of a model adds to a difference of logits, the last norm held at a prompt's.

The stream behind the last block is the sum of the embedding and of what every part writes, x = x₀ + Σ o. A norm divides
it by a number s(x). *Frozen* at a prompt, with s a constant, logits are linear in x, and the part's share of
w·logits is

    w·U (γ ⊙ P o)/s  =  v·h,     h the part's value (z of a head, the output of a network),

U the head, γ the norm's weight, P its centring. So v is a direction at the part's hook, and `dla 9.6 logit3-logit5>0`
is a claim about it. *Live*, with s(x) of every input, the share is v·h · s/s(x). Both s are positive: a sign that is
proved of the one is proved of the other, and a size is not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.edits import find_place
from prooflens.models.parts import Place

if TYPE_CHECKING:
    from prooflens.models.prompt import Prompt
    from prooflens.models.transformer import Transformer


def attribution(
    model: Transformer, part: str, row: Float[Tensor, " C"] | tuple[int, int], prompt: Prompt | str
) -> tuple[str, Float[Tensor, " n"]]:
    """Return the hook of a part and the direction that reads its direct contribution to logits there.

    Args:
        model: a decoder whose blocks read a norm of the stream (GPT-2, Llama).
        part: a head `a9.h6`, an attention `a9` or a network `m3`.
        row: weights of the logits, shape [C]; or (a, b) for logit a − logit b.
        prompt: the last norm is frozen at its last token.

    Returns:
        The hook's name and the direction v: v·h at the last token is the part's contribution, the norm frozen.

    Raises:
        ModelError: if the model's parts do not add up to its stream, or there is no such part.

    Example:
        >>> import prooflens as pl
        >>> hook, v = pl.attribution(model, "a9.h6", (3, 5), text)  # doctest: +SKIP
        >>> pl.certify(model, text, pl.Ball(1e-4), queries=f"read({hook}@-1,V)>0", vectors={"V": v})  # doctest: +SKIP
    """
    a = model.architecture
    place = _part(model, part)
    weight, _ = model.head
    if isinstance(row, tuple):
        if not all(0 <= i < len(weight) for i in row):
            raise ModelError(f"there is no output {max(row)}: the model has {len(weight)}")
        wanted = weight.new_zeros(len(weight))
        wanted[row[0]] += 1.0
        wanted[row[1]] -= 1.0
    else:
        wanted = torch.as_tensor(row).to(weight)
    if wanted.shape != (len(weight),):
        raise ModelError(f"weights of logits have shape [{len(weight)}], got {list(wanted.shape)}")
    u = wanted @ weight
    if a.has_final_norm:
        held = model.prompt(prompt) if isinstance(prompt, str) else prompt
        u = u * model.weights["final_norm.weight"] if "final_norm.weight" in model.weights else u
        u = u - u.mean() if a.norm_kind == "layer" else u
        u = u * _frozen(model, held)
    if place.columns is None:
        return place.hook, u
    chosen = slice(place.columns.start, place.columns.stop)
    o = model.weights[f"{place.reader}.weight"]
    v = o.new_zeros(o.shape[1])
    v[chosen] = u @ o[:, chosen]
    return place.hook, v


def contribution(model: Transformer, part: str, h: Float[Tensor, "B n"]) -> Float[Tensor, "B d"]:
    """Return what a part adds to the vector that the head reads, before the last norm divides by its scale.

    The scale is a positive number of each input, so the rows of the head read the sign of the direct contribution.

    Args:
        model: as in `attribution`.
        part: likewise.
        h: values of the part's hook, shape [B, n].
    """
    a, place = model.architecture, _part(model, part)
    if place.columns is not None:
        chosen = slice(place.columns.start, place.columns.stop)
        h = h[:, chosen] @ model.weights[f"{place.reader}.weight"][:, chosen].T
    if not a.has_final_norm:
        return h
    h = h - h.mean(-1, keepdim=True) if a.norm_kind == "layer" else h
    return h * model.weights["final_norm.weight"] if "final_norm.weight" in model.weights else h


def _part(model: Transformer, part: str) -> Place:
    """A part that writes into the stream that the model's head reads."""
    a = model.architecture
    if a.norm_place not in ("pre", "none") or a.pool not in ("none", "last") or a.pooler or a.read_hook:
        raise ModelError(
            f"parts of {model.name} do not add up to what its head reads: it has no attributions"
        )
    place = find_place(a, part)
    if ".n" in place.name:
        raise ModelError(f"{place.name} is one neuron: give a head, an attention or a network")
    return place


def _frozen(model: Transformer, prompt: Prompt) -> Tensor:
    """1/s of the last norm at the prompt's last token, in float64: the constant that a frozen norm multiplies by."""
    a = model.architecture
    last = f"blocks.{a.n_layers - 1}.hook_resid_post"
    with torch.no_grad():
        x = model.run(prompt, last)[last][-1]
    x = x - x.mean() if a.norm_kind == "layer" else x
    return torch.rsqrt(x.square().mean() + a.norm_eps)


def attribution_error(model: Transformer, part: str, row: tuple[int, int], prompt: Prompt) -> float:
    """Bound how far v·h is from the part's contribution, v being rounded, on every input that there is.

    With n roundings in sequence, |v − v*| ≤ γ_n M, where M is the product that makes v with the sizes of all its
    numbers. A difference, two products, and the mean of d numbers where the norm is centred, make at most d + 8; a
    head's own product makes d more. M is rounded itself, which twice as many roundings cover. What a part writes is
    bounded by weights alone, since the part reads a norm (‖x/s‖₂ ≤ √d): |(v − v*)·h| ≤ γ_2n ‖M‖₂ ‖h‖₂.

    Args:
        model: as in `attribution`.
        part: likewise.
        row: (a, b) for logit a − logit b.
        prompt: the last norm is frozen at its last token.

    Raises:
        ModelError: if the part reads the stream without a norm: its size is then bounded by no weight.
    """
    a, place = model.architecture, _part(model, part)
    weight, _ = model.head
    size = (weight[row[0]] - weight[row[1]]).abs()
    if a.has_final_norm:
        size = (
            size * model.weights["final_norm.weight"].abs() if "final_norm.weight" in model.weights else size
        )
        size = (size + size.mean() if a.norm_kind == "layer" else size) * _frozen(model, prompt)
    if place.columns is not None:
        o = model.weights[f"{place.reader}.weight"]
        size = size @ o[:, place.columns.start : place.columns.stop].abs()
    sums = (a.norm_kind == "layer") + (place.columns is not None)
    roundings = 2 * (sums * a.d_model + 8) * 2.0**-53 / (1.0 - 2.0**-20)
    # The factor covers the few roundings of the norms below; the last term, products that underflow.
    return 1.001 * roundings * float(size.norm()) * _largest(model, place) + 2.0**-900


def _largest(model: Transformer, place: Place) -> float:
    """Bound the 2-norm of what a part's hook holds at a token, whatever the input."""
    a, block, attends = model.architecture, f"blocks.{place.layer}", place.name.startswith("a")
    if a.norm_place != "pre" or (attends and place.layer == 0 and not a.first_norm):
        raise ModelError(
            f"{place.name} of {model.name} reads the stream without a norm: no weight bounds what it writes; "
            "ask for read(HOOK@-1,V) with the direction of pl.attribution"
        )
    norm = f"{block}.norm{1 if attends or (a.parallel and a.shared_norm) else 2}"
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    gain, shift = model.weights.get(f"{norm}.weight", zero + 1.0), model.weights.get(f"{norm}.bias", zero)

    def rows(name: str) -> Tensor:
        """The largest size of each coordinate of W n + b, n the norm that the part reads."""
        weight = model.weights[f"{block}.{name}.weight"]
        bias = model.weights.get(f"{block}.{name}.bias", zero)
        size: Tensor = (weight * gain).square().sum(1).sqrt() * math.sqrt(a.d_model)
        return size + (weight.square().sum(1) * shift.square().sum()).sqrt() + bias.abs()

    if a.network_norm and not attends:  # a norm's output is at most √n long before its scales
        own = f"{block}.network_norm"
        scale = model.weights.get(f"{own}.weight", torch.ones(1)).abs().amax()
        inner = scale * math.sqrt(a.d_ff) + model.weights.get(f"{own}.bias", zero).norm()
    elif attends:  # a head mixes values with weights that sum to 1
        inner = rows("v").norm() * math.sqrt(a.n_heads / a.kv_heads)
    else:  # |φ(t)| ≤ |t|, or t² for the squared ReLU
        inner = rows("gate") * rows("up") if a.gated else rows("up")
        inner = (inner * rows("gate" if a.gated else "up") if a.activation == "relu2" else inner).norm()
    if place.columns is not None:
        return float(inner)
    bias = model.weights.get(f"{place.reader}.bias", zero)
    return float(model.weights[f"{place.reader}.weight"].norm() * inner + bias.norm())
