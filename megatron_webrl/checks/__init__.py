"""Checks of an installation, a model, its weights, GPUs and nodes."""
