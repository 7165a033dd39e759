"""Parity check of a checkpoint: transformers, Megatron and vLLM score the same prompts."""
