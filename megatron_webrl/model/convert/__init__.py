"""Conversion between Hugging Face and Megatron checkpoints."""
