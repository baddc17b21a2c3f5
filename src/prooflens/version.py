"""The version of prooflens, in a module of its own so that every part of the package may name it."""

__version__ = "0.2.0"
