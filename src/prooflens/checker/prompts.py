"""Runs about families of prompts: counts that add up, and members that are run again by the checker's own float64 code.

Every listed member (failures, the worst, the nearest to zero) is found in the family and run again, its margin
compared; members drawn by chance are run as well, and must not be failures that are missing from the list. Members of
a family that is called `proved` are run in balls.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prooflens.checker.member_values import SITE, Readouts, ball_sign, hooks_of, judged, lenses_of
from prooflens.checker.network import Network
from prooflens.checker.plain import PlainNetwork
from prooflens.checker.query_reader import Form, QueryReader

DRAWN = 64
"""Members of every claim that are drawn by chance."""
BATCH = 32
"""Prompts that are run together."""
MOST_COUNTED = 10**7
"""Combinations of slots that must differ that are counted one by one."""
NEAR = 1e-6
"""Relative distance of margins of two float64 programs."""

Row = dict[str, Any]
Word = tuple[str, str]
_LENS = re.compile(r"lens (\d+) ")
_ROLE = re.compile(r"([A-Za-z_]\w*)(?:\.(\d+))?(?:\.(first|last))?")
_SELF = re.compile(r"self([+-]\d+)?")


class Shape:
    """The members of one length: fixed tokens, and the tokens of every slot's fillers."""

    def __init__(
        self, stated: Mapping[str, Any], slots: Mapping[str, Any], number: int, tensors: Any
    ) -> None:
        self.ids = np.array(stated["ids"])
        self.places: dict[str, list[list[int]]] = stated["places"]
        self.fillers = {slot: tensors[f"shape/{number}/{slot}/fillers"].tolist() for slot in self.places}
        self.words = {slot: [slots[slot][i] for i in self.fillers[slot]] for slot in self.places}
        self.tokens = {
            slot: [tensors[f"shape/{number}/{slot}/tokens/{k}"] for k in range(len(spans))]
            for slot, spans in self.places.items()
        }
        self.known = {
            slot: {row: i for i, row in enumerate(zip(*(map(tuple, t.tolist()) for t in held), strict=True))}
            for slot, held in self.tokens.items()
        }

    def count(self, differ: Sequence[Sequence[str]]) -> int | None:
        """How many members there are: slots that must differ one by one, all others by their product."""
        named = sorted({slot for pair in differ for slot in pair})
        if math.prod(len(self.words[slot]) for slot in named) > MOST_COUNTED:
            return None
        grids = np.meshgrid(*(np.arange(len(self.words[slot])) for slot in named), indexing="ij")
        kept = np.ones(grids[0].shape if grids else (), dtype=bool)
        for a, b in differ:
            same = np.array([[x == y for y in self.words[b]] for x in self.words[a]])
            kept &= ~same[grids[named.index(a)], grids[named.index(b)]]
        return int(kept.sum()) * math.prod(len(w) for slot, w in self.words.items() if slot not in named)

    def fillers_of(self, ids: Sequence[int], differ: Sequence[Sequence[str]]) -> dict[str, int] | None:
        """Which fillers a member has; None if these tokens are no member."""
        held = np.array(ids)
        if held.shape != self.ids.shape or np.any((self.ids >= 0) & (held != self.ids)):
            return None
        found = {}
        for slot, spans in self.places.items():
            tokens = tuple(tuple(held[start:stop].tolist()) for start, stop in spans)
            if tokens not in self.known[slot]:
                return None
            found[slot] = self.known[slot][tokens]
        words = {slot: self.words[slot][i] for slot, i in found.items()}
        return None if any(words[a] == words[b] for a, b in differ) else found

    def draw(self, chance: np.random.Generator) -> list[int]:
        """The tokens of a combination of fillers, by chance."""
        ids = self.ids.copy()
        for slot, spans in self.places.items():
            chosen = chance.integers(len(self.words[slot]))
            for (start, stop), tokens in zip(spans, self.tokens[slot], strict=True):
                ids[start:stop] = tokens[chosen]
        found: list[int] = ids.tolist()
        return found


class FamilyChecker:
    """The rows of a run about one family."""

    def __init__(self, net: Network, info: Mapping[str, Any], tensors: Any, rows: Sequence[Row]) -> None:
        self.net, self.plain, self.tensors, self.rows = net, PlainNetwork(net), tensors, rows
        family = info["family"]
        self.members, self.differ = int(family["members"]), family["differ"]
        self.shapes = [Shape(s, family["slots"], i, tensors) for i, s in enumerate(family["shapes"])]
        self.slots = family["slots"]
        self.reads = Readouts(net, info.get("reads") or {}, tensors)
        self.queries = list(dict.fromkeys(row["query"] for row in rows))

    def judge_all(self) -> dict[int, Word]:
        """One word and a note per row."""
        found: dict[int, Word] = {}
        if wrong := self.miscounted():
            return {row["row"]: ("WRONG", wrong) for row in self.rows}
        for number, query in enumerate(self.queries):
            mine = [row for row in self.rows if row["query"] == query]
            if unread := self._unread(query):
                found |= {row["row"]: ("not checkable", f"query: {unread}") for row in mine}
            else:
                found |= dict(self._claim(number, query, mine))
        return found

    def miscounted(self) -> str:
        """Why the family does not have so many members; an empty text if it does, or that would take too long."""
        counts = [shape.count(self.differ) for shape in self.shapes]
        whole = None if None in counts else sum(c or 0 for c in counts)
        if whole is None or whole == self.members:
            return ""
        return f"the family has {whole} members, not {self.members}"

    def _unread(self, query: str) -> str:
        """Why a query cannot be read; an empty text if it can."""
        try:
            for shape in self.shapes:
                self._forms(query, shape, shape.draw(np.random.default_rng(0)))
        except (LookupError, ValueError) as error:
            return str(error) or "it is not one that there is"
        return ""

    def _claim(self, number: int, query: str, rows: Sequence[Row]) -> Iterator[tuple[int, Word]]:
        (claim,) = [row for row in rows if row["what"] == "claim"]
        wrong = self._counts(number, claim, rows)
        listed = [row for row in rows if row["what"] in ("failure", "worst", "nearest")]
        judged = self._rerun(query, [row["ids"] for row in listed])
        for row, own in zip(listed, judged, strict=True):
            yield row["row"], self._member(row, own)
        for row in rows:
            if row["what"] in ("filler", "pair"):
                yield row["row"], self._counted(number, row)
        word, note = ("WRONG", wrong) if wrong else self._drawn(query, claim, listed)
        free = "; directions are the stored ones" if re.search(r"\b(read\(|feature )", query) else ""
        yield claim["row"], (word, note + free)

    def _counts(self, number: int, claim: Row, rows: Sequence[Row]) -> str:
        """Why the counts of a claim do not add up; an empty text if they do."""
        asked, held, word = claim["asked"], claim["held"], claim["word"]
        failures = [tuple(row["ids"]) for row in rows if row["what"] == "failure"]
        whole = word in ("proved", "enumerated")
        tables = [
            t
            for name, t in self.tensors.items()
            if name.startswith((f"claim/{number}/slot/", f"claim/{number}/pair/"))
        ]
        close = [row for row in rows if row["what"] == "nearest"]
        proved = len({tuple(r["ids"]) for r in close if r["confirmed"] == "confirmed"}) == self.members
        reasons = {
            "there is no such word": word not in ("proved", "enumerated", "estimated", "incomplete"),
            "it has a share, or none, against its word": (claim["share"] is None) != (word == "incomplete"),
            "more members hold than were run": not 0 <= held <= asked,
            "it states another number of members": claim["members"]
            != (self.members if self.members < 2**63 else None),
            "not every member was run": whole and asked != self.members,
            "an estimate has no interval": (word == "estimated") != (claim["lower"] is not None),
            "its share is not its count": claim["share"] is not None and claim["share"] != held / asked,
            "its histogram counts others": int(self.tensors[f"claim/{number}/histogram"].sum()) > asked,
            "more failures are listed than there are": len(failures) > asked - held,
            "a failure is listed twice": word != "estimated" and len(set(failures)) < len(failures),
            "it is called proved and not every member was confirmed": word == "proved" and not proved,
            "its shares do not add up": any(
                t.reshape(2, -1).sum(1).tolist() != [held, asked] for t in tables
            ),
        }
        if word == "estimated" and not _interval(held, asked, claim["lower"], claim["upper"]):
            return "its interval is not that of Clopper and Pearson"
        return next((reason for reason, here in reasons.items() if here), "")

    def _counted(self, number: int, row: Row) -> Word:
        """A row of shares against the stored table."""
        slots, words = [row["slot"]], [row["filler"]]
        if row["what"] == "pair":
            slots, words = [*slots, row["slot2"]], [*words, row["filler2"]]
        table = self.tensors[f"claim/{number}/{'slot' if len(slots) == 1 else 'pair'}/{'/'.join(slots)}"]
        if all(isinstance(word, str) for slot in slots for word in self.slots[slot]):
            at = tuple(self.slots[slot].index(word) for slot, word in zip(slots, words, strict=True))
            if [int(side[at]) for side in table] != [row["held"], row["asked"]]:
                return "WRONG", "the share is not that of the stored table"
        return "not checkable", "a count: it adds up with the claim's"

    def _member(self, row: Row, own: tuple[float, bool] | None) -> Word:
        """A listed member against the checker's own run of it."""
        if own is None:
            return "WRONG", "these tokens are no member of the family"
        margin, held = own
        stated = math.inf if row["margin"] is None else row["margin"]
        near = NEAR * (1.0 + abs(stated)) if math.isfinite(stated) else 0.0
        if margin != stated and not abs(margin - stated) <= near:
            return "WRONG", f"its margin is {margin:.6g}, not {stated:.6g}"
        if held != bool(row["held"]) and abs(margin) > near:
            return (
                "WRONG",
                f"its margin is {margin:.6g}, which the row calls {'held' if row['held'] else 'failed'}",
            )
        if row["what"] == "failure" and row["held"]:
            return "WRONG", "a member that satisfies the claim is listed as a failure"
        return "re-run", f"own margin {margin:.6g}"

    def _drawn(self, query: str, claim: Row, listed: Sequence[Row]) -> Word:
        """Members by chance: none is a failure that the list leaves out, and none has a smaller margin than stated."""
        if claim["word"] == "estimated":
            return "not checkable", "an estimate: its counts add up"
        failures = {tuple(row["ids"]) for row in listed if row["what"] == "failure"}
        complete = len(failures) == claim["asked"] - claim["held"] and claim["share"] is not None
        chance = np.random.default_rng(0)
        drawn = [self.shapes[chance.integers(len(self.shapes))].draw(chance) for _ in range(DRAWN)]
        for ids, own in zip(drawn, self._rerun(query, drawn), strict=True):
            if own is None:
                continue  # two slots that must differ are the same
            margin, held = own
            near = NEAR * (1.0 + abs(margin)) if math.isfinite(margin) else 0.0
            if complete and held is (tuple(ids) in failures) and abs(margin) > near:
                return (
                    "WRONG",
                    f"a member of margin {margin:.6g} is listed wrongly, or is missing: tokens {ids}",
                )
            if claim["share"] is not None and claim["margin"] is not None and margin < claim["margin"] - near:
                return "WRONG", f"a member has the margin {margin:.6g}, below the smallest: tokens {ids}"
        if claim["word"] == "proved":
            close = [row["ids"] for row in listed if row["what"] == "nearest"]
            signs = [self._sign(query, ids) for ids in close]
            known = Counter(signs)
            if known[True] > claim["held"] or known[False] > claim["asked"] - claim["held"]:
                return "WRONG", "the signs of its members in balls are others"
            if not known[None]:
                return "re-proved", f"all {len(close)} members in balls"
        return "re-run", f"{DRAWN} members by chance agree; all listed ones were run again"

    def _rerun(self, query: str, every: Sequence[Sequence[int]]) -> list[tuple[float, bool] | None]:
        """The margin of every member in float64, and whether it satisfies the query; None for what is no member."""
        found: list[tuple[float, bool] | None] = [None] * len(every)
        groups = defaultdict[int, list[int]](list)
        forms: dict[int, list[Form]] = {}
        for i, ids in enumerate(every):
            shape = self._shape(ids)
            if shape is not None:
                forms[i] = self._forms(query, shape, ids)
                groups[len(ids)].append(i)
        for members in groups.values():
            for start in range(0, len(members), BATCH):
                batch = members[start : start + BATCH]
                atoms = [atom for i in batch for form in forms[i] for atom in form[0]]
                layers = {atom[1] for atom in atoms if atom[0] in ("mass", "entropy")}
                output = any(atom[0] in ("logit", "largest") for atom in atoms)
                hooks = hooks_of(atoms)
                values = self.plain.run(np.array([every[i] for i in batch]), layers, output, hooks)
                for layer in lenses_of(atoms):
                    values[f"lens {layer}"] = self.plain.read_out(values[f"blocks.{layer}.hook_resid_post"])
                for b, i in enumerate(batch):
                    found[i] = judged(forms[i], values, b, self.reads)
        return found

    def _shape(self, ids: Sequence[int]) -> Shape | None:
        return next((s for s in self.shapes if s.fillers_of(ids, self.differ) is not None), None)

    def _forms(self, query: str, shape: Shape, ids: Sequence[int]) -> list[Form]:
        if " * " in query or '"' in query:
            raise ValueError("weighted sums and tokens by text are not read in families")
        reader, found = QueryReader(self.net, [""] * len(ids), {}), list[Form]()
        for part in query.split(" & "):
            if lens := _LENS.match(part):
                for text in _ordinary(part[lens.end() :], shape.places, ids):
                    forms = reader.forms(text)
                    layer = int(lens[1])
                    found += [({("lens", layer, a): w for a, w in f[0].items()}, f[1], f[2]) for f in forms]
            elif SITE.match(part):
                named = _with_outputs(part, shape.places, ids)
                found += self.reads.forms(
                    named, lambda at: _positions(at.strip("{}"), shape.places, None), len(ids)
                )
            else:
                found += [form for text in _ordinary(part, shape.places, ids) for form in reader.forms(text)]
        return found

    def _sign(self, query: str, ids: Sequence[int]) -> bool | None:
        """Whether a member satisfies the query over the reals; None if balls do not say."""
        shape = self._shape(ids)
        if shape is None:
            return None
        forms = self._forms(query, shape, ids)
        atoms = [atom for form in forms for atom in form[0]]
        layers = {atom[1] for atom in atoms if atom[0] in ("mass", "entropy")}
        output = any(atom[0] in ("logit", "largest") for atom in atoms)
        (values,) = self.net.run([self.net.embed(ids)], layers, output)
        for layer in lenses_of(atoms):
            values[f"lens {layer}"] = self.net.cut(layer + 1).run([self.net.embed(ids)], (), True)[0][
                "logits"
            ]
        signs = [ball_sign(form, values, self.reads, ids) for form in forms]
        return False if False in signs else None if None in signs else True


def _with_outputs(part: str, places: Mapping[str, Any], ids: Sequence[int]) -> str:
    """A part whose outputs are named by their numbers."""
    return re.sub(r"(logit|argmax=)\{([^{}]*)\}", lambda m: f"{m[1]}{_output(m[2], places, ids)}", part)


def _ordinary(part: str, places: Mapping[str, Any], ids: Sequence[int]) -> Iterator[str]:
    """A part with every role as a position or an output, one for each position where `self` is read."""
    text = _with_outputs(part, places, ids)
    kind, *sets = re.split(r"@(?=[\[{])", text)
    if sets and not (kind.partition(":")[2].startswith("mass") and len(sets) == 1 and sets[0][0] == "{"):
        held = ",".join(map(str, _positions(sets.pop()[1:-1], places, None)))
        where: str | None = f"[{held}]"
    else:
        where = None
    body = "@".join([kind, *sets])
    if "self" not in body:
        yield _placed(body, places, None) + (f"@{where}" if where else "")
        return
    body, _, given = body.partition("@") if "@" in body and not sets else (body, "", "")
    named = where[1:-1] if where else given
    for at in [int(x) % len(ids) for x in named.split(",")] if named else range(len(ids)):
        text = _placed(body, places, at)
        inside = all(0 <= int(x) < len(ids) for x in re.findall(r"(?<=[{,])-?\d+", text))
        if inside:
            yield f"{text}@{at}"


def _placed(text: str, places: Mapping[str, Any], at: int | None) -> str:
    return re.sub(
        r"\{([^{}]*)\}", lambda m: "{" + ",".join(map(str, _positions(m[1], places, at))) + "}", text
    )


def _positions(text: str, places: Mapping[str, Any], at: int | None) -> list[int]:
    found = []
    for item in text.split(","):
        near = _SELF.fullmatch(item)
        if near and at is not None:
            found.append(at + int(near[1] or 0))
        elif re.fullmatch(r"-?\d+", item):
            found.append(int(item))
        else:
            found += _role(item, places)
    return found


def _role(text: str, places: Mapping[str, Any]) -> list[int]:
    match = _ROLE.fullmatch(text)
    if match is None or match[1] not in places:
        raise LookupError(f"there is no slot {text!r}")
    spans = [range(start, stop) for start, stop in places[match[1]]]
    spans = spans if match[2] is None else [spans[int(match[2]) - 1]]
    part = {"first": slice(0, 1), "last": slice(-1, None), None: slice(None)}[match[3]]
    return [position for span in spans for position in span[part]]


def _output(text: str, places: Mapping[str, Any], ids: Sequence[int]) -> int:
    named = text if text.endswith((".first", ".last")) else f"{text}.first"
    (token,) = {ids[position] for position in _role(named, places)}
    return token


def output_named(name: str, places: Mapping[str, Any], ids: Sequence[int]) -> int:
    """An output by its number, or the token of a slot in braces."""
    return int(name) if name.isdigit() else _output(name.strip("{}"), places, ids)


def _interval(held: int, asked: int, low: float, high: float) -> bool:
    """Whether the tails of the binomial distribution at both ends are 2.5 %, as Clopper and Pearson have them."""

    def tail(share: float, ks: range) -> float:
        logs = [
            math.lgamma(asked + 1) - math.lgamma(k + 1) - math.lgamma(asked - k + 1)
            + k * math.log(share) + (asked - k) * math.log1p(-share)
            for k in ks
        ]  # fmt: skip
        return math.fsum(map(math.exp, logs))

    below = low == 0.0 if held == 0 else abs(tail(low, range(held, asked + 1)) - 0.025) < 1e-6
    above = high == 1.0 if held == asked else abs(tail(high, range(held + 1)) - 0.025) < 1e-6
    return below and above
