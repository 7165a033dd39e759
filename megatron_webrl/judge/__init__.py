"""Evaluators that turn a finished episode into an outcome."""
