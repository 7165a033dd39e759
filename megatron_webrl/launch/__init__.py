"""Nodes of a job, their roles, watchdog, restarts, and validation of a configuration."""
