"""What each step's prompt holds of the steps before it: docs/context.md."""
