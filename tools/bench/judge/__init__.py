"""The benchmark of the judge."""
