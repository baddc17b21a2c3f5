"""How a probe is asked: Q1 at the second occurrence of a name, per head and circuit, in one or many processes."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from prooflens.engines.attack import Budget
from prooflens.models import Transformer
from prooflens.queries import Circuit
from prooflens.queries.attention import Specialised
from prooflens.queries.base import Query
from prooflens.studies.base import Settings, StudyError, silent
from prooflens.studies.measure import Case, answered, attacked
from prooflens.studies.prompts import Duplicate

PROBE = Budget(64, 1, 10)
CHECK = Budget(8, 1, 3)
"""Attacks on what is open, and on what is proved: a check."""

Circuits = tuple[tuple[int, ...], ...]
"""Heads of one layer, asked together."""

Item = tuple[Duplicate, float, Circuits]
"""One prompt at one ε."""


@dataclass(frozen=True)
class Probe:
    """Per head: its roles on the clean prompts; per ε and name, which prompts are proved and which stand."""

    layer: int
    n: int
    roles: dict[int, Counter[str]]
    circuits: Circuits
    proved: dict[float, dict[str, list[bool]]]
    standing: dict[float, dict[str, list[bool]]]
    seconds: float

    def name(self, head: int) -> str:
        """`0.6`."""
        return f"{self.layer}.{head}"

    def role(self, head: int) -> tuple[str, int]:
        """The most frequent role, and on how many prompts."""
        return self.roles[head].most_common(1)[0]


def joint_margins(case: Case, heads: Sequence[int], layer: int, position: int) -> Query:
    """The sum of the heads' margins between their two most attended tokens, bounded as one functional."""
    parts = []
    setting = case.problem.setting([layer])
    keys = setting.keys(position)
    for head in heads:
        scores = setting.scores[layer][head, position]
        first, second = sorted(keys, key=lambda key: -float(scores[key]))[:2]
        parts.append(Specialised((first,), (second,), heads=f"{layer}.{head}", positions=(position,)))
    return Circuit(tuple(parts), (1.0,) * len(parts))


def joint_name(circuit: Sequence[int]) -> str:
    """How the joint claim of a circuit is called."""
    return f"joint {','.join(map(str, circuit))}"


@dataclass(frozen=True)
class Answer:
    """One prompt at one ε: what is proved and what stands, by the name of the head or circuit."""

    proved: dict[str, bool]
    standing: dict[str, bool]
    seconds: float


@dataclass(frozen=True)
class Asked:
    """Who is asked how: a model cut after a layer, and an engine."""

    settings: Settings
    model: Transformer
    layer: int
    engine: str

    @classmethod
    def of(cls, settings: Settings, usual: str = "smollm2") -> Asked:
        """The layer and engine that were asked for, or layer 0 by `layer0`."""
        layer = settings.layer or 0
        engine = settings.engine or ("layer0" if layer == 0 else "crown")
        return cls(settings, settings.load(usual).cut(layer + 1), layer, engine)

    def probe(
        self,
        places: Sequence[Duplicate],
        radii: Sequence[float],
        roles: dict[int, Counter[str]],
        circuits: Circuits = (),
    ) -> Probe:
        """Every head of the layer, every prompt, every ε."""
        found = Probe(self.layer, len(places), roles, circuits, {}, {}, 0.0)
        items = [(place, eps, circuits) for eps, place in itertools.product(radii, places)]
        seconds = 0.0
        for step, ((_, eps, _), answer) in enumerate(zip(items, self._answers(items), strict=True)):
            self.settings.tell(f"ε = {eps:g}", (step + 1) / len(items))
            seconds += answer.seconds
            for kept, source in ((found.proved, answer.proved), (found.standing, answer.standing)):
                for name, holds in source.items():
                    kept.setdefault(eps, {}).setdefault(name, []).append(holds)
        return replace(found, seconds=seconds / len(items))

    def _answers(self, items: Sequence[Item]) -> Iterator[Answer]:
        """In the order of the items, by this process or by as many others as were asked for."""
        if self.settings.jobs == 1:
            yield from itertools.starmap(self.one, items)
            return
        alone = replace(self.settings, tell=silent, kept=None, jobs=1)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.settings.jobs, context, _start, (alone,)) as pool:
            yield from pool.map(_work, (_moved(item, "cpu") for item in items))

    def one(self, place: Duplicate, eps: float, circuits: Circuits) -> Answer:
        """One prompt at one ε. A proved claim that the attack breaks is an error."""
        case = Case.of(self.model, place.prompt, eps, {"Q1": "top1"}, self.layer, [place.second])
        setting = case.problem.setting([self.layer])
        joint = {
            joint_name(circuit): joint_margins(case, circuit, self.layer, place.second).bind(setting)
            for circuit in circuits
        }
        case = Case(case.problem, {**case.claims, **joint})
        tally = answered(self.engine, [case])
        if tally.reason:
            raise StudyError(f"{self.engine} cannot answer: {tally.reason}")
        left = attacked([case], PROBE, self.settings.seed, tally, CHECK)
        proved, standing = (
            {f"{self.layer}.{head}": holds for head, holds in enumerate(table["Q1"])}
            | {name: table[name][0] for name in joint}
            for table in (tally.holds, left.holds)
        )
        if any(holds and not standing[name] for name, holds in proved.items()):
            raise StudyError(f"{self.engine} proved a claim that the attack breaks: report this")
        return Answer(proved, standing, tally.seconds)


_ASKED: list[Asked] = []
"""What a process of the pool holds."""


def _start(settings: Settings) -> None:
    torch.set_num_threads(1)
    _ASKED.append(Asked.of(settings))


def _work(item: Item) -> Answer:
    return _ASKED[0].one(*_moved(item, _ASKED[0].model.device))


def _moved(item: Item, device: torch.device | str) -> Item:
    """The item with its prompt elsewhere: tensors travel between processes on the CPU."""
    place, eps, circuits = item
    prompt = replace(place.prompt, x=place.prompt.x.to(device))
    return replace(place, prompt=prompt), eps, circuits
