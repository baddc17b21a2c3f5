"""Pruning heads: what tells which head to drop, the mask, and what the model is worth afterwards.

A head is pruned by setting the columns of the output projection that read it to zero; everything else stays, and the
pruned model is a model of its own, with its own fingerprint. `profile` measures per head what the paper's case study
looks at (gradient, ablation, entropy, certificates); `choose` ranks heads by one of these; `evaluate` looks at the
result: how many answers stay, clean and under attack, and how many of them are proved to stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines import get_engine
from prooflens.engines.functionals import bound_functionals
from prooflens.errors import ModelError, QueryError
from prooflens.models import Prompt, Transformer
from prooflens.models.edits import edit
from prooflens.problem import Problem
from prooflens.queries import Argmax, parse_heads
from prooflens.regions import Ball
from prooflens.results.outcome import Verdict
from prooflens.verdicts.certify import certify
from prooflens.verdicts.decide import is_proved

Rule = Literal["certified", "responsive", "gradient", "ablation", "entropy"]
"""What decides which head goes. `certified`: the head whose attention is proved stable most often, as the paper does.
`responsive`: the opposite. `gradient`: the smallest gradient through the head; `ablation`: the smallest loss of
accuracy; `entropy`: the most spread attention."""

Head = tuple[int, int]


def prune(model: Transformer, heads: str | Iterable[Head]) -> Transformer:
    """The model without these heads (`"0.1,1.0"`); the name says which are gone.

    Args:
        model: the model.
        heads: the heads to take out, as a text or as pairs of layer and head.
    """
    architecture = model.architecture
    chosen = (
        parse_heads(heads, architecture.n_layers, architecture.n_heads)
        if isinstance(heads, str)
        else list(heads)
    )
    if not chosen:
        raise QueryError("no head is named: write them as in '0.1,1.0'")
    if len(set(chosen)) == architecture.n_layers * architecture.n_heads:
        raise QueryError("nothing would be left: name fewer heads")
    edited = edit(model, list(dict.fromkeys(f"a{layer}.h{head}" for layer, head in chosen)))
    gone = ",".join(f"{layer}.{head}" for layer, head in chosen)
    return replace(edited, name=f"{model.name} without {gone}")


@dataclass(frozen=True)
class HeadProfile:
    """What is known of one head over some inputs."""

    head: Head
    gradient: float
    """Mean norm of the loss' gradient in the input, along the paths through this head."""
    ablation: float
    """Accuracy lost when the head is zeroed, in [0, 1]."""
    entropy: float
    """Mean entropy of its clean rows, in nats."""
    stable: int
    """Rows whose most attended token is proved to stay."""
    heavy: int
    """Rows whose mass on it is proved to stay above τ."""
    width: float
    """Mean proved width of the entropy's range."""
    flipped: int
    """Rows whose most attended token an attack changes."""
    rows: int
    """How many rows there are."""


def profile(
    model: Transformer,
    prompts: Sequence[Prompt],
    eps: float,
    *,
    layer: int = 0,
    labels: Int[Tensor, " n"] | None = None,
    tau: float = 0.3,
    engine: str = "auto",
    seed: int = 0,
    budget: str | None = None,
) -> list[HeadProfile]:
    """Every head of a layer over some inputs.

    Args:
        model: the model.
        prompts: the inputs.
        eps: the radius of the ball around each.
        layer: the layer whose heads are asked about.
        labels: the true answers, shape [n]; without them the model's own are taken for true.
        tau: the mass that a row's most attended token is asked to keep.
        engine: who bounds; `auto` chooses.
        seed: of the attack.
        budget: of the attack, as samples/restarts/steps.
    """
    labels = answers(model, prompts) if labels is None else labels
    gradients = head_gradients(model, prompts, labels, layer)
    before = accuracy(model, prompts, labels)
    found = []
    results = [
        certify(
            model,
            prompt,
            Ball(eps),
            layer=layer,
            queries=["top1", f"mass>={tau}", "entropy"],
            engine=engine,
            seed=seed,
            budget=budget,
        )
        for prompt in prompts
    ]
    rows = [row for result in results for row in result.rows]
    for head in range(model.architecture.n_heads):
        own = [row for row in rows if row["head"] == head]
        top = [row for row in own if row["query"] == "top1"]
        spread = [row["upper"] - row["lower"] for row in own if row["query"] == "entropy"]
        found.append(
            HeadProfile(
                (layer, head),
                float(gradients[head]),
                before - accuracy(prune(model, [(layer, head)]), prompts, labels),
                clean_entropy(model, prompts, layer, head),
                sum(row["verdict"] == Verdict.HOLDS for row in top),
                sum(row["verdict"] == Verdict.HOLDS for row in own if row["query"].startswith("mass")),
                sum(spread) / max(1, len(spread)),
                sum(row["verdict"] == Verdict.FAILS for row in top),
                len(top),
            )
        )
    return found


def choose(profiles: Sequence[HeadProfile], rule: Rule) -> Head:
    """The head to prune by a rule; ties go to the mass, then to the narrower entropy, then to the first head.

    Args:
        profiles: what is known of every head that is left.
        rule: how heads are compared.
    """
    if rule not in get_args(Rule):
        raise QueryError(f"there is no rule {rule!r}; rules are {', '.join(get_args(Rule))}")

    def worth(one: HeadProfile) -> tuple[float, ...]:
        if rule in ("certified", "responsive"):
            stable = (float(one.stable), float(one.heavy), -one.width)
            return tuple(-v for v in stable) if rule == "certified" else stable
        return {
            "gradient": (one.gradient,),
            "ablation": (one.ablation,),
            "entropy": (-one.entropy,),
        }[rule]

    return min(profiles, key=worth).head


def stacked(prompts: Sequence[Prompt]) -> list[Float[Tensor, "n S d"]]:
    """Inputs of equal length together, in order of first appearance.

    Args:
        prompts: the prompts.
    """
    by_length: dict[int, list[Tensor]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt), []).append(prompt.x)
    return [torch.stack(group) for group in by_length.values()]


def read_answer(model: Transformer, x: Float[Tensor, "... S d"]) -> Float[Tensor, "... C"]:
    """The logits of the answer: of the class or, in a language model, of the next token.

    Args:
        model: the model.
        x: inputs, shape [..., S, d].
    """
    model.check_head()
    out = model(x)
    return out if model.architecture.pool != "none" else out[..., -1, :]


def answers(model: Transformer, prompts: Sequence[Prompt]) -> Int[Tensor, " n"]:
    """What the model says on each input.

    Args:
        model: the model.
        prompts: the inputs.
    """
    with torch.no_grad():
        return torch.stack([read_answer(model, prompt.x).argmax(-1) for prompt in prompts])


def accuracy(model: Transformer, prompts: Sequence[Prompt], labels: Int[Tensor, " n"]) -> float:
    """The share of inputs that the model answers as labelled.

    Args:
        model: the model.
        prompts: the inputs.
        labels: their true answers, shape [n].
    """
    return float((answers(model, prompts) == labels).double().mean())


def head_gradients(
    model: Transformer, prompts: Sequence[Prompt], labels: Int[Tensor, " n"], layer: int
) -> Float[Tensor, " H"]:
    """Mean ‖∂loss/∂x‖₂ along the paths through each head of a layer: the other heads' outputs are held fixed there.

    Args:
        model: the model.
        prompts: the inputs.
        labels: their true answers, shape [n].
        layer: the layer of the heads.
    """
    heads = model.architecture.n_heads
    total = torch.zeros(heads, dtype=torch.float64)
    for prompt, label in zip(prompts, labels, strict=True):
        x = prompt.x.clone().requires_grad_()
        _, cache = model.run_with_cache(x)
        out = cache["output"] if model.architecture.pool != "none" else cache["output"][..., -1, :]
        loss = torch.nn.functional.cross_entropy(out[None], label[None])
        z = cache[f"blocks.{layer}.attn.hook_z"]
        (at_z,) = torch.autograd.grad(loss, z, retain_graph=True)
        for head in range(heads):
            only = torch.zeros_like(at_z)
            only[:, head] = at_z[:, head]
            (at_x,) = torch.autograd.grad(z, x, only, retain_graph=True)
            total[head] += at_x.norm().cpu()
    return total / len(prompts)


def clean_entropy(model: Transformer, prompts: Sequence[Prompt], layer: int, head: int) -> float:
    """The mean entropy of a head's rows on the inputs themselves.

    Args:
        model: the model.
        prompts: the inputs.
        layer: the head's layer.
        head: its number there.
    """
    values = []
    with torch.no_grad():
        for prompt in prompts:
            pattern = model.pattern(prompt.x, layer)[head]
            values.append(torch.special.entr(pattern).sum(-1).mean())
    return float(torch.stack(values).mean())


def survivors(
    model: Transformer,
    x: Float[Tensor, "n S d"],
    labels: Int[Tensor, " n"],
    eps: float,
    restarts: int = 20,
    steps: int = 50,
    seed: int = 0,
) -> list[bool]:
    """Which inputs keep their label under projected gradient ascent on the loss; a wrong clean answer does not.

    Args:
        model: the model.
        x: inputs of one length, shape [n, S, d].
        labels: their true answers, shape [n].
        eps: the radius of the ball around each.
        restarts: how often the ascent starts, at random points.
        steps: how many steps each takes.
        seed: of the random points.
    """
    generator = torch.Generator(device=x.device).manual_seed(seed)
    with torch.no_grad():
        standing = read_answer(model, x).argmax(-1) == labels
    shape = (restarts, *x.shape)
    wanted = labels.expand(restarts, -1).flatten()
    move = (torch.rand(shape, generator=generator, dtype=x.dtype, device=x.device) * 2 - 1) * eps
    for step in range(steps):
        point = (x + move).requires_grad_()
        logits = read_answer(model, point).flatten(0, 1)
        (slope,) = torch.autograd.grad(
            torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"), point
        )
        rate = 0.25 * eps * (1.0 + math.cos(math.pi * step / steps))
        move = (move + rate * slope.sign()).clamp(-eps, eps)
    with torch.no_grad():
        standing &= (read_answer(model, x + move).argmax(-1) == labels).all(0)
    found: list[bool] = standing.tolist()
    return found


def proved(
    model: Transformer, prompts: Sequence[Prompt], labels: Int[Tensor, " n"], eps: float, engine: str
) -> list[bool]:
    """Which inputs are proved to keep their label on the whole ball.

    Args:
        model: the model.
        prompts: the inputs.
        labels: their true answers, shape [n].
        eps: the radius of the ball around each.
        engine: who bounds.
    """
    asked, found = get_engine(engine), []
    for prompt, label in zip(prompts, labels.tolist(), strict=True):
        problem = Problem(model, Ball(eps).around(prompt))
        (claim,) = Argmax().bind(problem.setting((), output=True))
        bounds = bound_functionals(asked, problem, claim.functionals)
        right = int(read_answer(model, prompt.x).argmax(-1)) == label
        found.append(right and is_proved(claim, bounds))
    return found


@dataclass(frozen=True)
class Worth:
    """What a model is worth on some inputs: counts of right answers, clean, under attack, and proved on the ball."""

    clean: int
    attack: int
    proved: int | None
    n: int


def evaluate(
    model: Transformer,
    prompts: Sequence[Prompt],
    labels: Int[Tensor, " n"],
    eps: float,
    *,
    restarts: int = 20,
    steps: int = 50,
    engine: str | None = "crown",
    seed: int = 0,
) -> Worth:
    """Right answers on clean inputs, those that an attack leaves, and those that are proved.

    Args:
        model: the model.
        prompts: the inputs.
        labels: their true answers, shape [n].
        eps: the radius of the ball around each.
        restarts: how often the attack starts.
        steps: how many steps each start takes.
        engine: who proves; None proves nothing.
        seed: of the attack.
    """
    clean = int((answers(model, prompts) == labels).sum())
    left = 0
    for group in stacked(prompts):
        places = [i for i, prompt in enumerate(prompts) if len(prompt) == group.shape[1]]
        left += sum(survivors(model, group, labels[places], eps, restarts, steps, seed))
    kept = None if engine is None else proved(model, prompts, labels, eps, engine)
    if kept is not None and sum(kept) > left:
        raise ModelError(f"{sum(kept)} answers are proved and only {left} stand: report this")
    return Worth(clean, left, None if kept is None else sum(kept), len(prompts))
