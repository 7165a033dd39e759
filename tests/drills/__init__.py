"""Drills as tests, in their short forms."""
