"""Counts over whole vocabularies, again: for the query tokens that a document names, by searches in place of one sort.

`profile(…).save(file)` writes how often each key of a head of layer 0 is attended most, and for a few query tokens the
counts one by one. Here those are counted again in plain numpy. Scores that are closer than a slack, far wider than the
rounding of either program, stay open, so the own count has two ends as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from prooflens.checker.edited import before_scores
from prooflens.checker.families import Powers
from prooflens.checker.findings import NOT_CHECKABLE, RERUN, WRONG, Row, need
from prooflens.checker.network import Array, Network, Tables

SCHEMA = "prooflens-vocabulary-1"

SLACK = 2.0**-36
"""Scores that differ by less than this times |q||k| may have either order."""

LONGEST = 4096
"""The longest prompts of a model that states no context."""

DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(OverflowError, RecursionError, StopIteration, ZeroDivisionError),
)


@dataclass(frozen=True)
class Recount:
    """One query token of one head: `agrees`, or WRONG, and why."""

    head: str
    token: int
    status: str
    detail: str


@dataclass(frozen=True)
class VocabularyReport:
    """Problems of the document as a whole, and what was counted again."""

    problems: list[str]
    findings: list[Recount]

    @property
    def ok(self) -> bool:
        """Whether nothing is WRONG, and something was counted."""
        return not self.problems and all(found.status == "agrees" for found in self.findings)


def recount(
    document: Path, weights: Path, tables: Tables | None = None, powers: Powers | None = None
) -> VocabularyReport:
    """Count the named query tokens of a document again, and check that its numbers fit together.

    Args:
        document: the file that `Profiles.save` wrote.
        weights: the folder of the model's weights.
        tables: RoPE's float32 constants, as for `check`.
        powers: the powers of RoPE's base, as for `check`.
    """
    try:
        info = json.loads(document.read_text(encoding="utf-8"))
        if info["schema"] != SCHEMA:
            return VocabularyReport([f"WRONG: the document has another format than {SCHEMA}"], [])
        return _judged(Network.read(weights, tables, powers), info)
    except DAMAGE as error:
        return VocabularyReport([f"WRONG: {error or type(error).__name__}"], [])


def _judged(net: Network, info: dict[str, Any]) -> VocabularyReport:
    """What a network says of a document."""
    problems = [] if net.sha256 == info["model_sha256"] else ["WRONG: the weights have another fingerprint"]
    counter = _Counter(net, info)
    findings = []
    for head in info["heads"]:
        problems += _sums(head, counter.each, counter.query_tokens)
        findings += [counter.judge(head, row) for row in head["recount"]]
    return VocabularyReport(problems, findings)


class VocabularyChecker:
    """The rows of a run about all prompts: they must be the counts of its document, which is counted again."""

    def __init__(self, net: Network, info: dict[str, Any], tensors: Any, rows: list[Row]) -> None:
        self.net, self.document, self.rows = net, info["document"], rows
        need(self.document["schema"] == SCHEMA, f"the document has another format than {SCHEMA}")
        need(self.document["model"] == info["model"]["name"], "the document is about another model")

    def judge_all(self) -> dict[int, tuple[str, str]]:
        """One word and a note per row."""
        found = _judged(self.net, self.document)
        need(not found.problems, "; ".join(found.problems).removeprefix("WRONG: "))
        counts = [(h, c, kind) for h in self.document["heads"] for kind in ("top", "claims") for c in h[kind]]
        need(len(counts) == len(self.rows), "there is not one row per count of the document")
        words = {}
        for row, (head, count, kind) in zip(self.rows, counts, strict=True):
            told = [row[name] for name in ("head", "claim_text", "lower_count", "upper_count", "prompts")]
            same = told == [head["head"], *(count[name] for name in ("claim", "lower", "upper", "prompts"))]
            shares = [int(count[end]) / int(count["prompts"]) for end in ("lower", "upper")]
            near = all(
                abs(row[end] - share) <= 1e-12 for end, share in zip(("lower", "upper"), shares, strict=True)
            )
            again = [one for one in found.findings if one.head == head["head"]]
            broken = next((one for one in again if one.status != "agrees"), None)
            if not (same and near):
                words[row["row"]] = WRONG, "the row is not the count of its document"
            elif broken is not None:
                words[row["row"]] = WRONG, f"query token {broken.token}: {broken.detail}"
            elif kind == "claims" or not again:
                words[row["row"]] = NOT_CHECKABLE, "only counts of the most attended key are repeated"
            else:
                words[row["row"]] = RERUN, f"{len(again)} query tokens were counted again"
        return words


def _sums(head: dict[str, Any], each: int, size: int) -> list[str]:
    """Numbers of one head that cannot be true together."""
    ends = [(int(count["lower"]), int(count["upper"])) for count in head["top"]]
    problems = []
    if int(head["each"]) != each or any(int(count["prompts"]) != each * size for count in head["top"]):
        problems.append(f"WRONG: head {head['head']} states another number of prompts than its slots have")
    if any(not 0 <= low <= high for low, high in ends):
        problems.append(f"WRONG: head {head['head']} has a lower count above its upper one")
    if not sum(low for low, _ in ends) <= each * size <= sum(high for _, high in ends):
        problems.append(f"WRONG: the counts of head {head['head']} do not add up to all prompts")
    for column, (_, most) in enumerate(ends):
        if sum(int(row["lower"][column]) for row in head["recount"]) > most:
            problems.append(
                f"WRONG: query tokens of head {head['head']} exceed the sum that they are a part of"
            )
    return problems


class _Counter:
    """The first scores of a network, for the prompts of a document."""

    def __init__(self, net: Network, info: dict[str, Any]) -> None:
        self.net, self.info = net, info
        self.n, self.at = int(info["length"]), int(info["position"])
        self.vocabulary = len(net.weights["embed.tokens"])
        if before_scores(net.weights):
            raise ValueError("what the first scores read is edited: that is not counted again")
        if self.vocabulary != info["vocabulary"]:
            raise ValueError("the document states another vocabulary")
        if not 1 <= self.n <= int(net.arch["context"] or LONGEST) or not 0 <= self.at < self.n:
            raise ValueError("the document states a length or a position that the model does not have")
        real = np.array(info["real"], dtype=bool).reshape(self.n)
        self.keys = np.flatnonzero(net.mask(self.n, 0)[self.at] & real).tolist()
        groups = [list(map(int, group)) for group in info["same"]]
        taken = {position for group in groups for position in group}
        self.slots = groups + [[position] for position in range(self.n) if position not in taken]
        if sorted(position for slot in self.slots for position in slot) != list(range(self.n)):
            raise ValueError("a position stands in two groups of `same`")
        self.lists = {int(p): np.array(t, dtype=int) for p, t in info["choices"].items()}
        for tokens in self.lists.values():
            if tokens.ndim != 1 or len(set(tokens.tolist())) < len(tokens) or not self._are_tokens(tokens):
                raise ValueError("`choices` names something that is no list of tokens")
        self.tables = net.rotary(self.n, 0)

    def _are_tokens(self, tokens: Any) -> bool:
        return len(tokens) > 0 and bool(((tokens >= 0) & (tokens < self.vocabulary)).all())

    @property
    def each(self) -> int:
        """How many prompts there are per query token."""
        return prod(len(self._tokens(slot)) for slot in self.slots if self.at not in slot)

    @property
    def query_tokens(self) -> int:
        """How many query tokens the document is about."""
        stated = self.info["query_tokens"]
        own = next(slot for slot in self.slots if self.at in slot)
        return len(self._tokens(own)) if stated == "all" else len(stated)

    def _tokens(self, slot: list[int]) -> Any:
        return next((self.lists[p] for p in slot if p in self.lists), np.arange(self.vocabulary))

    def judge(self, head: dict[str, Any], row: dict[str, Any]) -> Recount:
        """Count one query token, and compare."""
        token, name = int(row["token"]), str(head["head"])
        number = int(name.removeprefix("0."))
        own = next(slot for slot in self.slots if self.at in slot)
        if not 0 <= number < int(self.net.arch["n_heads"]) or token not in self._tokens(own):
            return Recount(name, token, "WRONG", "there is no such head, or no such query token")
        if head["keys"] != self.keys:
            return Recount(
                name, token, "WRONG", f"the position attends to {self.keys}, not to {head['keys']}"
            )
        found = self._count(number, token)
        for key, (low, high), *stated in zip(self.keys, found, row["lower"], row["upper"], strict=True):
            lower, upper = map(int, stated)
            if lower > high or upper < low or lower > upper:
                detail = f"key {key}: stated {lower} to {upper} prompts, counted {low} to {high}"
                return Recount(name, token, "WRONG", detail)
        open_ = max((high - low) / self.each for low, high in found)
        return Recount(name, token, "agrees", f"counted again, to {open_:.1e} of all prompts")

    def _count(self, head: int, token: int) -> list[tuple[int, int]]:
        """The two ends of the own count, by key."""
        q = self._vectors("q", head, self.at, np.array([token]))[0]
        scale, bias = self.net.scale(0), self.net.score_bias(self.n)[head, self.at]
        groups: list[tuple[list[int], Array, Array]] = []
        free, size = 1, 0.0
        for slot in self.slots:
            there = [key for key in slot if key in self.keys]
            tokens = np.array([token]) if self.at in slot else self._tokens(slot)
            if not there:
                free *= len(tokens)
                continue
            keys = [self._vectors("k", head, key, tokens) for key in there]
            size = max(size, *(float(np.linalg.norm(k, axis=-1).max()) for k in keys))
            scores = np.stack([k @ q * scale + bias[key] for k, key in zip(keys, there, strict=True)])
            groups.append((there, scores, np.sort(scores.max(0))))
        off = SLACK if self.tables is None else SLACK + 4.0 * self.tables[2]
        slack = off * (abs(scale) * float(np.linalg.norm(q)) * size + float(np.abs(bias).max()))
        found: dict[int, tuple[int, int]] = {}
        for there, scores, _ in groups:
            best = scores.max(0)
            rest = [others for keys, _, others in groups if keys is not there]
            for i, key in enumerate(there):
                close = scores[i] >= best - slack
                alone = (scores[i] - slack > np.delete(scores, i, 0)).all(0)
                below = self._products(best[alone] - slack, rest, "left")
                found[key] = (below * free, self._products(best[close] + slack, rest, "right") * free)
        return [found[key] for key in self.keys]

    def _products(self, values: Array, others: list[Array], side: Any) -> int:
        """Σ over values of the product of how many of each list stand below."""
        total = np.ones(len(values), dtype=object)
        for other in others:
            total = total * np.searchsorted(other, values, side).astype(object)
        return int(total.sum()) if len(total) else 0

    def _vectors(self, name: str, head: int, position: int, tokens: Any) -> Array:
        """Queries or keys of some tokens at a position, for one head."""
        arch, weights, width = self.net.arch, self.net.weights, self.net.head_dim
        x = self._embed(tokens, position)
        if arch["norm_place"] in ("pre", "sandwich") and arch.get("first_norm", True):
            x = self._norm("blocks.0.norm1", x)
        y = x @ weights[f"blocks.0.{name}.weight"].T + weights.get(f"blocks.0.{name}.bias", 0.0)
        if arch.get("head_positions"):
            y = y + weights[f"blocks.0.{name}.positions"][position]
        if arch.get("qk_norm", "none") == "whole":
            y = self._norm(f"blocks.0.{name}_norm", y)
        heads = y.shape[-1] // width
        y = y.reshape(len(y), heads, width)[:, head * heads // int(arch["n_heads"])]
        if arch.get("qk_norm", "none") == "head":
            y = self._norm(f"blocks.0.{name}_norm", y)
        if self.tables is None:
            return np.asarray(y)
        cos, sin, half = self.tables[0][position], self.tables[1][position], width // 2
        return np.asarray(y * cos + np.concatenate((-y[:, half:], y[:, :half]), -1) * sin)

    def _embed(self, tokens: Any, position: int) -> Array:
        """What the first block reads."""
        arch, weights = self.net.arch, self.net.weights
        x = weights["embed.tokens"][tokens]
        x = x if arch.get("embed_scale") is None else x * arch["embed_scale"]
        if "embed.positions" in weights:
            x = x + weights["embed.positions"][position + arch["position_offset"]]
        x = x + weights["embed.types"][0] if "embed.types" in weights else x
        if "embed.norm.weight" in weights:
            m = x - x.mean(-1, keepdims=True)
            x = m / np.sqrt((m * m).mean(-1, keepdims=True) + arch["norm_eps"]) * weights["embed.norm.weight"]
            x = x + weights.get("embed.norm.bias", 0.0)
        if "embed.project.weight" in weights:
            x = x @ weights["embed.project.weight"].T + weights.get("embed.project.bias", 0.0)
        return np.asarray(x)

    def _norm(self, name: str, x: Array) -> Array:
        weights = self.net.weights
        m = x - x.mean(-1, keepdims=True) if self.net.arch["norm_kind"] == "layer" else x
        z = m / np.sqrt((m * m).mean(-1, keepdims=True) + self.net.arch["norm_eps"])
        return np.asarray(z * weights.get(f"{name}.weight", 1.0) + weights.get(f"{name}.bias", 0.0))
