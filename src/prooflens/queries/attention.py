"""Queries about one row of attention at a time: top-k, ranking, evidence mass, specialisation, entropy.

The examples share one attention pattern of one head with two tokens; row 1 has the scores (3, 1):

    >>> import torch
    >>> from prooflens.queries import Setting, full_mask
    >>> setting = Setting({0: torch.tensor([[[0.0, 2.0], [3.0, 1.0]]])}, full_mask(2), n_layers=1, n_heads=1)
    >>> [claim] = TopK(1, positions=[1]).bind(setting)
    >>> print(claim, claim.functionals[0].name, claim.clean.tolist())
    top1@1 on 0.0@1 0.0@1: a[0] - a[1] [2.0]
    >>> [claim] = Mass(tau=0.5, positions=[1]).bind(setting)  # log odds: 3 − 1 − log(0.5 / 0.5)
    >>> round(claim.clean.item(), 9)
    2.0
    >>> [claim] = Entropy(upper=1.0, positions=[0], heads="0.0").bind(setting)
    >>> claim.functionals[0].name
    '0.0@0: 1 - entropy'
"""

import itertools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from prooflens.errors import QueryError
from prooflens.numerics.rounding import up
from prooflens.queries.base import Claim, Condition, Query, Sense, Setting, make_claim
from prooflens.queries.functionals import Functional, RowEntropy, group_log_ratio, margin
from prooflens.queries.rows import Named, Role, Row, find_tokens, write_tokens


class Reading(NamedTuple):
    """A row as a query reads it: the keys that take part, most attended first, and their clean scores."""

    row: Row
    order: tuple[int, ...]
    scores: tuple[float, ...]

    def tied(self, rank: int) -> bool:
        """Say whether the keys at `rank` and `rank` + 1 (counted from 0) have the same clean score.

        Args:
            rank: a place in the order of clean scores, from 0.
        """
        return rank + 1 < len(self.order) and self.scores[rank] == self.scores[rank + 1]

    def tie_between(self, rank: int) -> str:
        """Return a sentence about the tie of the keys at `rank` and `rank` + 1.

        Args:
            rank: a place in the order of clean scores, from 0.
        """
        return f"row {self.row}: keys {self.order[rank]} and {self.order[rank + 1]} tie in the clean pattern"


@dataclass(frozen=True, kw_only=True)
class RowQuery(Query):
    """A query that is asked of every row of attention that it names.

    Attributes:
        heads: the heads, as in `"2.4"` or `"0-2"`; None for those that `bind` is given.
        positions: the query positions, by index or by token text; None for all.
    """

    heads: str | None = None
    positions: tuple[Named, ...] | None = None

    def __post_init__(self) -> None:
        """Keep tokens as tuples, however they were given, so that queries can be compared and hashed."""
        for name in ("positions", "tokens", "A", "B"):
            given = getattr(self, name, None)
            if given is None:
                continue
            tokens = (given,) if isinstance(given, int | str | Role) else tuple(given)
            if not tokens:
                raise QueryError(f"{type(self).__name__} was given no {name}: name at least one token")
            object.__setattr__(self, name, tokens)

    @property
    @abstractmethod
    def kind(self) -> str:
        """The short form without heads and positions."""

    @abstractmethod
    def ask(self, setting: Setting, reading: Reading) -> tuple[list[Condition], str | None]:
        """Return the conditions on one row, and why the clean answer is not unique if there is a tie.

        Args:
            setting: the prompt in the model.
            reading: the row's keys, most attended first, and their clean scores.
        """

    def __str__(self) -> str:
        head = "" if self.heads is None else f"{self.heads}:"
        if self.positions is None:
            return head + self.kind
        inner = write_tokens(self.positions)
        if any(isinstance(token, Role) for token in self.positions):
            named = "}" in self.kind or not isinstance(
                self, Mass
            )  # the first braces of a mass are its tokens
            return f"{head}{self.kind}@{f'{{{inner}}}' if named else f'[{inner}]'}"
        return f"{head}{self.kind}@{inner if len(self.positions) == 1 else f'[{inner}]'}"

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Return one claim per head × position.

        Args:
            setting: the prompt in the model: clean scores, mask, token texts.
            heads: the heads to ask if the query names none itself.
        """
        claims = []
        for layer, head in setting.heads(self.heads or heads):
            for position in setting.positions(self.positions):
                row = Row(layer, head, position)
                conditions, tie = self.ask(setting, _read(setting, row))
                claims.append(make_claim(self, setting, (row,), conditions, tie))
        return claims


def _read(setting: Setting, row: Row) -> Reading:
    scores = setting.row(row).tolist()
    order = sorted(setting.keys(row.position, row.layer), key=lambda key: -scores[key])
    return Reading(row, tuple(order), tuple(scores[key] for key in order))


def _positive(functionals: list[Functional]) -> list[Condition]:
    return [Condition(functional, Sense.POSITIVE) for functional in functionals]


def _check_count(kind: str, k: int) -> None:
    if not isinstance(k, int) or k < 1:
        raise QueryError(f"{kind}{k} asks for no token: use a count of at least 1, as in {kind}1")


@dataclass(frozen=True)
class TopK(RowQuery):
    """Claim that the set of the k most attended tokens stays the clean one (`def:topk_stability`, `prop:cert_attn`).

    The softmax is monotone, so the claim is a_i − a_j > 0 for every i in the set and every j outside
    (`thm:margin_sound`).

    Attributes:
        k: the size of the set, at least 1.
        tokens: the set, by index, text or role, whatever the clean pattern is; None for the clean one. A negative
            number counts from the query: −1 is the token before it.

    Example:
        >>> str(TopK(3, heads="2.4", positions=[-1])), str(TopK(1, 3))
        ('2.4:top3@-1', 'top1={3}')
    """

    k: int
    tokens: tuple[Named, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("top", self.k)
        if self.tokens is not None:
            near = (Role("self", offset=t) if isinstance(t, int) and t < 0 else t for t in self.tokens)
            object.__setattr__(self, "tokens", tuple(near))

    @property
    def unit(self) -> str:
        """Differences of pre-softmax scores."""
        return "score margin"

    @property
    def kind(self) -> str:
        """The short form, as in `top3` or `top1={4}`."""
        return f"top{self.k}" + ("" if self.tokens is None else f"={{{write_tokens(self.tokens)}}}")

    def ask(self, setting: Setting, reading: Reading) -> tuple[list[Condition], str | None]:
        """Return k(S−k) margins, or none if all keys that take part are in the set.

        Args:
            setting: the prompt in the model.
            reading: a row of attention and its clean scores.
        """
        if self.tokens is not None:
            return self._named(setting, reading, self.tokens), None
        inside, outside = reading.order[: self.k], reading.order[self.k :]
        pairs = [margin(reading.row, i, j) for i, j in itertools.product(inside, outside)]
        return _positive(pairs), reading.tie_between(self.k - 1) if reading.tied(self.k - 1) else None

    def _named(self, setting: Setting, reading: Reading, tokens: tuple[Named, ...]) -> list[Condition]:
        """Return the margins of named tokens over all others; a constant below 0 if the mask leaves one of them out."""
        inside = find_tokens(tokens, setting.size, setting.tokens)
        if len(inside) != self.k:
            raise QueryError(
                f"{self.kind} names {len(inside)} tokens: ask 'top{len(inside)}={{…}}' of all of them, or name one "
                "occurrence, as in {A.1}"
            )
        if missing := sorted(set(inside) - set(reading.order)):
            return _positive([Functional((), -1.0, f"{reading.row}: key {missing[0]} takes no part")])
        outside = sorted(set(reading.order) - set(inside))
        return _positive([margin(reading.row, i, j) for i, j in itertools.product(inside, outside)])


@dataclass(frozen=True)
class Ranking(RowQuery):
    """Claim that the k most attended tokens stay the clean ones, in the clean order (`cor:topk_ranking`).

    Attributes:
        k: how many tokens are ranked, at least 1.

    Example:
        >>> str(Ranking(3, heads="2.4"))
        '2.4:rank3'
    """

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("rank", self.k)

    @property
    def unit(self) -> str:
        """Differences of pre-softmax scores."""
        return "score margin"

    @property
    def kind(self) -> str:
        """The short form, as in `rank3`."""
        return f"rank{self.k}"

    def ask(self, setting: Setting, reading: Reading) -> tuple[list[Condition], str | None]:
        """Return margins of each ranked key over the next, and of the last over all others; they imply all pairs.

        Args:
            setting: the prompt in the model.
            reading: a row of attention and its clean scores.
        """
        inside, outside = reading.order[: self.k], reading.order[self.k :]
        pairs = [*itertools.pairwise(inside), *((inside[-1], j) for j in outside)]
        tied = next((rank for rank in range(self.k) if reading.tied(rank)), None)
        conditions = _positive([margin(reading.row, i, j) for i, j in pairs])
        return conditions, None if tied is None else reading.tie_between(tied)


@dataclass(frozen=True)
class Mass(RowQuery):
    """Claim that the evidence tokens keep an attention mass of at least τ (`prop:evidence_mass`).

    In scores this is LSE(E) − LSE(rest) − log(τ/(1−τ)) ≥ 0, with the constant rounded to the strict side.

    Attributes:
        tokens: the evidence tokens E, by index or by text; None for the clean top-attended key.
        tau: the threshold τ, strictly between 0 and 1.

    Example:
        >>> str(Mass(tokens=[0, 1], tau=0.3))
        'mass>=0.3@{0,1}'
    """

    tokens: tuple[Named, ...] | None = None
    tau: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.tau < 1.0:
            raise QueryError(f"a mass threshold lies strictly between 0 and 1, got {self.tau}")

    @property
    def unit(self) -> str:
        """The logarithm of the odds of the mass, above those of the threshold."""
        return "log-odds"

    @property
    def kind(self) -> str:
        """The short form, as in `mass>=0.2` or `mass>=0.2@{0,1}`."""
        targets = "" if self.tokens is None else f"@{{{write_tokens(self.tokens)}}}"
        return f"mass>={self.tau!r}{targets}"

    def ask(self, setting: Setting, reading: Reading) -> tuple[list[Condition], str | None]:
        """Return one log-odds functional, or a constant if the mask makes the mass 1 or 0.

        Args:
            setting: the prompt in the model.
            reading: a row of attention and its clean scores.
        """
        row, tie = reading.row, None
        if self.tokens is None:
            wanted = [reading.order[0]]
            tie = reading.tie_between(0) if reading.tied(0) else None
        else:
            wanted = find_tokens(self.tokens, setting.size, setting.tokens)
        inside = tuple(sorted(set(wanted) & set(reading.order)))
        rest = tuple(sorted(set(reading.order) - set(inside)))
        slack = 0.0
        if not inside or not rest:
            mass = 1.0 if inside else 0.0
            functional = Functional((), mass - self.tau, f"{row}: mass is {mass:g} by the mask")
        else:
            ratio = group_log_ratio(row, inside, rest)
            # log τ and log1p(−τ) are each within 4 ulp and their difference rounds once: 9 of these 16 ulp.
            log_odds = math.log(self.tau) - math.log1p(-self.tau)
            slack = up(16 * math.ulp(max(-math.log(self.tau), -math.log1p(-self.tau))))
            functional = Functional(ratio.terms, -(log_odds + slack), f"{ratio.name} - log odds {self.tau:g}")
        return [Condition(functional, Sense.NONNEGATIVE, 2.0 * slack)], tie


@dataclass(frozen=True)
class Specialised(RowQuery):
    """Claim that the mass on tokens A stays above the mass on tokens B: LSE(A) − LSE(B) > 0 (`prop:head_spec`).

    Attributes:
        A: the tokens that should get more mass, by index or by text.
        B: the tokens that should get less; A and B share none.

    Example:
        >>> str(Specialised(A=[1, 2], B=[3]))
        'spec{1,2}>{3}'
    """

    A: tuple[Named, ...]
    B: tuple[Named, ...]

    @property
    def unit(self) -> str:
        """The logarithm of the ratio of both masses."""
        return "log-odds"

    @property
    def kind(self) -> str:
        """The short form, as in `spec{1,2}>{3}`."""
        return f"spec{{{write_tokens(self.A)}}}>{{{write_tokens(self.B)}}}"

    def ask(self, setting: Setting, reading: Reading) -> tuple[list[Condition], str | None]:
        """Return one ratio of masses, or a constant if the mask leaves one group out (true if it is B alone).

        Args:
            setting: the prompt in the model.
            reading: a row of attention and its clean scores.
        """
        groups = [set(find_tokens(group, setting.size, setting.tokens)) for group in (self.A, self.B)]
        if shared := groups[0] & groups[1]:
            raise QueryError(f"groups of {self.kind} must be disjoint; both hold token {min(shared)}")
        plus, minus = (tuple(sorted(group & set(reading.order))) for group in groups)
        if plus and minus:
            return _positive([group_log_ratio(reading.row, plus, minus)]), None
        verdict = 1.0 if plus else -1.0
        name = f"{reading.row}: {'B' if plus else 'A'} takes no part"
        return _positive([Functional((), verdict, name)]), None


@dataclass(frozen=True)
class Entropy(RowQuery):
    """Ask for the range of the row's entropy in nats, or claim that it keeps thresholds (`prop:entropy`).

    Attributes:
        lower: claim entropy ≥ lower; None for no such claim.
        upper: claim entropy ≤ upper; None for no such claim. With neither, the answer is a proved range.

    Example:
        >>> str(Entropy(upper=1.5)), str(Entropy())
        ('entropy<=1.5', 'entropy')
    """

    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [x for x in (self.lower, self.upper) if x is not None and not math.isfinite(x)]:
            raise QueryError(f"an entropy threshold is a finite number of nats, got {wrong[0]}")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise QueryError(f"entropy cannot lie between {self.lower} and {self.upper}: swap the thresholds")

    @property
    def unit(self) -> str:
        """Entropies, in nats."""
        return "nats"

    @property
    def kind(self) -> str:
        """The short form: `entropy`, `entropy<=1.5`, `entropy>=0.5` or `0.5<=entropy<=1.5`."""
        if self.lower is not None and self.upper is not None:
            return f"{self.lower!r}<=entropy<={self.upper!r}"
        if self.lower is not None:
            return f"entropy>={self.lower!r}"
        return "entropy" if self.upper is None else f"entropy<={self.upper!r}"

    def ask(self, setting: Setting, reading: Reading) -> tuple[list[Condition], str | None]:
        """Return H itself (range), or H − lower and upper − H, which should be ≥ 0.

        Args:
            setting: the prompt in the model.
            reading: a row of attention and its clean scores.
        """
        atom = RowEntropy(reading.row, tuple(sorted(reading.order)))
        if self.lower is None and self.upper is None:
            return [Condition(Functional(((1.0, atom),), name=f"{reading.row}: entropy"), Sense.RANGE)], None
        found = []
        if self.lower is not None:
            found.append(Functional(((1.0, atom),), -self.lower, f"{reading.row}: entropy - {self.lower:g}"))
        if self.upper is not None:
            found.append(Functional(((-1.0, atom),), self.upper, f"{reading.row}: {self.upper:g} - entropy"))
        return [Condition(functional, Sense.NONNEGATIVE) for functional in found], None
