"""Forward through a network: chains of values, and the sites between them.

Two networks that differ in some weights are walked side by side (`Walk.beside`): what stands in front of the first
difference is one and the same, chains, sites and remainders, so that it cancels in differences of their outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from prooflens.checker.depth.activations import KINKED, SMOOTH
from prooflens.checker.depth.carried import parted, placed, stacked
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.networks import Affine, NetworkSite
from prooflens.checker.depth.norms import NormSite
from prooflens.checker.depth.scores import Heads, ScoreSite
from prooflens.checker.depth.shapes import Array, ball, up
from prooflens.checker.depth.solu import SoluSite
from prooflens.checker.depth.values import ROOT, Chain, Value
from prooflens.checker.edited import tables_of
from prooflens.checker.network import SOLU, Network

Site = NormSite | NetworkSite | SoluSite
Affines = tuple[tuple[Array, Array] | None, ...]

AT_THE_END = ("final_norm.", "head.", "pooler.", "read.", "embed.")
"""Weights that no block reads."""
BEHIND_MIXING = ("up", "gate", "down", "norm1_out", "norm2", "norm2_out")
"""Parts of a block that stand behind its mixing, where it is not parallel."""


class Kept(NamedTuple):
    """A site and its output, with what they were made from."""

    source: Value
    weights: Affines
    name: str
    site: Site
    made: Value


@dataclass(eq=False)
class Layer:
    """A layer's scores, its mixing if the walk goes on, and the chain that both stand at the end of.

    Attributes:
        chain: the chain.
        sites: the sites on it, by name.
        stream: the stream in front of the layer.
        scores: the scores.
        mix: the mixing.
        behind: the chain that the mixing starts.
    """

    chain: Chain
    sites: dict[str, Site]
    stream: Value
    scores: ScoreSite
    mix: MixSite | None = None
    behind: Chain | None = None

    @property
    def read(self) -> dict[str, Value]:
        """The values that scores and mixing read, by name."""
        held = {"q": self.scores.q.value, "k": self.scores.k.value}
        return held if self.mix is None else held | {"v": self.mix.v.value, "stream": self.mix.stream}


@dataclass(eq=False)
class End:
    """What the outputs read: Σ_t shares_t value_t, which the head maps."""

    chain: Chain
    sites: dict[str, Site]
    value: Value
    shares: Array
    head: tuple[Array, Array]
    number: int
    """How many mixings stand before the chain."""

    @property
    def read(self) -> dict[str, Value]:
        """The value that the outputs read."""
        return {"value": self.value}


@dataclass(eq=False)
class Walk:
    """A network on c + Gα, |α| ≤ 1, as deep as it is asked.

    Attributes:
        net: the network.
        center: c [S, d].
        generators: G [S, d, p].
        tell: called with a layer's number before it is walked.
        blur: by how much the centre of each token may be off, in the 2-norm [S]; None if it is exact.
        keeps: whether every site's output is kept, for a walk beside this one.
        twin: the walk that this one goes beside.
    """

    net: Network
    center: Array
    generators: Array
    tell: Callable[[int], None] = lambda layer: None
    blur: Array | None = None
    keeps: bool = False
    twin: Walk | None = None
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sites: dict[str, Site] = {}
        self._kept: dict[str, Kept] = {}
        self._end: End | None = None
        self._carried: Value | None = None
        self._seen = set[str]()
        self._finished = len(self.layers)
        """How many layers have a mixing already."""
        if self.twin is None:
            off = {} if self.blur is None else {ROOT: ball(self.blur, self.center.shape[1])}
            self._chain = Chain(self.center, self.generators, off)
            self._stream = self._chain.start
        else:
            start = self.twin.layers[len(self.layers)]
            self._chain, self._stream, self._sites = start.chain, start.stream, dict(start.sites)

    def beside(self, net: Network) -> Walk:
        """The walk of a network of the same architecture, which shares all that no other weight of it changes.

        Args:
            net: the other network; this walk must be one that keeps its sites.
        """
        if self.net.arch.get("beside_hook") is not None:
            raise ValueError("effects on values at two places are not proved here")
        self.end()
        others = _apart(self.net.weights, net.weights)
        blocks = [int(name.split(".")[1]) for name in others if name.startswith("blocks.")]
        last = int(net.arch["n_layers"]) - 1
        blocks += [0 for name in others if not name.startswith(("blocks.", *AT_THE_END))]
        alike = self.layers[: min([*blocks, last])]
        return Walk(net, self.center, self.generators, self.tell, self.blur, twin=self, layers=list(alike))

    @staticmethod
    def refuses(net: Network) -> str:
        """Why a network is not one that is known here; empty if it is."""
        if str(net.arch.get("beside_hook")).endswith(("attn.hook_z", "hook_attn_out")):
            return "what attention makes is compared with a later value"
        if net.arch.get("score_cap") is not None:
            return "its scores are capped"
        if any(name.endswith(".knocked_out") for name in net.weights):
            return "keys of its heads are knocked out"
        if tables_of(net.weights):
            return "parts of it are held, or patterns frozen"
        if not net.arch.get("has_attention", True):
            return "its blocks have no attention"
        known = (*SMOOTH, *KINKED, SOLU, net.arch.get("pooler_activation", "tanh"))
        if net.arch["activation"] not in known:
            return f"its activation is {net.arch['activation']}"
        if net.arch.get("network_norm") and net.arch["activation"] != SOLU:
            return "its neurons are normed"
        if net.arch["pooler"] and net.arch["pool"] == "mean":
            return "its pooler reads a mean of tokens"
        return ""

    def layer(self, number: int) -> Layer:
        """The scores of a layer, walked to if need be."""
        while len(self.layers) <= number:
            if len(self.layers) > self._finished:
                self._finish(self.layers[-1], len(self.layers) - 1)
            self.tell(len(self.layers))
            self.layers.append(self._attend(len(self.layers)))
        return self.layers[number]

    def _attend(self, number: int) -> Layer:
        """The chain's end at a layer's scores."""
        net, S, heads = self.net, len(self.center), int(self.net.arch["n_heads"])
        self._note(f"blocks.{number}.hook_resid_pre", self._stream)
        self._inner = self._before(number, self._stream, 1)
        if self._inner is not self._stream:
            self._note(f"blocks.{number}.ln1.hook_normalized", self._inner)
        groups = int(net.arch["n_kv_heads"] or heads)
        q, k = self._queries(number, "q"), self._queries(number, "k")
        held = Heads(q, heads, heads), Heads(k, groups, heads)
        scores = ScoreSite(*held, net.scale(number), net.score_bias(S), net.mask(S, number))
        return Layer(self._chain, self._sites, self._stream, scores)

    def end(self) -> End:
        """The outputs, walked to if need be."""
        if self._end is None:
            self._end = self._read_out()
        return self._end

    def _note(self, hook: str, x: Value) -> Value:
        """A value, kept if the network ends at it, or carried on if it reads two."""
        if self.net.arch.get("beside_hook") is not None:
            self._carry(hook, x)
        elif self.net.arch.get("read_hook") == hook:
            token = np.zeros(len(x.c))
            token[int(self.net.arch["read_position"])] = 1.0
            mixings = len([layer for layer in self.layers if layer.mix is not None])
            self._end = End(self._chain, self._sites, x, token, self._weights("read"), mixings)
        return x

    def _carry(self, hook: str, x: Value) -> None:
        """Add what the outputs read of a value to what is carried; the network ends where both are there."""
        arch, (W, bias) = self.net.arch, self._weights("read")
        part = None if hook in self._seen else placed(arch, W, hook, x)
        if part is None:
            return
        self._seen.add(hook)
        self._carried = part if self._carried is None else self._carried.plus(part)
        if self._seen == {arch["read_hook"], arch["beside_hook"]}:
            tokens = np.zeros(len(x.c))
            tokens[[int(arch["read_position"]), int(arch["beside_position"])]] = 1.0
            mixings = len([layer for layer in self.layers if layer.mix is not None])
            self._end = End(self._chain, self._sites, self._carried, tokens, (np.eye(len(W)), bias), mixings)

    def _read_at_hook(self) -> End:
        """The end of a network that ends at a hook of its last block."""
        last = int(self.net.arch["n_layers"]) - 1
        layer = self.layer(last)
        if self._end is None:
            self._finish(layer, last)
        if self._end is None:
            raise ValueError(f"the checker's walk does not pass {self.net.arch['read_hook']}")
        return self._end

    def _read_out(self) -> End:
        if self.net.arch.get("read_hook") is not None:
            return self._read_at_hook()
        net, last, pool = self.net, int(self.net.arch["n_layers"]) - 1, self.net.arch["pool"]
        S = len(self.center)
        tokens = list(range(S)) if pool == "mean" else [0] if pool == "first" else [S - 1]
        self._finish(self.layer(last), last, tokens)
        x = self._stream
        if net.arch["norm_place"] in ("pre", "sandwich", "output"):
            x = self._norm("final_norm", x)
        d = x.c.shape[1]
        if net.arch["pooler"]:
            function, plain = net.arch.get("pooler_activation", "tanh"), (np.eye(d), np.zeros(d))
            x = self._neurons("pooler", x, function, self._weights("pooler"), plain)
        shares = np.full(len(tokens), 1.0 / len(tokens))
        head = (np.eye(d), np.zeros(d))
        if net.arch["d_out"] is not None:
            tied = "head.weight" not in net.weights
            W = net.weights["embed.tokens" if tied else "head.weight"]
            head = W, np.zeros(len(W)) if tied else net.weights.get("head.bias", np.zeros(len(W)))
        return End(self._chain, self._sites, x, shares, head, last + 1)

    def _finish(self, layer: Layer, number: int, tokens: list[int] | None = None) -> None:
        """Behind a layer's scores: its mixing, a new chain from there, and the network; at some tokens, or at all."""
        net, block, place = self.net, f"blocks.{number}", self.net.arch["norm_place"]
        heads, feeds = int(net.arch["n_heads"]), net.arch.get("has_network", True)
        projected = self._note(f"{block}.attn.hook_v", self._affine(f"{block}.v", self._inner))
        v = Heads(projected, int(net.arch["n_kv_heads"] or heads), heads)
        (W, bias), stream, behind = self._weights(f"{block}.o"), self._stream, place in ("sandwich", "output")
        parallel = bool(net.arch.get("parallel")) and feeds
        if parallel:
            second = self._inner if net.arch.get("shared_norm") else self._before(number, stream, 2)
            stream = stream.plus(self._behind(block, self._network(block, second), 2))
        if behind:
            # What is added goes through a norm first: the new root holds the stream and it side by side.
            d = len(W)
            W, bias = np.concatenate((np.zeros_like(W), W)), np.concatenate((np.zeros(d), bias))
            stream = stream.mapped(np.eye(2 * d, d))
        hook = net.arch.get("read_hook")
        if hook in (f"{block}.attn.hook_z", f"{block}.hook_attn_out"):
            # What attention makes, and nothing of the stream: the new root is the value itself.
            (W, bias), width = self._weights(f"{block}.o"), heads * net.head_dim
            W, bias = (W, bias) if hook.endswith("out") else (np.eye(width), np.zeros(width))
            nothing, width = self._stream.mapped(np.zeros((len(W), self.center.shape[1]))), len(W)
            if self._carried is not None:
                nothing, W, bias = stacked(nothing, W, bias, self._carried)
            layer.mix = MixSite(layer.scores, v, nothing, W, bias)
            self._chain, self._sites = layer.mix.next(list(range(len(self.center)))), {}
            self._note(hook, self._off_the_root(width))
            return
        width = len(W)
        if self._carried is not None:
            stream, W, bias = stacked(stream, W, bias, self._carried)
        tokens = tokens or list(range(len(self.center)))
        same = None if parallel else self._same_mixing(layer, number, tokens)
        if same is not None:
            layer.scores, layer.mix, layer.behind = same.scores, same.mix, same.behind
        else:
            layer.mix = MixSite(layer.scores, v, stream, W, bias)
            layer.behind = layer.mix.next(tokens)
        assert layer.behind is not None
        self._chain, self._sites = layer.behind, {}
        x = self._off_the_root(width)
        if behind:
            d = width // 2
            added = x.mapped(np.eye(d, 2 * d, d))
            x = x.mapped(np.eye(d, 2 * d)).plus(self._behind(block, added, 1))
        if not parallel:
            self._note(f"{block}.hook_resid_mid", x)
        if place == "post":
            x = self._note(f"{block}.ln1.hook_normalized", self._norm(f"{block}.norm1", x))
        if feeds and not parallel:
            second = self._before(number, x, 2)
            if second is not x:
                self._note(f"{block}.ln2.hook_normalized", second)
            x = x.plus(self._behind(block, self._network(block, second), 2))
        self._note(f"{block}.hook_resid_post", x)
        if feeds and place == "post":
            x = self._norm(f"{block}.norm2", x)
        self._stream = x if parallel else self._note(f"{block}.hook_normalized_resid_post", x)

    def _off_the_root(self, width: int) -> Value:
        """The stream behind a mixing; what is carried beside it goes on."""
        root = self._chain.start
        if self._carried is None:
            return root
        x, self._carried = parted(root, width)
        return x

    def _same_mixing(self, layer: Layer, number: int, tokens: list[int]) -> Layer | None:
        """The twin's layer, if its mixing reads the same stream through the same weights."""
        if self.twin is None:
            return None
        other, block = self.twin.layers[number], f"blocks.{number}."
        # Weights of other blocks and of the end do not matter here; all others do, those of no block too.
        unread = (*AT_THE_END, *(f"{block}{part}." for part in BEHIND_MIXING))
        others = [n for n in _apart(self.net.weights, self.twin.net.weights) if not n.startswith(unread)]
        changed = any(name.startswith(block) or not name.startswith("blocks.") for name in others)
        known = other.mix is not None and other.behind is not None and other.mix.tokens == tokens
        return other if known and not changed and layer.stream is other.stream else None

    def _behind(self, block: str, added: Value, part: int) -> Value:
        """What a part of a block adds: its output, or the norm of that."""
        normed = self.net.arch["norm_place"] in ("sandwich", "output")
        return self._norm(f"{block}.norm{part}_out", added) if normed else added

    def _before(self, number: int, x: Value, part: int) -> Value:
        """What a part of a block reads: the stream, or its norm."""
        bare = part == 1 and number == 0 and not self.net.arch.get("first_norm", True)
        if bare or self.net.arch["norm_place"] not in ("pre", "sandwich"):
            return x
        return self._norm(f"blocks.{number}.norm{part}", x)

    def _norm(self, name: str, x: Value, site_name: str | None = None) -> Value:
        arch, weights, d = self.net.arch, self.net.weights, x.c.shape[-1]
        gain, bias = weights.get(f"{name}.weight", np.ones(d)), weights.get(f"{name}.bias", np.zeros(d))
        make = lambda: NormSite(x, gain, bias, float(arch["norm_eps"]), arch["norm_kind"] == "layer")  # noqa: E731
        return self._site(site_name or name, x, ((gain, bias),), make)

    def _site(self, name: str, x: Value, weights: Affines, make: Callable[[], Site]) -> Value:
        """The output of a site: the twin's, if it reads the same value through the same weights."""
        kept = None if self.twin is None else self.twin._kept.get(name)
        if kept is None or kept.source is not x or not _alike(kept.weights, weights):
            # On a chain that is shared, another remainder needs another name.
            own = f"{name}, edited" if self.twin is not None and name in x.chain.shapes else name
            site = make()
            kept = Kept(x, weights, own, site, site.made(own))
        if self.keeps:
            self._kept[name] = kept
        self._sites[kept.name] = kept.site
        return kept.made

    def _normed_heads(self, name: str, x: Value, width: int) -> Value:
        """The norm of every head by itself: parts of x, normed, side by side again."""
        total = x.c.shape[1]
        if width == total:
            return self._norm(name, x)
        parts = []
        for first in range(0, total, width):
            take = np.eye(width, total, first)
            parts.append(self._norm(name, x.mapped(take), f"{name}.{first}").mapped(take.T))
        found = parts[0]
        for part in parts[1:]:
            found = found.plus(part)
        return found

    def _network(self, block: str, x: Value) -> Value:
        gated = bool(self.net.arch["gated"])
        hooks = {self.net.arch.get(name) for name in ("read_hook", "beside_hook")}
        bent = self._weights(f"{block}.{'gate' if gated else 'up'}")
        other = self._weights(f"{block}.up") if gated else None
        function = self.net.arch["activation"]
        if function == SOLU:
            return self._note(f"{block}.hook_mlp_out", self._softened(block, x))
        for name, affine in (("hook_pre", bent), ("hook_pre_linear", other)):
            if (hook := f"{block}.mlp.{name}") in hooks and affine is not None:
                self._note(hook, x.mapped(*affine))
        if (hook := f"{block}.mlp.hook_post") in hooks:
            n = len(bent[0])
            each = np.eye(n), np.zeros(n)
            self._note(hook, self._neurons(f"{block}.neurons", x, function, bent, each, other))
        made = self._neurons(f"{block}.network", x, function, bent, self._weights(f"{block}.down"), other)
        return self._note(f"{block}.hook_mlp_out", made)

    def _softened(self, block: str, x: Value) -> Value:
        """A network of SoLU, its neurons normed or not."""
        h = self._note(f"{block}.mlp.hook_pre", self._affine(f"{block}.up", x))
        y = self._site(f"{block}.solu", h, (), lambda: SoluSite(h))
        if self.net.arch.get("network_norm"):
            y = self._norm(f"{block}.network_norm", self._note(f"{block}.mlp.hook_mid", y))
        return self._affine(f"{block}.down", self._note(f"{block}.mlp.hook_post", y))

    def _neurons(
        self, name: str, x: Value, function: str, bent: Affine, down: Affine, other: Affine | None = None
    ) -> Value:
        return self._site(name, x, (bent, down, other), lambda: NetworkSite(x, function, bent, down, other))

    def _weights(self, name: str) -> tuple[Array, Array]:
        W = self.net.weights[f"{name}.weight"]
        return W, self.net.weights.get(f"{name}.bias", np.zeros(len(W)))

    def _affine(self, name: str, x: Value) -> Value:
        return x.mapped(*self._weights(name))

    def _queries(self, number: int, name: str) -> Value:
        """Queries or keys of a layer, with positions added, normed and turned where the model does so."""
        net, S = self.net, len(self.center)
        x = self._affine(f"blocks.{number}.{name}", self._inner)
        if net.arch.get("head_positions"):
            x = x.shifted(net.weights[f"blocks.{number}.{name}.positions"][:S])
        self._note(f"blocks.{number}.attn.hook_{name}", x)
        if (kind := net.arch.get("qk_norm", "none")) != "none":
            x = self._normed_heads(
                f"blocks.{number}.{name}_norm", x, net.head_dim if kind == "head" else x.c.shape[1]
            )
        tables = net.rotary(S, number)
        if tables is None:
            return self._note(f"blocks.{number}.attn.hook_rot_{name}", x)
        cos, sin, radius = tables
        n, half = net.head_dim, net.head_dim // 2
        swap = np.zeros((n, n))
        swap[np.arange(half), np.arange(half) + half] = -1.0
        swap[np.arange(half) + half, np.arange(half)] = 1.0
        turns = cos[:, :, None] * np.eye(n) + sin[:, :, None] * swap
        whole = np.stack([np.kron(np.eye(x.c.shape[1] // n), turn) for turn in turns])
        # |cos| and |sin| in every row and column of |W| once each: its 2-norm is at most their largest sum.
        turned = x.mapped(whole, most=float(up(2.0 * np.maximum(np.abs(cos).max(), np.abs(sin).max()))))
        noise = up(turned.noise + 2.0 * radius * x.size)
        turned = Value(turned.chain, turned.c, turned.jacobians, noise)
        return self._note(f"blocks.{number}.attn.hook_rot_{name}", turned)


def _apart(first: dict[str, Array], second: dict[str, Array]) -> list[str]:
    """The names of weights that two networks do not share."""
    names = first.keys() | second.keys()
    return [
        name
        for name in names
        if name not in first or name not in second or not _equal(first[name], second[name])
    ]


def _alike(first: Affines, second: Affines) -> bool:
    """Whether maps are the same ones."""
    pairs = zip(first, second, strict=True)
    return all(a is b or (a is not None and b is not None and all(map(_equal, a, b))) for a, b in pairs)


def _equal(a: Array, b: Array) -> bool:
    return a is b or np.array_equal(a, b)
