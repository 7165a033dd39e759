"""Metrics that the trainer measures: over tokens, groups, episodes and verdicts."""
