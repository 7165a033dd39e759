"""The timeline of a run: one trace of all its processes, and what bounded an update."""
