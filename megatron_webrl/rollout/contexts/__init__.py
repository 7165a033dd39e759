"""Context policies: what a step's prompt contains of earlier steps (docs/context.md)."""
