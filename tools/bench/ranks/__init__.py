"""Ranks of benchmarks: processes that they start."""
