"""Qwen3.5: layers of Gated DeltaNet and of gated attention."""
