"""Exact counts at layer 0."""
