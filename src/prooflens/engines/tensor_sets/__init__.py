"""Polynomial zonotopes of whole tensors: what `polyzono`, `zonotope` and `jacobian` propagate."""
