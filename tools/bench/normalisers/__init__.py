"""The experiment on loss normalisers that docs/learning.md describes."""
