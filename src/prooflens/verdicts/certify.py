"""Verdicts: what engines prove, what the attack breaks, and what is left unknown (the paper's Algorithm 1).

`certify` is the one call: model, prompt, region, heads, queries. `holds` is always a proof, `fails` always comes with a
point that was run through the model, `unknown` is neither, and `estimated` appears only where an engine that estimates
was asked for by name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

from torch import Tensor

from prooflens.engines import Engine, Guarantee
from prooflens.engines.attack import AttackBudget
from prooflens.engines.protocol import Workspace
from prooflens.errors import EngineError, PromptError, QueryError, RunError
from prooflens.memory import is_shortage
from prooflens.models import Prompt, Transformer, load
from prooflens.problem import Problem
from prooflens.progress import Progress, shown
from prooflens.queries import Claim, InsideQuery, Query
from prooflens.queries.rows import Token
from prooflens.regions import listed
from prooflens.results import Outcome, Results, Subject, Verdict
from prooflens.results.keeper import RunKeeper
from prooflens.results.tables import claim_key
from prooflens.verdicts.beside import MOST_PROMPTS, SideBySide, groups_of
from prooflens.verdicts.chunks import chunks, halves
from prooflens.verdicts.deployed import Precision
from prooflens.verdicts.evidence import Evidence
from prooflens.verdicts.forecast import deadline_of, depth_of
from prooflens.verdicts.portfolio import AttackOrder, gather_evidence, prove
from prooflens.verdicts.question import Heads, Place, Question, as_prompt, as_queries, ask
from prooflens.verdicts.settings import Options, Settings, checked_device
from prooflens.verdicts.sites import Vectors, are_inside, by_place


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `certify`; `results` holds every claim that was decided before."""

    def __init__(self, results: Results) -> None:
        super().__init__("interrupted")
        self.results = results

    def after(self, parts: Sequence[Results]) -> Interrupted:
        """Return the same, with what was decided about prompts before.

        Args:
            parts: the results of each of them.
        """
        return Interrupted(Results.joined([*parts, *(self.results.by_subject or [self.results])]))


def certify(
    model: Transformer | str,
    prompt: Prompt | str | Tensor | Sequence[Prompt | str | Tensor],
    region: Place,
    heads: Heads = None,
    *,
    layer: int | None = None,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    positions: Sequence[Token] | None = None,
    skip: Collection[tuple[object, ...]] = (),
    out: Path | str | None = None,
    resume: bool = False,
    vectors: Vectors | None = None,
    deployed: str | None = None,
    **options: Unpack[Options],
) -> Results:
    """Return a verdict for every head × position × query on a whole region: `holds` is proved for all of its points.

    Args:
        model: a model, or what `load` takes: a short name, a folder, a hub name.
        prompt: a text, `model.prompt(text)`, or an input of shape [S, d]; or a list of such, which
            share what depends on the model alone, and where they have one length the search for witnesses.
        region: the inputs on which the claims are to hold: `Ball(eps)`, `Paraphrases([...])`, or a `Region`.
        heads: `"2.4"`, `"0-2"`, a pair (2, 4), a list of such, or None for all.
        layer: all heads of one layer, in place of `heads`.
        queries: what is asked, as in `"top1"` or `"mass>=0.2"`; a query may name its own heads and position
            (`"2.4:top1@-1"`).
        positions: query positions, by index or by token text; None for all.
        skip: keys of claims to leave out (`Results.keys` of earlier results).
        out: a run directory to write while the work goes on (docs/certify.md).
        resume: go on with the run in `out`: what it holds is not asked again, and comes back with the rest.
        vectors: the directions and dictionaries that queries about values inside the model name.
        deployed: `"bfloat16"` or `"float32"`: also measure, at the clean input, at the worst point known and at 64
            points of the region, how far each margin moves in that precision (columns `deployed`, `difference`, …).
            That is measured, not proved.
        options: engine, memory, time, device, progress, seed and budget: see `Options`.

    Returns:
        A table with one row per claim: verdict, proved bounds, the engine behind them, and why.

    Raises:
        Interrupted: after Ctrl-C, with the results so far.
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> res = pl.certify(model, model.example(), pl.Ball(0.02), "0.1", positions=[-1])
        >>> res["0.1"].verdict
        <Verdict.HOLDS: 'holds'>
        >>> res["0.1"].bound > 0
        True
    """
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        _check_prompts(prompt, out, resume)
        held = load(model)
        options.setdefault("workspace", Workspace())
        if (device := options.pop("device", None)) is not None:
            held = held.to(checked_device(device))

        def each(one: Prompt | str | Tensor) -> Results:
            return certify(
                held,
                one,
                region,
                heads,
                layer=layer,
                queries=queries,
                positions=positions,
                skip=skip,
                vectors=vectors,
                deployed=deployed,
                **options,
            )

        def about(one: Prompt | str | Tensor) -> Question:
            question = ask(held, one, region, heads, layer=layer, queries=queries, positions=positions)
            claims = [claim for claim in question.claims if claim_key(claim) not in skip]
            return replace(question, claims=claims)

        roles = [one.roles if isinstance(one, Prompt) else () for one in prompt]
        if any(are_inside(as_queries(queries, some), heads, layer, positions) for some in roles):
            return Results.joined([each(one) for one in prompt])
        parts = list[Results]()
        try:
            parts.extend(decide_each(prompt, about, Settings.of(**options), deployed))
        except Interrupted as stop:
            raise stop.after(parts) from None
        return Results.joined(parts)
    settings = Settings.of(**options)
    wanted = as_queries(queries, prompt.roles if isinstance(prompt, Prompt) else ())
    if (
        are_inside(wanted, heads, layer, positions)
        and (groups := _groups(model, prompt, wanted, vectors))[1:]
    ):
        if out is not None:
            raise QueryError(
                "a run is about one hook and one token, or one lens: ask for each in a run of its own"
            )
        parts = [
            certify(model, prompt, region, queries=group, vectors=vectors, deployed=deployed, **options)
            for group in groups
        ]
        return Results.joined(parts)
    question = ask(
        model,
        prompt,
        region,
        heads,
        layer=layer,
        queries=queries,
        positions=positions,
        device=settings.device,
        vectors=vectors,
    )
    asked = {
        "heads": heads,
        "layer": layer,
        "queries": [str(query) for query in listed(queries)],
        "positions": positions,
        "deployed": deployed,
    }
    precision = Precision.of(question, deployed)
    keeper = RunKeeper(out, question.subject, _configuration(asked, settings), resume)
    claims = [claim for claim in keeper.remaining(question.claims) if claim_key(claim) not in skip]
    return decide_question(replace(question, claims=claims), settings, keeper, precision)


def _check_prompts(prompts: Sequence[Prompt | str | Tensor], out: Path | str | None, resume: bool) -> None:
    """Refuse lists that are no prompts, and a run about several of them."""
    if not prompts:
        raise PromptError("the list of prompts is empty: give at least one")
    if all(isinstance(one, int) for one in prompts):
        raise PromptError("a list of token ids is one prompt: give model.prompt(ids)")
    if out is not None or resume:
        raise RunError(
            "a run is about one prompt: give each its own `out`, or write a sweep (docs/sweeps.md)"
        )


Given = TypeVar("Given")


def decide_each(
    prompts: Sequence[Given],
    about: Callable[[Given], Question],
    settings: Settings,
    deployed: str | None = None,
) -> Iterator[Results]:
    """Decide the same about many prompts, those of one length side by side; the results come prompt by prompt.

    Args:
        prompts: whatever `about` takes.
        about: asks about a prompt of one model.
        settings: how claims are decided.
        deployed: the precision in which margins are measured, if that was asked for.

    Raises:
        Interrupted: after Ctrl-C, with the claims of later prompts than came back that were decided before.
    """
    for first in range(0, len(prompts), MOST_PROMPTS):
        questions = [about(one) for one in prompts[first : first + MOST_PROMPTS]]
        found = dict[int, Results]()
        for group in groups_of(questions, settings):
            some = [questions[number] for number in group]
            try:
                found |= zip(group, _decide_beside(some, settings, deployed), strict=True)
            except Interrupted as stop:
                known = [found[number] for number in sorted(found)]
                raise stop.after(known) from None
        yield from (found[number] for number in range(len(questions)))


def _decide_beside(questions: Sequence[Question], settings: Settings, deployed: str | None) -> list[Results]:
    """Decide questions of one group; one by one where there is only one, or memory does not do for all of them."""
    precisions = [Precision.of(question, deployed) for question in questions]
    if questions[1:]:
        beside = SideBySide(questions, settings, precisions)
        try:
            with shown(settings.progress) as tell:
                beside.run(tell)
            return beside.results()
        except KeyboardInterrupt:
            raise Interrupted(Results.joined(beside.results(decided=True))) from None
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            settings.workspace.clear()
        finally:
            for question in questions:
                settings.workspace.forget(question.problem)
    return [
        decide_question(question, settings, precision=precision)
        for question, precision in zip(questions, precisions, strict=True)
    ]


def _groups(
    model: Transformer | str, prompt: Prompt | str | Tensor, queries: Sequence[Query], vectors: Vectors | None
) -> list[list[InsideQuery]]:
    """Queries about values inside the model by what they read."""
    held = load(model)
    return by_place(held, as_prompt(held, prompt), queries, vectors)


def _configuration(asked: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What `run.json` says was asked for, as a call of Python has it."""
    written = {name: value if value is None else str(value) for name, value in asked.items()}
    return {
        **written,
        "engines": list(settings.engines),
        "seed": settings.seed,
        "memory": settings.memory,
        "time": settings.time,
        "device": settings.device,
        "budget": None if settings.budget is None else asdict(settings.budget),
    }


def decide_question(
    question: Question,
    settings: Settings,
    keeper: RunKeeper | None = None,
    precision: Precision | None = None,
) -> Results:
    """Decide the claims of a question chunk by chunk, shallow layers first.

    Args:
        question: the claims.
        settings: how they are decided.
        keeper: writes what each chunk came to; what an earlier run held comes back with the rest.
        precision: measures margins in the precision that the model is deployed in, if that was asked for.

    Raises:
        Interrupted: after Ctrl-C, with the claims that were decided before; they are written, too.
    """
    with shown(settings.progress) as tell:
        try:
            results = _decide_chunks(question, settings, tell, keeper, precision)
        except Interrupted as stop:
            if keeper is not None:
                keeper.keep(stop.results)
            raise
        finally:
            settings.workspace.forget(question.problem)
    return results if keeper is None else keeper.finish(results)


def _decide_chunks(
    question: Question,
    settings: Settings,
    tell: Progress,
    keeper: RunKeeper | None,
    precision: Precision | None,
) -> Results:
    problem, claims = question.problem, question.claims
    board = _Board(tell, len(claims))
    evidence: dict[int, Evidence] = {}
    try:
        waiting = list(chunks(problem, claims, settings.memory))
        settings = deadline_of(settings, problem, claims)
        while waiting:
            allowed = part_of_time(problem, claims, waiting, settings)
            chunk = waiting.pop(0)
            evidence = {i: Evidence.about(claims[i], problem.region.holds_reference) for i in chunk}
            board.start(len(chunk))
            try:
                gather_evidence(problem, list(evidence.values()), replace(allowed, progress=board.tell))
            except (MemoryError, RuntimeError) as error:
                settings.workspace.clear()
                waiting = [*halves(chunk, error), *waiting]
                continue
            found = [evidence[i].outcome(problem) for i in chunk]
            found = found if precision is None else precision.measured(found)
            board.outcomes |= dict(zip(chunk, found, strict=True))
            if keeper is not None:
                keeper.keep(Results.of([board.outcomes[i] for i in chunk], question.subject))
    except KeyboardInterrupt:
        board.outcomes |= {i: item.outcome(problem) for i, item in evidence.items() if item.decided}
        raise Interrupted(board.results(question.subject)) from None
    return board.results(question.subject)


def part_of_time(
    problem: Problem, claims: Sequence[Claim], waiting: Sequence[Sequence[int]], settings: Settings
) -> Settings:
    """Return the settings of the first chunk that waits: it has a share of the time that is left, a deep one more.

    Args:
        problem: the model and the region.
        claims: all claims.
        waiting: chunks of them that are not decided yet, by numbers.
        settings: with the deadline of the whole call.
    """
    left = settings.left
    if left is None:
        return settings
    weights = [len(chunk) * (1.0 + depth_of(problem, claims[chunk[0]])) for chunk in waiting if chunk]
    share = weights[0] / sum(weights) if weights else 1.0
    return settings.until(time.monotonic() + share * left, settings.allotted)


@dataclass(eq=False)
class _Board:
    """What is done so far, and how it is told: counts, and the share of all claims."""

    report: Progress
    total: int
    size: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    far: float = 0.0
    """The largest share that was told: what is left never grows."""

    def start(self, size: int) -> None:
        """A chunk of so many claims begins."""
        self.size = size
        self.tell("", 0.0)

    def tell(self, stage: str, share: float) -> None:
        """A share of the chunk is done."""
        counts = Counter(outcome.verdict for outcome in self.outcomes.values())
        tally = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
        self.far = max(self.far, (len(self.outcomes) + share * self.size) / max(1, self.total))
        self.report(f"{stage} {tally}".strip(), self.far)

    def results(self, subject: Subject) -> Results:
        """The outcomes in the order of the claims."""
        return Results.of([self.outcomes[i] for i in sorted(self.outcomes)], subject)


def decide_claims(
    problem: Problem,
    claims: Sequence[Claim],
    engine: Engine,
    budget: AttackBudget | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Decide claims by one engine: by proof, by the clean input itself, or by an attack on what is open.

    Args:
        problem: the model and the region.
        claims: what is claimed.
        engine: who is asked; it must prove.
        budget: how hard to attack what is open; None for no attack.
        seed: seed of the attack.

    Raises:
        EngineError: if the engine only estimates, or refuses.
    """
    if engine.guarantee is not Guarantee.PROVED:
        raise EngineError(f"{engine.name} only estimates: it cannot decide that a claim holds")
    evidence = [Evidence.about(claim, problem.region.holds_reference) for claim in claims]
    prove(problem, evidence, engine, required=True)
    if budget is not None:
        AttackOrder(problem, evidence, Settings(budget=budget, seed=seed)).carry_out()
    return [item.outcome(problem) for item in evidence]
