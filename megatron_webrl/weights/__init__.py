"""Weights on their way from trainer ranks to engine ranks."""
