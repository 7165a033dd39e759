"""Task sources."""
