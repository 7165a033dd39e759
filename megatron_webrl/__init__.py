"""Reinforcement learning of visual web agents with Megatron-Core, vLLM and real browsers."""

__version__ = "0.1.0"
