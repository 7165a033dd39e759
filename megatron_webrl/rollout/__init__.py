"""Rollout role: agents that generate with an engine and act in browsers."""
