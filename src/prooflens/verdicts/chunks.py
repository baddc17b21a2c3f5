"""How many claims are worked on at a time: as many as fit into memory, shallow layers first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prooflens.errors import EngineError
from prooflens.memory import available, is_shortage, written
from prooflens.problem import Problem
from prooflens.queries import Claim
from prooflens.verdicts.forecast import depth_of, form_count

CHUNK_NUMBERS = 2**25
"""Functionals times factors that are worked on at a time, unless a memory limit says less (256 MiB per matrix)."""

CHUNK_FUNCTIONALS = 4096
"""… and never more functionals than this, so that progress is seen and an interruption keeps most of the work."""

LEAST_FUNCTIONALS = 64
"""Chunks are not made smaller than this before anything was tried."""

TEMPORARIES = 6
"""Matrices of functionals by factors that an engine holds at a time, about."""


def halves(chunk: list[int], error: BaseException) -> list[list[int]]:
    """The two halves of a chunk that did not fit into memory; the error itself where it is another, or one claim.

    Args:
        chunk: the numbers of the claims in the chunk.
        error: what stopped it.
    """
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
    """About how many bytes the smallest chunk takes: matrices of functionals by factors, and one pass of the model.

    Args:
        problem: the model and the region.
        functionals: how many functionals are bounded together.
    """
    x = problem.region.center
    wide = max(problem.region.n_factors, x.numel())
    arch = problem.model.architecture
    one_pass = len(x) * (8 * arch.d_model + 3 * arch.d_ff) + 4 * arch.n_heads * len(x) ** 2
    return 8 * (TEMPORARIES * functionals * wide + 4 * one_pass)


def check_memory(problem: Problem, memory: int | None) -> int | None:
    """How many bytes may be used; an error before any work where even the smallest chunk does not fit.

    Args:
        problem: the model and the region.
        memory: bytes that the caller allows; None for what is free.
    """
    free = available() if problem.model.device.type == "cpu" else None
    allowed = min((size for size in (memory, free) if size is not None), default=None)
    need = least_memory(problem)
    if allowed is not None and need > allowed:
        raise EngineError(
            f"this needs at least about {written(need)} and {written(allowed)} may be used: give more --memory, or "
            "use fewer tokens"
        )
    return allowed


def numbers_at_a_time(problem: Problem, memory: int | None) -> int:
    """How many functionals times factors are worked on at a time.

    Args:
        problem: the model and the region.
        memory: bytes that may be used; None for what is free.
    """
    allowed = check_memory(problem, memory)
    return CHUNK_NUMBERS if allowed is None else min(CHUNK_NUMBERS, allowed // 64)


def chunks(problem: Problem, claims: Sequence[Claim], memory: int | None) -> Iterator[list[int]]:
    """Claims of one depth together, as many as fit; numbers of them in `claims`.

    Args:
        problem: the model and the region.
        claims: all claims.
        memory: bytes that may be used; None for what is free.
    """
    numbers = numbers_at_a_time(problem, memory)
    most = min(CHUNK_FUNCTIONALS, max(LEAST_FUNCTIONALS, numbers // max(1, problem.region.n_factors)))
    depths = [depth_of(problem, claim) for claim in claims]
    for depth in sorted(set(depths)):
        chunk: list[int] = []
        held = 0
        for i, claim in enumerate(claims):
            if depths[i] != depth:
                continue
            size = form_count(problem, claim.functionals)
            if chunk and held + size > most:
                yield chunk
                chunk, held = [], 0
            chunk.append(i)
            held += size
        yield chunk
