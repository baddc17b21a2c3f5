"""The sites of a network on a chain: norms, networks, what is held of a value; those of a walk beside are shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prooflens.checker.depth.activations import JUMP
from prooflens.checker.depth.beside import Affines, Kept, Site, alike
from prooflens.checker.depth.networks import Affine, NetworkSite
from prooflens.checker.depth.norms import NormSite
from prooflens.checker.depth.sent import NEURON, columns_of
from prooflens.checker.depth.shapes import Array, frobenius, gamma, length, up
from prooflens.checker.depth.solu import SoluSite
from prooflens.checker.depth.values import Value
from prooflens.checker.depth.writing import (
    Maps,
    Opening,
    Writing,
    directions,
    opening,
    valued,
    values,
    writing,
)
from prooflens.checker.edited import KINDS, Sender, jumps_of, places
from prooflens.checker.network import SOLU, Network

if TYPE_CHECKING:
    from prooflens.checker.depth.walk import Walk


FREE = "free"
"""The name under which free coordinates are carried: at which values of sets parts are held."""


class Steps:
    """What stands between mixings.

    Attributes:
        net: the network.
        nets: it, and the network that is walked beside it: what either needs apart is apart in both.
        twin: the walk that this one goes beside.
        keeps: whether every site's output is kept, for a walk beside this one.
        n_tokens: how many tokens the input has.
        tokens: which of them the values of the chain hold.
        senders: who sends over edges that are cut, and the last block that reads it.
    """

    net: Network
    nets: tuple[Network, ...]
    twin: Walk | None
    keeps: bool
    n_tokens: int
    tokens: list[int]
    senders: dict[Sender, int]

    def __init__(self) -> None:
        self._sites: dict[str, Site] = {}
        self._kept: dict[str, Kept] = {}
        self._carried: dict[Sender | str, Value] = {}
        """What goes on beside the stream."""

    def _note(self, hook: str, x: Value) -> Value:
        """A value at a hook, as the walk keeps it."""
        raise NotImplementedError

    def _reads(self, hook: str) -> bool:
        """Whether the network ends at a hook."""
        return hook in (self.net.arch.get("read_hook"), self.net.arch.get("beside_hook"))

    def _weights(self, name: str) -> tuple[Array, Array]:
        W = self.net.weights[f"{name}.weight"]
        return W, self.net.weights.get(f"{name}.bias", np.zeros(len(W)))

    def _affine(self, name: str, x: Value) -> Value:
        return x.mapped(*self._weights(name))

    def _norm(self, name: str, x: Value, site_name: str | None = None) -> Value:
        arch, weights, d = self.net.arch, self.net.weights, x.c.shape[-1]
        gain, bias = weights.get(f"{name}.weight", np.ones(d)), weights.get(f"{name}.bias", np.zeros(d))
        make = lambda: NormSite(x, gain, bias, float(arch["norm_eps"]), arch["norm_kind"] == "layer")  # noqa: E731
        return self._site(site_name or name, x, ((gain, bias),), make)

    def _site(self, name: str, x: Value, weights: Affines, make: Callable[[], Site]) -> Value:
        """The output of a site: the twin's, if it reads the same value through the same weights."""
        kept = None if self.twin is None else self.twin._kept.get(name)
        if kept is None or kept.source is not x or not alike(kept.weights, weights):
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

    def _behind(self, block: str, added: Value, part: int) -> Value:
        """What a part of a block adds: its output, or the norm of that."""
        normed = self.net.arch["norm_place"] in ("sandwich", "output")
        return self._norm(f"{block}.norm{part}_out", added) if normed else added

    def _before(self, number: int, x: Value, part: int, reader: str = "") -> Value:
        """What a part of a block reads: the stream, or its norm, a value that a form may read.

        A reader of its own has a site of its own, and no form reads its norm.
        """
        bare = part == 1 and number == 0 and not self.net.arch.get("first_norm", True)
        if bare or self.net.arch["norm_place"] not in ("pre", "sandwich"):
            return x
        name = f"blocks.{number}.norm{part}"
        if reader:
            return self._norm(name, x, f"{name}.{reader}")
        return self._note(f"blocks.{number}.ln{part}.hook_normalized", self._norm(name, x))

    def _opening(self, name: str) -> tuple[Opening, Writing]:
        """The rows that a site makes for all that is written from it, and how this network writes."""
        every = [writing(net.weights, name, self.n_tokens) for net in self.nets]
        own = every[self.nets.index(self.net)]
        d, n = self.net.weights[f"{name}.weight"].shape
        found = opening(every, d, n) or opening([own], d, n)
        if found is None:
            raise ValueError("too much of what a block writes is held apart")
        return found, own

    def _mapped(self, x: Value, maps: Maps) -> Value:
        """A value through a map of every token, with what the maps are off by."""
        here = maps.at(self.tokens)
        one = len(here.F) == 1
        y = x.mapped(here.F[0] if one else here.F, here.bias[0] if len(here.bias) == 1 else here.bias)
        return y.blurred(up(here.error * x.size + here.bias_error))

    def _valued(self, x: Value, maps: Maps | None) -> Value:
        """A value with what free coordinates add to it."""
        return x if maps is None else x.plus(self._mapped(self._carried[FREE], maps))

    def _held(self, hook: str, x: Value, kinds: Sequence[str] = KINDS) -> Value:
        """A value with its directions and features held where the network holds them (`edited.held_at`)."""
        weights = self.net.weights
        for kind in kinds:
            stem = f"{hook.replace('.hook_', '.')}.{kind}"
            if f"{stem}.at" not in weights:
                continue
            if kind == "directions":
                x = self._mapped(x, directions(weights, stem, self.n_tokens))
                x = self._valued(x, valued(weights, stem, self.n_tokens))
            else:
                x = self._features(stem, x, decoded=kind == "decoded")
        return x

    def _features(self, stem: str, x: Value, decoded: bool) -> Value:
        """Features held: x + P(c − chosen·f), or P f′ + o where the value is what the dictionary decodes."""
        weights, (chosen, put) = self.net.weights, places(self.net.weights, stem, self.n_tokens)
        chosen, put = chosen[self.tokens], put[self.tokens]
        if not chosen.any():
            return x
        R, r, P = (weights[f"{stem}.{part}"] for part in ("read", "bias", "write"))
        k, d = len(R), len(P)
        # Features that are held nowhere are decoded as they are: one map. Each other one stands by itself.
        some = chosen.any(0)
        own = np.flatnonzero(some)
        common = np.where(some, 0.0, P) if decoded else P[:0]
        rows = np.concatenate((common, np.eye(k)[own]))
        f = self._neurons(stem, x, "relu", (R, r), (rows, np.zeros(len(rows))))
        if (theta := jumps_of(weights, stem)) is not None:
            jumps = rows * theta
            g = self._neurons(f"{stem}.jumps", x, JUMP, (R, r), (jumps, np.zeros(len(rows))))
            # Every product of a row and a threshold rounds once; k features are at most 1 each.
            f = f.plus(g.blurred(np.full(len(x.c), up(gamma(4) * k**0.5 * frobenius(jumps)))))
        # Each number of the maps is a product with 0 or ±1; what is put is a sum of products.
        offset = weights[f"{stem}.offset"] * chosen.max(-1, keepdims=True) if decoded else np.zeros((1, d))
        error = up(gamma(k + 8) * (frobenius(P) * length(put) + length(offset)))
        if not decoded:
            maps = -P[:, own] * chosen[:, None, own]
            return x.plus(f.mapped(maps, put @ P.T).blurred(error))
        at = chosen.max(-1)
        blocks = np.broadcast_to(np.eye(d), (len(at), d, d)), P[:, own] * (1.0 - chosen)[:, None, own]
        maps = at[:, None, None] * np.concatenate(blocks, -1)
        made = f.mapped(maps, put @ P.T + offset).blurred(error)
        return x.mapped((1.0 - at)[:, None, None] * np.eye(d)).plus(made)

    def _network(self, block: str, x: Value) -> Value:
        gated = bool(self.net.arch["gated"])
        bent = self._weights(f"{block}.{'gate' if gated else 'up'}")
        other = self._weights(f"{block}.up") if gated else None
        function = self.net.arch["activation"]
        if function == SOLU:
            made = self._softened(block, x)
        else:
            for name, affine in (("hook_pre", bent), ("hook_pre_linear", other)):
                if self._reads(hook := f"{block}.mlp.{name}") and affine is not None:
                    self._note(hook, x.mapped(*affine))
            if self._reads(hook := f"{block}.mlp.hook_post"):
                n = len(bent[0])
                each = np.eye(n), np.zeros(n)
                self._note(hook, self._neurons(f"{block}.neurons", x, function, bent, each, other))
            make = lambda down: self._neurons(f"{block}.network", x, function, bent, down, other)  # noqa: E731
            made = self._written_by_neurons(block, make)
        made = self._valued(made, values(self.net.weights, f"{block}.down", self.n_tokens))
        made = self._held(f"{block}.hook_mlp_out", made, KINDS[1:])
        if (sender := (3, int(block.split(".")[1]), -1)) in self.senders:
            self._carried[sender] = made
        return self._note(f"{block}.hook_mlp_out", made)

    def _written_by_neurons(self, block: str, make: Callable[[Affine], Value]) -> Value:
        """What a network writes, from rows of the neurons' values that `make` gives; senders are carried on."""
        opened, own = self._opening(f"{block}.down")
        n = self.net.weights[f"{block}.down.weight"].shape[1]
        sent = columns_of(self.senders, NEURON, int(block.split(".")[1]), 1)
        if opened.is_plain and not sent:
            return make(self._weights(f"{block}.down"))
        common = np.zeros((0, n)) if opened.common is None else opened.common
        rows = np.concatenate((common, opened.rows, *(np.eye(n)[columns] for columns in sent.values())))
        made = make((rows, np.zeros(len(rows))))
        for place, sender in enumerate(sent, len(common) + len(opened.rows)):
            self._carried[sender] = made.mapped(np.eye(1, len(rows), place))
        whole = len(common) + len(opened.rows)
        return self._written(made.mapped(np.eye(whole, len(rows))), opened, own)

    def _written(self, x: Value, opened: Opening, own: Writing) -> Value:
        """What is written, from the rows that all share and those apart."""
        maps = opened.maps(own)
        if opened.common is not None:
            eye = np.broadcast_to(np.eye(len(opened.common)), (len(maps.F), *[len(opened.common)] * 2))
            maps = Maps(np.concatenate((eye, maps.F), -1), maps.bias, maps.error, maps.bias_error)
        return self._mapped(x, maps)

    def _softened(self, block: str, x: Value) -> Value:
        """A network of SoLU, its neurons normed or not."""
        h = self._note(f"{block}.mlp.hook_pre", self._affine(f"{block}.up", x))
        y = self._site(f"{block}.solu", h, (), lambda: SoluSite(h))
        if self.net.arch.get("network_norm"):
            y = self._norm(f"{block}.network_norm", self._note(f"{block}.mlp.hook_mid", y))
        y = self._note(f"{block}.mlp.hook_post", y)
        return self._written_by_neurons(block, lambda down: y.mapped(*down))

    def _neurons(
        self, name: str, x: Value, function: str, bent: Affine, down: Affine, other: Affine | None = None
    ) -> Value:
        return self._site(name, x, (bent, down, other), lambda: NetworkSite(x, function, bent, down, other))
