"""Places of a walk that forms are read at: the scores of a layer, and the outputs."""

from __future__ import annotations

from dataclasses import dataclass

from prooflens.checker.depth.beside import Site
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.pooling import PoolSite
from prooflens.checker.depth.scores import ScoreSite
from prooflens.checker.depth.shapes import Array
from prooflens.checker.depth.values import Chain, Value
from prooflens.checker.edited import Sender


@dataclass(eq=False)
class Layer:
    """A layer's scores, its mixing if the walk goes on, and the chain that both stand at the end of.

    Attributes:
        chain: the chain.
        sites: the sites on it, by name.
        stream: the stream in front of the layer.
        carried: what is carried beside it.
        scores: the scores.
        mix: the mixing.
        behind: the chain that the mixing starts.
    """

    chain: Chain
    sites: dict[str, Site]
    stream: Value
    carried: dict[Sender | str, Value]
    scores: ScoreSite
    mix: MixSite | None = None
    behind: Chain | None = None

    @property
    def read(self) -> dict[str, Value]:
        """The values that scores and mixing read, by name."""
        held = {"q": self.scores.q.value, "k": self.scores.k.value}
        return held if self.mix is None else held | {"v": self.mix.v.value, "stream": self.mix.stream}


@dataclass(eq=False)
class Pooled:
    """A mean of tokens that a pooler reads, and the chain in front of it.

    Attributes:
        chain: the chain.
        sites: the sites on it, by name.
        mix: the mean.
    """

    chain: Chain
    sites: dict[str, Site]
    mix: PoolSite

    @property
    def read(self) -> dict[str, Value]:
        """The value that is pooled."""
        return {"stream": self.mix.stream}


@dataclass(eq=False)
class End:
    """What the outputs read: Σ_t shares_t value_t, which the head maps."""

    chain: Chain
    sites: dict[str, Site]
    value: Value
    shares: Array
    head: tuple[Array, Array]
    number: int
    """How many mixings stand before the chain, a mean that a pooler reads included."""

    @property
    def read(self) -> dict[str, Value]:
        """The value that the outputs read."""
        return {"value": self.value}
