"""Writes the generated files of docs/: reference pages from the code, drawings from the objects that they show."""
