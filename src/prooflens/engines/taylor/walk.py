"""The walk of `taylor`: forward chain by chain, and covectors back.

`forward` gives every value its linear part and every site the ellipsoid of its remainder. `remainder` takes covectors
at values of a chain back to its root, or on to the input, and adds up the remainders of the sites on the way, as a
`RemainderBound` bounds them. With the linear part this is all there is to know of a functional.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import ball, image, support, total
from prooflens.engines.relaxations.norms import frobenius, grow, identity, length
from prooflens.engines.taylor.attention import Heads, ScoreSite
from prooflens.engines.taylor.chain import (
    Chain,
    Fork,
    RemainderBound,
    Seeds,
    affine_noise,
    moved,
    slip,
    turn,
    turning_norm,
)
from prooflens.engines.taylor.head_norms import HeadNormSite
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.next_root import next_root
from prooflens.engines.taylor.segments import FeedForward, Segment, TokenStep
from prooflens.engines.taylor.solu import SoluSite
from prooflens.engines.taylor.values import Root, Value, input_root, times
from prooflens.models.sites import Add, Affine, Norm, Pool, Rotary, Shift, Solu
from prooflens.numerics import gamma

FLOOR = 0.3
"""The least weight of a factor, as a share of the mean."""


@dataclass(eq=False)
class TaylorWalk:
    """All chains of a program up to what is asked for."""

    memory: int
    progress: Callable[[str, float], None] = lambda stage, share: None
    kept: frozenset[int] | None = None
    """Layers whose chains are kept whole; None for all, as walking back needs them."""
    quick: bool = False
    """Whether mixings are bounded in few steps."""
    blur: float = 0.0
    """By how much the centre of a token may be off, in the 2-norm."""
    visit: Callable[[Chain], None] = lambda chain: None
    """Called with every chain as soon as its scores are known."""
    chains: list[Chain] = field(default_factory=list)
    half_widths: Float[Tensor, " p"] | None = None
    """Half-widths of the factors, where a walk is to share them with another; None for what suits the first layer."""
    fork_at: int | None = None
    """The number of the chain at which another walk is to go on; None for no other walk."""
    fork: Fork | None = None
    """Where that walk goes on, once this one has come there."""

    def forward(
        self,
        segments: list[Segment],
        center: Float[Tensor, "S d"],
        generators: Float[Tensor, "S d p"],
        read: list[int] | None = None,
    ) -> None:
        """Walk all segments.

        Args:
            segments: the program, cut at its attentions.
            center: the centre of the region, shape [S, d].
            generators: what each factor moves, shape [S, d, p].
            read: the tokens that are walked behind the last attention; None for all.
        """
        given = center.new_ones(generators.shape[-1]) if self.half_widths is None else self.half_widths
        root = input_root(center, generators, given, self.blur)
        if self.half_widths is None and segments[0].attention is not None:
            root = input_root(center, generators, self._widths(segments[0], root), self.blur)
        del generators
        self._follow(segments, root, read)

    def go_on(self, segments: list[Segment], fork: Fork, read: list[int] | None = None) -> None:
        """Walk all segments, the first of them by taking over the chains of another walk.

        Args:
            segments: the program, cut at its attentions; it begins as that of the other walk did.
            fork: chains of a walk of the same factors, and the root behind them.
            read: the tokens that are walked behind the last attention; None for all.
        """
        self.chains = list(fork.chains)
        self._follow(segments, fork.root, read)

    def _follow(self, segments: list[Segment], root: Root, read: list[int] | None) -> None:
        """Walk the segments behind the chains that there are, from the root of the first of them."""
        tokens = list(range(len(root.u)))
        for number in range(len(self.chains), len(segments)):
            segment = segments[number]
            stage = "output" if segment.layer is None else f"layer {segment.layer}"

            def tell(share: float, stage: str = stage, number: int = number) -> None:
                self.progress(stage, (number + share) / len(segments))

            if number == self.fork_at:
                self.fork = Fork(self.chains, root).copied()
            chain = Chain(segment, root)
            if segment.attention is not None:
                last = not any(later.attention for later in segments[number + 1 :])
                chain.goes_on = read if last and read is not None else tokens
            self.chains.append(chain)
            self._start(chain)
            for step in segment.steps:
                tell(0.0)
                self._step(chain, step)
            if segment.scores is not None:
                tell(0.0)
                names = (segment.scores.inputs[0], segment.scores.inputs[1])
                q, k = (chain.values[name] for name in names)
                heads = Heads.of(q, q.heads), Heads.of(k, q.heads)
                chain.scores = ScoreSite(
                    segment.scores, names, *heads, root.half_widths, self.quick, segment.cap
                )
            self.visit(chain)
            if number + 1 < len(segments):
                root = self._next(chain, tell)
                # Only the way forward asks for them, and their Jacobians are the largest things there are.
                chain.root.origins.clear()
                if self.kept is not None and segment.layer not in self.kept:
                    chain.forget()
                elif self.quick:
                    chain.forget_moves()

    def _widths(self, segment: Segment, root: Root) -> Float[Tensor, " p"]:
        """Return half-widths that even out how the first layer reads the factors; any positive ones are valid."""
        attention = segment.attention
        assert attention is not None
        trial = TaylorWalk(self.memory)
        chain = Chain(segment, root)
        trial.chains.append(chain)
        trial._start(chain)
        for step in segment.steps:
            trial._step(chain, step)
        read = torch.zeros_like(root.half_widths)
        for name in (attention.q, attention.k, attention.v):
            columns = root.linear_part(chain.values[name].J).flatten(0, 1).square().sum(0)
            read = read + columns / columns.mean().clamp(min=2.0**-900)
        weight = read.sqrt() + FLOOR * read.sqrt().mean() + 2.0**-100
        return (weight / weight.mean()).sqrt()

    def _start(self, chain: Chain) -> None:
        root, name = chain.root, chain.segment.root
        noise = root.u.new_zeros(len(root.u)) if root.blur is None else root.blur
        chain.values[name] = Value(root.u, root.eye, root, {}, chain.shapes, noise)

    def _step(self, chain: Chain, step: TokenStep) -> None:
        """Make the next value: centre, Jacobians by the root and all sources, the shape of a site's remainder."""
        values = chain.values
        if isinstance(step, Norm | FeedForward | Solu):
            source = values[step.source if isinstance(step, FeedForward) else step.inputs[0]]
            values[step.out] = self._site(chain, step, source)
        elif isinstance(step, Affine):
            source = values[step.inputs[0]]
            u = torch.nn.functional.linear(source.u, step.weight, step.bias)
            heads = step.out_shape[0] if len(step.out_shape) > 1 else 1
            most = frobenius(step.weight)
            noise = slip(source, step.weight.shape[1], most)
            if step.bias is not None:
                noise = noise + gamma(step.weight.shape[1] + 8) * length(step.bias)
            values[step.out] = moved(source, u, lambda J: times(step.weight, J), noise, heads)
        elif isinstance(step, Rotary):
            source = values[step.inputs[0]]
            noise = slip(source, 8, turning_norm(step))
            values[step.out] = moved(
                source,
                turn(step, source.u),
                lambda J: turn(step, J.movedim(-1, 0)).movedim(0, -1).contiguous(),
                noise,
                source.heads,
            )
        elif isinstance(step, Shift):
            source = values[step.inputs[0]]
            offset = step.offset.flatten(1)
            noise = source.noise + gamma(8) * (source.size + source.stretch + length(offset))
            values[step.out] = moved(source, source.u + offset, lambda J: J, noise, source.heads)
        else:
            a, b = (values[name] for name in step.inputs)
            sources = dict(a.sources)
            for name, J in b.sources.items():
                sources[name] = sources[name] + J if name in sources else J
            noise = gamma(8) * (a.size + b.size + a.stretch + b.stretch)
            noise = grow(a.noise + b.noise + noise)
            values[step.out] = Value(a.u + b.u, a.J + b.J, a.root, sources, chain.shapes, noise, a.heads)

    def _site(self, chain: Chain, step: Norm | FeedForward | Solu, source: Value) -> Value:
        site: NormSite | HeadNormSite | NetworkSite | SoluSite
        if isinstance(step, FeedForward):
            site = NetworkSite(step, source)
            u = site.output
        elif isinstance(step, Solu):
            site = SoluSite(step, source)
            u = site.output
        elif source.heads == 1:
            site, u = NormSite(step, source), step(source.u)
        else:
            site = HeadNormSite(step, source)
            u = site.output
        chain.sites[step.out] = site
        chain.shapes[step.out] = site.shape
        heads = source.heads if isinstance(site, HeadNormSite) else 1
        made = moved(source, u, lambda J: times(site.jacobian, J), torch.zeros_like(source.noise), heads)
        eye = identity(u, u.shape[1]).expand(len(u), -1, -1)
        made.sources[step.out] = eye
        return made

    def _next(self, chain: Chain, tell: Callable[[float], None]) -> Root:
        """Return the root after an attention or a pooling, and tell how much of it is done."""
        segment = chain.segment
        if segment.pool is not None:
            return self._pooled(chain, segment.pool)
        return next_root(chain, self.memory, self.quick, tell)

    def _pooled(self, chain: Chain, pool: Pool) -> Root:
        tokens = self.chains[-2].goes_on if len(self.chains) > 1 else list(range(len(pool.weights)))
        chain.pool = pool = replace(pool, weights=pool.weights[tokens])
        value = chain.values[pool.inputs[0]]
        weights = pool.weights
        N = torch.einsum("s,snd,sdp->np", weights, value.J, value.root.N)[None]
        n = gamma(len(weights) * value.J.shape[-1] + 64)
        noise = weights.abs() @ (value.noise + n * 8.0 * (value.size + value.stretch))
        parts = [
            image(weights[t] * J[t], shape[t])
            for J, shape in value.parts
            for t in weights.nonzero()[:, 0].tolist()
        ]
        chain.noise = grow(noise)[None]
        B = total([*parts, ball(grow(noise), N.shape[1])])
        return Root(pool(value.u)[None], N, B[None], chain.root.factors)

    def batch(self, tokens: int) -> int:
        """Return how many covectors are walked back at once within the memory."""
        d = max(chain.root.u.shape[1] for chain in self.chains)
        wide = max(
            (
                site.h.shape[-1] if isinstance(site, NetworkSite) else site.n
                for chain in self.chains
                for site in chain.sites.values()
                if isinstance(site, NetworkSite | SoluSite)
            ),
            default=d,
        )
        each = 8 * (6 * d * d + tokens * (8 * d + 4 * wide))
        return max(1, int(self.memory // (4 * each)))

    def wide_batch(self) -> int:
        """Return how many covectors are taken at once if only ellipsoids are asked."""
        root = self.chains[0].root
        return max(1, int(self.memory // (64 * (len(root.half_widths) + root.u.numel()))))

    def remainder(
        self, chain: Chain, seeds: Mapping[int, Mapping[str, Tensor]], reading: RemainderBound
    ) -> tuple[Float[Tensor, "F 2"], Float[Tensor, "F p"]]:
        """Bound the remainders of covectors at a chain's values, for + and −, and return their linear parts."""
        number = next(i for i, c in enumerate(self.chains) if c is chain)
        some = next(iter(next(iter(seeds.values())).values()))
        missed = some.new_zeros(len(some), 2)
        roots: dict[int, Tensor] = {}
        for t, entries in seeds.items():
            roots[t], found = self._through(chain, t, dict(entries), reading)
            missed = missed + found
        reading.arrive(chain)
        stopped, linear = self._stop(chain.root, roots)
        if number == 0 or not reading.deep:
            return grow(missed + stopped[:, None]), linear
        before, again = self.cross(number - 1, roots, reading)
        half_widths = chain.root.half_widths
        # The linear part that is returned is the forward one; the other differs from it by rounding, which is measured.
        gap = (linear - again).abs() @ half_widths + gamma(linear.shape[-1] + 8) * (
            length(linear) + length(again)
        ) * length(half_widths)
        rest = before + gap[:, None]
        if reading.may_stop:
            rest = torch.minimum(stopped[:, None], rest)
        return grow(missed + rest), linear

    def _stop(self, root: Root, roots: dict[int, Tensor]) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"]]:
        """Bound the remainders of covectors at a root by its ellipsoids, and return their linear parts."""
        some = next(iter(roots.values()))
        linear = some.new_zeros(len(some), root.N.shape[-1])
        missed = some.new_zeros(len(some))
        for t, w in roots.items():
            linear = linear + w @ root.N[t]
            rounding = gamma(4 * sum(root.N.shape) + 256) * 4.0 * root.stretch[t]
            missed = missed + support(root.B[t], w) + length(w) * rounding
        return grow(missed), linear

    def cross(
        self, number: int, roots: dict[int, Tensor], reading: RemainderBound
    ) -> tuple[Float[Tensor, "F 2"], Float[Tensor, "F p"]]:
        """Do as `remainder` for covectors at the root that follows chain `number`."""
        chain = self.chains[number]
        some = next(iter(roots.values()))
        seeds: Seeds = {}
        if chain.pool is not None:
            for t, weight in enumerate(chain.pool.weights.tolist()):
                if weight:
                    seeds[t] = {chain.pool.inputs[0]: some * weight}
            value = chain.values[chain.pool.inputs[0]]
            noise = gamma(len(value.u) + 16) * length(some) * value.size.sum() * 4.0
            lost = noise[:, None].expand(-1, 2)
        else:
            assert chain.mix is not None
            names = chain.mix.attention
            lost = some.new_zeros(len(some), 2)
            heads = {name: chain.values[name].heads for name in (names.q, names.k, names.v)}
            keys: Tensor | None = None
            for place, u in roots.items():
                t = chain.goes_on[place]
                found = chain.mix.pull(u, t)
                noise = length(u) * chain.mix.noise[t]
                lost = lost + reading.mixing(chain, place, u) + noise[:, None]
                seeds.setdefault(t, {})
                _put(seeds[t], names.stream, u)
                _put(seeds[t], names.q, found["q"].flatten(1))
                both = torch.cat(
                    (_grouped(found["k"], heads[names.k]), _grouped(found["v"], heads[names.v])), -1
                )
                keys = both if keys is None else keys + both
            assert keys is not None
            width = chain.values[names.k].u.shape[1]
            for j in range(keys.shape[1]):
                entry = seeds.setdefault(j, {})
                _put(entry, names.k, keys[:, j, :width])
                _put(entry, names.v, keys[:, j, width:])
        before, linear = self.remainder(chain, seeds, reading)
        return grow(lost + before), linear

    def _through(
        self, chain: Chain, t: int, seeds: dict[str, Tensor], reading: RemainderBound
    ) -> tuple[Tensor, Float[Tensor, "F 2"]]:
        """Take covectors of one token through a chain: to its root, with the remainders of the chain's sites."""
        some = next(iter(seeds.values()))
        missed = some.new_zeros(len(some), 2)
        for step in reversed(chain.segment.steps):
            if step.out not in seeds:
                continue
            v = seeds.pop(step.out)
            if isinstance(step, Norm | FeedForward | Solu):
                site = chain.sites[step.out]
                source = step.source if isinstance(step, FeedForward) else step.inputs[0]
                missed = missed + reading.site(chain, step.out, v, t)
                _put(seeds, source, site.pull(v, t))
            elif isinstance(step, Affine):
                missed = missed + affine_noise(step, chain.values[step.inputs[0]], v, t)[:, None]
                _put(seeds, step.inputs[0], v @ step.weight)
            elif isinstance(step, Rotary):
                size = turning_norm(step) * length(v) * chain.values[step.inputs[0]].size[t]
                missed = missed + (gamma(16) * 2.0 * size)[:, None]
                _put(seeds, step.inputs[0], turn(step, v[:, None, :], back=True, position=t)[:, 0])
            else:
                assert isinstance(step, Add | Shift)
                missed = missed + (gamma(8) * length(v) * chain.values[step.out].size[t])[:, None]
                for name in step.inputs:
                    _put(seeds, name, v)
        root = seeds[chain.segment.root]
        return root, grow(missed)


def _put(seeds: dict[str, Tensor], name: str, v: Tensor) -> None:
    seeds[name] = seeds[name] + v if name in seeds else v


def _grouped(w: Float[Tensor, "F S H c"], groups: int) -> Float[Tensor, "F S n"]:
    F, S, H, c = w.shape
    return w.reshape(F, S, groups, H // groups, c).sum(3).flatten(2)
