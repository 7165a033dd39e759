"""Losses over the response tokens of one micro-batch, as pure functions; docs/algorithm.md explains them together."""
