"""Checks of a job's nodes before it starts."""
