"""Values of functionals at members of families: in float64, and their signs in balls; readouts of hooks among them.

A readout is the atom ("site", hook, token, name): w·h + b with the row of a neuron, or with what the run keeps as
`read/NAME/weight` and `read/NAME/bias`. A feature among the k largest is ("standing", its atom, k, the other atoms).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb

from prooflens.checker.attribution import attribution
from prooflens.checker.claims import standing
from prooflens.checker.network import Array, Network
from prooflens.checker.plain import UNNOTED
from prooflens.checker.query_reader import Form

_NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
_TOKEN = r"(?:-?\d+|\{[\w.]+\})"
_NAMED = r"(?:neuron \d+\.\d+|feature [\w-]+\.\d+)"
_READ = rf"read\([\w.]+@{_TOKEN},[\w-]+\)"
_SIDE = rf"(?:{_NAMED}@{_TOKEN}|{_READ})"
_COMPARED = re.compile(rf"({_SIDE})(>=|<=|>|<)({_SIDE})")
_LEVEL = re.compile(
    rf"(?:({_NAMED})( active| off| (?:not )?top\d+|(?:>=|<=|>|<){_NUMBER})@({_TOKEN})"
    rf"|({_READ})((?:>=|<=|>|<){_NUMBER}))"
)
_ATTRIBUTED = re.compile(r"(dla(?:-live)? [\w.]+ logit\d+-logit\d+)(>=|<=|>|<)0\.0")
SITE = re.compile(r"(?:neuron |feature |read\(|dla)")
"""How parts about values inside the model begin."""

Positions = Callable[[str], list[int]]
"""The tokens that a name means: an index, or a slot."""


class Readouts:
    """The readouts of a run about a family: directions as the run keeps them, hooks of dictionaries by feature."""

    def __init__(self, net: Network, hooks: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
        self.net, self.hooks, self.tensors = net, hooks, tensors

    def forms(self, part: str, places: Positions, size: int) -> Iterator[Form]:
        """The functionals of a part, one for every token that it names."""
        if match := _COMPARED.fullmatch(part):
            sides = [self._side(text, places, size) for text in (match[1], match[3])]
            (one,), (other,) = sides
            sign = 1 if match[2][0] == ">" else -1
            yield {one: Fraction(sign), other: Fraction(-sign)}, arb(0), _sense(match[2])
            return
        if match := _ATTRIBUTED.fullmatch(part):
            sign = 1 if match[2][0] == ">" else -1
            hook, _ = self._attribution(match[1])
            yield {("site", hook, size - 1, match[1]): Fraction(sign)}, arb(0), _sense(match[2])
            return
        match = _LEVEL.fullmatch(part)
        if match is None:
            raise LookupError(f"the query {part!r} is not one that there is")
        if "top" in (match[2] or ""):
            yield from self._standing(match, places, size)
            return
        level = {" active": ">0.0", " off": "<=0.0"}.get(match[2], match[2] or match[5])
        compare, than = re.fullmatch(rf"(>=|<=|>|<)({_NUMBER})", level).groups()  # type: ignore[union-attr]
        sign = 1 if compare[0] == ">" else -1
        text = match[4] or f"{match[1]}@{match[3]}"
        for atom in self._side(text, places, size):
            yield {atom: Fraction(sign)}, -sign * arb(float(than)), _sense(compare)

    def _standing(self, match: re.Match[str], places: Positions, size: int) -> Iterator[Form]:
        """A feature above 0 and among the k largest of its dictionary, or not, at every token that is named."""
        word, k = match[2].strip().split("top")
        owner = match[1].partition(" ")[2].rpartition(".")[0]
        group = [name for name in self.hooks if name.rpartition(".")[0] == owner]
        for atom in self._side(f"{match[1]}@{match[3]}", places, size):
            rivals = tuple((*atom[:3], name) for name in group if name != atom[3])
            sign, sense = (-1, ">=0") if word else (1, ">0")
            yield {("standing", atom, int(k), rivals): Fraction(sign)}, arb(0), sense

    def _side(self, text: str, places: Positions, size: int) -> list[tuple[Any, ...]]:
        """The atoms of a readout."""
        if text.startswith("read("):
            hook, _, rest = text.removeprefix("read(").partition("@")
            at, _, name = rest.removesuffix(")").rpartition(",")
        else:
            kept, _, at = text.rpartition("@")
            kind, _, name = kept.partition(" ")
            layer = name.partition(".")[0]
            hook = f"blocks.{layer}.mlp.hook_pre" if kind == "neuron" else self.hooks[name]
            name = kept if kind == "neuron" else name
        if hook.endswith(UNNOTED):
            raise ValueError(f"{hook} is not run again")
        found = places(at)
        if not all(-size <= position < size for position in found):
            raise LookupError(f"there is no token {at}")
        return [("site", hook, position % size, name) for position in found]

    def _attribution(self, name: str) -> tuple[str, Any]:
        """The hook and the direction, as balls, of what a part adds to a difference of outputs, up to a scale > 0."""
        _, place, pair = name.split(" ")
        first, second = (int(side) for side in re.findall(r"logit(\d+)", pair))
        return attribution(self.net, place, first, second)

    def row(self, name: str) -> tuple[Array, float]:
        """The direction and the bias of a readout."""
        if name.startswith("neuron "):
            row = np.zeros(int(self.net.arch["d_ff"]))
            row[int(name.rpartition(".")[2])] = 1.0
            return row, 0.0
        if name.startswith("dla"):
            return np.array([float(w) for w in self._attribution(name)[1]]), 0.0
        return self.tensors[f"read/{name}/weight"], float(self.tensors[f"read/{name}/bias"][0])

    def value(self, atom: tuple[Any, ...], values: Mapping[Any, Any], b: int) -> float:
        """A readout of one prompt in float64."""
        row, bias = self.row(atom[3])
        return float(values[atom[1]][b, atom[2]] @ row) + bias

    def ball(self, atom: tuple[Any, ...], ids: Sequence[int]) -> arb:
        """A readout of one prompt as a ball."""
        if atom[3].startswith("dla"):  # its direction is no row of numbers
            return arb("nan")
        (_, hook, position, _), (row, bias) = atom, self.row(atom[3])
        ends = self.net.cut(int(hook.split(".")[1]) + 1).read_at(hook, position, row[None], np.array([bias]))
        return ends.run([self.net.embed(ids)], (), True)[0]["logits"][0]


def _sense(compare: str) -> str:
    return ">=0" if compare.endswith("=") else ">0"


def judged(forms: Sequence[Form], values: Mapping[Any, Any], b: int, reads: Readouts) -> tuple[float, bool]:
    """The smallest functional of a member, and whether all have the sign that is wanted.

    Args:
        forms: the functionals.
        values: scores and outputs of members.
        b: the member's place among them.
        reads: readouts of members.
    """
    margins = [
        float(c.mid()) + sum(float(w) * _atom(a, values, b, reads) for a, w in atoms.items())
        for atoms, c, _ in forms
    ]
    met = [m > 0 or (m >= 0 and sense == ">=0") for m, (_, _, sense) in zip(margins, forms, strict=True)]
    return min(margins, default=math.inf), all(met)


def hooks_of(atoms: Sequence[tuple[Any, ...]]) -> set[str]:
    """The hooks that atoms read."""
    read = {atom[1] if atom[0] == "site" else atom[1][1] for atom in atoms if atom[0] in ("site", "standing")}
    return read | {f"blocks.{layer}.hook_resid_post" for layer in lenses_of(atoms)}


def lenses_of(atoms: Sequence[tuple[Any, ...]]) -> set[int]:
    """The blocks behind which atoms look through the head."""
    return {atom[1] for atom in atoms if atom[0] == "lens"}


def _atom(atom: tuple[Any, ...], values: Mapping[Any, Any], b: int, reads: Readouts) -> float:
    if atom[0] == "standing":
        own = reads.value(atom[1], values, b)
        gaps = sorted(own - reads.value(rival, values, b) for rival in atom[3])
        return min(own, gaps[atom[2] - 1]) if atom[2] <= len(gaps) else own
    if atom[0] == "site":
        return reads.value(atom, values, b)
    if atom[0] == "lens":
        return _atom(atom[2], {"logits": values[f"lens {atom[1]}"]}, b, reads)
    if atom[0] == "logit":
        return float(values["logits"][b, atom[1]])
    if atom[0] == "largest":
        return float(np.delete(values["logits"][b], list(atom[1])).max())
    _, layer, head, at, keys = atom
    row = values[layer][b, head, at, list(keys)]
    top = row.max()
    e = np.exp(row - top)
    lse = float(top + np.log(e.sum()))
    return lse if atom[0] == "mass" else lse - float((e * row).sum() / e.sum())


def ball_sign(form: Form, values: Mapping[Any, Any], reads: Readouts, ids: Sequence[int]) -> bool | None:
    """Whether a functional has the sign that is wanted of it at a member; None if its ball hides that.

    Args:
        form: the functional.
        values: the member's scores and outputs, in balls.
        reads: readouts of members.
        ids: the member's tokens.
    """
    total = form[1]
    for atom, weight in form[0].items():
        if atom[0] == "site":
            value = reads.ball(atom, ids)
        elif atom[0] == "standing":
            value = standing(reads.ball(atom[1], ids), [reads.ball(rival, ids) for rival in atom[3]], atom[2])
        elif atom[0] in ("logit", "largest", "lens"):
            held = values[f"lens {atom[1]}"] if atom[0] == "lens" else values["logits"]
            atom = atom[2] if atom[0] == "lens" else atom
            read = [held[atom[1]]] if atom[0] == "logit" else np.delete(held, list(atom[1])).tolist()
            value = read[0]
            for other in read[1:]:
                value = value.max(other)
        else:
            row = [values[atom[1]][atom[2], atom[3], key] for key in atom[4]]
            e = [(x - row[0].mid()).exp() for x in row]
            norm = sum(e, arb(0))
            value = norm.log() + row[0].mid()
            if atom[0] == "entropy":
                value -= sum((x * y for x, y in zip(e, row, strict=True)), arb(0)) / norm
        total = total + value * arb(weight.numerator) / arb(weight.denominator)
    if total > 0 or (form[2] == ">=0" and total >= 0):
        return True
    return False if total < 0 or (form[2] == ">0" and total <= 0) else None
