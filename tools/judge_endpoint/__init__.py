"""An OpenAI-compatible HTTP server for tests and offline runs: an oracle answers the judge, faults are injected."""
