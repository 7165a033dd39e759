"""Benchmarks of routing replay."""
