"""The features of a dictionary at a token: which are active, how far from their thresholds, and whether they stay so.

What is claimed of each feature is the sign of one readout (`docs/sites.md`); all of them are one proof.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.models import Prompt, Transformer, load
from prooflens.models.dictionaries import Dictionary
from prooflens.models.reads import read_at
from prooflens.queries import SiteQuery
from prooflens.queries.rows import Token, find_token
from prooflens.results.features import FeatureResults
from prooflens.verdicts.certify import certify
from prooflens.verdicts.question import Place, as_prompt
from prooflens.verdicts.settings import Options


def features(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    dictionary: object,
    region: Place,
    *,
    position: Token = -1,
    off: int = 10,
    most: int | None = None,
    name: str = "SAE",
    **options: Unpack[Options],
) -> FeatureResults:
    """Say of every feature that is active at a token whether it stays active on a whole region: `holds` is proved.

    Args:
        model: a model, or what `load` takes.
        prompt: a text, `model.prompt(text)`, or an input of shape [S, d].
        dictionary: a `Dictionary`, a folder of SAELens, or its object.
        region: the inputs on which features are to stay what they are: `Ball(eps)`, `Segment(a, b)`, …
        position: the token at which the dictionary reads.
        off: how many of the features that are off are asked whether they stay off: those nearest to their thresholds.
        most: how many of the active ones are asked, those nearest to their thresholds; None for all.
        name: what queries call the dictionary.
        options: engine, memory, time, device, progress, seed and budget: see `Options`.

    Returns:
        One row per feature: active ones first, then those that are off; in a notebook, a picture of their distances.
        `.save(path)` writes a run, `.queries` are the claims for `radius`, `way` and `family`.

    Raises:
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> eye = torch.eye(model.architecture.d_model).double()
        >>> sae = pl.Dictionary.of("blocks.1.hook_resid_post", eye)
        >>> found = pl.features(model, model.example(), sae, pl.Ball(1e-4), off=2)
        >>> found.summary["active"] == found.summary["stay active"] > 0
        True
    """
    held, read = load(model), Dictionary.adopt(dictionary)
    read.check(held)
    given = as_prompt(held, prompt)
    places = find_token(position, len(given), given.tokens)
    if len(places) != 1:
        raise QueryError(f"{position!r} names {len(places)} tokens of the prompt: give the index of one")
    if off < 0 or (most is not None and most < 1):
        raise QueryError("off is at least 0, and most at least 1")
    distances = _distances(held, given, read, places[0])
    order = distances.argsort(descending=True, stable=True).tolist()
    active = [i for i in order if distances[i] > 0.0]
    silent = [i for i in order if not distances[i] > 0.0][:off]
    active = active if most is None else active[-most:]
    asked = [(i, ">") for i in active] + [(i, "<=") for i in silent]
    if not asked:
        raise QueryError("no feature is active there, and off is 0: ask for some that are off")
    queries = [SiteQuery("feature", None, name, i, word, 0.0, places[0]) for i, word in asked]
    found = certify(held, given, region, queries=queries, vectors={name: read}, **options)
    subject = found.subject
    assert subject is not None
    return FeatureResults.about(found.outcomes, subject, read.size)


def _distances(model: Transformer, prompt: Prompt, dictionary: Dictionary, position: int) -> Tensor:
    """How far every feature is from its threshold on the prompt, in float64: it only chooses what is asked."""
    here = read_at(model, dictionary.hook, position, dictionary.weight)
    shift = dictionary.bias - dictionary.weight @ dictionary.center - dictionary.threshold
    with torch.no_grad():
        return dictionary.distances(here(prompt).cpu() + shift)
