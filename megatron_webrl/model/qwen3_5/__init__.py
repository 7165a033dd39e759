"""Parts of Qwen3.5: the gated delta rule."""
