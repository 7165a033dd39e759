"""The judge: the outcome of a finished episode."""
