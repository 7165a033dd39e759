"""Writes the generated pages of docs/ from the code."""
