"""What a row says that it is about: its query's short form against the functionals of its claim.

A forger who writes fresh hashes can store a weaker claim under a stronger query. Here the short form (docs/queries.md)
is read again and its functionals are written out. Where the query leaves a choice to the clean input (which keys are on
top), the choice is the claim's, and no clean score may contradict it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb

from prooflens.checker.attribution import attribution
from prooflens.checker.claims import OUTPUTS, Functional, keys_of, value
from prooflens.checker.distributions import KINDS as DISTRIBUTIONS
from prooflens.checker.network import Array, Network

Form = tuple[dict[tuple[Any, ...], Fraction], arb, str]
"""Weights of atoms, constant, sense."""

_ITEM = r'(?:-?\d+|"(?:[^"\\]|\\.)*")'
_ITEMS = rf"{_ITEM}(?:,{_ITEM})*"
_NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
_READOUT = (
    rf"(?:neuron \d+\.\d+|feature [\w-]+\.\d+|dla(?:-live)? [\w.]+ logit\d+-logit\d+"
    rf"|read\([\w.]+@{_ITEM},[\w-]+\))"
)
_SITE = rf"{_READOUT}(?:@{_ITEM})?"
_PART = re.compile(
    rf"(?:(?P<weight>{_NUMBER}) \* )?(?:(?P<heads>[\w.,\- ]+):)?(?:(?P<order>top|rank)(?P<k>\d+)"
    rf"(?:=\{{(?P<set>{_ITEMS})\}})?"
    rf"|mass>=(?P<tau>{_NUMBER})(?:@\{{(?P<on>{_ITEMS})\}})?|spec\{{(?P<A>{_ITEMS})\}}>\{{(?P<B>{_ITEMS})\}}"
    rf"|(?:(?P<low>{_NUMBER})<=)?(?P<entropy>entropy)(?:<=(?P<high>{_NUMBER})|>=(?P<least>{_NUMBER}))?"
    rf"|(?:lens (?P<lens>\d+) )?(?P<argmax>argmax)(?:=(?P<answer>\d+))?"
    rf"|(?:lens (?P<lens_of_two>\d+) )?logit(?P<winner>\d+)>logit(?P<loser>\d+)"
    rf"|(?P<one>{_SITE})(?P<over>>=|<=|>|<)(?P<two>{_SITE})"
    rf"|(?:(?P<level>(?:lens \d+ )?logit\d+|{_READOUT})"
    rf"(?: (?P<word>active|off|(?:not )?top\d+))?(?:(?P<compare>>=|<=|>|<)(?P<than>{_NUMBER}))?))"
    rf"(?:@\[?(?P<at>{_ITEMS})\]?)?"
)


class QueryReader:
    """Reads the queries of rows about one prompt: `texts` its tokens, `clean` the network's values at the centre.

    `names` are those of the outputs of a network that ends at a hook.
    """

    def __init__(
        self, net: Network, texts: list[str], clean: dict[Any, Any], names: Sequence[str] = ()
    ) -> None:
        self.net, self.arch, self.texts, self.clean, self.names = net, net.arch, texts, clean, list(names)
        self.size = len(texts)
        self.scales: dict[int, arb] = {}  # of the outputs that read attributions
        self.moves: list[
            arb
        ] = []  # how far the stored constants are from those of the query that was read last

    def differs(self, query: str, place: tuple[Any, ...], stored: list[Functional]) -> str:
        """Why the functionals are not those of the query ('' if they are); ValueError where it does not say enough."""
        total, left, found = query.endswith(" > 0"), list[Any](map(dict, stored)), list[Form]()
        for part in _parts(query.removesuffix(" > 0"), " + " if total else " & "):
            for at in self._places(part, place):
                forms = self._forms(part, at, left)
                found += forms
                if total:  # one functional, of which each part has its terms
                    weight = float(part["weight"])
                    scaled = {atom: Fraction(weight) * w for atom, w in forms[0][0].items()}
                    found[-1] = scaled, weight * forms[0][1], ">0"
                    left[0]["terms"] = left[0]["terms"][len(scaled) :]
                else:
                    left = left[len(forms) :]
        if total:
            atoms = defaultdict[tuple[Any, ...], Fraction](Fraction)
            for atom, share in itertools.chain.from_iterable(form[0].items() for form in found):
                atoms[atom] += share
            found = [(dict(atoms), sum((form[1] for form in found), arb(0)), ">0")]
        # An attribution's threshold is moved by what rounding of its direction may change, to the strict side.
        near = 1e-6 if re.search(r"\bdla\b", query) else 1e-9
        same = [same_form(*pair, near) for pair in zip(stored, found, strict=False)]
        self.moves = [arb(own["constant"]) - form[1] for own, form in zip(stored, found, strict=False)]
        return "" if all(same) and len(stored) == len(found) else "the claim is not what its query asks for"

    def forms(self, text: str) -> list[Form]:
        """The functionals of a query that leaves nothing to a clean input: it names its heads, and all tokens."""
        found: list[Form] = []
        for part in _parts(text, " & "):
            for at in self._places(part, (None, None, None)):
                if part["order"] and not part["set"]:
                    raise ValueError("the query compares with a clean input")
                found += self._forms(part, at, [])
        return found

    def _places(self, part: Mapping[str, Any], place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The rows of attention of a part: its own heads and positions, or those of the row."""
        if part["argmax"] or part["winner"] or part["level"] or part["one"]:
            yield ()
        elif place[0] is not None and not part["heads"] and not part["at"]:
            yield place
        elif place[0] is None and part["heads"]:
            at = self._tokens(part["at"]) if part["at"] else range(self.size)
            yield from ((*head, i) for head in self._heads(part["heads"]) for i in at)
        else:
            raise ValueError("the query does not say of which heads it was asked")

    def _heads(self, text: str) -> list[tuple[int, int]]:
        every, found = range(self.arch["n_heads"]), list[tuple[int, int]]()
        for word in (f"0-{self.arch['n_layers'] - 1}" if text == "all" else text).split(","):
            first, dot, head = word.strip().partition(".")
            start, _, end = first.partition("-")
            layers = range(int(start), int(end or start) + 1)
            found += [(layer, h) for layer in layers for h in ([int(head)] if dot else every)]
        return list(dict.fromkeys(found))

    def _tokens(self, text: str) -> list[int]:
        """Positions by index or by text, with or without the tokenizer's word mark."""
        found, marks = [], " \u0120\u2581"
        for token in json.loads(f"[{text}]"):
            exact = [i for i, t in enumerate(self.texts) if t == token]
            loose = [i for i, t in enumerate(self.texts) if t.lstrip(marks) == str(token).lstrip(marks)]
            found += [token % self.size] if isinstance(token, int) else exact or loose
        return list(dict.fromkeys(found))

    def _forms(self, part: Mapping[str, Any], at: tuple[Any, ...], left: list[Functional]) -> list[Form]:
        """The functionals of one part at one row of attention."""
        self._check_lens(part)
        if part["winner"]:
            return [_margin(("logit", int(part["winner"])), ("logit", int(part["loser"])))]
        if part["argmax"]:
            return self._argmax(left, part["answer"])
        if part["level"]:
            return [self._level(part)]
        if part["one"]:
            return [self._compared(part)]
        keys = np.flatnonzero(self.net.mask(self.size, at[0])[at[2]]).tolist()
        if part["set"]:
            return _over(self._tokens(part["set"]), int(part["k"]), at, keys)
        if part["order"]:
            return self._ranked(part["order"], min(int(part["k"]), len(keys)), at, keys, left)
        if part["entropy"]:
            atom, low = ("entropy", *at, tuple(keys)), part["low"] or part["least"]
            if low is None and part["high"] is None:
                return [({atom: Fraction(1)}, arb(0), "range")]
            ends = ((1, low), (-1, part["high"]))
            return [({atom: Fraction(s)}, -s * arb(float(x)), ">=0") for s, x in ends if x is not None]
        if part["tau"]:
            tau, chosen = arb(float(part["tau"])), part["on"]
            A = self._tokens(chosen) if chosen else keys_of(left[0]["terms"][0])[:1] if keys[1:] else keys
            if not chosen and keys[1:]:
                self._on_top(A, at, keys)
            B, constant, sense = [j for j in keys if j not in A], -(tau / (1 - tau)).log(), ">=0"
        else:
            A, B = self._tokens(part["A"]), self._tokens(part["B"])
            tau, constant, sense = arb(0), arb(0), ">0"
        A, B = ([j for j in keys if j in group] for group in (A, B))
        if not A or not B:  # decided by the mask: masses 1 and 0, or a sign
            return [({}, arb(1 if A else 0 if part["tau"] else -1) - tau, sense)]
        atoms, _, _ = _margin(("mass", *at, tuple(A)), ("mass", *at, tuple(B)))
        return [(atoms, constant, sense)]

    def _level(self, part: Mapping[str, Any]) -> Form:
        """An output beyond a number, or its range; of a network that ends at a hook, the output that reads the site."""
        sign, sense = 1 if (part["compare"] or ">")[0] == ">" else -1, part["compare"] or "range"
        if part["word"]:
            sign, sense = (1, ">") if part["word"] == "active" else (-1, "<=")
        index = self._output(part)
        if part["word"] and "top" in part["word"]:
            return self._standing(part, index)
        wanted = {"range": "range", ">": ">0", "<": ">0", ">=": ">=0", "<=": ">=0"}[sense]
        return {("logit", index): Fraction(sign)}, -sign * arb(float(part["than"] or 0)), wanted

    def _standing(self, part: Mapping[str, Any], index: int) -> Form:
        """A feature above 0 and among the k largest of its dictionary, or not: against all outputs of that name."""
        word, k = part["word"].split("top")
        owner = self.names[index].rpartition(".")[0]
        rivals = [i for i, name in enumerate(self.names) if name.rpartition(".")[0] == owner and i != index]
        sign, sense = (-1, ">=0") if word else (1, ">0")
        return {("standing", index, int(k), tuple(rivals)): Fraction(sign)}, arb(0), sense

    def _compared(self, part: Mapping[str, Any]) -> Form:
        """One readout above another of the same network."""
        sides = []
        for text in (part["one"], part["two"]):
            readout, _, at = text.rpartition("@") if re.search(r"@[^@)]*$", text) else (text, "", None)
            sides.append(
                self._output({"level": readout, "at": at, "compare": None, "than": None, "text": text})
            )
        held = [self.scales[side] for side in sides if side in self.scales]
        if len(held) == 2 and not abs(held[0] - held[1]) < 1e-9 * abs(held[0]):
            raise LookupError("two attributions are read at two scales")
        sign, over = (1, -1) if part["over"][0] == ">" else (-1, 1), part["over"]
        atoms = {("logit", side): Fraction(s) for side, s in zip(sides, sign, strict=True)}
        return atoms, arb(0), ">=0" if over.endswith("=") else ">0"

    def _check_lens(self, part: Mapping[str, Any]) -> None:
        """LookupError where a lens looks at another block than the network's last."""
        level = re.match(r"lens (\d+) ", part["level"] or "")
        layer = part["lens"] or part["lens_of_two"] or (level and level[1])
        whole = self.arch.get("read_hook") is None
        if layer is not None and not (whole and self.arch["n_layers"] == int(layer) + 1):
            raise LookupError("the network is not cut behind the block of the lens")

    def _output(self, part: Mapping[str, Any]) -> int:
        """The output that a part reads; LookupError where the network does not end at what the part names."""
        kind, _, name = re.sub(r"^lens \d+ ", "", part["level"]).partition(" ")
        if kind.startswith("logit"):
            return int(kind.removeprefix("logit"))
        given = re.match(rf"read\(([\w.]+)@({_ITEM}),", part["level"])
        tokens = self._tokens((given[2] if given else part["at"]) or "-1")
        if kind.startswith("read("):
            hook = "" if given is None else given[1]
            index = self._named(kind.removesuffix(")").rpartition(",")[2], part)
            self._row(index, hook, tokens)
            return index
        if kind == "feature":
            index = self._named(name, part)
            self._row(index, None, tokens)
            return index
        if kind in ("dla", "dla-live"):
            return self._attributed(kind, name, part)
        layer, _, neuron = name.partition(".")
        index, row = self._named(part["level"], part), np.zeros(int(self.arch["d_ff"]))
        row[int(neuron)] = 1.0
        bias = self.net.weights.get("read.bias", np.zeros(len(self.names)))[index]
        stored = self._row(index, f"blocks.{layer}.mlp.hook_pre", tokens)
        if bias or stored.shape != row.shape or np.any(stored != row):
            raise LookupError("another neuron is read")
        return index

    def _row(self, index: int, hook: str | None, tokens: list[int]) -> Array:
        """The direction by which an output reads a hook at a token; LookupError where it reads anything else.

        Args:
            index: the output.
            hook: the value; None for any.
            tokens: the token.
        """
        places = [(self.arch.get("read_hook"), self.arch.get("read_position"))]
        weight: Array = np.asarray(self.net.weights["read.weight"][index], dtype=np.float64)
        width = len(weight)
        if self.arch.get("beside_hook") is not None:
            places.append((self.arch["beside_hook"], self.arch["beside_position"]))
            width = _width(self.arch, self.arch["read_hook"])
        if not any([position] == tokens for _, position in places):
            raise LookupError("it is read at another token")
        parts: list[Array] = [weight[:width], weight[width:]]
        for number, (name, position) in enumerate(places):
            if [position] == tokens and hook in (None, name) and not np.any(parts[1 - number]):
                return parts[number]
        raise LookupError("another hook is read")

    def _attributed(self, kind: str, name: str, part: Mapping[str, Any]) -> int:
        """The output that reads a direct logit attribution: its direction is that of the weights, times a scale > 0."""
        if kind == "dla-live" and (part["compare"] is None or float(part["than"]) != 0.0):
            raise LookupError("a live attribution has a sign alone")
        place, _, pair = name.partition(" ")
        first, second = (int(side) for side in re.findall(r"logit(\d+)", pair))
        hook, wanted = attribution(self.net, place, first, second)
        index = self._named(f"dla {name}", part)
        stored = self._row(index, hook, [self.size - 1])
        largest = int(np.argmax([abs(float(w)) for w in wanted]))
        scale = arb(stored[largest]) / wanted[largest]
        near = 1e-9 * abs(stored[largest])
        same = len(stored) == len(wanted) and all(
            abs(s - scale * w) < near for s, w in zip(stored.tolist(), wanted, strict=True)
        )
        bias = self.net.weights.get("read.bias", np.zeros(len(self.names)))[index]
        if bias or not scale > 0 or not same:
            raise LookupError("another attribution is read")
        self.scales[index] = scale
        return index

    def _named(self, name: str, part: Mapping[str, Any]) -> int:
        """The output of a name; where two places are read, outputs are called as their readouts are written."""
        if self.arch.get("beside_hook") is not None:
            name = part.get("text") or name
        if name not in self.names:
            raise LookupError(f"no output is called {name}")
        return self.names.index(name)

    def _ranked(
        self, kind: str, k: int, at: tuple[Any, ...], keys: list[int], left: list[Functional]
    ) -> list[Form]:
        count = k * (len(keys) - k) if kind == "top" else len(keys) - 1
        pairs = [(f["terms"][0][5], f["terms"][1][5]) for f in left[:count]]
        if not count:
            return []
        inside = list(dict.fromkeys([i for i, _ in pairs] + [j for _, j in pairs[-1:] if k == len(keys)]))
        outside = list(dict.fromkeys(j for _, j in pairs if j not in inside))
        if len(inside) != k or sorted(inside + outside) != keys:
            raise LookupError("the claim does not ask for the clean margins")
        last = [(inside[-1], j) for j in outside]
        pairs = (
            [*itertools.product(inside, outside)] if kind == "top" else [*itertools.pairwise(inside), *last]
        )
        for i, j in pairs:
            self._on_top([i], at, [j])
        return [_margin(("mass", *at, (i,)), ("mass", *at, (j,))) for i, j in pairs]

    def _on_top(self, chosen: list[int], at: tuple[Any, ...], keys: list[int]) -> None:
        scores = self.clean[at[0]][at[1], at[2]]
        if any(scores[j] > scores[i] for i in chosen for j in keys):
            raise LookupError("the claim is not about the clean top keys")

    def _argmax(self, left: list[Functional], answer: str | None) -> list[Form]:
        """Margins of the stated or the clean answer over some outputs, and one over all that these leave out."""
        size, terms = self.arch["d_out"], (f["terms"] for f in left)
        direct = list(itertools.takewhile(lambda t: t[1][1] == "logit", terms))
        winner, others = left[0]["terms"][0][2] if left else 0, [t[1][2] for t in direct]
        winner = winner if answer is None else int(answer)
        named = tuple(sorted({winner, *others}))
        forms = [_margin(("logit", winner), ("logit", j)) for j in others]
        forms += [_margin(("logit", winner), ("largest", named))] if len(named) < size else []
        if answer is None and any(value(f, self.clean) < 0 for f in left[: len(forms)]):
            raise LookupError("the claim is not about the clean answer")
        return forms


def _width(arch: Mapping[str, Any], hook: str) -> int:
    """How many numbers a token has at a hook."""
    if ".mlp." in hook:
        return int(arch["d_ff"])
    if ".attn." not in hook:
        return int(arch["d_model"])
    each, shared = arch["d_head"] or arch["d_model"] // arch["n_heads"], arch["n_kv_heads"] or arch["n_heads"]
    return int(each * (arch["n_heads"] if hook.endswith(("_q", "_z")) else shared))


def _parts(query: str, between: str) -> Iterator[Mapping[str, Any]]:
    at = 0
    while match := _PART.match(query, at):
        yield match.groupdict()
        at = match.end()
        if at == len(query):
            return
        at += len(between) if query.startswith(between, at) else len(query)
    raise LookupError(f"the query {query!r} is not one that there is")


def _over(inside: list[int], k: int, at: tuple[Any, ...], keys: list[int]) -> list[Form]:
    """Margins of stated keys over all others; a constant below 0 where the mask leaves one of them out."""
    if len(inside) != k:
        raise LookupError("the query names more or fewer tokens than it asks for")
    if any(i not in keys for i in inside):
        return [({}, arb(-1), ">0")]
    pairs = itertools.product(inside, [j for j in keys if j not in inside])
    return [_margin(("mass", *at, (i,)), ("mass", *at, (j,))) for i, j in pairs]


def _margin(plus: tuple[Any, ...], minus: tuple[Any, ...]) -> Form:
    # An output against itself, as where a slot's token is the other output: the terms cancel.
    return {plus: Fraction(0)} if plus == minus else {plus: Fraction(1), minus: Fraction(-1)}, arb(0), ">0"


def same_form(stored: Functional, form: Form, distance: float = 1e-9) -> bool:
    """Equal weights of equal atoms; a constant near the query's and, where it decides nothing, no larger."""
    atoms = defaultdict[tuple[Any, ...], Fraction](Fraction)
    for weight, kind, *where in stored["terms"]:
        if kind == "standing":
            atom: tuple[Any, ...] = (kind, where[0], where[1], tuple(sorted(where[2])))
        elif kind in DISTRIBUTIONS:
            atom = kind, *(tuple(x) if isinstance(x, list) else x for x in where)
        elif kind in OUTPUTS:
            atom = kind, tuple(where[0]) if kind == "largest" else where[0]
        else:
            keys = where[3] if isinstance(where[3], list) else [where[3]]
            atom = "entropy" if kind == "entropy" else "mass", *where[:3], tuple(keys)
        atoms[atom] += Fraction(weight)
    over = arb(stored["constant"]) - form[1]
    near = abs(over) < distance * (1 + abs(form[1])) and (not atoms or not over > 0)
    return bool(dict(atoms) == form[0] and stored["sense"] == form[2] and near)
