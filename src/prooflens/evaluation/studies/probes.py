"""Mechanisms that single inputs find, asked on a ball: which heads that look alike split? (The paper's Section 4.4.)

The paper probes GPT-2's layer 0. The stand-in has no duplicate-token head there: its heads look at the token before,
or at the token itself. Its first duplicate-token heads are 1.8 and 2.4, and layer 8 is the first with two of them, 8.0
and 8.1: `--layer 8` asks about them with an engine for depth (`--engine taylor`, on a GPU: `--device cuda --jobs 8`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from prooflens.evaluation.studies.base import Sheet, StudyRow, StudySettings, study
from prooflens.evaluation.studies.journal import Journal
from prooflens.evaluation.studies.measure import StudyCase, bind, rows_of
from prooflens.evaluation.studies.probing import CHECK, PROBE, Probe, ProbeRun, joint_name
from prooflens.evaluation.studies.prompts import OTHERS, Duplicate, ioi_prompts, repeated_sequences
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries.attention import Entropy
from prooflens.queries.base import Claim, Query
from prooflens.regions import Ball
from prooflens.statistics import clopper_pearson

RADII = (5e-4, 1e-3, 2e-3)
"""The paper's ε."""

FIRST_LAYER = (3e-4, *RADII)
NEXT_LAYERS = (1e-4, 3e-4, 5e-4, 1e-3)
DEEP = (3e-5, 1e-4, 3e-4)
"""… and smaller ones, down to where deeper layers are still within reach (layers 1 and 2, and beyond)."""

SLACK = 0.1
"""Q3 of the induction probe: the entropy stays within so many nats of its clean value (the paper does not say)."""


def role_of(key: int, place: Duplicate) -> str:
    """What a most attended token is to the second occurrence of the name."""
    if key == place.first:
        return "duplicate"
    if key == place.second:
        return "itself"
    return "previous" if key == place.second - 1 else "first token" if key == 0 else "other"


def alike(roles: dict[int, Counter[str]], n: int) -> dict[str, list[int]]:
    """Heads with the same role on at least half of the prompts, most faithful first."""
    groups: dict[str, list[int]] = {}
    for head in sorted(roles, key=lambda h: -roles[h].most_common(1)[0][1]):
        role, count = roles[head].most_common(1)[0]
        if 2 * count >= n and role != "other":
            groups.setdefault(role, []).append(head)
    return groups


def circuits_of(roles: dict[int, Counter[str]], n: int) -> tuple[tuple[int, ...], ...]:
    """Pairs and triples of heads that look alike."""
    found: list[tuple[int, ...]] = []
    for heads in alike(roles, n).values():
        few = sorted(heads[:3])
        found += [pair for size in (2, 3) for pair in itertools.combinations(few, size)]
    return tuple(found)


def clean_roles(model: Transformer, places: Sequence[Duplicate], layer: int) -> dict[int, Counter[str]]:
    """What every head's most attended token is, prompt by prompt."""
    roles: dict[int, Counter[str]] = {head: Counter() for head in range(model.architecture.n_heads)}
    for place in places:
        with torch.no_grad():
            pattern = model.pattern(place.prompt.x, layer)[:, place.second]
        for head, key in enumerate(pattern.argmax(-1).tolist()):
            roles[head][role_of(key, place)] += 1
    return roles


def radii_at(layer: int) -> Sequence[float]:
    """The ε that a layer is asked at."""
    return FIRST_LAYER if layer == 0 else NEXT_LAYERS if layer <= 2 else DEEP


@lru_cache(maxsize=4)
def probe(settings: StudySettings) -> Probe:
    """The first prompts, with the circuits of heads that look alike on them."""
    asked = ProbeRun.of(settings)
    places = ioi_prompts(asked.model, settings.count(60, 3))
    roles = clean_roles(asked.model, places, asked.layer)
    radii = settings.some(radii_at(asked.layer)[::-1], 2)
    return asked.probe(places, radii, roles, circuits_of(roles, len(places)))


def probe_others(settings: StudySettings, radii: Sequence[float]) -> Probe:
    """As many prompts with other names, places and things."""
    asked = ProbeRun.of(settings)
    places = ioi_prompts(asked.model, settings.count(60, 3), OTHERS)
    return asked.probe(places, radii, clean_roles(asked.model, places, asked.layer))


@study(
    "wang_probe", "Heads that look alike at a duplicated name, on a ball", "probes", "smollm2", "GPT-2 small"
)
def wang_probe(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `wang_probe`: 60 IOI prompts, Q1 at the second occurrence; the chosen pairs again on 60 other prompts."""
    found = probe(settings)
    engine = settings.engine or ("layer0" if found.layer == 0 else "crown")
    for eps in sorted(found.proved):
        sheet.add(*(_of_head(found, head, eps, f"ε = {eps:g}", engine) for head in found.roles))
    sheet.data["roles"] = {found.name(head): dict(roles) for head, roles in found.roles.items()}
    sheet.note("Paper, GPT-2 layer 0, proved at ε = 5e-4, 1e-3, 2e-3: 0.1 1.7, 0, 0 %; 0.10 100, 95, 0 %.")
    pairs = furthest(found)
    for role, heads in alike(found.roles, found.n).items():
        if len(heads) == 1:
            sheet.note(f"Only {found.name(heads[0])} looks at: {role}, on half of the prompts or more.")
    for pair in pairs:
        sheet.note(told(pair, found))
    _end(settings, sheet, found, *([_again(settings, sheet, pairs, found, engine)] if pairs else []))


def _again(settings: StudySettings, sheet: Sheet, pairs: Sequence[Pair], found: Probe, engine: str) -> Probe:
    """The chosen pairs on the other prompts."""
    others = probe_others(settings, sorted({pair.eps for pair in pairs}))
    for eps in others.proved:
        heads = sorted({head for pair in pairs if pair.eps == eps for head in (pair.strong, pair.weak)})
        sheet.add(*(_of_head(others, head, eps, f"other prompts, ε = {eps:g}", engine) for head in heads))
    sheet.data["roles on other prompts"] = {
        others.name(head): dict(roles) for head, roles in others.roles.items()
    }
    sheet.note(
        "Pairs and ε were chosen where they lie furthest apart, so that the intervals above are too narrow. They are "
        f"asked again on {others.n} prompts with other names, places and things: a pair splits there if the interval "
        "of what is proved of the one lies above that of what an attack leaves of the other, at 95 % for all pairs "
        "together. Pairs, ε and criterion were fixed before these prompts were asked."
    )
    for pair in pairs:
        sheet.note(f"Other prompts: {told(pair, others, len(pairs))}")
    again = sum(apart(pair, others, len(pairs)) for pair in pairs)
    first = sum(apart(pair, found) for pair in pairs)
    sheet.note(
        f"So {first} of {len(pairs)} pairs split where they were chosen, and {again} on the other prompts."
    )
    return others


def _end(settings: StudySettings, sheet: Sheet, *asked: Probe) -> None:
    """All is answered: say what an earlier run has answered, and let go of what it kept."""
    if earlier := sum(one.earlier for one in asked):
        sheet.note(
            f"{earlier} answers are of an earlier run of the same code that did not end; the minutes are without them."
        )
    Journal.of(settings).end()


def _of_head(found: Probe, head: int, eps: float, group: str, engine: str) -> StudyRow:
    role, count = found.role(head)
    return StudyRow(
        group,
        f"{found.name(head)} (looks at: {role}, {count}/{found.n})",
        engine=engine,
        proved=sum(found.proved[eps][found.name(head)]),
        attack=sum(found.standing[eps][found.name(head)]),
        n=found.n,
        seconds=found.seconds,
    )


@dataclass(frozen=True)
class Pair:
    """Two heads that look alike, and the ε at which more is proved of the one than an attack leaves of the other."""

    role: str
    strong: int
    weak: int
    eps: float


def furthest(found: Probe) -> list[Pair]:
    """Per role: the two heads that share it and lie furthest apart at some ε."""
    chosen = []
    for role, heads in alike(found.roles, found.n).items():
        pairs = [
            (sum(found.proved[eps][found.name(a)]) - sum(found.standing[eps][found.name(b)]), eps, a, b)
            for eps, (a, b) in itertools.product(found.proved, itertools.permutations(heads, 2))
        ]
        if pairs:
            _, eps, strong, weak = max(pairs)
            chosen.append(Pair(role, strong, weak, eps))
    return chosen


def apart(pair: Pair, found: Probe, tests: int = 1) -> bool:
    """Whether the interval of what is proved of the one lies above that of what an attack leaves of the other.

    Intervals are at 95 % for all of so many tests together (Bonferroni).
    """
    proved = sum(found.proved[pair.eps][found.name(pair.strong)])
    left = sum(found.standing[pair.eps][found.name(pair.weak)])
    level = confidence(tests)
    return clopper_pearson(proved, found.n, level)[0] > clopper_pearson(left, found.n, level)[1]


def confidence(tests: int) -> float:
    """Of each interval, for 95 % of all together."""
    return 1.0 - 0.05 / tests


def told(pair: Pair, found: Probe, tests: int = 1) -> str:
    """What some prompts say of a pair."""
    names = strong, weak = found.name(pair.strong), found.name(pair.weak)
    proved, few = (sum(found.proved[pair.eps][name]) for name in names)
    left = sum(found.standing[pair.eps][weak])
    looks = [found.roles[head][pair.role] for head in (pair.strong, pair.weak)]
    verdict = "they split" if apart(pair, found, tests) else "they are not told apart"
    return (
        f"{strong} and {weak} look at: {pair.role}, on {looks[0]} and {looks[1]} of {found.n} prompts. At ε = "
        f"{pair.eps:g} {proved} of {found.n} are proved to stay for {strong}; of {weak} {few} are, and an attack "
        f"leaves {left}: {verdict} ({100 * confidence(tests):g} % intervals)."
    )


@study("cross_head_circuit", "Pairs and triples of those heads at once", "probes", "smollm2", "GPT-2 small")
def cross_head_circuit(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `cross_head_circuit`: all heads keep their target (AND), and the sum of their margins stays positive."""
    found = probe(settings)
    engine = settings.engine or ("layer0" if found.layer == 0 else "crown")
    for eps, circuit in itertools.product(sorted(found.proved), found.circuits):
        names = [found.name(head) for head in circuit]
        both = [
            sum(all(parts) for parts in zip(*(table[eps][name] for name in names), strict=True))
            for table in (found.proved, found.standing)
        ]
        joint = [sum(table[eps][joint_name(circuit)]) for table in (found.proved, found.standing)]
        for label, (proved, standing) in (("AND", both), ("joint sum of margins", joint)):
            sheet.add(
                StudyRow(
                    f"ε = {eps:g}",
                    f"{{{', '.join(names)}}} {label}",
                    engine=engine,
                    proved=proved,
                    attack=standing,
                    n=found.n,
                )
            )
    sheet.note(
        "Paper, GPT-2, at ε = 5e-4, 1e-3, 2e-3: {0.1, 0.10} 1, 0, 0 of 60; {0.3, 0.4} 60, 60, 54 of 60."
    )
    sheet.note("The joint sum asks for less than AND: a strong head may make up for a weak one.")
    _end(settings, sheet, found)


@study("induction_probe", "Three queries per head on repeated sequences", "probes", "smollm2", "GPT-2 small")
def induction_probe(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `induction_probe`: 30 sequences whose last token is the first again; Q1, Q2 (τ = 0.2), Q3 (± 0.1 nat)."""
    layer = settings.layer or 0
    engine = settings.engine or ("layer0" if layer == 0 else "crown")
    model = settings.load("smollm2").cut(layer + 1)
    places = repeated_sequences(model, settings.count(30, 3), seed=settings.seed)
    roles = clean_roles(model, places, layer)
    radii = settings.some(RADII, 1)
    for step, eps in enumerate(radii):
        settings.tell(f"ε = {eps:g}", step / len(radii))
        cases = [_three(model, place, eps, layer) for place in places]
        clean = {name: sum(case.claims[name][0].clean_holds for case in cases) for name in cases[0].claims}
        labels = {name: f"{name} (clean {count}/{len(places)})" for name, count in clean.items()}
        rows = rows_of(f"ε = {eps:g}", cases, {"CPZ": engine}, PROBE, None, settings.seed, CHECK, labels)
        sheet.add(*rows)
        proved = {name: int(row.proved or 0) for name, row in zip(clean, rows, strict=True)}
        standing = {name: int(row.attack or 0) for name, row in zip(clean, rows, strict=True)}
        for text in failure_modes(clean, proved, standing, len(places)):
            sheet.note(f"ε = {eps:g}: {text}")
    sheet.data["looks at"] = {f"{layer}.{head}": dict(found) for head, found in roles.items()}
    sheet.note("Paper, ε = 1e-3: H5 47, 90, 100 %; ε = 2e-3: H10 73, 100, 0 % (Q1, Q2, Q3).")
    if not any(" keeps " in note for note in sheet.notes):
        sheet.note(
            "So the paper's heads with different failure modes have no like here, at this layer and these ε."
        )


def _three(model: Transformer, place: Duplicate, eps: float, layer: int) -> StudyCase:
    """Q1, Q2 and Q3 of every head at the last token."""
    problem = Problem(model, Ball(eps).around(place.prompt))
    with torch.no_grad():
        rows = model.pattern(place.prompt.x, layer)[:, place.second]
    claims: dict[str, list[Claim]] = {}
    for head, row in enumerate(rows):
        entropy = float(torch.special.entr(row).sum())
        kept = Entropy(max(0.0, entropy - SLACK), entropy + SLACK)
        queries: dict[str, str | Query] = {"Q1": "top1", "Q2": "mass>=0.2", "Q3": kept}
        bound = bind(problem, queries, layer, [place.second], f"{layer}.{head}")
        claims |= {f"{query} of {layer}.{head}": found for query, found in bound.items()}
    return StudyCase(problem, claims)


def failure_modes(
    clean: Mapping[str, int], proved: Mapping[str, int], standing: Mapping[str, int], n: int
) -> list[str]:
    """Heads that have queries on three quarters of the clean prompts, keep some of them there and lose others.

    A query is kept where it is proved on three quarters of the prompts, and lost where an attack leaves a quarter.
    """
    notes = []
    for head in dict.fromkeys(name.partition(" of ")[2] for name in clean):
        had = [query for query in ("Q1", "Q2", "Q3") if 4 * clean[f"{query} of {head}"] >= 3 * n]
        kept = [query for query in had if 4 * proved[f"{query} of {head}"] >= 3 * n]
        lost = [query for query in had if 4 * standing[f"{query} of {head}"] <= n]
        if kept and lost:
            counts = [
                ", ".join(f"{query} {table[f'{query} of {head}']}" for query in ("Q1", "Q2", "Q3"))
                for table in (proved, standing)
            ]
            notes.append(
                f"{head} keeps {' and '.join(kept)} and loses {' and '.join(lost)} (proved: {counts[0]} of {n}; an "
                f"attack leaves: {counts[1]})."
            )
    return notes or [
        "there is no head with one query proved on 3/4 of the prompts and another broken on 3/4."
    ]
