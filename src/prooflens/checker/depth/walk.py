"""Forward through a network: chains of values, and the sites between them.

Two networks that differ in some weights are walked side by side (`Walk.beside`): what stands in front of the first
difference is one and the same, chains, sites and remainders, so that it cancels in differences of their outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prooflens.checker import edited
from prooflens.checker.depth.activations import KINKED, SMOOTH
from prooflens.checker.depth.attention import Attention
from prooflens.checker.depth.beside import AT_THE_END, apart, equal, mixes_alike
from prooflens.checker.depth.carried import parted, placed, stacked
from prooflens.checker.depth.layers import End, Layer, Pooled
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.pooling import PoolSite
from prooflens.checker.depth.room import numbers
from prooflens.checker.depth.scores import Heads, ScoreSite
from prooflens.checker.depth.sent import ATTENTION, FINAL, HEAD, INPUT, OUTPUT, columns_of, needed, without
from prooflens.checker.depth.shapes import Array, ball
from prooflens.checker.depth.steps import FREE
from prooflens.checker.depth.values import ROOT, Chain, Value, sum_of
from prooflens.checker.depth.writing import Opening, Writing, values
from prooflens.checker.edited import Sender
from prooflens.checker.network import SOLU, Network

READ = "read"
"""The name under which what a form reads at an earlier hook is carried."""
SHARE = 0.5
"""The share of the memory that the layers of a walk may take; beyond that only the last one is kept."""


class LetGoError(Exception):
    """A layer was let go of: the walk is too deep for all of them to fit into memory."""


@dataclass(eq=False)
class Walk(Attention):
    """A network on c + Gα, |α| ≤ 1, as deep as it is asked.

    Attributes:
        net: the network.
        center: c [S, d].
        generators: G [S, d, p].
        tell: called with a layer's number before it is walked.
        blur: by how much the centre of each token may be off, in the 2-norm [S]; None if it is exact.
        other: a network of the same architecture that is walked beside this one.
        padding: True at real tokens [S], which alone are attended to and pooled; None if all are.
        twin: the walk that this one goes beside.
        layers: the layers so far; None for those that were let go of because they do not all fit into memory.
    """

    net: Network
    center: Array
    generators: Array
    tell: Callable[[int], None] = lambda layer: None
    blur: Array | None = None
    other: Network | None = None
    padding: NDArray[np.bool_] | None = None
    twin: Walk | None = None
    layers: list[Layer | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        Attention.__init__(self)
        self.keeps = self.other is not None
        self.nets = (self.net,) if self.other is None else (self.net, self.other)
        if self.twin is not None:
            self.nets = self.twin.nets
        self.n_tokens = len(self.center)
        self.tokens = list(range(self.n_tokens))
        self._real = np.ones(self.n_tokens, bool) if self.padding is None else self.padding
        if not self._real.all() and any(edited.tables_of(net.weights) for net in self.nets):
            raise ValueError("edits at tokens of a padded prompt are not proved here")
        self.senders = needed([net.weights for net in self.nets], int(self.net.arch["n_layers"]))
        self._end: End | None = None
        self._pooled: Pooled | None = None
        self._seen = set[str]()
        self._finished = len(self.layers)
        """How many layers have a mixing already."""
        if self.twin is None:
            off = {} if self.blur is None else {ROOT: ball(self.blur, self.center.shape[1])}
            self._chain = Chain(self.center, self.generators, off, keeps=self.keeps)
            d, whole = int(self.net.arch["d_model"]), self.center.shape[1]
            self._stream = self._chain.start
            if whole > d:
                self._stream, self._carried[FREE] = parted(self._chain.start, [d, whole - d])
            if (INPUT, -1, -1) in self.senders:
                self._carried[INPUT, -1, -1] = self._stream
        else:
            start = self.twin.kept(len(self.layers))
            self._chain, self._stream, self._sites = start.chain, start.stream, dict(start.sites)
            self._carried = dict(start.carried)

    def beside(self) -> Walk:
        """The walk of the other network, which shares all that no other weight of it changes."""
        if self.other is None:
            raise ValueError("no other network is walked beside this one")
        if self.net.arch.get("beside_hook") is not None:
            raise ValueError("effects on values at two places are not proved here")
        self.end()
        others = apart(self.net.weights, self.other.weights)
        blocks = [int(name.split(".")[1]) for name in others if name.startswith("blocks.")]
        last = int(self.net.arch["n_layers"]) - 1
        blocks += [0 for name in others if not name.startswith(("blocks.", *AT_THE_END))]
        alike = self.layers[: min([*blocks, last])]
        return Walk(
            self.other,
            self.center,
            self.generators,
            self.tell,
            self.blur,
            padding=self.padding,
            twin=self,
            layers=list(alike),
        )

    @staticmethod
    def refuses(net: Network) -> str:
        """Why a network is not one that is known here; empty if it is."""
        if str(net.arch.get("beside_hook")).endswith(("attn.hook_z", "hook_attn_out")):
            return "what attention makes is compared with a later value"
        if not net.arch.get("has_attention", True):
            return "its blocks have no attention"
        known = (*SMOOTH, *KINKED, SOLU, net.arch.get("pooler_activation", "tanh"))
        if net.arch["activation"] not in known:
            return f"its activation is {net.arch['activation']}"
        if net.arch.get("network_norm") and net.arch["activation"] != SOLU:
            return "its neurons are normed"
        return ""

    def layer(self, number: int) -> Layer:
        """The scores of a layer, walked to if need be; again from the input if it was let go of."""
        if number < len(self.layers) and self.layers[number] is None:
            self.layers = []
            self.__post_init__()
        while len(self.layers) <= number:
            done = len(self.layers)
            if done > self._finished:
                self._finish(self.kept(done - 1), done - 1)
                if not self.keeps and self._numbers * (number + 1) > numbers(SHARE):
                    # Where one layer is missing no form is walked back, so that none is of use.
                    self.layers[:done] = [None] * done
            self.tell(done)
            self.layers.append(self._attend(done))
        return self.kept(number)

    @property
    def _numbers(self) -> int:
        """About how many numbers a layer holds: linear parts of what it reads, Jacobians and shapes."""
        S, d, p = self.generators.shape
        return int(S * d * (4 * p + 60 * d))

    def place(self, number: int) -> Layer | Pooled:
        """A layer that was walked to, or the mean behind the last one.

        Args:
            number: the layer; one more than the last for the mean.
        """
        behind = self._pooled if number == int(self.net.arch["n_layers"]) else None
        return self.kept(number) if behind is None else behind

    def kept(self, number: int) -> Layer:
        """A layer that was walked to.

        Raises:
            LetGoError: if it was let go of.
        """
        layer = self.layers[number]
        if layer is None:
            raise LetGoError
        return layer

    def _attend(self, number: int) -> Layer:
        """The chain's end at a layer's scores."""
        net, heads, block = self.net, int(self.net.arch["n_heads"]), f"blocks.{number}"
        before, carried = self._stream, dict(self._carried)
        self._stream = self._note(f"{block}.hook_resid_pre", self._held(f"{block}.hook_resid_pre", before))
        self._inner = self._before(number, self._stream, 1)
        q, k = self._queries(number, "q"), self._queries(number, "k")
        bias, q = self._frozen(number, q)
        held = Heads(q, heads, heads), Heads(k, k.c.shape[1] // net.head_dim, heads)
        scores = ScoreSite(*held, net.scale(number), bias, self._mask(number), net.arch.get("score_cap"))
        return Layer(self._chain, self._sites, before, carried, scores)

    def _mask(self, number: int) -> NDArray[np.bool_]:
        """Whether query i of head h of a layer may attend to key j [H, S, S]."""
        mask = self.net.masks(self.n_tokens, number) & self._real
        if not mask.any(-1).all():
            raise ValueError("a query attends to padding alone")
        return mask

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
            mixings = len([layer for layer in self.layers if layer is None or layer.mix is not None])
            self._end = End(self._chain, self._sites, x, token, self._weights("read"), mixings)
        return x

    def _carry(self, hook: str, x: Value) -> None:
        """Add what the outputs read of a value to what is carried; the network ends where both are there."""
        arch, (W, bias) = self.net.arch, self._weights("read")
        part = None if hook in self._seen else placed(arch, W, hook, x)
        if part is None:
            return
        self._seen.add(hook)
        before = self._carried.get(READ)
        self._carried[READ] = part = part if before is None else before.plus(part)
        if self._seen == {arch["read_hook"], arch["beside_hook"]}:
            tokens = np.zeros(len(x.c))
            tokens[[int(arch["read_position"]), int(arch["beside_position"])]] = 1.0
            mixings = len([layer for layer in self.layers if layer is None or layer.mix is not None])
            self._end = End(self._chain, self._sites, part, tokens, (np.eye(len(W)), bias), mixings)

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
        S, real = self.n_tokens, np.flatnonzero(self._real).tolist()
        tokens = real if pool == "mean" else [0] if pool == "first" else real[-1:]
        self._finish(self.layer(last), last, tokens)
        edges = [edge for edge in edited.edges_of(net.weights, FINAL) if edge.channel == OUTPUT]
        x = without(self._stream, edges, self._carried, net.weights, (S, self.tokens))
        if net.arch["norm_place"] in ("pre", "sandwich", "output"):
            x = self._norm("final_norm", x)
        d, shares = x.c.shape[1], np.full(len(tokens), 1.0 / len(tokens))
        if net.arch["pooler"]:
            x, shares = (self._mean(x, shares), np.ones(1)) if len(tokens) > 1 else (x, shares)
            function, plain = net.arch.get("pooler_activation", "tanh"), (np.eye(d), np.zeros(d))
            x = self._neurons("pooler", x, function, self._weights("pooler"), plain)
        head = (np.eye(d), np.zeros(d))
        if net.arch["d_out"] is not None:
            tied = "head.weight" not in net.weights
            W = net.weights["embed.tokens" if tied else "head.weight"]
            head = W, np.zeros(len(W)) if tied else net.weights.get("head.bias", np.zeros(len(W)))
        return End(self._chain, self._sites, x, shares, head, last + (1 if self._pooled is None else 2))

    def _mean(self, x: Value, shares: Array) -> Value:
        """The mean of tokens as the root of a new chain."""
        mix = PoolSite(x, shares)
        self._pooled = Pooled(self._chain, self._sites, mix)
        self._chain, self._sites, self.tokens = mix.behind, {}, mix.tokens
        return mix.behind.start

    def _finish(self, layer: Layer, number: int, tokens: list[int] | None = None) -> None:
        """Behind a layer's scores: its mixing, a new chain from there, and the network; at some tokens, or at all."""
        net, block, place = self.net, f"blocks.{number}", self.net.arch["norm_place"]
        feeds = net.arch.get("has_network", True)
        v, stream = self._projected(number, "v"), self._stream
        parallel = bool(net.arch.get("parallel")) and feeds
        if parallel:
            second = self._inner if net.arch.get("shared_norm") else self._before(number, stream, 2)
            second = self._fed(number, stream, second)
            stream = stream.plus(self._behind(block, self._network(block, second), 2))
        x = self._mixed(layer, number, v, stream, tokens or list(range(self.n_tokens)))
        if x is None:
            return
        middle = not parallel and (feeds or place == "post")
        x = self._held(f"{block}.hook_resid_{'mid' if middle else 'post'}", x)
        if not parallel:
            self._note(f"{block}.hook_resid_mid", x)
        if place == "post":
            x = self._note(f"{block}.ln1.hook_normalized", self._norm(f"{block}.norm1", x))
        if feeds and not parallel:
            second = self._before(number, x, 2)
            second = self._fed(number, x, second)
            x = x.plus(self._behind(block, self._network(block, second), 2))
            x = self._held(f"{block}.hook_resid_post", x)
        self._note(f"{block}.hook_resid_post", x)
        if feeds and place == "post":
            x = self._norm(f"{block}.norm2", x)
        self._stream = x if parallel else self._note(f"{block}.hook_normalized_resid_post", x)

    def _mixed(
        self, layer: Layer, number: int, values: Value, stream: Value, tokens: list[int]
    ) -> Value | None:
        """The stream behind a layer's attention, on the chain that its mixing starts; None if the network ends there.

        The new root holds the stream, what is written apart from it, z of heads that send, and what is carried.
        """
        net, block, heads = self.net, f"blocks.{number}", int(self.net.arch["n_heads"])
        (opened, own), z = self._opening(f"{block}.o"), np.eye(heads * net.head_dim)
        d, hook = int(net.arch["d_model"]), net.arch.get("read_hook")
        ends = hook in (f"{block}.attn.hook_z", f"{block}.hook_attn_out")
        alone = ends or self._is_alone(number)
        rows: dict[Sender | str, Array] = {"stream": np.zeros((d, len(z)))}
        if opened.common is not None:
            rows["written" if alone else "stream"] = opened.common
        rows |= {"opened": opened.rows} if not opened.is_plain else {}
        columns = columns_of(self.senders, HEAD, number, net.head_dim)
        rows |= {sender: z[own_columns] for sender, own_columns in columns.items()}
        if ends:
            # What attention makes, and nothing of the stream: the new root is the value itself.
            rows = {"z": z} if str(hook).endswith("z") else rows
            rows, stream = {"stream": z[:0]} | rows | {"stream": z[:0]}, stream.mapped(np.zeros((0, d)))
        bias = {name: np.zeros(len(part)) for name, part in rows.items()}
        if opened.is_plain and (place := "written" if alone else "stream") in rows:
            bias[place] = own.bias[0]
        carried = {name: x for name, x in self._carried.items() if self._is_needed(name, number)}
        made = np.concatenate(list(rows.values())), np.concatenate(list(bias.values()))
        stream, W, b = stacked(stream, *made, list(carried.values()))
        v = Heads(values, values.c.shape[1] // net.head_dim, heads)
        self._start(layer, number, MixSite(layer.scores, v, stream, W, b), tokens)
        widths = {name: len(part) for name, part in rows.items()}
        widths |= {name: x.c.shape[1] for name, x in carried.items()}
        widths = {name: width for name, width in widths.items() if width}
        found = dict(zip(widths, parted(self._chain.start, list(widths.values())), strict=True))
        self._carried = {name: found[name] for name in (*carried, *columns) if name in found}
        if "z" in found:
            self._note(f"{block}.attn.hook_z", found["z"])
            return None
        return self._added(number, found, opened, own)

    def _added(
        self, number: int, found: dict[Sender | str, Value], opened: Opening, own: Writing
    ) -> Value | None:
        """The stream behind a mixing, from the parts of the new root; None if the network ends in front of it."""
        block, alone, x = (
            f"blocks.{number}",
            "stream" not in found or self._is_alone(number),
            found.get("stream"),
        )
        parts = [found["written"]] if "written" in found else []
        parts += [self._mapped(found["opened"], opened.maps(own))] if "opened" in found else []
        by_values = values(self.net.weights, f"{block}.o", self.n_tokens)
        parts += [] if by_values is None else [self._mapped(self._carried[FREE], by_values)]
        written = sum_of(parts)
        if not alone:
            return x if written is None or x is None else x.plus(written)
        assert written is not None
        written = self._held(f"{block}.hook_attn_out", written, edited.KINDS[1:])
        if (sender := (ATTENTION, number, -1)) in self.senders:
            self._carried[sender] = written
        self._note(f"{block}.hook_attn_out", written)
        return None if x is None else x.plus(self._behind(block, written, 1))

    def _is_needed(self, name: Sender | str, number: int) -> bool:
        """Whether something that is carried is read in a block, behind its mixing, or later."""
        return isinstance(name, str) or self.senders[name] >= number

    def _is_alone(self, number: int) -> bool:
        """Whether what attention writes is needed by itself: normed, decoded, or sent over an edge."""
        stems = [f"blocks.{number}.attn_out.{kind}.at" for kind in edited.KINDS[1:]]
        held = any(stem in net.weights for stem in stems for net in self.nets)
        normed = self.net.arch["norm_place"] in ("sandwich", "output")
        return held or normed or (ATTENTION, number, -1) in self.senders

    def _start(self, layer: Layer, number: int, mix: MixSite, tokens: list[int]) -> None:
        """Begin the chain behind a mixing: the twin's, if its mixing reads the same values through the same weights."""
        same = self._same_mixing(layer, number, mix, tokens)
        if same is None:
            layer.mix, layer.behind = mix, mix.next(tokens)
        else:
            layer.scores, layer.mix, layer.behind = same.scores, same.mix, same.behind
            layer.sites.update(same.sites)
        assert layer.behind is not None
        self._chain, self._sites, self.tokens = layer.behind, {}, tokens

    def _same_mixing(self, layer: Layer, number: int, mix: MixSite, tokens: list[int]) -> Layer | None:
        """The twin's layer, if it is the same up to the root behind its mixing."""
        if self.twin is None or self.net.arch.get("parallel"):
            return None
        other = self.twin.kept(number)
        if other.mix is None or other.behind is None or other.mix.tokens != tokens:
            return None
        carries = layer.carried.keys() == other.carried.keys() and all(
            x is other.carried[name] for name, x in layer.carried.items()
        )
        into = equal(mix.out, other.mix.out) and equal(mix.bias, other.mix.bias)
        same = mixes_alike(number, self.net.weights, self.twin.net.weights)
        return other if layer.stream is other.stream and carries and into and same else None
