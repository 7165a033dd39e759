"""Protocols of the judge: which questions make a verdict."""
