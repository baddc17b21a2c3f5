"""Families of prompts: templates with slots, swaps at positions, lists; members as tokens of a model, by shape."""

from prooflens.families.family import Family, Member
from prooflens.families.shapes import Shape
from prooflens.families.templates import ALL, Given, Prompts, Swaps, Template
from prooflens.families.words import BUILT_IN, COLOURS, NAMES, NUMBERS, OBJECTS, PLACES, WordList

__all__ = [
    "ALL",
    "BUILT_IN",
    "COLOURS",
    "NAMES",
    "NUMBERS",
    "OBJECTS",
    "PLACES",
    "Family",
    "Given",
    "Member",
    "Prompts",
    "Shape",
    "Swaps",
    "Template",
    "WordList",
]
