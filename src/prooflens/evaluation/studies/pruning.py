"""The pruning case study: do certificates tell which head to prune? (The paper's Section 5 and its App. F.)

The paper prunes the head whose attention is proved stable ("inert") and keeps the responsive one, against pruning the
head with the smaller gradient. Its "1-head model" is not defined for two layers: here a head is pruned in layer 0,
which the certificates are about, or its number in every layer; both are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import torch
from torch import Tensor

from prooflens.engines.attack import BUDGETS
from prooflens.evaluation.studies.base import Sheet, StudyRow, StudySettings, study
from prooflens.evaluation.studies.measure import QUICK, StudyCase, rows_of
from prooflens.evaluation.studies.synthetic import inputs
from prooflens.models import Prompt, Transformer, load
from prooflens.models.cache import model_folder
from prooflens.models.train import RECIPES, marked_token, train
from prooflens.verdicts.prune import HeadProfile, Rule, Worth, accuracy, choose, evaluate, profile, prune

SEEDS = (42, 123, 456, 789, 1000, 2024, 31415, 271828, 7, 99, 11, 17, 23, 31, 53, 67, 73, 89, 101, 113)
"""The paper's 20 seeds."""

RADII = (0.01, 0.02, 0.05)
PGD = BUDGETS["pruning"]
RULES: tuple[Rule, ...] = get_args(Rule)
VARIANTS = ("layer 0", "every layer")

PER_HEAD = {
    (0.01, 0): (88.0, 27.0, 0.021),
    (0.01, 1): (97.0, 68.0, 0.027),
    (0.02, 0): (72.0, 25.0, 0.042),
    (0.02, 1): (97.0, 58.0, 0.053),
    (0.05, 0): (55.0, 18.0, 0.105),
    (0.05, 1): (88.0, 48.0, 0.134),
}
"""Tab. `per_head`: Q1, Q2 (τ = 0.3), Q3 by ε and head."""

BASELINES = {"ablation": (0.0, 0.0), "gradient": (2.7e-6, 0.131), "entropy": (1.69, 1.58)}
"""Tab. `empirical_baselines`, head 0 and head 1."""

FLIPS = {0.01: (3.3, 0.0), 0.02: (6.7, 3.3), 0.05: (18.3, 5.0)}
"""Tab. `adv_validation`: rows flipped by PGD, in %."""

PRUNED = {0.01: (100.0, 100.0, 100.0), 0.02: (100.0, 90.0, 100.0), 0.05: (100.0, 90.0, 100.0)}
"""Tab. `certified_pruning`: adversarial accuracy, CPZ-guided, gradient-guided, full."""

MEANS: Mapping[float, Mapping[str, float]] = {
    0.02: {"certified": 87.0, "gradient": 81.5},
    0.05: {"certified": 84.5, "gradient": 78.5},
}
"""Tabs `multiseed_app` and `multiseed`: means over 20 seeds."""


@dataclass(frozen=True)
class SeedRun:
    """One trained model: what is known of its heads by ε, and what it is worth without each at one ε."""

    seed: int
    accuracy: float
    eps: float
    profiles: dict[float, list[HeadProfile]]
    worth: dict[tuple[str, int], Worth]
    """By variant and pruned head."""

    def pick(self, rule: Rule) -> int:
        """The head that a rule prunes."""
        return choose(self.profiles[self.eps], rule)[1]

    def value(self, variant: str, rule: Rule) -> float:
        """Adversarial accuracy after pruning by a rule."""
        return self.after(variant, self.pick(rule))

    def after(self, variant: str, head: int) -> float:
        """Adversarial accuracy without a head."""
        found = self.worth[variant, head]
        return found.attack / found.n


def heads_of(variant: str, head: int, model: Transformer) -> list[tuple[int, int]]:
    """The heads that go in a variant."""
    layers = range(model.architecture.n_layers) if variant == "every layer" else range(1)
    return [(layer, head) for layer in layers]


def held_out(model: Transformer, count: int, seed: int) -> tuple[list[Prompt], Tensor]:
    """Labelled inputs of the induction task that no training saw: their seed is never one of training."""
    recipe = RECIPES["toy-induction"]
    generator = torch.Generator().manual_seed(10**6 + seed)
    x, y = marked_token(count, recipe.n_tokens, recipe.architecture.d_model, generator)
    names = tuple(f"x{i}" for i in range(recipe.n_tokens))
    return [Prompt(point.to(model.dtype), names) for point in x], y


def trained_with(seed: int, settings: StudySettings) -> Transformer:
    """The induction model of a seed, trained once, into the cache."""
    folder = model_folder(f"toy-induction-seed{seed}")
    if not (folder / "config.json").is_file():
        train("toy-induction", seed, progress=settings.tell, target=folder)
    return load(str(folder))


def run_seed(seed: int, settings: StudySettings, eps: float) -> SeedRun:
    """Everything about one seed at one ε; certificates at the smallest ε too, which predictions are made from."""
    model = trained_with(seed, settings)
    certified = inputs(model, settings.count(10, 4))
    prompts, labels = held_out(model, settings.count(50, 20), seed)
    profiles = {
        radius: profile(model, certified, radius, engine="layer0", budget="pruning", seed=settings.seed)
        for radius in (RADII[0], eps)
    }
    worth: dict[tuple[str, int], Worth] = {}
    restarts, steps = (5, 20) if settings.quick else (PGD.restarts, PGD.steps)
    for variant in VARIANTS:
        for head in range(model.architecture.n_heads):
            worth[variant, head] = evaluate(
                prune(model, heads_of(variant, head, model)),
                prompts,
                labels,
                eps,
                restarts=restarts,
                steps=steps,
                engine="crown" if variant == VARIANTS[0] else None,
                seed=settings.seed,
            )
    return SeedRun(seed, accuracy(model, prompts, labels), eps, profiles, worth)


@study("empirical_baselines", "What single inputs say about the two heads", "pruning", "toy-induction")
def empirical_baselines(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `empirical_baselines`: no ball and no proof is involved."""
    model = settings.load("toy-induction")
    prompts, labels = held_out(model, settings.count(100, 20), 0)
    for one in profile(model, prompts[:5], 0.01, labels=labels[:5], engine="interval", budget="0/0/0"):
        head = one.head[1]
        others = {
            "accuracy lost by ablation": accuracy(model, prompts, labels)
            - accuracy(prune(model, [one.head]), prompts, labels),
            "input gradient through the head": one.gradient,
            "clean entropy, nat": one.entropy,
        }
        for (label, value), paper in zip(others.items(), BASELINES.values(), strict=True):
            sheet.add(
                StudyRow(label, f"head {head}", "value", paper=paper[head], measured=value, n=len(prompts))
            )
    first = {row.label: row.measured for row in sheet.rows if row.group.startswith("accuracy")}
    sheet.note(
        f"Zeroing head 0 costs {100 * (first['head 0'] or 0):.1f} % of the answers, zeroing head 1 "
        f"{100 * (first['head 1'] or 0):.1f} %; in the paper neither costs anything."
    )


@study("per_head", "Certified queries per head of the induction model", "pruning", "toy-induction")
def per_head(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `per_head`: layer 0, 10 inputs, 60 rows per head."""
    model = settings.load("toy-induction")
    queries = {"Q1": "top1", "Q2": "mass>=0.3", "Q3": "entropy"}
    for eps in settings.some(RADII, 1):
        for head in (0, 1):
            published = dict(zip((("CPZ", query) for query in queries), PER_HEAD[eps, head], strict=True))
            prompts = inputs(model, settings.count(10, 3))
            cases = [StudyCase.of(model, x, eps, queries, 0, heads=f"0.{head}") for x in prompts]
            budget = QUICK if settings.quick else PGD
            engines = {"CPZ": "layer0", "IBP": "interval"}
            sheet.add(*rows_of(f"ε = {eps:g}, head {head}", cases, engines, budget, published, settings.seed))


@study("adv_validation", "Attention rows that PGD flips, per head", "pruning", "toy-induction")
def adv_validation(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `adv_validation`, as rows that keep their most attended token: 100 % minus the paper's flips."""
    model = settings.load("toy-induction")
    for eps in settings.some(RADII, 1):
        prompts = inputs(model, settings.count(10, 3))
        for one in profile(model, prompts, eps, engine="layer0", budget="pruning", seed=settings.seed):
            head = one.head[1]
            sheet.add(
                StudyRow(
                    f"ε = {eps:g}",
                    f"head {head} keeps its most attended token",
                    engine="layer0",
                    paper_attack=100.0 - FLIPS[eps][head],
                    proved=one.stable,
                    attack=one.rows - one.flipped,
                    n=one.rows,
                )
            )


@study("certified_pruning", "Accuracy after pruning one head", "pruning", "toy-induction")
def certified_pruning(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `certified_pruning` on the embedded induction model: which head a rule prunes, and what is left."""
    model = settings.load("toy-induction")
    prompts, labels = held_out(model, settings.count(100, 20), 0)
    certified = inputs(model, settings.count(10, 4))
    for eps in settings.some(RADII, 1):
        profiles = profile(model, certified, eps, engine="layer0", budget="pruning", seed=settings.seed)
        picks = {rule: choose(profiles, rule)[1] for rule in RULES}
        for variant in VARIANTS:
            for head in (None, 0, 1):
                small = model if head is None else prune(model, heads_of(variant, head, model))
                found = evaluate(small, prompts, labels, eps, steps=20 if settings.quick else 50)
                rules = [rule for rule, pick in picks.items() if pick == head]
                sheet.add(_worth_row(f"ε = {eps:g}, pruned in {variant}", head, rules, found, PRUNED[eps]))
    sheet.note("`n` answers are asked for; the clean count stands in the note of each row.")


def _worth_row(
    group: str, head: int | None, rules: Sequence[Rule], found: Worth, paper: tuple[float, ...]
) -> StudyRow:
    published = paper[2] if head is None else None
    if "certified" in rules:
        published = paper[0]
    elif "gradient" in rules:
        published = paper[1]
    label = "nothing pruned" if head is None else f"head {head} pruned (by {', '.join(rules) or 'no rule'})"
    note = f"{found.clean} of {found.n} right on clean inputs"
    return StudyRow(
        group,
        label,
        engine="crown",
        paper_attack=published,
        proved=found.proved,
        attack=found.attack,
        n=found.n,
        note=note,
    )


def seed_table(runs: Sequence[SeedRun]) -> list[dict[str, object]]:
    """Per seed: what each rule prunes and the adversarial accuracies."""
    return [
        {
            "seed": run.seed,
            "clean": run.accuracy,
            "profiles": [asdict(one) for one in run.profiles[run.eps]],
            **{rule: run.pick(rule) for rule in RULES},
            **{f"{variant}: {rule}": run.value(variant, rule) for variant in VARIANTS for rule in RULES},
            **{f"{variant}: head {head}": run.after(variant, head) for variant, head in run.worth},
        }
        for run in runs
    ]


def over_seeds(settings: StudySettings, sheet: Sheet, eps: float) -> None:
    """Rules against each other over all seeds at one ε."""
    runs = []
    seeds = settings.some(SEEDS, 2)
    for number, seed in enumerate(seeds):
        settings.tell(f"seed {seed}", number / len(seeds))
        runs.append(run_seed(seed, settings, eps))
    sheet.data["seeds"] = seed_table(runs)
    for variant in VARIANTS:
        group = f"ε = {eps:g}, pruned in {variant}"
        for rule in RULES:
            found = [run.worth[variant, run.pick(rule)] for run in runs]
            sheet.add(_pooled(group, f"by {rule}", found, MEANS[eps].get(rule)))
        best = [max((run.worth[variant, head] for head in (0, 1)), key=lambda w: w.attack) for run in runs]
        sheet.add(_pooled(group, "by hindsight (the better head)", best, None))
        _compare(sheet, runs, variant)
    _predictions(sheet, runs)
    sheet.note(
        "Counts are pooled over seeds, so that their intervals do not show how seeds differ; the signed-rank test does."
    )


def _pooled(group: str, label: str, found: Sequence[Worth], paper: float | None) -> StudyRow:
    proofs = [one.proved for one in found]
    return StudyRow(
        group,
        label,
        engine="crown" if None not in proofs else "",
        paper_attack=paper,
        proved=sum(p or 0 for p in proofs) if None not in proofs else None,
        attack=sum(one.attack for one in found),
        n=sum(one.n for one in found),
    )


def signed_rank(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The one-sided Wilcoxon p-value that `first` is larger; None where no pair differs."""
    from scipy.stats import wilcoxon

    if all(a == b for a, b in zip(first, second, strict=True)):
        return None
    return float(wilcoxon(first, second, alternative="greater", zero_method="wilcox").pvalue)


def _compare(sheet: Sheet, runs: Sequence[SeedRun], variant: str) -> None:
    eps = runs[0].eps
    certified, gradient = ([run.value(variant, rule) for run in runs] for rule in ("certified", "gradient"))
    wins = sum(a > b for a, b in zip(certified, gradient, strict=True))
    losses = sum(a < b for a, b in zip(certified, gradient, strict=True))
    differ = sum(run.pick("certified") != run.pick("gradient") for run in runs)
    p, reverse = signed_rank(certified, gradient), signed_rank(gradient, certified)
    sheet.data[f"wilcoxon, {variant}"] = {"certified is better": p, "gradient is better": reverse}
    sheet.note(
        f"Pruned in {variant}, ε = {eps:g}: certificates and gradients pick different heads on {differ} of {len(runs)} "
        f"seeds; certificate-guided is better on {wins} and worse on {losses}. One-sided signed-rank tests: better "
        f"p = {'–' if p is None else f'{p:.3g}'}, worse p = {'–' if reverse is None else f'{reverse:.3g}'} "
        f"(paper: never worse, p = {0.0118 if eps == 0.02 else 0.0042})."
    )


def _predictions(sheet: Sheet, runs: Sequence[SeedRun]) -> None:
    """Whether certificates at the smallest ε predict flips at the larger one, and what a head is worth there."""
    from scipy.stats import spearmanr

    small, large = RADII[0], runs[0].eps
    pairs = [(run, head) for run in runs for head in (0, 1)]
    stable = [run.profiles[small][head].stable for run, head in pairs]
    flips = [run.profiles[large][head].flipped for run, head in pairs]
    lost = [1.0 - run.after(VARIANTS[0], head) for run, head in pairs]
    for name, values in (("rows flipped by PGD", flips), ("adversarial accuracy lost by pruning", lost)):
        if len(set(stable)) < 2 or len(set(values)) < 2:
            continue
        found = spearmanr(stable, values)
        sheet.data[f"spearman, {name}"] = float(found.statistic)
        sheet.note(
            f"Rows proved stable at ε = {small:g} against {name} at ε = {large:g}, over {len(pairs)} heads: "
            f"Spearman ρ = {found.statistic:.2f} (p = {found.pvalue:.2g})."
        )


@study(
    "multiseed",
    "Certificate-guided against gradient-guided pruning, 20 seeds, ε = 0.05",
    "pruning",
    "toy-induction",
)
def multiseed(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `multiseed`."""
    over_seeds(settings, sheet, 0.05)


@study(
    "multiseed_app",
    "Certificate-guided against gradient-guided pruning, 20 seeds, ε = 0.02",
    "pruning",
    "toy-induction",
)
def multiseed_app(settings: StudySettings, sheet: Sheet) -> None:
    """Tab. `multiseed_app`."""
    over_seeds(settings, sheet, 0.02)
