"""Metrics, MLflow, and the live board."""
