"""The options that commands about claims share: dataclasses that say what they mean to the Python API.

Each group is one answer: about which input (`InputOptions`), which claims (`ClaimOptions`), decided how
(`EffortOptions`), kept where (`KeepOptions`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prooflens.errors import PromptError, QueryError, RegionError
from prooflens.memory import cap, keep_freed, parse_memory

if TYPE_CHECKING:
    from prooflens.models import Prompt, Transformer
    from prooflens.progress import Progress
    from prooflens.queries.rows import Token
    from prooflens.verdicts.question import Place, Question
    from prooflens.verdicts.settings import Options, Settings

Eps = Annotated[float | None, typer.Option(help="Radius of the ball around the embeddings.")]
Radius = Annotated[float, typer.Option("--eps", help="Radius of the ball around the embeddings.")]
Model = Annotated[str, typer.Argument(help="A model: short name, folder, .gguf file or hub name.")]
ENGINES = (
    "auto asks one after another, each where it is good. Or one by name: layer0, interval, taylor, crown, alpha-crown, "
    "beta-crown, chebyshev, cpz, exact, zonotope, pz, pz-norm, pz-simplex, jacobian-proved; jacobian and autolirpa "
    "only estimate; attack only tries to break (docs/engines.md)."
)
EngineName = Annotated[str, typer.Option("--engine", help=ENGINES)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]
Seed = Annotated[int, typer.Option(help="Seed of the attack.")]
Memory = Annotated[str | None, typer.Option(help="Memory that engines may use: 8GB.")]
Time = Annotated[
    str | None, typer.Option(help="Time that all of it may take: 60s, 2m (default: two minutes a layer).")
]
AttackEffort = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="S/R/N",
        help="How hard to attack: so many samples, restarts and steps, as in 1000/5/30; 0/0/0 for none; or a name: "
        "layer0, next-token, gpt2-layer1, bert-output, synthetic, multilayer, pruning (default: by the model's size).",
    ),
]
QUERY_HELP = """Queries (docs/queries.md has the grammar):

\b
  top1, top3          the most attended tokens of the clean prompt stay so
  top1={-1}           the token before is attended most: a previous-token head
  top1={self}         the token itself is; top1={3}, top1={Mary}: this token is
  mass>=0.2           at least this weight on the top token; mass>=0.2@{3,5}: on these
  spec{3}>{5}         more weight on token 3 than on token 5
  rank3, entropy<=1   the order of the first three; how spread the attention is
  argmax              the output stays; logit3>logit5: output 3 is above output 5
  neuron 5.12>0@-1    a value inside the model (docs/queries.md)
  lens 8 argmax       the output behind block 8; dla 9.6 logit3-logit5>0: what a head adds
  0.4:top1@-1         with a head and a position of its own; A & B: both at once
"""
"""What may be asked, at the end of the help of every command that takes queries."""

VectorFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--vector",
        metavar="NAME=PATH",
        help="A direction (.npy, .safetensors) or dictionary (SAELens folder) that queries name; may be repeated.",
    ),
]


def read_vectors(given: list[str] | None) -> dict[str, object]:
    """Directions and dictionaries by name, from texts NAME=PATH."""
    from prooflens.models.dictionaries import read_vector

    pairs = [text.partition("=") for text in given or ()]
    if wrong := [name for name, equals, path in pairs if not (name and equals and path)]:
        raise QueryError(f"--vector {wrong[0]!r} is not NAME=PATH, as in DIR=direction.npy")
    return {name: read_vector(path) for name, _, path in pairs}


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Run directory to write.")]
Nearest = Annotated[
    bool | None,
    typer.Option(
        "--nearest/--no-nearest",
        help="Tell ε as a share of the distance to the nearest other token, a pass over the vocabulary (default: where "
        "that takes a second or two).",
    ),
]
Deployed = Annotated[
    str | None,
    typer.Option(
        metavar="PRECISION",
        help="bfloat16 or float32: also measure (not prove) how far margins move when transformers runs the model so.",
    ),
]
Tolerance = Annotated[float, typer.Option(help="Step of the grid of radii, relatively.")]


@dataclass(frozen=True)
class InputOptions:
    """Which model, on which prompt, and which of its tokens move."""

    model: Model
    text: Annotated[str | None, typer.Option(help="The prompt.")] = None
    sample: Annotated[
        int | None, typer.Option(help="Example input of a model without text (default: 0).")
    ] = None
    tokens: Annotated[str | None, typer.Option(help="Only these tokens move: 2,5 or their texts.")] = None
    to: Annotated[
        str | None,
        typer.Option(
            help="Another prompt: ask about the whole way from --text to it (or a sample's number)."
        ),
    ] = None
    hull: Annotated[
        Path | None,
        typer.Option(help="A file with a prompt per line: ask about the hull of --text and these."),
    ] = None

    def load(self, tell: Progress, held: Transformer | None = None) -> tuple[Transformer, Prompt]:
        """The model and the prompt that were asked for; a model that is held is not loaded again."""
        held = loaded(self.model, None, tell) if held is None else held
        if self.text is not None and self.sample is not None:
            raise PromptError("give --text or --sample, not both")
        if self.text is None and held.examples is None:
            raise PromptError(f'{held.name} needs a text: --text "…"')
        if self.text is not None and held.tokenizer is None and held.examples is not None:
            raise PromptError(f"{held.name} reads no text: choose one of its example inputs with --sample")
        return held, held.prompt(self.text) if self.text is not None else held.example(self.sample or 0)

    def moving(self, prompt: Prompt) -> list[int] | None:
        """The tokens that move, by index; None for all."""
        from prooflens.queries.rows import find_tokens

        named = named_tokens(self.tokens)
        return None if named is None else find_tokens(named, len(prompt), prompt.tokens)

    def eps_in_words(
        self, eps: float | None, model: Transformer, prompt: Prompt, nearest: bool | None
    ) -> str | None:
        """What ε is worth in tokens; None where there is no ball."""
        from prooflens.models.nearest import yardstick

        if eps is None:
            return None
        return yardstick(model, prompt, nearest).words(eps, self.moving(prompt)) or None

    def region(self, eps: float | None, model: Transformer, prompt: Prompt) -> Place:
        """Where claims are to hold: a ball around the prompt, the way to another one, or the hull of several."""
        from prooflens.regions import Ball, Hull, Segment

        options = {"--eps": eps, "--to": self.to, "--hull": self.hull}
        given = [name for name, value in options.items() if value is not None]
        if len(given) != 1:
            raise RegionError(
                f"give one of --eps, --to and --hull{', not ' + ' and '.join(given) if given else ''}"
            )
        if eps is not None:
            return Ball(eps, self.moving(prompt))
        if self.tokens is not None:
            raise RegionError("--tokens is for balls: between prompts the tokens that differ move")
        if self.to is not None:
            return Segment(prompt, self.other(model, self.to))
        assert self.hull is not None
        return Hull([prompt, *(self.other(model, text) for text in prompts_of(self.hull))])

    def other(self, model: Transformer, text: str) -> Prompt:
        """Another prompt of the model."""
        return other_prompt(model, text)


@dataclass(frozen=True)
class SlottedOptions(InputOptions):
    """Which model, on which prompt; it may be a text with slots, which queries then name."""

    template: Annotated[
        str | None,
        typer.Option(
            help='Instead of --text, a text with slots that queries name: "When{A} and{B} met,{B} spoke".'
        ),
    ] = None
    slot: Annotated[
        list[str] | None, typer.Option("--slot", help='What stands in a slot of --template: "A= Mary".')
    ] = None
    from_layer: Annotated[
        int | None,
        typer.Option(
            help="Start inside the model: the region is around the residual stream in front of this block, and layer 0 "
            "is this block (docs/sites.md)."
        ),
    ] = None
    steer: Annotated[
        Path | None,
        typer.Option(help="With --from-layer, a vector (.npy, .safetensors) that is added to the stream."),
    ] = None
    strengths: Annotated[
        str, typer.Option(help="The range of strengths of --steer; --tokens says where (default: the last).")
    ] = "0,8"

    def load(self, tell: Progress, held: Transformer | None = None) -> tuple[Transformer, Prompt]:
        """The model and the prompt that were asked for; inside a model, its tail and the stream in front of that."""
        model, prompt = self._whole(tell, held)
        if self.from_layer is None:
            if self.steer is not None:
                raise RegionError("--steer adds to the stream in front of a block: name it with --from-layer")
            return model, prompt
        return self._inside(model, prompt)

    def region(self, eps: float | None, model: Transformer, prompt: Prompt) -> Place:
        """Where claims are to hold: as for other prompts, or a range of strengths of a steering vector."""
        if self.steer is None:
            return super().region(eps, model, prompt)
        from prooflens.models.dictionaries import Dictionary, read_vector
        from prooflens.regions import Steer

        if eps is not None or self.to is not None or self.hull is not None:
            raise RegionError("--steer is a region of its own: give no --eps, --to and --hull")
        direction, tokens = read_vector(str(self.steer)), self.moving(prompt)
        ends = [_number(text) for text in self.strengths.split(",")]
        if len(ends) != 2 or isinstance(direction, Dictionary):
            raise RegionError("--steer needs a vector and two --strengths, as in 0,8")
        return Steer(prompt, direction, (ends[0], ends[1]), (-1,) if tokens is None else tokens)

    def other(self, model: Transformer, text: str) -> Prompt:
        """Another prompt of the model, or its stream in front of the block."""
        if self.from_layer is None:
            return super().other(model, text)
        whole = loaded(self.model, None, lambda stage, share: None)
        return self._inside(whole, other_prompt(whole, text))[1]

    def _inside(self, model: Transformer, prompt: Prompt) -> tuple[Transformer, Prompt]:
        from prooflens.models.tails import start_at

        assert self.from_layer is not None
        tail, stream = start_at(model, self.from_layer, prompt)
        assert stream is not None
        return tail, stream

    def _whole(self, tell: Progress, held: Transformer | None) -> tuple[Transformer, Prompt]:
        """The whole model and the prompt, with the slots of its template as roles."""
        if self.template is None:
            if self.slot:
                raise PromptError("--slot is for --template")
            return super().load(tell, held)
        if self.text is not None or self.sample is not None:
            raise PromptError("give --template, --text or --sample: one of them")
        from prooflens.families.templates import filled

        parts = [text.partition("=") for text in self.slot or ()]
        if wrong := ["".join(part) for part in parts if not (part[1] and part[0].strip().isidentifier())]:
            raise PromptError(f"{wrong[0]!r} is no slot with its filler: write it as in 'A= Mary'")
        fillers = {name.strip(): filler for name, _, filler in parts}
        if len(fillers) < len(parts):
            raise PromptError("a slot is given twice: give it once")
        held = loaded(self.model, None, tell) if held is None else held
        return held, filled(held, self.template, fillers)


@dataclass(frozen=True)
class ClaimOptions:
    """Which claims: of which heads, at which positions, by which queries."""

    layer: Annotated[int | None, typer.Option(help="All heads of one layer.")] = None
    heads: Annotated[
        str | None, typer.Option(help="Heads: 0.10,1.3, a layer 2, layers 0-2 (default: all).")
    ] = None
    positions: Annotated[str | None, typer.Option(help="Only these query positions: -1, 2,5 or 2-4.")] = None
    query: Annotated[
        list[str] | None,
        typer.Option("--query", help="What is asked, see below (may be repeated; default: top1)."),
    ] = None
    vector: VectorFiles = None

    @property
    def queries(self) -> list[str]:
        """What is asked."""
        return self.query or ["top1"]

    def ask(
        self,
        given: InputOptions,
        eps: float | None,
        device: str | None,
        tell: Progress,
        held: Transformer | None = None,
    ) -> Question:
        """The claims, bound to the model, the prompt and the region; a model that is held is not loaded again."""
        from prooflens.verdicts.question import ask, source_of

        held, prompt = given.load(tell, held)
        return ask(
            held,
            prompt,
            given.region(eps, held, prompt),
            self.heads,
            layer=self.layer,
            queries=self.queries,
            device=device,
            positions=named_tokens(self.positions),
            source=source_of(given.model),
            vectors=self.vectors,
        )

    @property
    def vectors(self) -> dict[str, object]:
        """Directions and dictionaries by name."""
        return read_vectors(self.vector)


@dataclass(frozen=True)
class AttackOptions:
    """How claims are attacked, and where that runs."""

    device: Device = None
    seed: Seed = 0
    budget: AttackEffort = None

    def options(self, tell: Progress) -> Options:
        """The keyword arguments of the Python API, for the attack alone."""
        from prooflens.verdicts.settings import Options

        return Options(engine="attack", device=self.device, progress=tell, seed=self.seed, budget=self.budget)

    def settings(self, tell: Progress) -> Settings:
        """The same, read."""
        from prooflens.verdicts.settings import Settings

        return Settings.of(**self.options(tell))


@dataclass(frozen=True)
class EffortOptions(AttackOptions):
    """How claims are decided: by which engine, with how much memory, where, and how hard they are attacked."""

    engine: EngineName = "auto"
    memory: Memory = None
    time: Time = None

    def options(self, tell: Progress) -> Options:
        """The keyword arguments of the Python API."""
        from prooflens.verdicts.settings import Options

        return super().options(tell) | Options(engine=self.engine, memory=self.memory, time=self.time)


@dataclass(frozen=True)
class KeepOptions:
    """Where what is found goes: a run directory, a document on stdout."""

    out: Out = None
    as_json: Json = False


def limit_memory(text: str | None) -> None:
    """Apply `--memory`: from here on, with the model loaded, this process cannot take more."""
    size = parse_memory(text)
    if size is None:
        keep_freed()
    else:
        import pyarrow as pa

        pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own pools reserve far more than they use
        cap(size)


def loaded(name: str, device: str | None, tell: Progress) -> Transformer:
    """A model by its name, on a device."""
    from prooflens.models import load

    held = load(name, tell)
    return held if device is None else held.to(device)


def _number(text: str) -> float:
    """A number of an option."""
    try:
        return float(text)
    except ValueError:
        raise RegionError(f"{text!r} is no number: write two, as in 0,8") from None


def other_prompt(model: Transformer, text: str) -> Prompt:
    """Another prompt; of a model without text, one of its example inputs by number."""
    if model.tokenizer is None and model.examples is not None and text.strip().isdigit():
        return model.example(int(text))
    return model.prompt(text)


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file, one per line; empty lines do not count."""
    from prooflens.families.read import lines_of

    return lines_of(path, "prompt")


def named_tokens(text: str | None) -> list[Token] | None:
    """Tokens of a comma list: indices, ranges of indices such as 2-4, or texts."""
    if text is None:
        return None
    found: list[Token] = []
    for part in text.split(","):
        if (ends := re.fullmatch(r"\s*(\d{1,9})-(\d{1,9})\s*", part)) and int(ends[1]) <= int(ends[2]):
            found += range(int(ends[1]), int(ends[2]) + 1)
        else:
            found.append(int(part) if re.fullmatch(r"\s*[+-]?\d{1,9}\s*", part) else part)
    return found
