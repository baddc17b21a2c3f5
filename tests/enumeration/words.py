"""A tokenizer of few words, and tiny models that read them."""

import re
from dataclasses import replace
from functools import cache

from prooflens.models import Transformer, load
from tests.families import bert, gpt2, llama

WORDS = (
    "When", " Mary", " John", " Kate", " Tom", " Alice", " James", " and", " met", ",", " spoke", " to", ".", " the",
    " store", " park", " red", " blue", "met", "Mary",
)  # fmt: skip
LETTERS = " abcdefghijklmnopqrstuvwxyz"


class WordTokenizer:
    """Words of a list are one token each; other words are spelled letter by letter."""

    def __init__(self, before: int | None = None) -> None:
        self.before = before
        self.texts = [*WORDS, *LETTERS]

    def encode(self, text: str) -> list[int]:
        found = [] if self.before is None else [self.before]
        for word in re.findall(r" ?\w+|[^\w\s]|\s", text):
            if word in self.texts:
                found.append(self.texts.index(word))
            else:
                found += [self.texts.index(letter) for letter in word.lower()]
        return found + ([] if self.before is None else [self.before + 1])

    def token(self, index: int) -> str:
        return self.texts[index] if index < len(self.texts) else f"#{index}"


@cache
def reader(kind: str = "llama", seed: int = 0) -> Transformer:
    """A tiny model that reads words: `llama` and `gpt2` are causal, `bert` puts a token before and behind a text."""
    module = {"llama": llama, "gpt2": gpt2, "bert": lambda s: bert(s, heads=False)}[kind](seed)
    tokenizer = WordTokenizer(50 if kind == "bert" else None)
    return replace(load(module), tokenizer=tokenizer, name=kind)
