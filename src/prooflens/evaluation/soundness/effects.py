"""Random edits of random models: bounds of their effects, jointly and alone, against an attack on the difference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines import Engine, forms_of
from prooflens.engines.attack.effects import attack_effects
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.relational import bound_effects
from prooflens.errors import ModelError
from prooflens.evaluation.soundness.cases import Case
from prooflens.evaluation.soundness.distributions import try_distributions
from prooflens.evaluation.soundness.forms import (
    MOST_PROJECTED,
    WEIGHTED,
    affordable,
    compare,
    output_functionals,
    random_readout,
)
from prooflens.evaluation.soundness.record import SoundnessReport
from prooflens.evaluation.soundness.spreads import side_by_side, spread_edits
from prooflens.models import Transformer
from prooflens.models.dictionaries import Dictionary
from prooflens.models.edits import edit, find_place, places_of
from prooflens.models.held import hooks_at
from prooflens.models.held_edits import feature
from prooflens.models.parts import Edit, split_tokens
from prooflens.models.reads import find_hook, value_name

READS = 0.3
"""The share of cases that are about a value inside the model."""


RESULTS = 0.3
"""The share of heads of which what they write is held, not z."""

SOME_TOKENS = 0.5
"""The share of parts that are held at some tokens only."""

STREAMS = 0.2
"""The share of cases in which a direction of the stream is held, too."""

FREEZES = 0.3
"""The share of cases in which a head's pattern is frozen, too."""

CUTS = 0.6
"""The share of models with parts that add up in which edges are cut, too."""

FEATURES = 0.3
"""The share of cases in which a feature of a dictionary is held, too."""

JUMPS = 0.6
"""The share of features that jump as they become active, half of them near what the model reads at the clean input."""

HIDES = 0.4
"""The share of cases in which keys of heads are knocked out, too."""


def random_edits(
    model: Transformer,
    choose: random.Random,
    n_tokens: int,
    n_all: int | None = None,
    x: Float[Tensor, "S d"] | None = None,
) -> list[Edit]:
    """One to three parts of a model, each at zero, at a constant, or without a direction, at some tokens or at all.

    Perhaps a direction of the stream is held, a pattern frozen and keys knocked out, too.

    Args:
        model: the model.
        choose: what draws them.
        n_tokens: how many tokens the model reads, without padding.
        n_all: how many with padding; None if there is none.
        x: an input of the whole model without padding, near which features may jump; None for anywhere.
    """
    a = model.architecture
    small = places_of(a, neurons=True)
    names = [*places_of(a), *choose.sample(small, min(2, len(small)))]
    names += [f"a{choose.randrange(a.n_layers)}"] if a.has_attention else []
    found: dict[str, Edit] = {}
    for name in choose.sample(names, choose.randint(1, min(3, len(names)))):
        place = find_place(a, name)
        if {name, place.block} & set(found) or any(other.startswith(f"{name}.") for other in found):
            continue
        if ".h" in name and choose.random() < RESULTS:
            name, place = f"{name}.result", find_place(a, f"{name}.result")
        width = a.d_model if place.columns is None or place.written else len(place.columns)
        value = torch.tensor([choose.gauss(0.0, 0.5) for _ in range(width)], dtype=torch.float64)
        at = f"{name}{_some_tokens(choose, n_tokens)}"
        made = Edit(at, value if choose.random() < 0.4 else None)
        if place.columns is None and choose.random() < 0.3:
            made = (
                Edit(at, value[:1], direction=value)
                if choose.random() < 0.5
                else Edit(at, None, direction=value)
            )
        found[name] = made
    more = [*_direction(model, choose, n_tokens), *_features(model, choose, n_tokens, x)]
    more += _frozen(model, choose, n_all or n_tokens)
    held = [*found.values(), *more, *_hidden_keys(model, choose, n_tokens)]
    cut = _edges(model, choose, n_tokens)
    return cut if cut and choose.random() < 0.5 else _fitting(model, held, cut)


def _features(
    model: Transformer, choose: random.Random, n_tokens: int, x: Float[Tensor, "S d"] | None
) -> list[Edit]:
    """Now and then a feature of a dictionary that is drawn, with its error term or without, at some tokens or all."""
    if choose.random() >= FEATURES:
        return []
    a = model.architecture
    hook, size = choose.choice(hooks_at(a, choose.randrange(a.n_layers))), 4
    rows = torch.tensor(
        [[choose.gauss(0.0, 0.5) for _ in range(a.d_model)] for _ in range(2 * size + 2)]
    ).double()
    bias = torch.tensor([choose.gauss(0.0, 0.5) for _ in range(size)])
    W, D, (center, offset) = rows[:size], rows[size : 2 * size].T, rows[2 * size :]
    drawn = Dictionary.of(hook, W, bias, center, decoder=D, decoder_bias=offset)
    if choose.random() < JUMPS:
        thresholds = torch.tensor([abs(choose.gauss(0.0, 1.0)) for _ in range(size)])
        if x is not None and choose.random() < 0.5:
            near = _read(model, drawn, x)[choose.randrange(n_tokens)]
            near = near + torch.tensor([choose.gauss(0.0, 0.01) for _ in range(size)])
            thresholds = torch.where(near > 0.0, near, thresholds)
        drawn = replace(drawn, threshold=thresholds.double(), kind=choose.choice(["jumprelu", "batchtopk"]))
    tokens = split_tokens(f"m0{_some_tokens(choose, n_tokens)}")[1]
    value = choose.gauss(0.0, 1.0) if choose.random() < 0.5 else None
    return [feature(drawn, choose.randrange(size), value, tokens, choose.random() < 0.6)]


def _read(model: Transformer, drawn: Dictionary, x: Float[Tensor, "S d"]) -> Float[Tensor, "S F"]:
    """What every feature reads at an input."""
    values = model.run_with_cache(x)[1]
    h = values[value_name(values, find_hook(model.architecture, drawn.hook))]
    return (h - drawn.center) @ drawn.weight.T + drawn.bias


def _edges(model: Transformer, choose: random.Random, n_tokens: int) -> list[Edit]:
    """One to three edges, where the parts of a model add up in its stream; cut, or with a constant in their place."""
    a = model.architecture
    if a.norm_place not in ("pre", "none") or choose.random() >= CUTS:
        return []
    senders = ["input", *places_of(a), *(f"a{i}" for i in range(a.n_layers) if a.has_attention)]
    neurons = places_of(a, neurons=True) if a.has_network else []
    senders += [name for name in choose.sample(neurons, min(3, len(neurons))) if ".n" in name]
    receivers = ["logits", *(f"m{i}" for i in range(a.n_layers) if a.has_network)]
    if a.has_attention:
        ends = ["", ".q", ".k", ".v"]
        receivers += [f"a{i}.h{h}{choose.choice(ends)}" for i in range(a.n_layers) for h in range(a.n_heads)]
    found: list[Edit] = []
    for _ in range(20):
        name = f"{choose.choice(senders)}->{choose.choice(receivers)}"
        try:
            edit(model, [*found, Edit(name)])
        except ModelError:
            continue
        sender = name.split("->")[0]
        width = a.head_dim if ".h" in sender else 1 if ".n" in sender else a.d_model
        value = torch.tensor([choose.gauss(0.0, 0.5) for _ in range(width)], dtype=torch.float64)
        place = f"{name}{_some_tokens(choose, n_tokens)}"
        found.append(Edit(place, value if choose.random() < 0.4 else None))
        if len(found) == 3 or choose.random() < 0.4:
            break
    return found


def _fitting(model: Transformer, held: list[Edit], cut: list[Edit]) -> list[Edit]:
    """Both, or the first alone where an edge's sender is held, too."""
    try:
        edit(model, [*held, *cut])
    except ModelError:
        return held
    return [*held, *cut]


def _frozen(model: Transformer, choose: random.Random, n_tokens: int) -> list[Edit]:
    """Now and then the pattern of a head, frozen at scores that are drawn."""
    a = model.architecture
    if not a.has_attention or choose.random() >= FREEZES:
        return []
    name = f"a{choose.randrange(a.n_layers)}.h{choose.randrange(a.n_heads)}.pattern"
    scores = [[choose.gauss(0.0, 1.0) for _ in range(n_tokens)] for _ in range(n_tokens)]
    return [Edit(name, torch.tensor(scores, dtype=torch.float64))]


def _some_tokens(choose: random.Random, n_tokens: int) -> str:
    """Tokens at which a part is held, as its name has them; none for all."""
    if choose.random() >= SOME_TOKENS:
        return ""
    chosen = choose.sample(range(n_tokens), choose.randint(1, min(2, n_tokens)))
    return "".join(f"@{choose.choice([token, token - n_tokens])}" for token in chosen)


def _direction(model: Transformer, choose: random.Random, n_tokens: int) -> list[Edit]:
    """Now and then a direction of the stream in front of a block, at some tokens or all."""
    if choose.random() >= STREAMS:
        return []
    layer = choose.randrange(model.architecture.n_layers)
    v = torch.tensor([choose.gauss(0.0, 1.0) for _ in range(model.architecture.d_model)], dtype=torch.float64)
    value = torch.tensor([choose.gauss(0.0, 1.0)]) if choose.random() < 0.5 else None
    return [Edit(f"blocks.{layer}.hook_resid_pre{_some_tokens(choose, n_tokens)}", value, direction=v)]


def _hidden_keys(model: Transformer, choose: random.Random, n_tokens: int) -> list[Edit]:
    """One key of some heads, hidden from all others or from one token; every token keeps itself."""
    a = model.architecture
    if not a.has_attention or n_tokens < 2 or choose.random() >= HIDES:
        return []
    names = set[str]()
    for _ in range(choose.randint(1, 3)):
        key, query = sorted(choose.sample(range(n_tokens), 2))
        of = choose.choice(["", f".q{query}"])
        names.add(f"a{choose.randrange(a.n_layers)}.h{choose.randrange(a.n_heads)}{of}.k{key}")
    return [Edit(name) for name in sorted(names)]


def try_effects(case: Case, engines: Sequence[Engine], budget: AttackBudget, report: SoundnessReport) -> None:
    """Ask engines for the effect of one random edit on many forms of the output, or of a value inside the model.

    Args:
        case: a random model and region.
        engines: who is asked; those that refuse, or would take too long, are left out.
        budget: how hard what they prove is attacked.
        report: gets the counts and what was violated.
    """
    report.cases["effects"] += 1
    problem, choose = case.problem, random.Random(f"edit of case {case.seed}")
    if choose.random() < READS:
        problem = replace(problem, model=random_readout(problem, choose, case.seed))
    real = problem.n_tokens if problem.padding is None else int(problem.padding.sum())
    whole = problem.model is case.problem.model and problem.padding is None
    x = problem.region.center if whole else None
    drawn = random_edits(problem.model, choose, real, problem.n_tokens, x)
    drawn = spread_edits(problem.model, drawn, random.Random(f"values of case {case.seed}"))
    problem, edited = side_by_side(problem, edit(problem.model, drawn), real)
    outputs = problem.model.architecture.d_out or 0
    functionals = [
        replace(f, name=f"effect on {f.name}") for f in output_functionals(outputs, choose, WEIGHTED)
    ]
    if problem.region.constraints is not None:
        functionals = functionals[:MOST_PROJECTED]
    forms = forms_of(functionals, outputs)
    answers = {
        engine.name: bound_effects(engine, problem, edited, forms)
        for engine in engines
        if affordable(engine, problem)
        and engine.refuses(problem, forms) is None
        and engine.refuses(edited, forms) is None
    }
    if not answers:
        return
    reached = attack_effects(problem, edited, forms, budget, case.seed, list(answers.values()))
    for name, bounds in answers.items():
        compare(case, name, functionals, bounds, reached.lower, reached.upper, report)
    asked = [engine for engine in engines if engine.name in answers]
    try_distributions(case, problem, edited, asked, budget, choose, report)
