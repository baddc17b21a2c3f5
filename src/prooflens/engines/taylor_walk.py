"""The walk of `taylor`: forward chain by chain, and covectors back to the input.

`remainder` is the heart. Given covectors at values of a chain it walks back to the input and adds up, site by site,
what the affine stand-ins miss (`bound` of norms and networks, `pull` of attention). The result and the linear part are
all there is to know of a functional. The same call gives E of every value that a site reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor_attention import Heads, MixSite, ScoreSite
from prooflens.engines.taylor_norms import frobenius, grow, length, product_error
from prooflens.engines.taylor_segments import Network, Segment, TokenStep
from prooflens.engines.taylor_sites import NetworkSite, NormSite, affine_noise
from prooflens.engines.taylor_values import Root, Value
from prooflens.models.sites import Add, Affine, Norm, Pool, Rotary
from prooflens.numerics import gamma
from prooflens.numerics.rounding import UNIT_ROUNDOFF

FLOOR = 0.3
"""No factor's weight is less than this share of the mean."""

Seeds = dict[int, dict[str, Tensor]]
"""Covectors [F, n] by token and by the name of the value they read."""


@dataclass(eq=False)
class Chain:
    """A segment with its values and sites, and how it goes on."""

    segment: Segment
    root: Root
    values: dict[str, Value] = field(default_factory=dict)
    sites: dict[str, NormSite | NetworkSite] = field(default_factory=dict)
    scores: ScoreSite | None = None
    mix: MixSite | None = None
    pool: Pool | None = None


@dataclass(eq=False)
class Walk:
    """All chains up to what is asked for."""

    memory: int
    progress: Callable[[str, float], None] = lambda stage, share: None
    chains: list[Chain] = field(default_factory=list)

    def forward(
        self, segments: list[Segment], center: Float[Tensor, "S d"], generators: Float[Tensor, "S d p"]
    ) -> None:
        """Walk all segments."""
        root = _input(center, generators, torch.ones(generators.shape[-1]).to(center))
        if segments[0].attention is not None:
            root = _input(center, generators, self._widths(segments[0], root))
        for number, segment in enumerate(segments):
            chain = Chain(segment, root)
            self.chains.append(chain)
            self._start(chain)
            for step in segment.steps:
                self._step(chain, step)
            if segment.scores is not None:
                names = (segment.scores.inputs[0], segment.scores.inputs[1])
                q, k = (self._known(chain, name) for name in names)
                chain.scores = ScoreSite(segment.scores, names, Heads.of(q, q.heads), Heads.of(k, q.heads))
            if number + 1 < len(segments):
                stage = "output" if segment.layer is None else f"layer {segment.layer}"
                self.progress(stage, number / len(segments))
                root = self._next(chain)

    def _widths(self, segment: Segment, root: Root) -> Float[Tensor, " p"]:
        """Half-widths that even out how strongly queries, keys and values of the first layer read the factors.

        Any positive widths will do: α_k = half_k · α̂_k is a change of variables. 2-norms of evenly read factors are
        nearer to what the box attains.
        """
        attention = segment.attention
        assert attention is not None
        trial = Walk(self.memory)
        chain = Chain(segment, root)
        trial.chains.append(chain)
        trial._start(chain)
        for step in segment.steps:
            trial._step(chain, step)
        read = torch.zeros_like(root.half)
        for name in (attention.q, attention.k, attention.v):
            columns = (chain.values[name].J @ root.N).flatten(0, 1).square().sum(0)
            read = read + columns / columns.mean().clamp(min=2.0**-900)
        weight = read.sqrt() + FLOOR * read.sqrt().mean() + 2.0**-100
        return (weight / weight.mean()).sqrt()

    def _start(self, chain: Chain) -> None:
        root = chain.root
        eye = torch.eye(root.u.shape[1]).to(root.u).expand(len(root.u), -1, -1)
        start = Value(root.u, eye, root, torch.zeros(len(root.u)).to(root.u), E=root.E, basis=root.basis)
        start.far = start.reach[:, 0]
        chain.values[chain.segment.root] = start

    def _step(self, chain: Chain, step: TokenStep) -> None:
        """One step forward: value, Jacobian, and E of what the step's site reads."""
        values = chain.values
        if isinstance(step, Norm):
            source = self._known(chain, step.inputs[0])
            norm = NormSite(step, source, self._along(chain, step))
            chain.sites[step.out] = norm
            far = grow(norm.gain.abs().max() / norm.least * source.far)
            values[step.out] = Value(step(source.u), norm.tangent(), source.root, far)
        elif isinstance(step, Network):
            source = self._known(chain, step.source)
            network = NetworkSite(step, source)
            chain.sites[step.out] = network
            values[step.out] = Value(network.output, network.tangent(), source.root, network.far)
        elif isinstance(step, Affine):
            source = values[step.inputs[0]]
            u = torch.nn.functional.linear(source.u, step.weight, step.bias)
            heads = step.out_shape[0] if len(step.out_shape) > 1 else 1
            far = grow(frobenius(step.weight) * source.far)
            values[step.out] = Value(u, step.weight @ source.J, source.root, far, heads)
        elif isinstance(step, Rotary):
            source = values[step.inputs[0]]
            J = turn(step, source.J.movedim(-1, 0)).movedim(0, -1).contiguous()
            values[step.out] = Value(turn(step, source.u), J, source.root, 2.0 * source.far, source.heads)
        else:
            a, b = (values[name] for name in step.inputs)
            values[step.out] = Value(a.u + b.u, a.J + b.J, a.root, a.far + b.far)

    def _along(self, chain: Chain, step: Norm) -> Float[Tensor, " S"]:
        """E of the one direction per token that a norm bends along."""
        name = step.inputs[0]
        value = chain.values[name]
        m = value.u - value.u.mean(-1, keepdim=True) if step.centred else value.u
        return torch.stack([self._missed(chain, name, t, m[t : t + 1])[0] for t in range(len(m))])

    def _missed(self, chain: Chain, name: str, t: int, rows: Float[Tensor, "F n"]) -> Float[Tensor, " F"]:
        """sup |w·(u(x) − u − JNα)| for covectors w of a value at one token."""
        value = chain.values[name]
        bound, linear = self.remainder(chain, {t: {name: rows}})
        forward = rows @ value.J[t]
        terms = length(rows) * frobenius(value.J[t]) * frobenius(value.root.N[t])
        return grow(bound.amax(-1) + self._mismatch(linear, forward @ value.root.N[t], terms))

    def _mismatch(
        self, linear: dict[int, Tensor], forward: Float[Tensor, "F p"], terms: Float[Tensor, " F"]
    ) -> Float[Tensor, " F"]:
        """How far a linear part that was walked back may be from the same one walked forward, over the box.

        The two are computed along different paths and rounded all along; their difference is measured here, and only
        the last products, of terms of the given size, are left to bound.
        """
        root = self.chains[0].root
        back = torch.zeros_like(forward)
        for t, covector in linear.items():
            back = back + covector @ root.N[t]
            terms = terms + length(covector) * frobenius(root.N[t])
        rounding = gamma(4 * sum(root.N.shape) + 256) * 4.0 * terms * length(root.half)
        return grow((back - forward).abs() @ root.half + rounding)

    def _known(self, chain: Chain, name: str) -> Value:
        """A value with its E: every coordinate walked back to the input."""
        value = chain.values[name]
        if value.E is not None:
            return value
        if value.heads == 1:
            value.choose_basis()
        S, n, d = value.J.shape
        found = []
        for t in range(S):
            rows = torch.eye(n).to(value.u) if value.basis is None else value.basis[t].T
            parts = [self._missed(chain, name, t, some) for some in rows.split(self.batch(S))]
            found.append(torch.cat(parts))
        # Heads read A = JN as a computed product.
        N = value.root.N
        slack = product_error(d, frobenius(value.J) * frobenius(N)) * length(value.root.half)
        value.E = grow(torch.stack(found) + slack[:, None])
        return value

    def _next(self, chain: Chain) -> Root:
        """The root after an attention or a pooling."""
        segment = chain.segment
        if segment.pool is not None:
            return self._pooled(chain, segment.pool)
        assert segment.attention is not None
        assert chain.scores is not None
        H = chain.values[segment.attention.q].heads
        value = self._known(chain, segment.attention.v)
        v = Heads.of(value, H)
        values = (value.J @ value.root.N).reshape(len(value.u), value.heads, v.u.shape[-1], -1)
        stream = chain.values[segment.attention.stream]
        mix = MixSite(chain.scores, segment.attention, v, values, stream.size, chain.root.half)
        chain.mix = mix
        A = mix.tangent(chain.values)
        S, d = len(stream.u), A.shape[-1]
        flat = A.movedim(1, 2).reshape(S * A.shape[2], S * d)
        whole = chain.root.N.flatten(0, 1)
        N = (flat @ whole).reshape(S, A.shape[2], -1)
        u = stream.u + segment.attention.output(mix.z)
        return self._rooted(u, N)

    def _pooled(self, chain: Chain, pool: Pool) -> Root:
        chain.pool = pool
        value = chain.values[pool.inputs[0]]
        N = torch.einsum("s,snd,sdp->np", pool.weights, value.J, value.root.N)[None]
        return self._rooted(pool(value.u)[None], N)

    def _rooted(self, u: Float[Tensor, "S d"], N: Float[Tensor, "S d p"]) -> Root:
        """E of a new root in the eigenbasis of NNᵀ, by walking its covectors back."""
        S = len(u)
        gram = N @ N.mT
        basis = torch.linalg.eigh(0.5 * (gram + gram.mT)).eigenvectors
        found = []
        for t in range(S):
            parts = []
            for some in basis[t].T.split(self.batch(S)):
                bound, linear = self.cross(len(self.chains) - 1, {t: some})
                terms = length(some) * frobenius(N[t])
                parts.append(grow(bound.amax(-1) + self._mismatch(linear, some @ N[t], terms)))
            found.append(torch.cat(parts))
        return Root(u, N, torch.stack(found), basis, self.chains[0].root.half)

    def batch(self, tokens: int) -> int:
        """How many covectors are walked at once within the memory."""
        d = max(chain.root.u.shape[1] for chain in self.chains)
        wide = max(
            (
                site.h.shape[-1]
                for chain in self.chains
                for site in chain.sites.values()
                if isinstance(site, NetworkSite)
            ),
            default=d,
        )
        each = 8 * (6 * d * d + tokens * (8 * d + 4 * wide))
        return max(1, int(self.memory // (4 * each)))

    def remainder(
        self, chain: Chain, seeds: Mapping[int, Mapping[str, Tensor]]
    ) -> tuple[Float[Tensor, "F 2"], dict[int, Tensor]]:
        """What the linear parts of covectors at a chain's values miss, for + and −; and those linear parts."""
        number = next(i for i, c in enumerate(self.chains) if c is chain)
        total: Tensor | None = None
        roots: dict[int, Tensor] = {}
        for t, entries in seeds.items():
            roots[t], missed = self._through(chain, t, dict(entries))
            total = missed if total is None else total + missed
        assert total is not None
        if number == 0:
            return total, roots
        before, linear = self.cross(number - 1, roots)
        return grow(total + before), linear

    def cross(self, number: int, roots: dict[int, Tensor]) -> tuple[Float[Tensor, "F 2"], dict[int, Tensor]]:
        """The same from covectors at the root that follows chain `number`."""
        chain = self.chains[number]
        some = next(iter(roots.values()))
        seeds: Seeds = {}
        if chain.pool is not None:
            for t, weight in enumerate(chain.pool.weights.tolist()):
                if weight:
                    seeds[t] = {chain.pool.inputs[0]: some * weight}
            value = chain.values[chain.pool.inputs[0]]
            noise = gamma(len(value.u) + 16) * length(some) * value.size.sum() * 4.0
            total = noise[:, None].expand(-1, 2)
        else:
            assert chain.mix is not None
            names = chain.mix.attention
            total = torch.zeros(len(some), 2).to(some)
            heads = {name: chain.values[name].heads for name in (names.q, names.k, names.v)}
            keys: Tensor | None = None
            for t, u in roots.items():
                found, missed = chain.mix.pull(u, t)
                total = total + missed
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
        before, linear = self.remainder(chain, seeds)
        return grow(total + before), linear

    def _through(self, chain: Chain, t: int, seeds: dict[str, Tensor]) -> tuple[Tensor, Float[Tensor, "F 2"]]:
        """Covectors of one token through a chain: at its root, with what the chain's sites miss."""
        some = next(iter(seeds.values()))
        missed = torch.zeros(len(some), 2).to(some)
        for step in reversed(chain.segment.steps):
            if step.out not in seeds:
                continue
            v = seeds.pop(step.out)
            if isinstance(step, Norm | Network):
                site = chain.sites[step.out]
                source = step.source if isinstance(step, Network) else step.inputs[0]
                missed = missed + site.bound(v, t)
                _put(seeds, source, site.pull(v, t))
            elif isinstance(step, Affine):
                missed = missed + affine_noise(step, chain.values[step.inputs[0]], v, t)[:, None]
                _put(seeds, step.inputs[0], v @ step.weight)
            elif isinstance(step, Rotary):
                missed = (
                    missed + (gamma(16) * 4.0 * length(v) * chain.values[step.inputs[0]].size[t])[:, None]
                )
                _put(seeds, step.inputs[0], turn(step, v[:, None, :], back=True, position=t)[:, 0])
            else:
                assert isinstance(step, Add)
                missed = missed + (gamma(8) * length(v) * chain.values[step.out].size[t])[:, None]
                for name in step.inputs:
                    _put(seeds, name, v)
        root = seeds[chain.segment.root]
        return root, grow(missed)


def _input(
    center: Float[Tensor, "S d"], generators: Float[Tensor, "S d p"], half: Float[Tensor, " p"]
) -> Root:
    """The input as a root, by factors of the given half-widths; dividing by them rounds, which E covers."""
    S, d = center.shape
    eye = torch.eye(d).to(center).expand(S, d, d)
    E = torch.zeros_like(center)
    if bool((half != 1.0).any()):
        E = grow(4.0 * UNIT_ROUNDOFF * generators.abs().sum(-1))
    return Root(center, generators / half, E, eye, half)


def turn(
    step: Rotary, x: Float[Tensor, "... S n"], back: bool = False, position: int | None = None
) -> Tensor:
    """RoPE on vectors that hold all heads side by side, or its transpose; at all positions or at one."""
    width = step.cos.shape[-1]
    y = x.reshape(*x.shape[:-1], -1, width)
    half = width // 2
    cos, sin = step.cos[:, None, :], step.sin[:, None, :]
    if position is not None:
        cos, sin = cos[position : position + 1], sin[position : position + 1]
    if back:
        swapped = y * sin
        swapped = torch.cat((swapped[..., half:], -swapped[..., :half]), -1)
        return (y * cos + swapped).reshape(x.shape)
    return (y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin).reshape(x.shape)


def _put(seeds: dict[str, Tensor], name: str, v: Tensor) -> None:
    seeds[name] = seeds[name] + v if name in seeds else v


def _grouped(w: Float[Tensor, "F S H c"], groups: int) -> Float[Tensor, "F S n"]:
    """Add up what the readers of a shared head send back."""
    F, S, H, c = w.shape
    return w.reshape(F, S, groups, H // groups, c).sum(3).flatten(2)
