"""Browser sessions: reset, step, screenshot."""
