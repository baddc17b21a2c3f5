"""Claims about layer 0 over every prompt there is: exact counts, with proved ends."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

import torch

from prooflens.engines.counting import Counts, FirstScores, Slots, count_most_attended
from prooflens.engines.counting.masses import mass_margins
from prooflens.engines.counting.slots import place
from prooflens.engines.counting.statements import TokenStatement, copies, prefers_duplicates
from prooflens.errors import QueryError
from prooflens.models import Transformer, load
from prooflens.progress import Progress
from prooflens.results.vocabulary import Count, HeadProfile, Profiles
from prooflens.verdicts.question import Heads

NUMBER = r"(?:self|-?\d+)"
TOP = re.compile(rf"top1=\{{({NUMBER}(?:,{NUMBER})*)\}}")
SPEC = re.compile(rf"spec\{{({NUMBER})>({NUMBER})\}}")
MASS = re.compile(rf"mass>=([0-9.eE+-]+)@\{{({NUMBER}(?:,{NUMBER})*)\}}")


def profile(
    model: Transformer | str,
    heads: Heads = None,
    *,
    length: int,
    position: int = -1,
    claims: str | Sequence[str] = (),
    same: Sequence[Sequence[int]] = (),
    choices: Mapping[int, Sequence[int]] | None = None,
    tokens: int | Sequence[int] | None = None,
    real: Sequence[bool] | None = None,
    pieces: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: Progress | None = None,
) -> Profiles:
    """Count, over all prompts of a length, on how many each key is attended most by heads of layer 0.

    What is proved: the number of prompts t ∈ V^n (with the given slots) on which the score of a key at the query
    position is larger than that of every other key, over the real numbers, lies between `lower` and `upper`.

    Args:
        model: a model with a vocabulary, or what `load` takes.
        heads: heads of layer 0, as in "0.3", (0, 3) or a list of those; None for all.
        length: n, how many tokens prompts have.
        position: the query position; negative positions count from the end.
        claims: what else is counted: `top1={1,3}` (one of these keys is attended most), `spec{5>0}` (one key before
            another), `mass>=0.5@{4}` (the softmax weights of the keys add up to that much: a lower and an upper count).
            A key is a position, `self`, or −d for the d-th token before the query.
        same: positions that hold one token: same=[(0, 5)] are the prompts whose first and sixth token are equal.
        choices: the tokens that a position may hold, by position; other positions hold any.
        tokens: count only prompts with one of these query tokens; a number draws so many. None for all.
        real: False at positions that are padding; None if all are real.
        pieces: cut the range of scores into so many pieces in place of sorting: faster, the ends are further apart.
        seed: seed of the drawn query tokens.
        device: where to count; None for where the model is.
        progress: called with a stage and a share from 0 to 1.

    Raises:
        ModelError: if the first scores are no function of two tokens and their places.
        QueryError: if a head, a position, a token or a claim is none.

    Example:
        >>> import prooflens as pl
        >>> found = pl.profile("smollm2", "0.3", length=6, tokens=8)  # doctest: +SKIP
        >>> [float(count.shares[0]) for count in found[0].top]  # doctest: +SKIP
    """
    started = time.perf_counter()
    held = load(model) if isinstance(model, str) else model
    held = held if device is None else held.to(device)
    padding = None if real is None else torch.tensor(list(real), dtype=torch.bool)
    if padding is not None and len(padding) != length:
        raise QueryError(f"`real` must have {length} entries, one per token, not {len(padding)}")
    scores = FirstScores(held, length, padding)
    slots = Slots.of(length, scores.vocabulary, same, choices)
    where = place(position, length)
    numbers = heads_of(heads, scores.n_heads)
    asked = [claims] if isinstance(claims, str) else list(claims)
    chosen = _drawn(tokens, slots, where, seed)
    found = []
    for i, head in enumerate(numbers):

        def tell(share: float, head: int = head, i: int = i) -> None:
            if progress is not None:
                progress(f"head 0.{head}", (i + share) / len(numbers))

        counts = count_most_attended(scores, slots, head, where, tokens=chosen, pieces=pieces, progress=tell)
        more = [_claim(scores, slots, head, where, claim, counts, pieces) for claim in asked]
        top = [Count(f"top1={{{key}}}", *counts.total(key), counts.prompts) for key in counts.keys]
        found.append(
            HeadProfile(
                f"0.{head}",
                counts.keys,
                tuple(top),
                tuple(more),
                counts.tokens,
                counts.lower,
                counts.upper,
                counts.each,
            )
        )
    return Profiles(
        held.name,
        held.sha256,
        length,
        where,
        scores.vocabulary,
        tuple([True] * length if real is None else map(bool, real)),
        tuple(slot.positions for slot in slots.slots if len(slot.positions) > 1),
        {slot.positions[0]: slot.tokens for slot in slots.slots if slot.tokens is not None},
        chosen is None,
        found,
        time.perf_counter() - started,
    )


def duplicate_tokens(
    model: Transformer | str,
    head: str | tuple[int, int],
    *,
    length: int,
    tokens: Sequence[int] | None = None,
    device: str | None = None,
) -> TokenStatement:
    """Say for which tokens a head of layer 0 scores an earlier copy above every other token, wherever the two stand.

    Args:
        model: a model with a vocabulary, or what `load` takes.
        head: the head, as in "0.3".
        length: n: distances 1 … n − 1 before the last token are compared.
        tokens: the tokens that are asked about; None for the whole vocabulary.
        device: where to compute; None for where the model is.
    """
    scores, number = _one_head(model, head, length, device)
    return prefers_duplicates(scores, number, None if tokens is None else torch.tensor(list(tokens)))


def copied_tokens(
    model: Transformer | str,
    head: str | tuple[int, int],
    *,
    position: int = 0,
    tokens: Sequence[int] | None = None,
    device: str | None = None,
) -> TokenStatement:
    """Say which tokens the OV circuit of a head of layer 0 copies: the largest entry of W_U W_O W_V z(t) is t's own.

    Args:
        model: a model that predicts tokens, or what `load` takes.
        head: the head, as in "0.3".
        position: where the token stands; without learned positions it makes no difference.
        tokens: the tokens that are asked about; None for the whole vocabulary.
        device: where to compute; None for where the model is.
    """
    scores, number = _one_head(model, head, position + 1, device)
    return copies(scores, number, position, None if tokens is None else torch.tensor(list(tokens)))


def statements(
    model: Transformer | str,
    heads: Heads,
    length: int,
    position: int = -1,
    tokens: int | None = None,
    seed: int = 0,
    device: str | None = None,
    duplicates: bool = True,
) -> dict[str, TokenStatement]:
    """Return `duplicate_tokens` or `copied_tokens` of several heads.

    Args:
        model: a model with a vocabulary, or what `load` takes.
        heads: heads of layer 0; None for all.
        length: how many tokens prompts have.
        position: where a token stands that is copied; duplicates are asked at the last token.
        tokens: draw so many tokens; None for the whole vocabulary.
        seed: seed of the drawn tokens.
        device: where to compute; None for where the model is.
        duplicates: whether duplicates are asked, or copies.
    """
    held = load(model) if isinstance(model, str) else model
    scores = FirstScores(held if device is None else held.to(device), length)
    drawn = _drawn(tokens, Slots.of(length, scores.vocabulary), length - 1, seed)
    chosen = None if drawn is None else torch.tensor(drawn)
    where = place(position, length)
    return {
        f"0.{head}": prefers_duplicates(scores, head, chosen)
        if duplicates
        else copies(scores, head, where, chosen)
        for head in heads_of(heads, scores.n_heads)
    }


def _one_head(
    model: Transformer | str, head: str | tuple[int, int], length: int, device: str | None
) -> tuple[FirstScores, int]:
    held = load(model) if isinstance(model, str) else model
    scores = FirstScores(held if device is None else held.to(device), length)
    (number,) = heads_of([head] if isinstance(head, tuple) else head, scores.n_heads)
    return scores, number


def heads_of(heads: Heads, n_heads: int) -> list[int]:
    """Return numbers of heads of layer 0, or raise an error that names those there are.

    Args:
        heads: as `profile` takes them.
        n_heads: how many heads the layer has.
    """
    if heads is None:
        return list(range(n_heads))
    given = [heads] if isinstance(heads, str | tuple) else list(heads)
    numbers = []
    for head in given:
        for part in head.split(",") if isinstance(head, str) else [head]:
            match = re.fullmatch(r"\s*0\.(\d+)\s*", part) if isinstance(part, str) else None
            if isinstance(part, tuple) and len(part) == 2 and part[0] == 0:
                numbers.append(int(part[1]))
            elif match:
                numbers.append(int(match[1]))
            else:
                raise QueryError(f"{part!r} is no head of layer 0: give heads as in 0.3")
    if wrong := [number for number in numbers if not 0 <= number < n_heads]:
        raise QueryError(f"layer 0 has heads 0.0 … 0.{n_heads - 1}, not 0.{wrong[0]}")
    return numbers


def _drawn(tokens: int | Sequence[int] | None, slots: Slots, position: int, seed: int) -> list[int] | None:
    """Return the query tokens that are counted; None for all."""
    if tokens is None or not isinstance(tokens, int):
        return None if tokens is None else list(dict.fromkeys(int(token) for token in tokens))
    if tokens < 1:
        raise QueryError(f"count at least 1 query token, not {tokens}")
    slot = slots.slot_of(position)
    allowed = list(range(slots.vocabulary)) if slot.tokens is None else list(slot.tokens)
    if tokens >= len(allowed):
        return None
    order = torch.randperm(len(allowed), generator=torch.Generator().manual_seed(seed))
    return sorted(allowed[i] for i in order[:tokens].tolist())


def _claim(
    scores: FirstScores,
    slots: Slots,
    head: int,
    position: int,
    claim: str,
    top: Counts,
    pieces: int | None,
) -> Count:
    """Count one claim."""
    text = claim.replace(" ", "")
    if match := TOP.fullmatch(text):
        ends = [top.total(key) for key in _keys(match[1], position, top.keys)]
        return _bounded(claim, sum(low for low, _ in ends), sum(high for _, high in ends), top)
    if match := SPEC.fullmatch(text):
        first, second = _keys(f"{match[1]},{match[2]}", position, top.keys)
        found = count_most_attended(
            scores, slots, head, position, [first, second], tokens=top.tokens, pieces=pieces
        )
        return Count(claim, *found.total(first), found.prompts)
    if match := MASS.fullmatch(text):
        keys = _keys(match[2], position, top.keys)
        return _mass(scores, slots, head, position, claim, keys, float(match[1]), top, pieces)
    raise QueryError(
        f"{claim!r} cannot be counted: write top1={{-1}}, spec{{5>0}} or mass>=0.5@{{4}}, with positions as keys"
    )


def _mass(
    scores: FirstScores,
    slots: Slots,
    head: int,
    position: int,
    claim: str,
    keys: list[int],
    share: float,
    top: Counts,
    pieces: int | None,
) -> Count:
    """Bound on how many prompts Σ_{j∈J} s_j ≥ τ holds.

    A margin between the largest score in J and outside that is enough, and one that is necessary, are claims about
    the largest score, with the scores of J shifted (`mass_margins`).
    """
    if scores.model.architecture.score_cap is not None:
        raise QueryError(
            "scores of this model go through a cap: its masses are not counted, only the order of keys"
        )
    others = len(top.keys) - len(keys)
    if not 0.0 < share < 1.0 or not others:
        if not 0.0 <= share <= 1.0:
            raise QueryError(f"a mass lies between 0 and 1, not at {share:g}")
        everywhere = share == 0.0 or not others
        return Count(claim, top.prompts if everywhere else 0, top.prompts if everywhere else 0, top.prompts)
    ends = []
    for margin in mass_margins(share, len(keys), others):
        moved = dict.fromkeys(keys, -margin)
        found = count_most_attended(
            scores, slots, head, position, shifts=moved, tokens=top.tokens, pieces=pieces
        )
        ends.append([sum(column) for column in zip(*(found.total(key) for key in keys), strict=True)])
    return _bounded(claim, ends[0][0], ends[1][1], top)


def _bounded(claim: str, lower: int, upper: int, top: Counts) -> Count:
    return Count(claim, lower, min(upper, top.prompts), top.prompts)


def _keys(text: str, position: int, keys: Sequence[int]) -> list[int]:
    """Read keys: positions, `self`, or so many tokens before the query."""
    found = []
    for part in text.split(","):
        key = position if part == "self" else position + int(part) if int(part) < 0 else int(part)
        if key not in keys:
            raise QueryError(
                f"{{{part}}} is no key that position {position} attends to: those are {list(keys)}"
            )
        found.append(key)
    if len(set(found)) < len(found):
        raise QueryError(f"{{{text}}} names a key twice")
    return found
