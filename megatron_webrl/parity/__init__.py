"""The users' own check: transformers, Megatron and vLLM score the same prompts on any checkpoint."""
