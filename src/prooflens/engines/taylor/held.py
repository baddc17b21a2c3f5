"""Walks that are kept between calls: a question about a deeper layer goes on where a shallower one ended.

A walk to the scores of layer ℓ passes every layer before it, and a caller that asks layer after layer would pay for the
first one as often as there are layers. The caller's `EngineOptions.workspace` holds the last quick and the last tight
walk. What is taken over are the chains that had gone on by attention, and the root of the chain that had not: the very
objects, so a walk that goes on has the bounds of one that starts at the input.
"""

from __future__ import annotations

from dataclasses import dataclass

from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineOptions, Workspace, allowed_memory
from prooflens.engines.taylor.chain import Fork
from prooflens.engines.taylor.cost import least_memory
from prooflens.engines.taylor.segments import Segment
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.problem import Problem


@dataclass(frozen=True, eq=False)
class HeldWalk:
    """A walk forward, and the problem that it is about."""

    problem: Problem
    walk: TaylorWalk


def _place(quick: bool) -> str:
    """Under which name a workspace holds walks."""
    return f"taylor, {'quick' if quick else 'tight'} walk"


def earlier_walk(
    options: EngineOptions, problem: Problem, segments: list[Segment], asked: TaylorWalk
) -> Fork | None:
    """Take a walk that one may go on from out of the workspace, and return where; None if there is none.

    It is about the same objects, was made by the same rules, passed no layer that is not passed now, and still has
    what is to be kept. Going on uses up what its last root holds for that, so it is not held any longer.

    Args:
        options: with the caller's workspace.
        problem: the model and the region.
        segments: the program that is to be walked.
        asked: the walk that is to begin, still without chains.
    """
    if options.workspace is None or asked.blur:
        return None
    held = options.workspace.take(_place(asked.quick))
    if not isinstance(held, HeldWalk):
        return None
    about, walk = held.problem, held.walk
    same = (
        about.model is problem.model and about.region is problem.region and about.padding is problem.padding
    )
    roots = [chain.segment.root for chain in walk.chains]
    passed = {chain.segment.layer for chain in walk.chains[:-1]}
    if not same or roots != [segment.root for segment in segments[: len(roots)]]:
        return None
    *before, last = walk.chains
    fork = Fork(before, last.root)
    if walk.kept is None or asked.kept is None:
        return fork if walk.kept is asked.kept else None
    return fork if passed & asked.kept <= walk.kept else None


def held_layer(problem: Problem, workspace: Workspace | None) -> int:
    """Return the layer whose scores the held quick walk ends at; 0 if there is none about this problem.

    Args:
        problem: the model and the region.
        workspace: what the caller's calls share.
    """
    held = None if workspace is None else workspace.look(_place(quick=True))
    if not isinstance(held, HeldWalk):
        return 0
    same = held.problem.model is problem.model and held.problem.region is problem.region
    return len(held.walk.chains) - 1 if same else 0


def hold_walk(options: EngineOptions, problem: Problem, forms: Forms, walk: TaylorWalk) -> None:
    """Keep a walk to scores for later calls, where a quick and a tight one fit into memory together.

    Args:
        options: with the caller's workspace.
        problem: the model and the region.
        forms: what was asked.
        walk: the walk; every token of it goes on behind every attention.
    """
    if options.workspace is None or walk.blur or forms.logits is not None or len(walk.chains) < 2:
        return  # a walk that ends at the first scores has not seen how a first attention reads the factors
    whole = walk.kept is None
    both = sum(least_memory(problem, forms, whole, quick) for quick in (True, False))
    if both <= allowed_memory(problem, options):
        options.workspace.put(_place(walk.quick), problem, HeldWalk(problem, walk))
