"""Checks of the nodes of a job before it starts."""
