"""The vLLM engine, its followers on other nodes, its weights."""
