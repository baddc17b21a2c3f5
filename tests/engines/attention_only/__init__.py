"""The whole function of small attention-only models."""
