"""Runs about the effect of an edit: two networks side by side, output i that of the model, output C + i of its edit.

The edited network is made from the model's weights and from what the run says was changed; its fingerprint must be the
stated one. Where words such as `without a1.h0` say all of the edit, the network that they describe must have that
fingerprint, too. Values at the clean input and at witnesses are computed in balls. Effects are proved again on both
networks side by side (`pair_proofs`), and the same answer on each by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb

from prooflens.checker import edit_words, edited
from prooflens.checker.claims import Functional
from prooflens.checker.distributions import Metric, plain_value, read_metric
from prooflens.checker.findings import (
    CONFIRMED,
    NOT_CHECKABLE,
    NOTHING_CLAIMED,
    REPROVED,
    RERUN,
    WRONG,
    Row,
    WrongError,
    need,
)
from prooflens.checker.network import Balls, Network
from prooflens.checker.pair_proofs import PairProver
from prooflens.checker.plain import PlainNetwork
from prooflens.checker.prompts import DRAWN, NEAR, FamilyChecker, Word, output_named
from prooflens.checker.proofs import Prover
from prooflens.checker.query_reader import Form, QueryReader, same_form
from prooflens.checker.rows import WORTH, RowChecker

_QUERY = re.compile(
    r"(?P<bar>\|)?effect\((?P<metric>.+?)\)(?(bar)\|<=(?P<most>[^ ]+)|(?:>=(?P<least>[^ ]+))?) (?P<edit>.+)"
    r"|same answer (?P<answers>.+)|patched\((?P<sided>.+?)\)(?P<side>[<>])0 (?P<patched>.+)",
    re.DOTALL,
)
_HIDDEN = re.compile(r"a(\d+)\.h(\d+)(?:\.q(\d+))?\.k(\d+)")
_VALUED = re.compile(r"with (?P<place>[\w.@-]+) at any value within (?P<by>[^ ]+) of 0")
_PLACE = re.compile(r"(?:a(\d+)(?:\.h(\d+)(\.result)?)?|m(\d+)(?:\.n(\d+))?)((?:@-?\d+)*)")


class PairNetwork:
    """A network and an edit of it that read the same points; `name` is what its tensors' names start with."""

    def __init__(
        self, first: Network, stated: Mapping[str, Any], tensors: Mapping[str, Any], name: str = "edited"
    ) -> None:
        weights = {weight: t for weight, t in first.weights.items() if weight not in stated["removed"]}
        for weight, ranges in stated["zeroed"].items():
            weights[weight] = weights[weight].copy()
            for start, stop in ranges:
                need(0 <= start < stop <= weights[weight].shape[1], "columns are zero that there are not")
                weights[weight][:, start:stop] = 0.0
        for weight in stated["replaced"]:
            weights[weight] = np.ascontiguousarray(tensors[f"{name}/{weight}"], dtype=np.float64)
        self.first, self.second = first, Network(first.arch, weights, first.tables)
        need(self.second.sha256 == stated["sha256"], "the edited model does not have the stated fingerprint")
        self.arch, self.weights, self.edit = first.arch, first.weights, stated["edit"]
        told = _without(first, self.edit)
        self.named = told is not None
        need(told in (None, stated["sha256"]), "other parts are taken out than the edit names")

    def run(
        self, points: list[Balls], layers: Iterable[int], output: bool = False
    ) -> list[dict[int | str, Balls]]:
        """The outputs of both at points, one after the other."""
        pairs = zip(*(net.run(points, layers, output) for net in (self.first, self.second)), strict=True)
        return [{"logits": np.concatenate((a["logits"], b["logits"]))} for a, b in pairs]


def _without(net: Network, edit: str) -> str | None:
    """The fingerprint of the network without the parts that an edit names; None where its words do not say all."""
    valued = _VALUED.fullmatch(edit)
    match = re.fullmatch(r"without ([\w., @<>-]+)", f"without {valued['place']}" if valued else edit)
    names = match[1].split(", ") if match else []
    hidden = [found for name in names if (found := _HIDDEN.fullmatch(name))]
    weights = _hide(net, hidden)
    heads, d = net.arch["n_heads"], net.arch["d_model"]
    cut = [name for name in names if edit_words.cut(weights, heads, d, name)]
    places = [_PLACE.fullmatch(name) for name in names if not _HIDDEN.fullmatch(name) and name not in cut]
    if not names or None in places:
        return None
    if "read_hook" in net.arch:  # edges of what stands behind the hook are gone
        kept = tuple(f"blocks.{layer}." for layer in range(net.arch["n_layers"]))
        weights = {name: t for name, t in weights.items() if ".edges." not in name or name.startswith(kept)}
    for a, h, result, m, n, tokens in (place.groups() for place in places if place is not None):
        block = f"blocks.{a or m}.{'o' if a else 'down'}"
        index, width = (h, net.head_dim) if a else (n, 1)
        size = d if index is None or result else width
        if int(a or m) >= net.arch["n_layers"]:  # behind the hook that is read
            if valued:
                edit_words.widen(weights, f"{block}.held", size, float(valued["by"]))
            continue
        some = slice(None) if index is None else slice(int(index) * width, (int(index) + 1) * width)
        if tokens or valued:
            at = [int(token) for token in tokens.split("@")[1:]] or [edited.EVERY]
            edit_words.hold(weights, block, None if index is None else some, at, result is not None)
            if valued:
                edit_words.widen(weights, f"{block}.held", size, float(valued["by"]))
            continue
        weights[f"{block}.weight"] = weights[f"{block}.weight"].copy()
        weights[f"{block}.weight"][:, some] = 0.0
        if index is None:
            weights.pop(f"{block}.bias", None)
    return Network(net.arch, weights).sha256


def _hide(net: Network, hidden: list[re.Match[str]]) -> dict[str, Any]:
    """The weights with more keys knocked out: tables of rows (head, query or −1 for all others, key), in order."""
    weights, tables = dict(net.weights), dict[str, set[tuple[int, ...]]]()
    for a, h, q, k in (match.groups() for match in hidden):
        if int(a) < net.arch["n_layers"]:
            row = (int(h), -1 if q is None else int(q), int(k))
            tables.setdefault(f"blocks.{a}.knocked_out", set()).add(row)
    for name, rows in tables.items():
        before = [tuple(map(int, row)) for row in weights.get(name, ())]
        weights[name] = np.array(sorted(rows.union(before)), dtype=np.float64)
    return weights


class EffectReader(QueryReader):
    """Reads claims about effects: `net` is the pair."""

    net: Any

    def differs(self, query: str, place: tuple[Any, ...], stored: list[Functional]) -> str:
        """Why the functionals are not those of the query ('' if they are)."""
        match = _QUERY.fullmatch(query)
        if match is None or self.net.edit not in (match["edit"], match["answers"], match["patched"]):
            return "the query is not about the effect of this edit"
        forms = [] if match["answers"] else self._sided(match) if match["sided"] else self._effect(match)
        same = len(stored) == len(forms) and all(map(same_form, stored, forms))
        return "" if same else "the claim is not what its query asks for"

    def _effect(self, match: re.Match[str]) -> list[Form]:
        """The functionals of a claim about the size of an effect."""
        size = len(self.clean["logits"]) // 2
        if distribution := read_metric(match["metric"]):
            effect = {atom: Fraction(weight) for weight, atom in distribution.atoms(size)}
        else:
            metric = self._metric(match["metric"])
            effect = metric | {("logit", atom[1] + size): -weight for atom, weight in metric.items()}
        parts = [(1, arb(0), "range")]
        if match["bar"]:
            parts = [(sign, arb(float(match["most"])), ">=0") for sign in (1, -1)]
        elif match["least"]:
            parts = [(1, -arb(float(match["least"])), ">=0")]
        return [({atom: s * w for atom, w in effect.items()}, c, sense) for s, c, sense in parts]

    def _metric(self, text: str) -> dict[tuple[Any, ...], Fraction]:
        """Weights of the outputs of one network."""
        both, size = re.fullmatch(r"logit(\d+)-logit(\d+)", text), len(self.clean["logits"]) // 2
        if both:
            metric: dict[tuple[Any, ...], Fraction] = {("logit", int(both[1])): Fraction(1)}
            metric[("logit", int(both[2]))] = Fraction(-1)
        else:
            ((metric, _, _),) = self.forms(text)
        need(all(atom[1] < size for atom in metric), "the metric reads an output that there is not")
        return metric

    def _sided(self, match: re.Match[str]) -> list[Form]:
        """The functional of a claim that the edited network's metric is on one side of 0."""
        sign, size = (1 if match["side"] == ">" else -1), len(self.clean["logits"]) // 2
        metric = self._metric(match["sided"])
        return [({("logit", atom[1] + size): sign * w for atom, w in metric.items()}, arb(0), ">0")]


class EffectChecker(RowChecker):
    """The rows of a run about one effect."""

    reader = EffectReader
    prover_kind = PairProver
    net: Any

    def _values(self, n: int) -> tuple[list[list[int]], Any]:
        weights = self.net.second.weights
        return edited.moved_by(weights, n), weights.get(edited.RADII, np.zeros(0))

    def _judge(self, row: Row) -> tuple[str, str]:
        word, note = self._answers(row) if row["query"].startswith("same answer") else super()._judge(row)
        return word, note if self.net.named else f"{note}; the edit is the stored one: its name is free text"

    def _answers(self, row: Row) -> tuple[str, str]:
        """The claim that both answers are the same: a witness gives two."""
        bare = all(row[column] is None for column in ("lower", "upper", "clean", "attack", "layer", "top"))
        need(bare and not row["claim"]["functionals"], "the claim is not what its query asks for")
        need(
            (row["verdict"], row["guarantee"]) in WORTH, "an estimate or an unknown word is called a verdict"
        )
        unread = self._about(row, [])
        if row["verdict"] == "unknown":
            return NOTHING_CLAIMED, unread or "the verdict is unknown"
        if self.net.arch.get("read_hook") is not None:
            return NOT_CHECKABLE, "the run ends at a hook, in front of the answers"
        if row["verdict"] == "holds":
            word, note = self._same_answer()
            return word, f"{note}; {unread}" if unread else note
        alpha = self.tensors[f"row/{row['row']}/witness_alpha"]
        need(np.all(np.abs(alpha) <= 1.0), "the witness lies outside the region")
        if not self.region.meets(alpha):
            return NOT_CHECKABLE, "the witness's factors break the constraints: others may give it"
        (found,) = self.net.run([self.region.point(alpha)], (), output=True)
        first, second = (_largest(half) for half in np.split(found["logits"], 2))
        if first is None or second is None:
            return NOT_CHECKABLE, "the balls around the largest outputs meet"
        need(first != second, "the witness has the same answer in both models")
        return CONFIRMED, f"answers {first} and {second}"

    def _same_answer(self) -> tuple[str, str]:
        """A second proof that one output is the largest of both networks on the whole region."""
        answers = [_largest(half) for half in np.split(self.clean["logits"], 2)]
        if answers[0] is None or answers[0] != answers[1]:
            return NOT_CHECKABLE, "at the clean input no output is seen to be the largest of both"
        margin = {"constant": 0.0, "terms": [[1.0, "logit", answers[0]], [-1.0, "largest", answers[:1]]]}
        weakest = np.inf
        for net in (self.net.first, self.net.second):
            prover = Prover(net, self.region, self.prover.tell)
            try:
                own = prover.bounds(margin, tight=False)
                own = own if own.low > 0 else prover.bounds(margin, tight=True)
            except (ValueError, ArithmeticError) as error:
                return NOT_CHECKABLE, f"the checker's proof failed: {str(error) or type(error).__name__}"
            if not own.low > 0:
                return NOT_CHECKABLE, prover.refusal or "the checker's bounds are weaker"
            weakest = min(weakest, own.low)
        return REPROVED, f"both answers are {answers[0]}, own bound {weakest:.6g}"


def pair_of(net: Network, info: Mapping[str, Any], tensors: Mapping[str, Any]) -> PairNetwork:
    """The network of a run about an effect, beside its edit.

    Args:
        net: the network that was edited.
        info: the content of run.json.
        tensors: the tensors of the run.
    """
    stated = info["edited"]
    # A cap changes differences of outputs, and no run is about them (`read_at` leaves it out).
    need(net.arch.get("logit_cap") is None, "the outputs go through a cap, which changes their differences")
    where = f", read at {net.arch['read_hook']}@" if "read_hook" in net.arch else ""
    base = info["model"]["name"].partition(where)[0] if where else info["model"]["name"]
    need(stated["name"].removeprefix(base).strip() == stated["edit"], "the edited model has another name")
    return PairNetwork(net, stated, tensors)


class FamilyEffectChecker(FamilyChecker):
    """The rows of a run about effects over one family: members are run again through both networks, in float64."""

    def __init__(self, net: Network, info: Mapping[str, Any], tensors: Any, rows: list[Row]) -> None:
        super().__init__(net, info, tensors, [row | {"query": row["metric"]} for row in rows])
        self.edits, self.claimed = info["edits"], info["claimed"]
        self.other = info.get("patched_ids")
        need(len(self.edits) == len(rows), "there is not one row per edit")
        self.base = info["model"]["name"]

    def judge_all(self) -> dict[int, Word]:
        """One word and a note per row."""
        wrong = self.miscounted()
        pairs = zip(self.rows, self.edits, strict=True)
        return {row["row"]: self._word(row, stated, wrong) for row, stated in pairs}

    def _word(self, row: Row, stated: Mapping[str, Any], wrong: str) -> Word:
        try:
            need(not wrong, wrong)
            need(row["edited"] == stated["name"], "the row is about another edit than run.json")
            need(row["edited_sha256"] == stated["sha256"], "the row states another fingerprint")
            named = stated["name"].removeprefix(self.base).strip() == stated["edit"]
            need(named, "the edited model has another name")
            pair = PairNetwork(self.net, stated, self.tensors, f"edit/{row['row']}")
            note = self._effects(row, PlainNetwork(pair.second))
        except WrongError as error:
            return WRONG, str(error)
        return RERUN, note if pair.named else f"{note}; the edit is the stored one: its name is free text"

    def _effects(self, row: Row, second: PlainNetwork) -> str:
        """Counts that the ends allow, and the effects of listed members and of some drawn by chance."""
        asked, least, most, word = (row[name] for name in ("asked", "least", "most", "word"))
        need(word in ("enumerated", "estimated"), "there is no such word")
        stated = self.members if self.members < 2**63 else None
        need(row["members"] == stated, "it states another number of members")
        need(word == "estimated" or asked == self.members, "not every member was run")
        near = NEAR * (1.0 + abs(least) + abs(most))
        need(least - near <= row["mean"] <= most + near, "the mean lies outside the ends")
        for name in ("necessary", "faithful"):
            delta = self.claimed.get(name)
            need((delta is None) == (row[name] is None), f"{name} is counted, or not, against run.json")
            if delta is not None:
                low, high = (delta, np.inf) if name == "necessary" else (-delta, delta)
                need(_can_be(row[name], asked, least, most, low, high), f"{name} is miscounted")
        need(
            row["same"] is None or 0 <= row["same"] <= asked,
            "more answers are the same than members were run",
        )
        taken = row.get("patched")
        need((taken is None) == (self.other is None), "patches are counted, or not, against run.json")
        need(taken is None or 0 <= taken <= asked, "more members take a side than were run")
        chance = np.random.default_rng(row["row"])
        listed = [list(row["least_ids"]), list(row["most_ids"])]
        drawn = [self.shapes[chance.integers(len(self.shapes))].draw(chance) for _ in range(DRAWN)]
        effects = self._both(row["metric"], listed + drawn, second)
        for own, told in zip(effects[:2], (least, most), strict=True):
            need(own is not None, "a listed prompt is no member of the family")
            need(abs((own or 0.0) - told) <= near, f"a listed member has the effect {own}")
        for own in effects[2:] if word == "enumerated" else []:
            inside = own is None or least - near <= own <= most + near
            need(inside, f"a member has the effect {own}, outside the ends")
        if taken is not None and word == "enumerated" and taken in (0, asked):
            for ids in listed + drawn:
                sided = self._takes_side(row["metric"], ids, second)
                need(sided in (None, taken == asked), "a member takes another side than is counted")
        return f"both ends were run again, and {DRAWN} members by chance lie between them"

    def _both(self, metric: str, every: list[list[int]], second: PlainNetwork) -> list[float | None]:
        """The effect on every member; None for what is no member."""
        if distribution := read_metric(metric):
            return [self._distribution(distribution, ids, second) for ids in every]
        margin = metric.replace("-", ">", 1)
        first, self.plain = self.plain, second
        try:
            other = self._rerun(margin, every)
        finally:
            self.plain = first
        pairs = zip(self._rerun(margin, every), other, strict=True)
        return [None if a is None or b is None else a[0] - b[0] for a, b in pairs]

    def _takes_side(self, metric: str, ids: list[int], second: PlainNetwork) -> bool | None:
        """Whether a member takes the other prompt's side; None for no member, or where rounding could decide."""
        shape = self._shape(ids)
        if shape is None:
            return None
        first, other = (
            output_named(name, shape.places, ids) for name in re.findall(r"logit(\{[^{}]*\}|\d+)", metric)
        )
        runs = [
            net.run(np.array([tokens]), set(), True, set())["logits"][0]
            for net, tokens in ((self.plain, self.other), (second, ids))
        ]
        there, here = (float(y[first] - y[other]) for y in runs)
        return None if min(abs(there), abs(here)) < NEAR else there * here > 0.0

    def _distribution(self, metric: Metric, ids: list[int], second: PlainNetwork) -> float | None:
        """The effect on a distribution of one member; None for what is no member."""
        shape = self._shape(ids)
        if shape is None:
            return None
        runs = [net.run(np.array([ids]), set(), True, set())["logits"][0] for net in (self.plain, second)]
        atoms = metric.atoms(len(runs[0]), lambda name: output_named(name, shape.places, ids))
        return sum(weight * plain_value(atom, np.concatenate(runs)) for weight, atom in atoms)


def _can_be(count: int, asked: int, least: float, most: float, low: float, high: float) -> bool:
    """Whether so many of `asked` numbers, whose ends are known, can lie within [low, high]."""
    inside = [low <= end <= high for end in (least, most)]
    if all(inside):
        return count == asked
    if most < low or least > high:
        return count == 0
    return any(inside) <= count < asked


def _largest(logits: Balls) -> int | None:
    """The largest output; None if balls do not say."""
    held: list[arb] = logits.tolist()
    best = max(range(len(held)), key=lambda i: float(held[i].mid()))
    return best if all(held[best] > x for i, x in enumerate(held) if i != best) else None
