"""Qwen3-VL on Megatron-Core, its parameter map, and what prepares its inputs."""
