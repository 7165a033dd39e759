"""The vLLM engine, its followers on other nodes, and its weight updates."""
