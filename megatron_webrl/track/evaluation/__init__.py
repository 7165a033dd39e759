"""Evaluations of held-out tasks: queue, results, tables."""
