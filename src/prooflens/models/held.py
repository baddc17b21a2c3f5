"""Parts that are held at some tokens: heads, neurons, outputs of blocks, directions, features, as tables of a model.

A map y = W x + b that reads a part (`blocks.9.o`, `blocks.3.down`) is *opened*: the part's coordinates p = R x + r
stand beside the rest, are held at the tokens that are listed, and are written by a map of their own,

    y_s = W′ x_s + b + P p′_s,     p′_s = c_s at listed tokens, p_s at all others,

with W′ the columns of W that do not read the part, so W′ + P R = W number by number. A direction of a value x
(`directions`), or a feature of a dictionary that reads it (`features`), is held by what is added to the value,

    x′_s = x_s + P (c_s − e(R x_s + r)) at listed tokens,     e the identity, or φ for features,

so the error term of a dictionary stays. Without it (`decoded`) the value is what the dictionary makes of it, there
x′_s = P f′_s + o with all features f = φ(R x_s + r), those of the row's coordinates held. A feature with the threshold
θ ≥ 0 is z if z > θ and 0 if not; R x + r is y = z − θ, so

    φ(y) = max(0, y) + θ·jump(y),     jump(y) = 1 for y > 0, and 0 for y ≤ 0.

| table of `blocks.L.o.held`, `blocks.L.down.held`, `blocks.L.resid_pre.directions`, … | shape | what |
|---|---|---|
| `.read`, `.bias` | [k, n], [k] | R and r |
| `.write` | [d, k] | P |
| `.at` | [m, 3] | rows (token, first coordinate, beyond the last): these are held there |
| `.values` | [m, k] | c, 0 outside of the row's coordinates |
| `.offset` | [d] | o, of `decoded` alone |
| `.jumps` | [k] | θ, of features alone; none where all are 0 |
| `.spread` | [m, k, K] | generators of the values that parts and directions may have (`models.spread`) |

Tokens are whole numbers, negative ones from the last real token on; 2²⁴ stands for every token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError

if TYPE_CHECKING:
    from prooflens.models.architecture import Architecture

Shape = tuple[int | None, ...]
PARTS = ("read", "bias", "write", "at", "values")
EXTRAS = ("jumps", "spread")
EVERY = 2**24
"""The number that stands for every token; others lie within ± this."""

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
"""Values whose directions and features can be held, by the ends of their hooks' names."""

KINDS = ("directions", "features", "decoded")
"""What can be held of them, in the order in which that is done."""

FEATURES = (".features", ".decoded")
"""How what the names of tables of features start with ends."""


def token_of(token: int, n_real: int) -> int | None:
    """Return the place of a token that may be counted from the end; None if the prompt does not have it.

    Args:
        token: counted from 0, or negative from the last real token on.
        n_real: how many tokens there are, without padding at the end.
    """
    place = token if token >= 0 else n_real + token
    return place if 0 <= place < n_real else None


@dataclass(frozen=True, eq=False)
class Held:
    """The tables of one map: what stands beside the rest, and where it is held.

    Attributes:
        read: R, shape [k, n].
        bias: r, shape [k].
        write: P, shape [d, k].
        at: rows (token, first coordinate, beyond the last).
        values: c of every row, shape [m, k].
        jumps: θ of every feature, shape [k]; None where all are 0.
        spread: by which free coordinates may move c, of every row, shape [m, k, K]; None where none does.
    """

    read: Float[Tensor, "k n"]
    bias: Float[Tensor, " k"]
    write: Float[Tensor, "d k"]
    at: Float[Tensor, "m 3"]
    values: Float[Tensor, "m k"]
    jumps: Float[Tensor, " k"] | None = None
    spread: Float[Tensor, "m k K"] | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], stem: str) -> Held | None:
        """Return the tables of a map or value; None if nothing of it is held.

        Args:
            weights: a model's weights.
            stem: what the tables' names start with, as in `blocks.9.o.held`.
        """
        if f"{stem}.at" not in weights:
            return None
        found = cls(*(weights[f"{stem}.{part}"] for part in PARTS))
        return replace(found, jumps=weights.get(f"{stem}.jumps"), spread=weights.get(f"{stem}.spread"))

    def joined(self, other: Held) -> Held:
        """Return the tables of both, one after the other.

        Args:
            other: tables of the same map, for other parts.
        """
        k, more = len(self.read), len(other.read)
        at = other.at + torch.tensor([0.0, k, k]).to(other.at)
        values = self.values.new_zeros(len(self.at) + len(at), k + more)
        values[: len(self.at), :k], values[len(self.at) :, k:] = self.values, other.values
        both = [torch.zeros_like(held.bias) if held.jumps is None else held.jumps for held in (self, other)]
        free = max(0 if held.spread is None else held.spread.shape[-1] for held in (self, other))
        spread = self.values.new_zeros(*values.shape, free)
        if self.spread is not None:
            spread[: len(self.at), :k] = self.spread
        if other.spread is not None:
            spread[len(self.at) :, k:] = other.spread
        return Held(
            torch.cat((self.read, other.read)),
            torch.cat((self.bias, other.bias)),
            torch.cat((self.write, other.write), 1),
            torch.cat((self.at, at)),
            values,
            None if self.jumps is None and other.jumps is None else torch.cat(both),
            spread if free else None,
        )

    def put(self, weights: dict[str, Tensor], stem: str) -> None:
        """Keep the tables among weights, behind those that are there.

        Args:
            weights: they get them.
            stem: what the tables' names start with.
        """
        before = Held.of(weights, stem)
        kept = self if before is None else before.joined(self)
        for part in PARTS:
            weights[f"{stem}.{part}"] = (
                getattr(kept, part).contiguous().clone()
            )  # files take no shared memory
        for part in EXTRAS:
            if (table := getattr(kept, part)) is not None:
                weights[f"{stem}.{part}"] = table.contiguous().clone()

    def places(self, n_tokens: int, n_real: int) -> tuple[Float[Tensor, "S k"], Float[Tensor, "S k"]]:
        """Return where coordinates are held, 1 or 0, and at what, for every token.

        Args:
            n_tokens: S.
            n_real: how many of these are no padding.
        """
        held = self.values.new_ones(len(self.at), self.values.shape[1])
        return self._placed(held, n_tokens, n_real), self._placed(self.values, n_tokens, n_real)

    def spreads(self, n_tokens: int, n_real: int) -> Float[Tensor, "S k K"] | None:
        """Return the generators of every token's values; None where there is only one value.

        Args:
            n_tokens: S.
            n_real: how many of these are no padding.
        """
        return None if self.spread is None else self._placed(self.spread, n_tokens, n_real)

    def _placed(self, rows: Float[Tensor, "m k ..."], n_tokens: int, n_real: int) -> Float[Tensor, "S k ..."]:
        """What rows say of their coordinates, at their tokens; 0 elsewhere."""
        found = rows.new_zeros(n_tokens, *rows.shape[1:])
        for (token, start, stop), row in zip(self.at.long().tolist(), rows, strict=True):
            place = slice(None) if token == EVERY else token_of(token, n_real)
            if place is not None:
                found[place, start:stop] = row[start:stop]
        return found


def stems_of(architecture: Architecture) -> dict[str, int]:
    """Return what names of tables may start with, and how wide the value is that each reads.

    Args:
        architecture: what the model looks like.
    """
    a, found = architecture, dict[str, int]()
    for layer in range(a.n_layers):
        found |= {f"blocks.{layer}.o.held": a.n_heads * a.head_dim} if a.has_attention else {}
        found |= {f"blocks.{layer}.down.held": a.d_ff} if a.has_network else {}
        hooks = [name.removeprefix(f"blocks.{layer}.hook_") for name in hooks_at(a, layer)]
        found |= {f"blocks.{layer}.{site}.{kind}": a.d_model for site in hooks for kind in KINDS}
    return found


def hooks_at(architecture: Architecture, layer: int) -> list[str]:
    """Return the hooks of a block whose directions and features can be held.

    Args:
        architecture: what the model looks like.
        layer: the block.
    """
    a = architecture
    there = {
        "resid_pre": True,
        "resid_mid": a.has_attention and not a.parallel and (a.has_network or a.norm_place == "post"),
        "resid_post": a.has_network or a.norm_place != "post",
        "attn_out": a.has_attention,
        "mlp_out": a.has_network,
    }
    return [f"blocks.{layer}.hook_{site}" for site in SITES if there[site]]


def held_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return names and shapes of all tables of held parts that a model may have; None where any number may stand.

    Args:
        architecture: what the model looks like.
    """
    found = dict[str, Shape]()
    for stem, width in stems_of(architecture).items():
        found |= {f"{stem}.read": (None, width), f"{stem}.bias": (None,), f"{stem}.at": (None, 3)}
        found |= {f"{stem}.write": (architecture.d_model, None), f"{stem}.values": (None, None)}
        if stem.endswith(".decoded"):
            found[f"{stem}.offset"] = (architecture.d_model,)
        if stem.endswith(FEATURES):
            found[f"{stem}.jumps"] = (None,)
        elif architecture.free:
            found[f"{stem}.spread"] = (None, None, architecture.free)
    return found


def check_held(weights: Mapping[str, Tensor], stem: str) -> None:
    """Raise a `ModelError` unless the tables of one map or value fit together.

    Args:
        weights: a model's weights; shapes were looked at.
        stem: what the tables' names start with.
    """
    needed = [*PARTS, *(["offset"] if stem.endswith(".decoded") else [])]
    if missing := [part for part in needed if f"{stem}.{part}" not in weights]:
        raise ModelError(f"the weights lack '{stem}.{missing[0]}'")
    held = Held(*(weights[f"{stem}.{part}"] for part in PARTS))
    k, m, at = len(held.read), len(held.at), held.at
    jumps = len(weights.get(f"{stem}.jumps", held.bias))
    spread = weights.get(f"{stem}.spread", held.values).shape[:2]
    if (len(held.bias), held.write.shape[1], *held.values.shape, jumps, *spread) != (k, k, m, k, k, m, k):
        raise ModelError(f"the tables of what is held of {stem} do not fit together")
    right = bool((at == at.round()).all()) and bool((at.abs() <= EVERY).all()) and len(at) > 0
    if not right or not bool(((at[:, 1] >= 0) & (at[:, 1] < at[:, 2]) & (at[:, 2] <= k)).all()):
        raise ModelError(f"{stem}.at holds rows (token, first coordinate, beyond the last): these are none")


def check_held_tokens(weights: Mapping[str, Tensor], n_tokens: int) -> None:
    """Raise a `ModelError` if a part is held at a token that a prompt does not have: less would be done than is said.

    Args:
        weights: a model's weights.
        n_tokens: how many tokens the prompt has.
    """
    for name, table in weights.items():
        column = 0 if name.endswith(AT) else 5 if name.endswith(".edges.rows") else None
        for token in [] if column is None else sorted({int(row[column]) for row in table}):
            if token != EVERY and token_of(token, n_tokens) is None:
                raise ModelError(
                    f"a part is held at token {token}, and the prompt has tokens 0 … {n_tokens - 1} "
                    f"({name.rpartition('.')[0]})"
                )


AT = (".held.at", *(f".{kind}.at" for kind in KINDS))
"""How the names of tables of tokens end."""


def edit_tables(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of all tables of edits among weights: held parts, frozen patterns, edges.

    Args:
        weights: a model's weights.
    """
    return [name for name in weights if TABLE.search(name)]


def edits_first_scores(weights: Mapping[str, Tensor]) -> bool:
    """Say whether an edit changes what the first scores read, or these themselves.

    Args:
        weights: a model's weights.
    """
    first = ("blocks.0.resid_pre.", "blocks.0.frozen.", "blocks.0.edges.")
    return any(name.startswith(first) for name in edit_tables(weights))


TABLE = re.compile(r"\.(?:held|frozen|edges|directions|features|decoded)\.\w+$")
"""How the names of all tables of edits end."""
