"""What `profile` returns: on how many prompts, of all there are, a head of layer 0 attends most to each key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa

from prooflens.certificate.store import RunWriter
from prooflens.results.record import run_header
from prooflens.version import __version__

SCHEMA = "prooflens-vocabulary-1"
"""The format of the saved document."""


@dataclass(frozen=True)
class Count:
    """How many prompts satisfy a claim: proved from below and above, rounding counted.

    Attributes:
        claim: the claim, as in `top1={5}`.
        lower: at least so many prompts.
        upper: at most so many.
        prompts: of so many.
    """

    claim: str
    lower: int
    upper: int
    prompts: int

    @property
    def exact(self) -> bool:
        """Whether both ends are one number."""
        return self.lower == self.upper

    @property
    def shares(self) -> tuple[Fraction, Fraction]:
        """The ends as shares of all prompts."""
        return Fraction(self.lower, self.prompts), Fraction(self.upper, self.prompts)

    def to_dict(self) -> dict[str, Any]:
        """Plain texts and numbers; counts are texts, because they exceed what JSON readers hold."""
        low, high = self.shares
        return {
            "claim": self.claim,
            "lower": str(self.lower),
            "upper": str(self.upper),
            "prompts": str(self.prompts),
            "share": [float(low), float(high)],
        }


@dataclass(frozen=True)
class HeadProfile:
    """One head at one query position, over all prompts.

    Attributes:
        head: the head, as in `0.3`.
        keys: the keys that the position attends to.
        top: how often each of them is attended most, alone.
        claims: the claims that were asked besides.
        tokens: the query tokens that were counted.
        lower: per query token and key, at least so many prompts.
        upper: per query token and key, at most so many.
        each: how many prompts there are per query token.
    """

    head: str
    keys: tuple[int, ...]
    top: tuple[Count, ...]
    claims: tuple[Count, ...]
    tokens: tuple[int, ...]
    lower: tuple[tuple[int, ...], ...]
    upper: tuple[tuple[int, ...], ...]
    each: int

    def by_token(self, key: int) -> dict[int, tuple[Fraction, Fraction]]:
        """Return, for every query token, the share of its prompts on which a key is attended most.

        With the key's slot also the query's (`same=[(0, 5)]`), it says how often the head finds the duplicate.

        Args:
            key: one of `keys`.
        """
        column = self.keys.index(key)
        return {
            token: (Fraction(low[column], self.each), Fraction(high[column], self.each))
            for token, low, high in zip(self.tokens, self.lower, self.upper, strict=True)
        }


@dataclass(frozen=True)
class Profiles:
    """Heads of layer 0 over all prompts of one length.

    Attributes:
        model: the model's name.
        model_sha256: its fingerprint.
        length: how many tokens prompts have.
        position: the query position.
        vocabulary: how many tokens there are.
        real: which positions are no padding.
        same: positions that hold one token.
        choices: lists of tokens, by position.
        whole: whether all query tokens were counted, or only `tokens`.
        heads: one profile per head.
        seconds: how long it took.
    """

    model: str
    model_sha256: str
    length: int
    position: int
    vocabulary: int
    real: tuple[bool, ...]
    same: tuple[tuple[int, ...], ...]
    choices: Mapping[int, tuple[int, ...]]
    whole: bool
    heads: Sequence[HeadProfile]
    seconds: float

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[HeadProfile]:
        return iter(self.heads)

    def __getitem__(self, head: str | int) -> HeadProfile:
        return self.heads[head] if isinstance(head, int) else next(p for p in self.heads if p.head == head)

    def to_dict(self, recount: int = 4) -> dict[str, Any]:
        """Everything as plain numbers and texts.

        Args:
            recount: the counts of so many query tokens stand in the document one by one, for the checker.
        """
        return {
            "schema": SCHEMA,
            "prooflens": __version__,
            "model": self.model,
            "model_sha256": self.model_sha256,
            "length": self.length,
            "position": self.position,
            "vocabulary": self.vocabulary,
            "real": list(self.real),
            "same": [list(group) for group in self.same],
            "choices": {str(position): list(tokens) for position, tokens in self.choices.items()},
            "query_tokens": "all" if self.whole else list(self.heads[0].tokens) if self.heads else [],
            "seconds": self.seconds,
            "heads": [_head(profile, recount) for profile in self.heads],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Profiles:
        """Read back what `to_dict` made; of query tokens it has those that the document lists one by one.

        Args:
            document: the document.
        """
        return cls(
            document["model"],
            document["model_sha256"],
            document["length"],
            document["position"],
            document["vocabulary"],
            tuple(document["real"]),
            tuple(tuple(group) for group in document["same"]),
            {int(position): tuple(tokens) for position, tokens in document["choices"].items()},
            document["query_tokens"] == "all",
            [_read_head(head) for head in document["heads"]],
            document["seconds"],
        )

    def save(self, path: Path | str, recount: int = 4, **configuration: object) -> None:
        """Write what `prooflens check` recounts on a few query tokens: a run directory, or a document in a JSON file.

        Args:
            path: the directory, which must not hold a run yet; or a file whose name ends in `.json`.
            recount: how many query tokens are written one by one.
            configuration: what was asked for, kept in `run.json`.
        """
        if Path(path).suffix != ".json":
            self._save_run(Path(path), recount, configuration)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps(self.to_dict(recount), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    def _save_run(self, path: Path, recount: int, configuration: Mapping[str, Any]) -> None:
        """One row per head and claim; the whole document stands in `run.json`."""
        model = {"name": self.model, "sha256": self.model_sha256, "source": None}
        label = f"all prompts of {self.length} tokens, query at {self.position}"
        header = run_header("vocabulary", model, configuration) | {
            "tokens": [],
            "text": None,
            "region": {"label": label, "eps": None},
            "document": self.to_dict(recount),
        }
        counts = [
            (profile.head, count) for profile in self.heads for count in (*profile.top, *profile.claims)
        ]
        rows = [
            {
                "model": self.model,
                "model_sha256": self.model_sha256,
                "head": head,
                "claim_text": count.claim,
                "lower_count": str(count.lower),
                "upper_count": str(count.upper),
                "prompts": str(count.prompts),
                "lower": float(count.shares[0]),
                "upper": float(count.shares[1]),
            }
            for head, count in counts
        ]
        columns = {name: [row[name] for row in rows] for name in VOCABULARY.names}
        writer = RunWriter.create(path, header)
        writer.append(pa.table(columns, schema=VOCABULARY), {})
        writer.finish()


VOCABULARY = pa.schema(
    [
        *(
            (name, pa.string())
            for name in (
                "model",
                "model_sha256",
                "head",
                "claim_text",
                "lower_count",
                "upper_count",
                "prompts",
            )
        ),
        *((name, pa.float64()) for name in ("lower", "upper")),
    ]
)
"""The columns of a run: counts as texts, since they exceed what columns hold, and both ends as shares."""


def _read_head(head: Mapping[str, Any]) -> HeadProfile:
    def counts(name: str) -> tuple[Count, ...]:
        listed = ((c["claim"], *(int(c[end]) for end in ("lower", "upper", "prompts"))) for c in head[name])
        return tuple(Count(*one) for one in listed)

    lower, upper = (tuple(tuple(map(int, row[end])) for row in head["recount"]) for end in ("lower", "upper"))
    tokens, keys = tuple(row["token"] for row in head["recount"]), tuple(head["keys"])
    each = int(head["each"])
    return HeadProfile(head["head"], keys, counts("top"), counts("claims"), tokens, lower, upper, each)


def _head(profile: HeadProfile, recount: int) -> dict[str, Any]:
    step = max(1, len(profile.tokens) // max(1, recount))
    rows = range(0, len(profile.tokens), step)[:recount]
    return {
        "head": profile.head,
        "keys": list(profile.keys),
        "each": str(profile.each),
        "top": [count.to_dict() for count in profile.top],
        "claims": [count.to_dict() for count in profile.claims],
        "recount": [
            {
                "token": profile.tokens[row],
                "lower": [str(number) for number in profile.lower[row]],
                "upper": [str(number) for number in profile.upper[row]],
            }
            for row in rows
        ],
    }
