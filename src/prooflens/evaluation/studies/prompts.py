"""The texts that studies read: IOI prompts with a duplicated name, repeated sequences, paraphrases, plain sentences."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from prooflens.errors import PromptError
from prooflens.models import Prompt, Transformer
from prooflens.models.train import read_sst2, sst2_folder


@dataclass(frozen=True)
class Words:
    """What the templates are filled with."""

    names: tuple[str, ...]
    places: tuple[str, ...]
    things: tuple[str, ...]


FIRST = Words(
    ("Mary", "John", "Tom", "Anna", "Paul", "Sarah", "James", "Emma", "David", "Alice"),
    ("store", "park", "school", "house", "beach", "office"),
    ("drink", "book", "ball", "letter", "ring"),
)
OTHERS = Words(
    ("Peter", "Lisa", "Robert", "Laura", "Henry", "Julia", "Simon", "Rachel", "Daniel", "Helen"),
    ("market", "station", "garden", "library", "hotel", "museum"),
    ("key", "phone", "pen", "card", "bag"),
)
"""Words of prompts that confirm what was chosen on the first ones; none is in both."""

TEMPLATES = (
    "When {a} and {b} went to the {place}, {b} gave a {thing} to",
    "Then {a} and {b} had a long talk at the {place}, and {b} gave a {thing} to",
    "After {a} and {b} left the {place}, {b} handed the {thing} to",
)
"""{b} occurs twice; the second occurrence is where a duplicate-token head looks back."""


@dataclass(frozen=True)
class Duplicate:
    """A prompt with a name that occurs twice: where, and where first."""

    prompt: Prompt
    first: int
    second: int


def ioi_texts(count: int = 60, words: Words = FIRST) -> list[tuple[str, str]]:
    """Texts and their duplicated names: templates, pairs of names, places and things in (nearly) equal shares."""
    pairs = list(itertools.permutations(words.names, 2))
    found = []
    for i in range(count):
        a, b = pairs[(i * 7) % len(pairs)]
        template = TEMPLATES[i % len(TEMPLATES)]
        place = words.places[(i // len(TEMPLATES)) % len(words.places)]  # every place in every template
        text = template.format(a=a, b=b, place=place, thing=words.things[i % len(words.things)])
        found.append((text, b))
    return found


def ioi_prompts(model: Transformer, count: int = 60, words: Words = FIRST) -> list[Duplicate]:
    """The prompts in a model's tokens."""
    return [duplicate_in(model.prompt(text), name) for text, name in ioi_texts(count, words)]


def duplicate_in(prompt: Prompt, name: str) -> Duplicate:
    """Where a name stands first and second."""
    places = [i for i, token in enumerate(prompt.tokens) if token.strip() == name]
    if len(places) < 2:
        raise PromptError(
            f"{name!r} is not twice one token in {prompt.text!r}: use another model or other names"
        )
    return Duplicate(prompt, places[0], places[1])


def repeated_sequences(
    model: Transformer, count: int = 30, length: int = 7, seed: int = 0
) -> list[Duplicate]:
    """Return random tokens, and at the end the first one again: where a head that matches tokens looks back.

    Args:
        model: its vocabulary is drawn from.
        count: how many prompts.
        length: how many tokens stand before the repeated one.
        seed: seed of the draw.
    """
    architecture = model.architecture
    if architecture.d_vocab is None or model.tokenizer is None:
        raise PromptError(f"{model.name} reads no text: repeated sequences need a vocabulary")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(1000, min(20_000, architecture.d_vocab), (length,), generator=generator)
        ids = torch.cat((ids, ids[:1]))
        tokens = tuple(model.tokenizer.token(int(i)) for i in ids)
        prompt = Prompt(model.embed(ids), tokens, tuple(ids.tolist()))
        found.append(Duplicate(prompt, 0, length))
    return found


PARAPHRASES = (
    (
        "the movie was really good",
        "the film was very good",
        "the movie was truly great",
        "the film was really great",
        "the picture was very nice",
    ),
    (
        "this story is boring and slow",
        "this plot is dull and slow",
        "this tale is boring and long",
        "this story is dull and long",
        "this story is slow and dull",
    ),
    (
        "we liked the new restaurant",
        "we loved the new place",
        "we enjoyed the new restaurant",
        "they liked the new cafe",
        "we loved the old restaurant",
    ),
)
"""Three sets of five paraphrases of equal length in MiniLM's tokens."""


def paraphrase_sets(model: Transformer, count: int) -> list[list[Prompt]]:
    """The first sets in a model's tokens."""
    return [[model.prompt(text) for text in texts] for texts in PARAPHRASES[:count]]


def sst2_sentences(model: Transformer, count: int, size: int = 8) -> list[Prompt]:
    """The first test sentences of SST-2 with at least `size` tokens, cut to `size`; an encoder's end in [SEP]."""
    if model.tokenizer is None:
        raise PromptError(f"{model.name} has no tokenizer: SST-2 needs one")
    found: list[Prompt] = []
    for text, _ in read_sst2(sst2_folder() / "test.tsv"):
        ids = model.tokenizer.encode(text)
        if len(ids) >= size and len(found) < count:
            last = size - 1 if model.architecture.causal else -1
            kept = torch.tensor([*ids[: size - 1], ids[last]])
            tokens = tuple(model.tokenizer.token(int(i)) for i in kept)
            found.append(Prompt(model.embed(kept), tokens, tuple(kept.tolist()), text))
    return found


SENTENCES = (
    "the film was long but moving",
    "a warm and funny little story",
    "the keys are on the table",
    "she gave the book to him",
    "we never went back to paris",
)
"""Eight tokens each in MiniLM's and MPNet's vocabulary, with the two special ones."""

OPENINGS = (
    "The capital of France is the city of",
    "She opened the door and saw a small",
    "My favourite colour in all the world is",
    "In the morning I drink a cup of",
    "The first thing that I saw was the",
    "He put the letter back in the old",
    "We walked along the river until the next",
    "The doctor told her to stay in her",
    "The train to London leaves early in the",
    "There was a bird on the top of",
    "They lived in a big house near the",
    "He could not find the key to his",
    "The best way to learn this is to",
    "I have never been to the north of",
    "The cat was asleep on the old red",
    "When the bell rang the children ran to",
    "The old man sat down by the open",
    "She wrote her name at the top of",
    "The largest planet in the solar system is",
    "He asked me what time it was and",
    "A group of people stood in front of",
    "The price of bread has gone up by",
    "You can see the mountains from the top",
    "The boy threw the ball over the garden",
    "The story begins in a small town in",
    "Please turn off the light before you go",
    "The king and the queen lived in a",
    "It took us three hours to reach the",
    "The teacher wrote the right answer on the",
    "My father works in a factory that makes",
    "The ship sailed across the ocean to the",
    "On the last day of the year we",
    "The dog ran after the car and then",
    "He was born in a village in the",
    "The sun rises in the east and it",
    "I would like a glass of very cold",
    "The police are looking for a man with",
    "Her new book is about the history of",
    "The road was covered with ice and the",
    "If you are hungry there is some more",
    "The film was shown here for the first",
    "At the end of the street there is",
    "We planted some trees in front of the",
    "The answer to your question is on the",
    "In winter the whole lake is covered with",
    "He looked at the map and found the",
    "Most of the food was eaten by the",
    "The war came to an end in the",
    "Every summer we go to the beach and",
    "The window was open and the room was",
)
"""Eight tokens each in SmolLM2's vocabulary, as many as the paper asks for the next token of."""
