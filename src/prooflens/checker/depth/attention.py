"""What attention and networks read of a stream: queries, keys and values, frozen patterns, streams without edges."""

from __future__ import annotations

import numpy as np

from prooflens.checker import edited
from prooflens.checker.depth.sent import NETWORK, groups, without
from prooflens.checker.depth.shapes import Array, up
from prooflens.checker.depth.steps import Steps
from prooflens.checker.depth.values import Value, sum_of


class Attention(Steps):
    """The steps in front of a layer's scores and of its network."""

    _stream: Value
    """The stream in front of the block."""
    _inner: Value
    """What its attention reads."""

    def _frozen(self, number: int, q: Value) -> tuple[Array, Value]:
        """The bias of scores and the queries: of frozen heads the scores that they have, and 0."""
        bias = edited.frozen(self.net.weights, number, self.net.score_bias(self.n_tokens))
        heads = self.net.weights.get(f"blocks.{number}.frozen.heads")
        if heads is None:
            return bias, q
        live = np.ones((int(self.net.arch["n_heads"]), self.net.head_dim))
        live[heads.astype(int)] = 0.0
        return bias, q.mapped(np.diag(live.ravel()), most=1.0)

    def _projected(self, number: int, name: str) -> Value:
        """Queries, keys or values, of heads with edges those of the stream without them."""
        block, c, hook = f"blocks.{number}", self.net.head_dim, f"blocks.{number}.attn.hook_{name}"
        edges = [e for e in edited.edges_of(self.net.weights, block) if e.channel == "qkv".index(name)]
        placed_later = name != "v" and self.net.arch.get("head_positions")
        if not edges:
            found = self._affine(f"{block}.{name}", self._inner)
            return found if placed_later else self._note(hook, found)
        W, bias = self._weights(f"{block}.{name}")
        H, G = int(self.net.arch["n_heads"]), len(W) // c
        if G < H and self._reads(hook):
            self._note(hook, self._inner.mapped(W, bias))
        W, bias = (x.reshape(G, c, -1).repeat(H // G, 0).reshape(H * c, -1) for x in (W, bias))
        readers = groups(edges)
        rest = [h for h in range(H) if not any(h in heads for heads in readers)]
        some = {tuple(rest): self._inner} if rest else dict[tuple[int, ...], Value]()
        for heads, own in readers.items():
            stream = without(self._stream, own, self._carried, self.net.weights, (self.n_tokens, self.tokens))
            some[heads] = self._before(number, stream, 1, f"{name}{heads[0]}")
        kept = {heads: np.isin(np.arange(H), heads).repeat(c)[:, None] for heads in some}
        made = sum_of(
            [read.mapped(W * kept[heads], (bias * kept[heads])[:, 0]) for heads, read in some.items()]
        )
        assert made is not None
        return self._note(hook, made) if G == H else made

    def _queries(self, number: int, name: str) -> Value:
        """Queries or keys of a layer, with positions added, normed and turned where the model does so."""
        net, S = self.net, self.n_tokens
        x = self._projected(number, name)
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
        return self._note(f"blocks.{number}.attn.hook_rot_{name}", turned.blurred(2.0 * radius * x.size))

    def _fed(self, number: int, x: Value, second: Value) -> Value:
        """What a network reads: `second`, or the same of the stream x without its edges."""
        every = edited.edges_of(self.net.weights, f"blocks.{number}")
        edges = [edge for edge in every if edge.channel == NETWORK]
        if not edges:
            return second
        y = without(x, edges, self._carried, self.net.weights, (self.n_tokens, self.tokens))
        shared = self.net.arch.get("parallel") and self.net.arch.get("shared_norm")
        return self._before(number, y, 1 if shared else 2, "network")
