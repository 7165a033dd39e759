"""Processes, stack dumps and import shims."""
