"""Verdicts: what engines prove, what an attack breaks, what is left unknown. `decide` says when a claim is met."""
