"""From one root of `taylor` to the next, through a softmax mixing, a few query tokens at a time.

The Jacobian of the next root by this one is the largest thing there is, S² blocks of d × d. Only a row of it is held
at a time: it moves the factors' matrix N and the remainders' sources on, and then it is dropped. A token that a mask
hides from a query adds nothing, so in a causal model only the tokens before a query are worked on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import ball, total, trace
from prooflens.engines.relaxations.norms import CHUNK, frobenius, grow, product_error
from prooflens.engines.taylor.attention import Heads, MixSite
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.mixing import MixShape
from prooflens.engines.taylor.remainder_sources import (
    KEPT,
    PropagatedSource,
    RemainderSource,
    kept_apart,
    narrowing,
    propagate,
    reached,
)
from prooflens.engines.taylor.values import Columns, Root, Value
from prooflens.numerics import gamma


def next_root(chain: Chain, memory: int, quick: bool, tell: Callable[[float], None]) -> Root:
    """Return the root after the attention of a chain; the chain learns its mixing and what that leaves.

    Args:
        chain: a chain with scores and an attention.
        memory: bytes that may be used.
        quick: bound the mixing in few steps.
        tell: told the share of the tokens that is done, before every few of them; it may end the work.
    """
    names = chain.segment.attention
    assert names is not None
    assert chain.scores is not None
    q, k, v, stream = (chain.values[name] for name in (names.q, names.k, names.v, names.stream))
    mix = MixSite(chain.scores, names, Heads.of(v, q.heads), stream.size, chain.root.factors)
    chain.mix = mix
    root, tokens = chain.root, chain.goes_on
    (S, m), T, d = root.u.shape, len(tokens), stream.u.shape[1]
    row = 8 * CHUNK if root.u.is_cuda else CHUNK // 8
    size = min(tokens_at_once(mix, d, memory), max(1, row // (S * d * m)))
    step = _Step(chain, mix, (q, k, v, stream), 0 if quick else sources_room(memory, T * S * d * m))
    grams = Grams(mix, memory // 8 if size < T else 0)
    mixed, beyond = [], []
    for start in range(0, T, size):
        tell(start / T)
        places = slice(start, min(start + size, T))
        step.take(places)
        shapes = MixShape(mix, q, k, v, tokens[places], grams)
        if quick:
            mixed.append(total(shapes.quick()))
            continue
        second, rest = shapes.parts()
        beyond.append(total(rest))
        mixed.append(total([second, *rest]))
    chain.mixed = torch.cat(mixed)
    chain.beyond = torch.cat(beyond) if beyond else None
    chain.noise = grow(step.noise)
    return step.root(chain.mixed, (stream.u + names.output(mix.z))[tokens])


def sources_room(memory: int, numbers: int) -> int:
    """Return how many sources of remainders can be kept apart in a third of the memory, at two roots at once.

    Args:
        memory: bytes that may be used.
        numbers: how many numbers the Jacobian of one source has, of four bytes each.
    """
    return int(memory // (24 * numbers))


class _Step:
    """The linear part of a step from root to root, and all remainders that it takes along.

    Args:
        chain: the chain that ends in the step.
        mix: its mixing.
        values: queries, keys, values and the stream.
        room: how many sources of remainders can be kept apart.
    """

    def __init__(
        self, chain: Chain, mix: MixSite, values: tuple[Value, Value, Value, Value], room: int
    ) -> None:
        self.chain, self.mix, self.values, self.room = chain, mix, values, room
        root, T, d = chain.root, len(chain.goes_on), values[3].u.shape[1]
        self.origins = root.origins
        if not self.origins and root.blur is None:
            self.origins = [RemainderSource(root.B)]
        self.own = {name: chain.shapes[name] for value in values for name in value.sources}
        self.N = root.N.new_zeros(T, d, root.N.shape[-1])
        self.columns: Columns = []
        self.noise = values[3].noise[chain.goes_on] + value_noise(mix, *values[:3])
        self.missed: dict[str, list[Tensor]] = {name: [] for name in self.own}
        self.there: list[list[Tensor]] = [[] for _ in self.origins]
        kept = [origin.shape for origin in self.origins] if room else []
        blocks = [torch.zeros(T, d, *shape.shape[:2], dtype=KEPT, device=shape.device) for shape in kept]
        self.J = [J.movedim(2, 1) for J in blocks]
        self.live = [torch.zeros(T, len(shape), dtype=torch.bool) for shape in kept]
        S = mix.mask.shape[-1]
        self.reads = mix.mask.reshape(-1, S, S).any(0).cpu() | torch.eye(S, dtype=torch.bool)

    def take(self, places: slice) -> None:
        """Do some tokens of the next root."""
        root, S, m = self.chain.root, *self.chain.root.u.shape
        tokens = self.chain.goes_on[places]
        keys = self._keys(tokens)
        q, k, v, stream = self.values
        A, error = tangent(self.mix, q.J, k.J, v.J, stream.J, tokens, keys)
        self._move(places, tokens, keys, A)
        noise = (error + product_error(S * m, frobenius(A))) @ root.stretch[keys]
        reads = self.reads[tokens, keys]
        carried, lost = propagate([origin.seen_by(keys) for origin in self.origins], A, error, reads)
        noise = noise + lost
        for number, (shape, J, live) in enumerate(carried):
            self.there[number].append(reached(J, shape, live))
            if self.room:
                of = keys if self.origins[number].J is None else slice(None)
                self.J[number][places, of], self.live[number][places, of] = J.to(KEPT), live
                noise = noise + narrowing(J, shape)
        del A, carried
        for name, shape in self.own.items():
            by = [value.sources.get(name) for value in self.values]
            B, error = tangent(self.mix, by[0], by[1], by[2], by[3], tokens, keys)
            noise = noise + error @ trace(shape[keys]).sqrt()
            self.missed[name].append(reached(B, shape[keys], reads))
        self.noise[places] += noise

    def _keys(self, tokens: list[int]) -> slice:
        """Return the range of the tokens that some queries read, themselves included."""
        live = self.reads[tokens].any(0).nonzero()[:, 0].tolist()
        return slice(live[0], live[-1] + 1)

    def _move(self, places: slice, tokens: list[int], keys: slice, A: Float[Tensor, "T K d m"]) -> None:
        """Write the rows N = A N of the next root."""
        root, p = self.chain.root, self.N.shape[-1]
        if all(range_ == (0, p) for range_ in root.columns[keys]):
            flat = A.movedim(1, 2).flatten(2)
            self.N[places] = (flat.flatten(0, 1) @ root.N[keys].flatten(0, 1)).reshape(len(A), -1, p)
        else:
            for place, (first, last) in enumerate(root.columns[keys]):
                here = root.N[keys][place, :, first:last]
                self.N[places, :, first:last] += A[:, place] @ here
        for t in tokens:
            own = [range_ for range_ in root.columns[self._keys([t])] if range_ != (0, 0)]
            self.columns.append((min(r[0] for r in own), max(r[1] for r in own)) if own else (0, 0))

    def root(self, mixed: Float[Tensor, "T d d"], u: Float[Tensor, "T d"]) -> Root:
        """Return the next root once all its tokens are done."""
        parts = [torch.cat(found) for found in self.missed.values()]
        missed = total([*parts, mixed, ball(grow(self.noise), u.shape[1])])
        there = [torch.cat(found) for found in self.there]
        kept = self.origins if self.room else []
        shapes = [origin.shape for origin in kept]
        carried = list(map(PropagatedSource, shapes, self.J, self.live))
        origins = kept_apart(carried, there, missed, self.room)
        return Root(u, self.N, total([*there, missed]), self.chain.root.factors, self.columns, origins)


def tangent(
    mix: MixSite,
    q: Float[Tensor, "S n m"] | None,
    k: Float[Tensor, "S n m"] | None,
    v: Float[Tensor, "S n m"] | None,
    stream: Float[Tensor, "S d m"] | None,
    tokens: list[int],
    keys: slice,
) -> tuple[Float[Tensor, "T K d m"], Float[Tensor, "T K"]]:
    """Return the Jacobian of the next root by something of each token, and its rounding.

    It is made of the Jacobians of q, k, v and the stream by that something. Sums have at most S, c·H or d terms,
    and deviations from means have S more. The factor 8 in the rounding covers the three parts, and key-value
    heads that several query heads share: r readers of a head count √r times.

    Args:
        mix: the mixing.
        q: the Jacobian of queries, shape [S, n, m]; here and below None for 0.
        k: the Jacobian of keys.
        v: the Jacobian of values.
        stream: the Jacobian of the residual stream.
        tokens: the tokens of the next root.
        keys: the range of the tokens whose something counts: all that `tokens` read, and themselves.

    Returns:
        The Jacobian [T, K, d, m], and bounds of its blocks' rounding in the Frobenius norm, [T, K].
    """
    S, H, c = mix.z.shape
    T, K, d = len(tokens), len(range(S)[keys]), len(mix.out)
    m = next(J.shape[-1] for J in (q, k, v, stream) if J is not None)
    chosen, places = torch.arange(T), [t - range(S)[keys][0] for t in tokens]
    values, most_k, most_q = mix.v.n.amax(), mix.scores.k.n.amax(), mix.scores.q.n.amax()
    out = mix.out_size.square().sum().sqrt()
    size, own = mix.s.new_zeros(K), mix.s.new_zeros(T)
    pulled = (mix.s[..., None] * mix.deviations)[:, tokens, keys].permute(1, 2, 0, 3)
    inner = mix.s.new_zeros(T, K, H, c, m)
    if v is not None:
        weights = mix.s[:, tokens, keys].permute(1, 2, 0).unflatten(2, (v.shape[1] // c, -1))
        Jv = v[keys].unflatten(1, (-1, c))[None, :, :, None]
        inner.view(*weights.shape, c, m).copy_(weights[..., None, None] * Jv)
        size = size + out * frobenius(v[keys])
    if k is not None:
        groups = k.shape[1] // c
        queries = (mix.scale * mix.scores.q.u[tokens]).unflatten(1, (groups, -1))
        beta = torch.einsum("jgcd,tgrc->tjgrd", k[keys].unflatten(1, (groups, c)), queries).flatten(2, 3)
        beta = beta * mix.slopes[:, tokens, keys].permute(1, 2, 0)[..., None]
        inner.addcmul_(pulled[..., None], beta[..., None, :])
        size = size + out * 2.0 * values * mix.scale * (most_q * frobenius(k[keys]) * H**0.5)
    if q is not None:
        near = mix.scale * mix.keys[:, tokens, keys]
        alpha = torch.einsum("thcd,htjc->thjd", q[tokens].unflatten(1, (H, c)), near)
        inner[chosen, places] += torch.einsum("tjhc,thjd->thcd", pulled, alpha)
        own = own + out * 4.0 * values * mix.scale * most_k * frobenius(q[tokens]) * H**0.5 * S
    made = mix.out.flatten(1) @ inner.flatten(2, 3)
    if stream is not None:
        made[chosen, places] += stream[tokens]
        own = own + frobenius(stream[tokens])
    error = size.expand(T, -1).clone()
    error[chosen, places] += own
    return made, grow(gamma(8 * (S + c * H + d) + 256) * 8.0 * error)


def tokens_at_once(mix: MixSite, d: int, memory: int) -> int:
    """Return how many query tokens fit into half of the memory while their ellipsoids are made."""
    S, H, c = mix.z.shape
    groups = max(mix.scores.k.source.heads, mix.v.source.heads)
    return max(1, int(memory // (16 * one_token(S, H, groups, c, d, mix.rows.shape[-1]))))


def one_token(S: int, H: int, groups: int, c: int, d: int, p: int) -> int:
    """Estimate how many numbers are held for one query token while its ellipsoids are made.

    Args:
        S: how many tokens.
        H: how many heads of queries.
        groups: how many heads of keys and values.
        c: the width of a head.
        d: the width of the stream.
        p: how many factors.
    """
    return 8 * (S * groups * c) ** 2 + 4 * S * ((H * c) ** 2 + d * d) + 4 * H * S * p


def value_noise(mix: MixSite, q: Value, k: Value, v: Value) -> Tensor:
    """Bound what the rounding of queries, keys and values becomes at the next root.

    Each head may get all of a token's noise, so together they send on at most √H‖W_O‖_F of it. |v_j − z| and |k_j − k̄|
    are at most twice the largest value and key: that makes a factor 4, and 5 leaves room for rounding.

    Args:
        mix: the mixing.
        q: queries.
        k: keys.
        v: values.
    """
    scores = mix.scores
    queries, keys, values = ((x.n + x.reach).amax() for x in (scores.q, scores.k, mix.v))
    heads = (mix.out_size.square().sum() * len(mix.out_size)).sqrt()
    shifted = 5.0 * values * mix.scale * (queries * k.noise.max() + keys * q.noise.max())
    return grow(heads * (v.noise.max() + shifted))
