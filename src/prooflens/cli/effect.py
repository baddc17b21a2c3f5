"""The command `effect`: what taking parts out of a model does to a metric, on a region or over a family of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import app, print_json, say
from prooflens.cli.family import TemplateOptions
from prooflens.cli.groups import grouped
from prooflens.cli.keep import configuration, make_room, tell_written
from prooflens.cli.options import (
    EffortOptions,
    Eps,
    InputOptions,
    KeepOptions,
    VectorFiles,
    limit_memory,
    other_prompt,
    read_vectors,
)
from prooflens.cli.prove import exit_code
from prooflens.errors import QueryError
from prooflens.progress import Progress, shown

if TYPE_CHECKING:
    from prooflens.families import Prompts, Template
    from prooflens.models import Prompt, Transformer
    from prooflens.models.parts import Edit
    from prooflens.results.effects import Effect, FamilyEffects


@dataclass(frozen=True)
class MetricOptions:
    """What an effect is measured on."""

    metric: Annotated[
        str,
        typer.Option(
            help='"logit{ Mary}-logit{ John}", "prob({A}|{A},{B})", "kl(3,5)", logit3, "neuron 5.12@-1".'
        ),
    ]
    vector: VectorFiles = None

    @property
    def vectors(self) -> dict[str, object]:
        """Directions and dictionaries by name."""
        return read_vectors(self.vector)


@dataclass(frozen=True)
class EditOptions:
    """What is taken out of the model."""

    without: Annotated[
        str | None,
        typer.Option(
            help="Parts that are taken out: a9.h6,m3 (also a9, m3.n12, keys a9.h6.k3, edges a9.h6->a10.h2.q), "
            "at some tokens: a9.h6@3@-1."
        ),
    ] = None
    frozen: Annotated[
        str | None, typer.Option(help="Heads whose attention pattern is frozen at the prompt: a9.h6,a10.")
    ] = None
    circuit: Annotated[
        Path | None, typer.Option(help="Keep only this circuit (JSON of nodes): all else is taken out.")
    ] = None
    edges: Annotated[
        bool,
        typer.Option(
            "--edges", help="Of a circuit of edges, cut all others (else its nodes are kept whole)."
        ),
    ] = False
    spread: Annotated[
        float | None,
        typer.Option(
            help="Hold the parts of --without at any value, each number within ± this of 0 (with --patched: of their "
            "values there)."
        ),
    ] = None
    between: Annotated[
        list[str] | None,
        typer.Option(
            help="Hold the parts of --without at any value between those that they have on the prompt and on this one "
            "(or a sample's number); twice: between those on these two."
        ),
    ] = None
    each: Annotated[bool, typer.Option("--each", help="Take each part out by itself, not all at once.")] = (
        False
    )

    def parts(self, model: Transformer) -> list[str]:
        """The parts that are taken out: those that are named, or all that are not in a circuit."""
        from prooflens.verdicts.circuit_files import outside, outside_edges, read_json

        frozen = [f"{name.strip()}.pattern" for name in self.frozen.split(",")] if self.frozen else []
        if (self.without is not None) + (self.circuit is not None) != 1 and not (frozen and not self.circuit):
            raise QueryError("give --without a9.h6,m3 or --circuit FILE.json, one of them, or --frozen a9.h6")
        if self.circuit is not None:
            left = outside_edges if self.edges else outside
            return [*left(read_json(self.circuit), model.architecture), *frozen]
        if self.edges:
            raise QueryError("--edges is for circuits: give --circuit FILE.json")
        named = self.without.split(",") if self.without else []
        return [*(name.strip() for name in named), *frozen]

    def valued(
        self, model: Transformer, part: str, prompt: Prompt | str, other: Prompt | str | None
    ) -> str | Edit:
        """A part with the set of values that it may have; its name alone if it is taken out, or has one value.

        Args:
            model: the model.
            part: its name.
            prompt: the prompt that is asked about.
            other: the prompt of --patched; None if there is none.
        """
        from prooflens.models.edits import between, value_on
        from prooflens.models.parts import Edit

        if self.between is not None:
            ends = [text if model.tokenizer else other_prompt(model, text) for text in self.between]
            if len(ends) > 2 or self.spread is not None or other is not None:
                raise QueryError("--between is given once or twice, without --spread and --patched")
            return between(model, part, *([prompt, *ends][-2:]))
        if self.spread is None:
            return part
        return replace(Edit(part) if other is None else value_on(model, part, other), spread=self.spread)


@dataclass(frozen=True)
class EffectClaims:
    """What is claimed of an effect."""

    necessary: Annotated[
        float | None, typer.Option(help="Claim that the effect is at least this everywhere.")
    ] = None
    faithful: Annotated[
        float | None, typer.Option(help="Claim that the effect is within ± this everywhere.")
    ] = None
    sufficient: Annotated[
        bool, typer.Option("--sufficient", help="Claim that both models give the same answer everywhere.")
    ] = False
    patched: Annotated[
        str | None,
        typer.Option(
            help="Another prompt (or a sample's number): the parts of --without get their values on it, and the "
            "claim is that the metric takes its side everywhere."
        ),
    ] = None


@app.command()
@grouped
def effect(
    given: InputOptions,
    edits: EditOptions,
    claims: EffectClaims,
    prompts: TemplateOptions,
    effort: EffortOptions,
    keep: KeepOptions,
    measured: MetricOptions,
    eps: Eps = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of a family: run so many members drawn by chance.")
    ] = None,
) -> None:
    """What taking parts out of a model does to a metric: proved on a whole region, or counted over a family of prompts.

    Exit code: 0 all claims hold, 1 error, 2 some unknown or only estimated, 3 some fail.
    """
    make_room(keep.out)
    family = prompts.given()
    if family is None and samples is not None:
        raise QueryError("--samples is for families: give --template or --prompts")
    written = configuration(given, edits, claims, prompts, effort, measured, eps=eps)

    def save(name: str, one: Effect | FamilyEffects) -> None:
        if keep.out is not None:
            one.save(keep.out / name, **written)

    found: Sequence[Effect | FamilyEffects]
    with shown(not keep.as_json) as tell:
        if family is None:
            found = _on_region(given, edits, claims, effort, measured, eps, tell, save)
        else:
            check_family(given, eps, measured)
            if edits.spread is not None or edits.between is not None:
                raise QueryError(
                    "over a family parts are held at one value: --spread and --between are for regions"
                )
            asked = given.model, edits, claims, effort, measured.metric, family, samples, tell
            found = [_over_family(*asked)]
            save("", found[0])
    documents = [one.to_dict() for one in found]
    if keep.as_json:
        print_json({"effects": documents} if family is None and edits.each else documents[0])
    else:
        say("\n".join(map(str, found)))
    if keep.out is not None:
        tell_written(keep)
    raise typer.Exit(exit_code(Counter(verdict for one in found for verdict in one.verdicts)))


def check_family(given: InputOptions, eps: float | None, measured: MetricOptions) -> None:
    """Raise a `QueryError` where a prompt, a region or a readout is given beside a family of prompts."""
    if measured.vector or any(
        option is not None for option in (eps, given.text, given.to, given.hull, given.sample)
    ):
        raise QueryError(
            "a family has prompts of its own: give no --text, --sample, --eps, --to, --hull and --vector"
        )


def _on_region(
    given: InputOptions,
    edits: EditOptions,
    claims: EffectClaims,
    effort: EffortOptions,
    measured: MetricOptions,
    eps: float | None,
    tell: Progress,
    save: Callable[[str, Effect], None],
) -> list[Effect]:
    """The effect of all parts together, saved under no name, or of each of them under its own."""
    from prooflens.verdicts.effect import effects

    held, prompt = given.load(tell)
    limit_memory(effort.memory)
    region, parts = given.region(eps, held, prompt), edits.parts(held)
    asked = {part: [part] for part in parts} if edits.each else {"": parts}
    names, said = list(asked), _asked(claims, held)
    own = prompt if prompt.text is None else prompt.text
    every = [[edits.valued(held, part, own, said["patched"]) for part in some] for some in asked.values()]
    return effects(
        held,
        every,
        prompt,
        region,
        measured.metric,
        vectors=measured.vectors,
        found=lambda number, one: save(names[number], one),
        **said,
        **effort.options(tell),
    )


def _over_family(
    model: str,
    edits: EditOptions,
    claims: EffectClaims,
    effort: EffortOptions,
    metric: str,
    family: Template | Prompts,
    samples: int | None,
    tell: Progress,
) -> FamilyEffects:
    from prooflens.enumeration import family_effects
    from prooflens.models import load

    held = load(model, tell)
    parts = edits.parts(held)
    asked = [[part] for part in parts] if edits.each else [parts]
    return family_effects(
        held,
        asked,
        family,
        metric,
        sample=samples,
        seed=effort.seed,
        memory=effort.memory,
        device=effort.device,
        progress=tell,
        **_asked(claims, held),
    )


def _asked(claims: EffectClaims, model: Transformer) -> dict[str, Any]:
    """The claims by their names; the other prompt of a patch is one of the model."""
    asked = asdict(claims)
    if claims.patched is not None and model.tokenizer is None:
        asked["patched"] = other_prompt(model, claims.patched)
    return asked
