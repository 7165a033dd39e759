"""Qwen3-VL: attention in every layer, DeepStack."""
