"""Covectors that move with the factors, walked back from the scores to the input (`taylor.third_order`).

At every value of every chain W holds, for each form, what each factor adds to the covector there: shape [F, p, n], in
factors of half-width 1. Linear steps take W back as they take covectors back. At a site, and at a mixing, the Hessian
of what follows adds its product with the linear part of the input. Each time (Wα)·r is bounded for the remainder r
that arises there by a square of the factors that is least where the form is steepest, at the corner of its linear
part; all these squares are one matrix.

Rounding: an error of W by δ in the Frobenius norm is seen by the e of its value, of which |e| ≤ `_missed`, over
|α| ≤ √p. What rounding adds to e itself between sites is `noise`, seen by W. Both are added up in `slack`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.ellipsoids import trace, weights_of_sum
from prooflens.engines.relaxations.norms import (
    cholesky_factor,
    frobenius,
    grow,
    largest,
    length,
    product_error,
)
from prooflens.engines.taylor.attention import seen_keys
from prooflens.engines.taylor.chain import Chain, turn, turning_norm
from prooflens.engines.taylor.corners import EVEN
from prooflens.engines.taylor.head_norms import HeadNormSite
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.segments import FeedForward
from prooflens.engines.taylor.solu import SoluSite
from prooflens.engines.taylor.values import Value
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models.sites import Affine, Norm, Rotary, Solu
from prooflens.numerics import gamma

JOINT_ON_CPU = 4096
"""On a CPU, up to so many factors are all sites bounded together."""
LEAST_SHARE = 0.3
"""t at least, as a share of the largest value of the root: J is at most so many times steeper than what it is above."""
GUESSES = 8
"""Steps of a power iteration."""

Moves = dict[int, dict[str, Tensor]]
"""W [F, p, n] by token and by the name of the value."""


class SiteForm(NamedTuple):
    """The Hessians of v·r at the input of a site, shape [F, n, n], and bounds of their error in the 2-norm."""

    Q: Float[Tensor, "F n n"]
    error: Float[Tensor, " F"]


class Moved(NamedTuple):
    """What moving covectors make of all remainders: at most ½ αᵀJα + rest.

    Attributes:
        J: Σ C_iC_iᵀ/t_i over the sites, C_i = W_iL_i, shape [F, p, p] for the first p factors; None for 0.
        error: bounds of its error in the 2-norm.
        halves: ½ Σ t_i.
        rest: everything else.
    """

    J: Float[Tensor, "F p p"] | None
    error: Float[Tensor, " F"]
    halves: Float[Tensor, " F"]
    rest: Float[Tensor, " F"]


class MovingCovectors:
    """W of some forms, and what it makes of the remainders of all sites.

    Args:
        walk: the walk forward.
        forms: the forms.
        sites: the Hessians at all norms and networks that the forms' covectors passed, by chain, name and token.
        mixings: the forms' covectors at the mixings, by chain and place.
        slope: the linear parts of the forms, shape [F, p].
    """

    def __init__(
        self,
        walk: TaylorWalk,
        forms: Forms,
        sites: Mapping[tuple[Chain, str, int], SiteForm],
        mixings: Mapping[tuple[Chain, int], Tensor],
        slope: Float[Tensor, "F p"],
    ) -> None:
        self.walk, self.forms, self.sites, self.mixings = walk, forms, sites, mixings
        self.half_widths = walk.chains[0].root.half_widths
        self.p = self._live()
        self.corner = torch.where(slope[:, : self.p] >= 0.0, 1.0, -1.0).to(slope)
        self.found = self.half_widths.new_zeros(forms.size)
        """The sum of ½ t_i, or where no matrix is made of what each site has at most."""
        self.joint: Tensor | None = None
        """J; None where it costs too much."""
        if self.half_widths.is_cuda or self.p <= JOINT_ON_CPU:
            self.joint = self.half_widths.new_zeros(forms.size, self.p, self.p)
        self.sizes = self.half_widths.new_zeros(forms.size)
        self.slack = self.half_widths.new_zeros(forms.size)

    def _live(self) -> int:
        """Return how many factors count: those behind the last token that a covector passed move nothing.

        At a mixing it passes the token and all that it attends to, of which the token itself may not move at all.
        """
        ends = [chain.root.columns[t][1] for chain, _, t in self.sites]
        for chain, place in self.mixings:
            assert chain.mix is not None
            t, columns = chain.goes_on[place], chain.root.columns
            ends += [columns[t][1], *(last for _, last in columns[seen_keys(chain.mix.mask[..., t, :])])]
        for chain in self.walk.chains:
            if chain.segment.layer in self.forms.layers:
                here = self.forms.layer == chain.segment.layer
                places = torch.cat((self.forms.position[here], self.forms.key[here])).tolist()
                ends += [chain.root.columns[t][1] for t in places]
        return max(ends, default=len(self.half_widths))

    def moved(self) -> Moved:
        """Bound |Σ (W_sα)·r_s| over all sites of all chains; the clock is looked at from token to token."""
        self._walk()
        if self.joint is None:
            return Moved(None, self.slack, torch.zeros_like(self.slack), grow(self.found + self.slack))
        # Adding up n products and some hundred matrices errs by γ of their sizes in the 2-norm.
        error = gamma(16384 + 8 * self.p) * self.sizes
        return Moved(0.5 * (self.joint + self.joint.mT), error, self.found, grow(self.slack))

    def _walk(self) -> None:
        if not self.p:
            return
        roots: dict[int, Tensor] = {}
        for number in reversed(range(len(self.walk.chains))):
            chain = self.walk.chains[number]
            moves = self._before(chain, roots)
            self._add_scores(chain, moves)
            tokens = {t for owner, _, t in self.sites if owner is chain} | moves.keys()
            roots = {}
            for t in sorted(tokens):
                W = self._through(chain, t, moves.pop(t, {}))
                if W is not None:
                    roots[t] = W
                self.walk.progress("third orders, site by site", 1.0 - (number + 0.5) / len(self.walk.chains))
        blur = self.walk.chains[0].root.blur
        assert blur is not None
        for t, W in roots.items():
            self.slack += self._size(W) * blur[t]

    def _missed(self, value: Value, t: int) -> Tensor:
        """Bound sup ‖e‖₂ of a value, all heads together."""
        return length(value.e[t])

    def _size(self, W: Float[Tensor, "F p n"]) -> Float[Tensor, " F"]:
        """Bound sup ‖Wα‖₂ crudely, for rounding."""
        size: Tensor = frobenius(W) * self.p**0.5
        return size

    def _against(self, M: Float[Tensor, "n n"], W: Float[Tensor, "F p n"]) -> None:
        """Bound (Wα)·r for r in E(M) by ‖Cᵀα‖₂ ≤ ½(‖Cᵀα‖²/t + t), C = WL, equal where t = ‖Cᵀα‖: at the corner."""
        L = cholesky_factor(M)
        C = W @ L
        self.slack += product_error(len(M), frobenius(W) * frobenius(L)) * self.p**0.5
        if self.joint is None:
            self.found = grow(self.found + _most(C))
            return
        there = torch.linalg.vector_norm((C.mT @ self.corner[..., None])[..., 0], dim=-1)
        most = torch.maximum(there, LEAST_SHARE * _likely_most(C)) + 2.0**-300
        self.found = grow(self.found + 0.5 * most)
        share = C / most[:, None, None]
        torch.baddbmm(self.joint, share, C.mT, out=self.joint)
        self.sizes = grow(self.sizes + frobenius(share) * frobenius(C))

    def _add_scores(self, chain: Chain, moves: Moves) -> None:
        """Add what the products of queries and keys in the forms make of the covectors of either."""
        scores, forms = chain.scores, self.forms
        if scores is None or chain.segment.layer not in forms.layers:
            return
        here = forms.layer == chain.segment.layer
        entries = zip(
            *(x[here].tolist() for x in (forms.index, forms.head, forms.position, forms.key, forms.weight)),
            strict=True,
        )
        widths, (q, k) = self.half_widths[: self.p], scores.names
        for form, h, i, j, weight in entries:
            group = h // scores.k.share
            pairs = (i, q, h, scores.k, (j, group)), (j, k, group, scores.q, (i, h))
            for t, name, at, other, (token, head) in pairs:
                value = chain.values[name]
                part = moves.setdefault(t, {})
                if name not in part:
                    part[name] = widths.new_zeros(forms.size, self.p, value.u.shape[1])
                A = other.A[token, head, :, : self.p] * widths
                own = part[name][form].unflatten(-1, (value.heads, -1))[:, at]
                own += (weight * scores.step.scale) * A.T
                # The linear part is a product JN, and adding up a form's entries rounds as well.
                size = abs(weight) * scores.step.scale * self._part_size(other.source, token)
                slip = product_error(other.source.J.shape[-1] + 2 * len(forms.index) + 16, size)
                self.slack[form] += slip * self.p**0.5 * self._missed(value, t)

    def _part_size(self, value: Value, t: int) -> Tensor:
        """Bound the terms of a value's linear part in factors of half-width 1, in the Frobenius norm."""
        return frobenius(value.J[t]) * frobenius(value.root.N[t] * self.half_widths)

    def _linear(self, value: Value, t: int) -> Float[Tensor, "p n"]:
        """Return the linear part of a value in factors of half-width 1, factor by factor."""
        N = value.root.N[t, :, : self.p] * self.half_widths[: self.p]
        return N.T @ value.J[t].T

    def _through(self, chain: Chain, t: int, moves: dict[str, Tensor]) -> Float[Tensor, "F p d"] | None:
        """Take W of one token through a chain, from its values to its root."""
        values, root_p = chain.values, self.p**0.5
        for step in reversed(chain.segment.steps):
            W = moves.pop(step.out, None)
            if isinstance(step, Norm | FeedForward | Solu):
                source = step.source if isinstance(step, FeedForward) else step.inputs[0]
                _put(moves, source, self._site(chain, step.out, values[source], t, W))
                continue
            if W is None:
                continue
            self.slack += self._size(W) * values[step.out].noise[t]
            if isinstance(step, Affine):
                most = frobenius(W) * frobenius(step.weight)
                slip = product_error(len(step.weight), most) * self._missed(values[step.inputs[0]], t)
                self.slack += slip * root_p
                _put(moves, step.inputs[0], W @ step.weight)
            elif isinstance(step, Rotary):
                size = turning_norm(step) * self._missed(values[step.inputs[0]], t)
                self.slack += gamma(16) * 2.0 * self._size(W) * size
                turned = turn(step, W.flatten(0, 1)[:, None, :], back=True, position=t)[:, 0]
                _put(moves, step.inputs[0], turned.unflatten(0, W.shape[:2]))
            else:
                for name in step.inputs:
                    self.slack += gamma(8) * self._size(W) * self._missed(values[name], t)
                    _put(moves, name, W)
        return moves.get(chain.segment.root)

    def _site(
        self, chain: Chain, name: str, source: Value, t: int, W: Float[Tensor, "F p o"] | None
    ) -> Float[Tensor, "F p n"] | None:
        """Bound (Wα)·r at a norm or a network, and return W at its input."""
        site, back = chain.sites[name], None
        assert not isinstance(site, HeadNormSite)
        if W is not None:
            self._against(chain.shapes[name][t], W)
            back = site.pull(W.flatten(0, 1), t).unflatten(0, W.shape[:2])
            self.slack += self._size(W) * _pull_error(site, t) * self._missed(source, t)
        if (form := self.sites.get((chain, name, t))) is None:
            return back
        A = self._linear(source, t)
        most, size = self._part_size(source, t), frobenius(form.Q)
        slip = product_error(2 * source.J.shape[-1] + 2 * A.shape[1] + 16, size * most) * self.p**0.5
        self.slack += (slip + form.error * length(source.tau[t])) * self._missed(source, t)
        made = A @ form.Q
        return made if back is None else back + made

    def _before(self, chain: Chain, roots: dict[int, Tensor]) -> Moves:
        """Take W from the root that follows a chain to the chain's values."""
        moves: Moves = {}
        if chain.pool is not None:
            if (W := roots.get(0)) is None:
                return moves
            assert chain.noise is not None
            # What the mean's centre and linear part round by, and far less, what W times a weight does.
            self.slack += self._size(W) * chain.noise[0]
            source = chain.pool.inputs[0]
            for t, weight in enumerate(chain.pool.weights.tolist()):
                if weight:
                    self.slack += gamma(16) * self._size(W) * abs(weight) * chain.values[source].size[t]
                    moves[t] = {source: W * weight}
            return moves
        places = roots.keys() | {place for owner, place in self.mixings if owner is chain}
        for place in sorted(places):
            self._mixing(chain, place, roots.get(place), moves)
        return moves

    def _mixing(self, chain: Chain, place: int, W: Float[Tensor, "F p d"] | None, moves: Moves) -> None:
        """Bound (Wα)·r at a token of a mixing, and add W at its queries, keys, values and stream.

        With ω the covector at a head's output, c = s ω·(V − z) and p = ω·A_vα, the covector c of a score moves by
        γ_j = c_j b_j + s_j (p_j − Σ c b − Σ s p), that of a query by scale Σ (γ_j k_j + c_j A_kα), that of a key by
        scale (γ_j q + c_j A_qα), and that of a value by s_j b_j ω.
        """
        mix, t = chain.mix, chain.goes_on[place]
        assert mix is not None
        assert chain.mixed is not None
        assert chain.noise is not None
        names, p, widths = mix.attention, self.p, self.half_widths[: self.p]
        keys = seen_keys(mix.mask[..., t, :])
        s, deviations = mix.s[:, t, keys], mix.deviations[:, t, keys]
        gamma_, at_values, at_query, at_keys = None, None, None, None
        k_heads, v_heads = mix.scores.k.source.heads, mix.v.source.heads
        if W is not None:
            self._against(chain.mixed[place], W)
            self.slack += self._size(W) * (mix.noise[t] + chain.noise[place])
            moved = torch.einsum("fpd,dhc->fphc", W, mix.out)
            gamma_ = s * torch.einsum("fphc,hjc->fphj", moved, deviations)
            at_values = torch.einsum("hj,fphc->fpjhc", s, moved)
            _put(moves.setdefault(t, {}), names.stream, W)
        if (u := self.mixings.get((chain, place))) is not None:
            omega = torch.einsum("fd,dhc->fhc", u, mix.out)
            coef = s * torch.einsum("fhc,hjc->fhj", omega, deviations)
            rows = (mix.rows[:, t, keys, :p] * widths).permute(2, 0, 1)
            A_q, A_k, A_v = (
                x * widths
                for x in (mix.scores.q.A[t, ..., :p], mix.scores.k.A[keys, ..., :p], mix.v.A[keys, ..., :p])
            )
            by_value = torch.einsum("fgrc,jgcp->fpgrj", omega.unflatten(1, (v_heads, -1)), A_v).flatten(2, 3)
            by_score, by_value = coef[:, None] * rows, s * by_value
            by_value = by_value - s * by_value.sum(-1, keepdim=True)
            mean = s * by_score.sum(-1, keepdim=True)
            made = by_score - mean + by_value
            self._third(chain, place, keys, by_score / 6.0 - 0.5 * mean + 0.5 * by_value, made)
            gamma_ = made if gamma_ is None else gamma_ + made
            turned = torch.einsum("phj,fhc->fpjhc", s * rows, omega)
            at_values = turned if at_values is None else at_values + turned
            at_query = torch.einsum("fgrj,jgcp->fpgrc", coef.unflatten(1, (k_heads, -1)), A_k).flatten(2, 3)
            at_keys = torch.einsum("fhj,hcp->fpjhc", coef, A_q)
        assert gamma_ is not None
        assert at_values is not None
        query = torch.einsum("fphj,hjc->fphc", gamma_, mix.keys[:, t, keys])
        key = torch.einsum("fphj,hc->fpjhc", gamma_, mix.scores.q.u[t])
        if at_query is not None and at_keys is not None:
            query, key = query + at_query, key + at_keys
        _put(moves.setdefault(t, {}), names.q, mix.scale * query.flatten(2))
        self._mixing_slack(chain, place, W, u)
        grouped = (
            (names.k, mix.scale * key.unflatten(3, (k_heads, -1)).sum(4)),
            (names.v, at_values.unflatten(3, (v_heads, -1)).sum(4)),
        )
        for place_, j in enumerate(range(len(mix.z))[keys]):
            for name, part in grouped:
                _put(moves.setdefault(j, {}), name, part[:, :, place_].flatten(2))

    def _third(
        self,
        chain: Chain,
        place: int,
        keys: slice,
        squares: Float[Tensor, "F p H K"],
        products: Float[Tensor, "F p H K"],
    ) -> None:
        """Bound a mixing's own third order, Σ b²ℓ + Σ πγ (`taylor.moved_mixing`)."""
        assert chain.moved is not None
        H = squares.shape[2]
        for W, M in ((squares, chain.moved.squares), (products, chain.moved.products)):
            some = M[place].unflatten(0, (H, -1)).unflatten(2, (H, -1))[:, keys, :, keys]
            self._against(some.flatten(2).flatten(0, 1), W.flatten(2))

    def _mixing_slack(self, chain: Chain, place: int, W: Tensor | None, u: Tensor | None) -> None:
        """Count the rounding of one token's mixing.

        Sums run over a head's coordinates, keys, heads and the stream. Each of W's parts at queries, keys and values is
        a sum of at most four products that e sees, with terms of the sizes here: ‖ω‖ ≤ ‖u‖‖W_O‖, |V − z| ≤ 2 max|V|
        and |k − k̄| ≤ 2 max|k|, and with the linear parts of scores, queries, keys and values by their Frobenius norms.
        The ellipsoids of b² and π see ℓ and γ.
        """
        mix, t = chain.mix, chain.goes_on[place]
        assert mix is not None
        q, k, v = mix.scores.q, mix.scores.k, mix.v
        S, H, c = mix.z.shape
        sizes = [length(x.e) for x in (q.source, k.source, v.source)]
        read, out = self.half_widths[: self.p], mix.out_size.square().sum().sqrt()
        values, queries, keys = v.n.amax(), q.n[t].amax(), 2.0 * k.n.amax()
        by_scores = mix.scale * (keys * sizes[0][t] + queries * sizes[1].sum())
        moved = torch.zeros_like(self.slack) if W is None else frobenius(W) * out
        most = moved * (2.0 * values * by_scores + sizes[2].sum())
        if u is not None:
            omega = length(u) * out
            A_q, A_k, A_v = (frobenius((x.A[..., : self.p] * read).flatten(0, 2)) for x in (q, k, v))
            rows = frobenius((mix.rows[:, t, :, : self.p] * read).flatten(0, 1))
            coef = 2.0 * omega * values
            assert chain.moved is not None
            seen = sum(trace(M[place]).sqrt() for M in (chain.moved.squares, chain.moved.products))
            most = most + 4.0 * (coef * rows + omega * A_v) * (by_scores + seen) * H
            most = most + mix.scale * coef * H * (A_k * sizes[0][t] + A_q * sizes[1].sum())
            most = most + omega * rows * sizes[2].sum() * H
        self.slack += gamma(16 * (S + c * H + len(mix.out)) + 512) * 16.0 * most * self.p**0.5


def _weighed(C: Float[Tensor, "F p n"]) -> Float[Tensor, "F p n"]:
    """Return c^½C with Σ 1/c_k ≤ 1: the largest eigenvalue of CᵀcC bounds ‖Cᵀα‖² over the box."""
    sizes = ((C @ (C.mT @ C)) * C).sum(-1).clamp(min=0.0).sqrt()
    return weights_of_sum(sizes + EVEN * sizes.mean(-1, keepdim=True)).sqrt()[..., None] * C


def _most(C: Float[Tensor, "F p n"]) -> Float[Tensor, " F"]:
    """Bound ‖Cᵀα‖₂ over the box."""
    X = _weighed(C)
    G = X.mT @ X
    error = product_error(C.shape[1] + 16, frobenius(X).square())
    return grow((largest(0.5 * (G + G.mT)) + error).sqrt())


def _likely_most(C: Float[Tensor, "F p n"]) -> Float[Tensor, " F"]:
    """Guess the same by a power iteration."""
    X = _weighed(C)
    x = torch.ones_like(X[:, 0])
    for _ in range(GUESSES):
        x = (X.mT @ (X @ x[..., None]))[..., 0]
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=2.0**-400)
        x = x / size
    found: Tensor = size[:, 0].sqrt()
    return found


def _pull_error(site: NormSite | NetworkSite | SoluSite, t: int) -> Tensor:
    """Bound the rounding of a covector's way back through a site, per length of the covector.

    A norm's is a product with γ, a multiple of m taken away, a mean taken away and a quotient by σ: its terms are at
    most 3 max|γ|/σ long. A network's is two products, with W_d and with the rows of its pre-activations.
    """
    if isinstance(site, SoluSite):
        return site.pull_error(t)
    if isinstance(site, NormSite):
        return gamma(8 * site.d + 64) * 8.0 * site.gain.abs().amax() / site.least[t].clamp(min=2.0**-500)
    step, first = site.step, site.first[t].abs()
    most = frobenius(step.bent.weight) * (first if step.gate is None else first * site.other[t].abs()).amax()
    if step.gate is not None:
        most = most + frobenius(step.up.weight) * site.post[t].abs().amax()
    inner = 2 * (sum(site.down.shape) + sum(step.bent.weight.shape))
    return product_error(inner, 4.0 * frobenius(site.down) * most)


def _put(moves: dict[str, Tensor], name: str, W: Tensor | None) -> None:
    if W is not None:
        moves[name] = moves[name] + W if name in moves else W
