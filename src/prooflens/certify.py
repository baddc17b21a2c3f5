"""Verdicts: what engines prove, what the attack breaks, and what is left unknown (the paper's Algorithm 1).

`certify` is the one call: model, prompt, region, heads, queries. `holds` is always a proof, `fails` always comes with a
point that was run through the model, `unknown` is neither, and `estimated` appears only where an engine that estimates
was asked for by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from prooflens.engines import Engine, Guarantee, Problem
from prooflens.engines.attack import BUDGETS, Budget
from prooflens.errors import EngineError, PromptError, QueryError, RegionError
from prooflens.frames import Subject
from prooflens.memory import available, is_shortage, parse_memory, written
from prooflens.models import EMBEDDED, Prompt, Transformer, load
from prooflens.models.cache import model_folder
from prooflens.outcomes import Outcome, Verdict
from prooflens.portfolio import Evidence, Settings, attack, depth_of, gather, prove, stages_of
from prooflens.progress import Progress, Show, shown
from prooflens.queries import Argmax, Beats, Circuit, Claim, Query, parse_heads, parse_query
from prooflens.queries.attention import RowQuery
from prooflens.queries.rows import Token, find_token, suggestion
from prooflens.regions import Ball, Paraphrases, Region, listed
from prooflens.results import Results, claim_key

__all__ = ["Interrupted", "Outcome", "Question", "Verdict", "ask", "certify", "certify_question", "settle"]

CHUNK_NUMBERS = 2**25
"""Functionals times factors that are worked on at a time, unless a memory limit says less (256 MiB per matrix)."""

CHUNK_FUNCTIONALS = 4096
"""… and never more functionals than this, so that progress is seen and an interruption keeps most of the work."""

LEAST_FUNCTIONALS = 64
"""Chunks are not made smaller than this before anything was tried."""

TEMPORARIES = 6
"""Matrices of functionals by factors that an engine holds at a time, about."""

Heads = str | tuple[int, int] | Sequence[str | tuple[int, int]] | None
"""`"2.4"`, `"0-2"`, a pair (layer, head), a list of such; None for all."""

Place = Ball | Region | Paraphrases
"""Where a claim is to hold."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `certify`; `results` holds every claim that was decided before."""

    def __init__(self, results: Results) -> None:
        super().__init__("interrupted")
        self.results = results


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked: a problem and its claims, and the names that results carry."""

    problem: Problem
    claims: list[Claim]
    subject: Subject


def certify(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    heads: Heads = None,
    *,
    layer: int | None = None,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    engine: str = "auto",
    memory: int | str | None = None,
    device: str | None = None,
    progress: Show = False,
    seed: int = 0,
    budget: Budget | str | None = None,
    positions: Sequence[Token] | None = None,
    skip: Collection[tuple[object, ...]] = (),
) -> Results:
    """A verdict for every head × position × query on a whole region: `holds` is proved for all of its points.

    `heads` is `"2.4"`, `"0-2"`, a pair (2, 4), a list of such, or None for all; a query may name its own heads and
    position (`"2.4:top1@-1"`). `engine="auto"` asks a portfolio; a name asks that engine, then attacks. `budget` is a
    row of `BUDGETS`, a `Budget`, or None for one that fits the model's size. `memory` (bytes) limits engines that keep
    a lot.
    Claims whose key is in `skip` (`Results.keys` of an earlier run) are left out. Ctrl-C raises `Interrupted`, which
    holds the results so far.
    """
    question = ask(
        model, prompt, region, heads, layer=layer, queries=queries, device=device, positions=positions
    )
    if skip:
        kept = [claim for claim in question.claims if claim_key(claim) not in skip]
        question = replace(question, claims=kept)
    settings = Settings(stages_of(engine), parse_budget(budget), seed, parse_memory(memory))
    with shown(progress) as tell:
        return certify_question(question, settings, tell)


def ask(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    heads: Heads = None,
    *,
    layer: int | None = None,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    device: str | None = None,
    positions: Sequence[Token] | None = None,
    source: str | None = None,
) -> Question:
    """Bind queries to a prompt in a model; nothing is proved yet."""
    source = source or (source_of(model) if isinstance(model, str | Transformer) else None)
    model = load(model) if device is None else load(model).to(checked_device(device))
    if model.dtype != torch.float64:
        raise EngineError(f"proofs need a float64 model, {model.name} is {model.dtype}: do not convert it")
    prompt = as_prompt(model, prompt)
    place = as_region(region.of(model) if isinstance(region, Paraphrases) else region, prompt)
    place = place.to(dtype=model.dtype)  # from a coarser precision, without rounding
    problem = Problem(model, place.to(device=model.device))
    wanted = [_placed(query, positions) for query in as_queries(queries)]
    chosen = head_text(heads, layer)
    architecture = model.architecture
    texts = [t for query in wanted for t in _heads_named(query)]
    if any(t is None for t in texts):
        texts.append(chosen or "all")
    layers = sorted(
        {
            found
            for text in texts
            if text is not None
            for found, _ in parse_heads(text, architecture.n_layers, architecture.n_heads)
        }
    )
    output = any(isinstance(part, Argmax | Beats) for query in wanted for part in _parts(query))
    setting = problem.setting(layers, output, prompt.tokens)
    claims = [claim for query in wanted for claim in query.bind(setting, chosen)]
    return Question(problem, claims, Subject.of(model, prompt, place, source))


def certify_question(
    question: Question, settings: Settings, tell: Progress, keep: Callable[[Results], None] | None = None
) -> Results:
    """Settle the claims of a question chunk by chunk, shallow layers first; `keep` is told what each chunk came to."""
    problem, claims = question.problem, question.claims
    board = _Board(tell, len(claims))
    evidence: dict[int, Evidence] = {}
    try:
        waiting = list(chunks(problem, claims, settings.memory))
        while waiting:
            chunk = waiting.pop(0)
            evidence = {i: Evidence.about(claims[i], problem.region.holds_center) for i in chunk}
            board.start(len(chunk))
            try:
                gather(problem, list(evidence.values()), replace(settings, progress=board.tell))
            except (MemoryError, RuntimeError) as error:
                waiting = [*halves(chunk, error), *waiting]
                continue
            board.outcomes |= {i: item.outcome(problem) for i, item in evidence.items()}
            if keep is not None:
                keep(Results.of([board.outcomes[i] for i in chunk], question.subject))
    except KeyboardInterrupt:
        board.outcomes |= {i: item.outcome(problem) for i, item in evidence.items() if not item.open}
        raise Interrupted(board.results(question.subject)) from None
    return board.results(question.subject)


@dataclass(eq=False)
class _Board:
    """What is done so far, and how it is told: counts, and the share of all claims."""

    report: Progress
    total: int
    size: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def start(self, size: int) -> None:
        """A chunk of so many claims begins."""
        self.size = size
        self.tell("", 0.0)

    def tell(self, stage: str, share: float) -> None:
        """A share of the chunk is done."""
        counts = Counter(outcome.verdict for outcome in self.outcomes.values())
        tally = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
        self.report(f"{stage} {tally}".strip(), (len(self.outcomes) + share * self.size) / max(1, self.total))

    def results(self, subject: Subject) -> Results:
        """The outcomes in the order of the claims."""
        return Results.of([self.outcomes[i] for i in sorted(self.outcomes)], subject)


def settle(
    problem: Problem, claims: Sequence[Claim], engine: Engine, budget: Budget | None = None, seed: int = 0
) -> list[Outcome]:
    """A verdict for every claim by one engine: by proof, by the clean input itself, or by an attack on what is open."""
    if engine.guarantee is not Guarantee.PROVED:
        raise EngineError(f"{engine.name} only estimates: it cannot decide that a claim holds")
    evidence = [Evidence.about(claim, problem.region.holds_center) for claim in claims]
    prove(problem, evidence, engine, required=True)
    if budget is not None:
        attack(problem, evidence, Settings(budget=budget, seed=seed))
    return [item.outcome(problem) for item in evidence]


def halves(chunk: list[int], error: BaseException) -> list[list[int]]:
    """The two halves of a chunk that did not fit into memory; the error itself where it is another, or one claim."""
    if not is_shortage(error):
        raise error
    if len(chunk) == 1:
        raise EngineError(
            "not enough memory for a single claim: use fewer or shorter tokens, a cheaper engine, or give "
            "more --memory"
        ) from error
    middle = len(chunk) // 2
    return [chunk[:middle], chunk[middle:]]


def least_memory(problem: Problem, functionals: int = LEAST_FUNCTIONALS) -> int:
    """About how many bytes the smallest chunk takes: matrices of functionals by factors, and one pass of the model."""
    x = problem.region.center
    wide = max(problem.region.n_factors, x.numel())
    arch = problem.model.architecture
    one_pass = len(x) * (8 * arch.d_model + 3 * arch.d_ff) + 4 * arch.n_heads * len(x) ** 2
    return 8 * (TEMPORARIES * functionals * wide + 4 * one_pass)


def check_memory(problem: Problem, memory: int | None) -> int | None:
    """How many bytes may be used; an error before any work where even the smallest chunk does not fit."""
    free = available() if problem.model.device.type == "cpu" else None
    allowed = min((size for size in (memory, free) if size is not None), default=None)
    need = least_memory(problem)
    if allowed is not None and need > allowed:
        raise EngineError(
            f"this needs at least about {written(need)} and {written(allowed)} may be used: give more --memory, or "
            "use fewer tokens"
        )
    return allowed


def chunks(problem: Problem, claims: Sequence[Claim], memory: int | None) -> Iterator[list[int]]:
    """Claims of one depth together, as many as fit; numbers of them in `claims`."""
    allowed = check_memory(problem, memory)
    numbers = CHUNK_NUMBERS if allowed is None else min(CHUNK_NUMBERS, allowed // 64)
    most = min(CHUNK_FUNCTIONALS, max(LEAST_FUNCTIONALS, numbers // max(1, problem.region.n_factors)))
    per_row = problem.n_tokens * (problem.n_tokens + 1) // 2
    depths = [depth_of(problem, claim) for claim in claims]
    for depth in sorted(set(depths)):
        chunk: list[int] = []
        held = 0
        for i, claim in enumerate(claims):
            if depths[i] != depth:
                continue
            size = sum(1 if f.is_linear else per_row * len(f.rows) for f in claim.functionals)
            if chunk and held + size > most:
                yield chunk
                chunk, held = [], 0
            chunk.append(i)
            held += size
        yield chunk


def source_of(model: Transformer | str) -> str | None:
    """The folder of a model's weights: the given one, or the cache's; None for embedded and converted models."""
    name = model if isinstance(model, str) else model.name
    if name in EMBEDDED:
        return None
    for folder in (Path(name).expanduser(), model_folder(name)):
        if (folder / "config.json").is_file():
            return str(folder.resolve())
    return None


def as_prompt(model: Transformer, prompt: Prompt | str | Tensor) -> Prompt:
    """A prompt of the model, on its device, from a text, a prompt or an input of shape [S, d]."""
    if isinstance(prompt, str):
        prompt = model.prompt(prompt)
    if isinstance(prompt, Tensor):
        model.check_input(prompt)
        prompt = Prompt(prompt, tuple(f"x{i}" for i in range(len(prompt))))
    if not isinstance(prompt, Prompt):
        raise PromptError(
            f"a {type(prompt).__name__} is no prompt: give a text, model.prompt(text), or a tensor of shape [S, d]"
        )
    return replace(prompt, x=prompt.x.to(model.device))


def as_region(place: Place, prompt: Prompt) -> Region:
    """The region that a ball around the prompt, a hull of paraphrases, or a region is."""
    if isinstance(place, Ball):
        return _indexed(place, prompt).around(prompt)
    region = place.region() if isinstance(place, Paraphrases) else place
    if not isinstance(region, Region):
        raise RegionError(f"{place!r} is no region: give one, such as pl.Ball(0.01)")
    if len(region.center) != len(prompt):
        raise RegionError(f"the region has {len(region.center)} tokens, the prompt {len(prompt)}")
    return region


def _indexed(ball: Ball, prompt: Prompt) -> Ball:
    """The ball with tokens that are named by their texts as indices."""

    def places(token: Token) -> list[int]:
        return find_token(token, len(prompt), prompt.tokens) if isinstance(token, str) else [token]

    if isinstance(ball.eps, Mapping):
        pairs = [(i, eps) for token, eps in ball.eps.items() for i in places(token)]
        if len(dict(pairs)) < len(pairs):
            raise RegionError(f"a token has two radii in {ball}: give it one")
        return replace(ball, eps=dict(pairs))
    if ball.tokens is None:
        return ball
    return replace(ball, tokens=[i for token in listed(ball.tokens) for i in places(token)])


def as_queries(queries: str | Query | Sequence[str | Query]) -> list[Query]:
    """Queries from their short forms."""
    given = listed(queries)
    if not given:
        raise QueryError("no query is asked: give at least one, such as 'top1'")
    if wrong := [query for query in given if not isinstance(query, str | Query)]:
        raise QueryError(f"{wrong[0]!r} is no query: give one, such as 'top1'")
    return [parse_query(query) if isinstance(query, str) else query for query in given]


def head_text(heads: Heads, layer: int | None) -> str | None:
    """Heads as one text."""
    if layer is not None and heads is not None:
        raise QueryError("give a layer or heads, not both")
    if layer is not None:
        return str(layer)
    if isinstance(heads, tuple) and all(type(part) is int for part in heads):
        return _head_name(heads)
    return None if heads is None else ",".join(map(_head_name, listed(heads)))


def _head_name(head: object) -> str:
    """`"2.4"` as it is, (2, 4) as `2.4`; a number could be a layer or a head, and 1.10 would read as 1.1."""
    if isinstance(head, tuple):
        return ".".join(map(str, head))
    if not isinstance(head, str):
        raise QueryError(f"{head!r} does not name a head: write '1.10' or (1, 10), and '1' for a whole layer")
    return head


def parse_budget(budget: Budget | str | None) -> Budget | None:
    """A row of `BUDGETS` by name, `samples/restarts/steps`, or a budget as it is."""
    if budget is None or isinstance(budget, Budget):
        return budget
    budget = budget if isinstance(budget, str) else "/".join(map(str, listed(budget)))
    if budget in BUDGETS:
        return BUDGETS[budget]
    parts = budget.split("/")
    if len(parts) == 3 and all(part.isdigit() for part in parts):
        return Budget(*map(int, parts))
    raise EngineError(
        f"there is no budget {budget!r}{suggestion(budget, BUDGETS)}; budgets are {', '.join(BUDGETS)} "
        "and samples/restarts/steps such as 2000/10/50"
    )


def checked_device(device: str) -> str:
    """The device, if it is there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        line = str(error).splitlines()[0]
        raise PromptError(f"device {device!r} cannot be used: {line}") from error
    return device


def _parts(query: Query) -> tuple[Query, ...]:
    return query.parts if isinstance(query, Circuit) else (query,)


def _heads_named(query: Query) -> list[str | None]:
    """The heads that the parts of a query name; None where a part leaves them open."""
    return [part.heads for part in _parts(query) if isinstance(part, RowQuery)]


def _placed(query: Query, positions: Sequence[Token] | None) -> Query:
    """The query asked at these positions, unless it names its own."""
    if positions is None:
        return query
    if isinstance(query, Circuit):
        return replace(query, parts=tuple(_placed(part, positions) for part in query.parts))
    if isinstance(query, RowQuery) and query.positions is None:
        return replace(query, positions=tuple(listed(positions)))
    return query
