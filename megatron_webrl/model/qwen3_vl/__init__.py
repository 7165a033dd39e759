"""Qwen3-VL on megatron-core."""
