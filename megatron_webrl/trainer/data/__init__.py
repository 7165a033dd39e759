"""From records to packed sequences."""
