"""Prove that an attention mechanism holds on a whole neighbourhood of an input."""

__version__ = "0.1.0"
