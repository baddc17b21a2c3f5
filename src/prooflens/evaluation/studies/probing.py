"""How a probe is asked: Q1 at the second occurrence of a name, per head and circuit, in one or many processes.

What is answered is kept as it comes (`journal`): a run that fails goes on where it was when it is started again.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from prooflens.engines.attack import AttackBudget
from prooflens.engines.protocol import EngineOptions, default_memory
from prooflens.evaluation.studies.base import CHOICES, StudyError, StudySettings, silent
from prooflens.evaluation.studies.journal import Journal, ProbeAnswer
from prooflens.evaluation.studies.measure import StudyCase, answered, attacked
from prooflens.evaluation.studies.prompts import Duplicate
from prooflens.memory import is_shortage
from prooflens.models import Transformer
from prooflens.queries import Circuit
from prooflens.queries.attention import Specialised
from prooflens.queries.base import Query

PROBE = AttackBudget(64, 1, 10)
CHECK = AttackBudget(8, 1, 3)
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
    earlier: int = 0
    """How many answers were kept from a run that did not end."""

    def name(self, head: int) -> str:
        """`0.6`."""
        return f"{self.layer}.{head}"

    def role(self, head: int) -> tuple[str, int]:
        """The most frequent role, and on how many prompts."""
        return self.roles[head].most_common(1)[0]


def joint_margins(case: StudyCase, heads: Sequence[int], layer: int, position: int) -> Query:
    """Return the sum of the heads' margins between their two most attended tokens, bounded as one functional.

    Args:
        case: the problem.
        heads: the heads of the layer.
        layer: the layer.
        position: the query's position.
    """
    parts = []
    setting = case.problem.setting([layer])
    keys = setting.keys(position, layer)
    for head in heads:
        scores = setting.scores[layer][head, position]
        first, second = sorted(keys, key=lambda key: -float(scores[key]))[:2]
        parts.append(Specialised((first,), (second,), heads=f"{layer}.{head}", positions=(position,)))
    return Circuit(tuple(parts), (1.0,) * len(parts))


def joint_name(circuit: Sequence[int]) -> str:
    """How the joint claim of a circuit is called."""
    return f"joint {','.join(map(str, circuit))}"


@dataclass(frozen=True)
class ProbeRun:
    """Who is asked how: a model cut after a layer, and an engine."""

    settings: StudySettings
    model: Transformer
    layer: int
    engine: str
    memory: int | None = None
    """Bytes that an engine which takes a limit may use; None: what it takes where it is alone."""

    @classmethod
    def of(cls, settings: StudySettings, usual: str = "smollm2", memory: int | None = None) -> ProbeRun:
        """The layer and engine that were asked for, or layer 0 by `layer0`."""
        layer = settings.layer or 0
        engine = settings.engine or ("layer0" if layer == 0 else "crown")
        return cls(settings, settings.load(usual).cut(layer + 1), layer, engine, memory)

    def probe(
        self,
        places: Sequence[Duplicate],
        radii: Sequence[float],
        roles: dict[int, Counter[str]],
        circuits: Circuits = (),
    ) -> Probe:
        """Ask about every head of the layer, every prompt and every ε.

        Args:
            places: prompts with a token that occurs twice.
            radii: the ε.
            roles: what each head looks at on the clean prompts, counted.
            circuits: groups of heads that are also asked about jointly.
        """
        found = Probe(self.layer, len(places), roles, circuits, {}, {}, 0.0)
        items = [(place, eps, circuits) for eps, place in itertools.product(radii, places)]
        journal, keys = Journal.of(self.settings), self._keys(items)
        answers = {key: answer for key, answer in journal.read().items() if key in keys}
        earlier = len(answers)
        left = {key: item for key, item in zip(keys, items, strict=True) if key not in answers}
        for key, answer in self._answers(left):
            journal.add(key, answer)
            answers[key] = answer
            self.settings.tell(f"ε = {left[key][1]:g}", len(answers) / len(items))
        for key, (_, eps, _) in zip(keys, items, strict=True):
            sides = (found.proved, answers[key].proved), (found.standing, answers[key].standing)
            for kept, source in sides:
                for name, holds in source.items():
                    kept.setdefault(eps, {}).setdefault(name, []).append(holds)
        seconds = sum(answers[key].seconds for key in keys) / len(items)
        return replace(found, seconds=seconds, earlier=earlier)

    def _keys(self, items: Sequence[Item]) -> list[str]:
        """What an answer depends on beside the settings and the code: the model, the prompt, ε, the circuits."""
        model, found = self.model.sha256, []
        for place, eps, circuits in items:
            x = place.prompt.x.cpu().numpy()
            asked = (model, x.shape, str(x.dtype), place.first, place.second, eps, circuits)
            found.append(hashlib.sha256(repr(asked).encode() + x.tobytes()).hexdigest())
        return found

    def _answers(self, items: Mapping[str, Item]) -> Iterator[tuple[str, ProbeAnswer]]:
        """As they come, by this process or by as many others as were asked for."""
        if self.settings.jobs == 1 or len(items) <= 1:
            for key, item in items.items():
                yield key, self.one(*item)
            return
        alone = replace(self.settings.only(CHOICES), tell=silent, kept=None, jobs=1)
        context = multiprocessing.get_context("spawn")
        memory = share(self.model.device, self.settings.jobs)
        with ProcessPoolExecutor(self.settings.jobs, context, _start, (alone, memory)) as pool:
            waiting = {pool.submit(_work, _moved(item, "cpu")): key for key, item in items.items()}
            try:
                for future in as_completed(waiting):
                    yield waiting[future], future.result()
            except (MemoryError, RuntimeError) as error:
                if not isinstance(error, BrokenExecutor) and not is_shortage(error):
                    raise
                raise StudyError(
                    f"one of {self.settings.jobs} processes ended, most often for want of memory: use fewer --jobs; "
                    "what is answered is kept in the folder of -o"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)

    def one(self, place: Duplicate, eps: float, circuits: Circuits) -> ProbeAnswer:
        """One prompt at one ε. A proved claim that the attack breaks is an error."""
        case = StudyCase.of(self.model, place.prompt, eps, {"Q1": "top1"}, self.layer, [place.second])
        setting = case.problem.setting([self.layer])
        joint = {
            joint_name(circuit): joint_margins(case, circuit, self.layer, place.second).bind(setting)
            for circuit in circuits
        }
        case = StudyCase(case.problem, {**case.claims, **joint})
        tally = answered(self.engine, [case], EngineOptions(self.memory))
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
        return ProbeAnswer(proved, standing, tally.seconds)


_ASKED: list[ProbeRun] = []
"""What a process of the pool holds."""


def share(device: torch.device, jobs: int) -> int:
    """Bytes of a device that each of so many processes may use: together what one alone would."""
    return default_memory(device) // jobs


def _start(settings: StudySettings, memory: int) -> None:
    torch.set_num_threads(1)
    _ASKED.append(ProbeRun.of(settings, memory=memory))


def _work(item: Item) -> ProbeAnswer:
    answer = _ASKED[0].one(*_moved(item, _ASKED[0].model.device))
    torch.cuda.empty_cache()  # what this process holds for later, the others lack
    return answer


def _moved(item: Item, device: torch.device | str) -> Item:
    """The item with its prompt elsewhere: tensors travel between processes on the CPU."""
    place, eps, circuits = item
    prompt = replace(place.prompt, x=place.prompt.x.to(device))
    return replace(place, prompt=prompt), eps, circuits
