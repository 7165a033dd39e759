"""Screenshots decoded ahead of the forward pass."""
