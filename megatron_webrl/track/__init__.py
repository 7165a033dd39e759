"""Metrics, their upload, and the live board."""
