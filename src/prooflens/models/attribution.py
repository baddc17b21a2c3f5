"""Direct logit attribution: what a part of a model adds to a difference of logits, the last norm held at a prompt's.

The stream behind the last block is the sum of the embedding and of what every part writes, x = x₀ + Σ o. A norm divides
it by a number s(x). *Frozen* at a prompt, with s a constant, logits are linear in x, and the part's share of
w·logits is

    w·U (γ ⊙ P o)/s  =  v·h,     h the part's value (z of a head, the output of a network),

U the head, γ the norm's weight, P its centring. So v is a direction at the part's hook, and `read(HOOK@-1,DLA)>0` is a
claim about it. *Live*, with s(x) of every input, the share is v·h · s/s(x). Both s are positive: a sign that is proved
of the one is proved of the other, and a size is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.edits import find_place

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
    if a.norm_place not in ("pre", "none") or a.pool not in ("none", "last") or a.pooler or a.read_hook:
        raise ModelError(
            f"parts of {model.name} do not add up to what its head reads: it has no attributions"
        )
    place = find_place(a, part)
    if ".n" in place.name:
        raise ModelError(f"{place.name} is one neuron: give a head, an attention or a network")
    weight, _ = model.head
    if isinstance(row, tuple):
        wanted = weight.new_zeros(len(weight))
        wanted[row[0]], wanted[row[1]] = 1.0, -1.0
    else:
        wanted = torch.as_tensor(row).to(weight)
    if wanted.shape != (len(weight),):
        raise ModelError(f"weights of logits have shape [{len(weight)}], got {list(wanted.shape)}")
    u = wanted @ weight
    if a.has_final_norm:
        held = model.prompt(prompt) if isinstance(prompt, str) else prompt
        last = f"blocks.{a.n_layers - 1}.hook_resid_post"
        with torch.no_grad():
            x = model.run(held, last)[last][-1]
        u = u * model.weights["final_norm.weight"] if "final_norm.weight" in model.weights else u
        centred = a.norm_kind == "layer"
        x, u = (x - x.mean(), u - u.mean()) if centred else (x, u)
        u = u * torch.rsqrt(x.square().mean() + a.norm_eps)
    if place.columns is None:
        return place.hook, u
    chosen = slice(place.columns.start, place.columns.stop)
    o = model.weights[f"{place.reader}.weight"]
    v = o.new_zeros(o.shape[1])
    v[chosen] = u @ o[:, chosen]
    return place.hook, v
