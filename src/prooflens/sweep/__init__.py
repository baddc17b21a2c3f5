"""Sweeps: many models, prompts, layers and radii as tasks that are done once each, whatever is killed meanwhile."""
